"""Convolutions with channels last: for small boards, residual blocks and images."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from redline.algos import fused_conv, rectified
from redline.algos.dense import activate, precision, round_up
from redline.engine.triton_use import HALF

# For boards and neighbourhoods up to this size, a matrix product is faster than a convolution.
_MAX_CELLS, _MAX_NEIGHBOURHOOD = 1024, 128
_MAX_DENSE_INPUTS = 512  # up to this many inputs, a GPU multiplies the whole board in one product


class Conv(nn.Module):
    """A 3x3 convolution of boards with channels last: (B, H, W, C) -> (B, H', W', out).

    With few channels it is computed as a matrix product of each cell's neighbourhood (im2col): on a GPU, cuDNN's convolution
    of three channels took a third of a training step, mostly for the gradient of a few weights. On a GPU a small board is
    multiplied as a whole by a matrix that holds each weight wherever it applies and zeros elsewhere: ten times the
    arithmetic, but neighbourhoods are not written to memory, and one product computes all cells.
    """

    placement: Tensor | None
    channels_last = True  # memory layout of the boards passed to torch's convolution; False: NCHW

    def __init__(
        self, channels: int, out: int, stride: int = 1, board: tuple[int, int] = (0, 0), padding: bool = True
    ) -> None:
        """board: rows and columns of a board with few channels; (0, 0) if there are many.

        padding: surround the board with zeros, so that it keeps its size.
        """
        super().__init__()
        self.padding = int(padding)
        few = 0 < math.prod(board) <= _MAX_CELLS and 9 * channels <= _MAX_NEIGHBOURHOOD and stride == 1
        self.pad = round_up(9 * channels, 8) - 9 * channels if few else round_up(channels, 8) - channels
        self.product = nn.Linear(9 * channels + self.pad, out) if few else None
        self.conv = None if few else nn.Conv2d(channels + self.pad, out, 3, stride=stride, padding=self.padding)
        # Padding inputs are always 0: scale initial weights as if there were none.
        self.gain = math.sqrt((9 * channels + self.pad) / (9 * channels) if few else (channels + self.pad) / channels)
        whole = few and math.prod(board) * channels <= _MAX_DENSE_INPUTS
        placement = _placement(*board, channels, self.padding, 9 * channels + self.pad) if whole else None
        self.register_buffer("placement", placement, persistent=False)

    def forward(self, x: Tensor, relu: bool = False) -> Tensor:
        """Return the convolution of x, or its ReLU if `relu`."""
        if self.product is None:
            return self._convolve(x, relu)
        out = self.as_dense(x) if self.placement is not None and x.is_cuda else self.as_im2col(x)
        return F.relu(out) if relu else out

    def reads_observations(self, obs: Tensor) -> bool:
        """Return whether `from_observations` can be called with obs (B, C, H, W)."""
        return self.product is not None and fused_conv.suits(obs, self.product.out_features, precision(obs))

    def from_observations(self, obs: Tensor, scale: Tensor, norm: bool) -> Tensor:
        """Return the ReLU of the convolution of obs * scale, layer-normalised first if `norm`, computed by one kernel."""
        assert self.product is not None
        scale, half = scale.flatten(), precision(obs)
        return fused_conv.board_conv(obs, scale, self.product.weight, self.product.bias, self.padding, norm, half)

    def as_im2col(self, x: Tensor) -> Tensor:
        """Compute the convolution as a product of each cell's neighbourhood."""
        assert self.product is not None
        height, width = self._output_size(x)
        x = F.pad(x, (0, 0, *(self.padding,) * 4))
        neighbours = [x[:, i : i + height, j : j + width] for i in range(3) for j in range(3)]
        out: Tensor = self.product(F.pad(torch.cat(neighbours, 3), (0, self.pad)).flatten(0, 2))
        return out.view(-1, height, width, out.shape[1])

    def as_dense(self, x: Tensor) -> Tensor:
        """Compute the convolution as one product of the whole board."""
        assert self.product is not None
        assert self.placement is not None
        height, width = self._output_size(x)
        inputs, placement = x.flatten(1), self.placement.to(x.dtype)
        inputs = F.pad(inputs, (0, len(placement) - inputs.shape[1]))
        matrix = torch.mm(placement.flatten(0, 1), self.product.weight.to(x.dtype).t()).view(len(placement), -1)
        return torch.mm(inputs, matrix).view(len(x), height, width, -1) + self.product.bias.to(x.dtype)

    def _output_size(self, x: Tensor) -> tuple[int, int]:
        return x.shape[1] + 2 * self.padding - 2, x.shape[2] + 2 * self.padding - 2

    def _convolve(self, x: Tensor, relu: bool) -> Tensor:
        assert self.conv is not None
        assert self.conv.bias is not None
        x = F.pad(x, (0, self.pad)).permute(0, 3, 1, 2)
        x = x if self.channels_last else x.contiguous()
        if relu and x.is_cuda and x.dtype in HALF and torch.backends.cudnn.enabled:
            weight, bias = self.conv.weight.to(x.dtype), self.conv.bias.to(x.dtype)
            boards: Tensor = rectified.conv_relu(x, weight, bias, self.conv.stride[0], self.padding)
        else:
            boards = self.conv(x)
            boards = F.relu(boards) if relu else boards
        return boards.permute(0, 2, 3, 1)


def _placement(height: int, width: int, channels: int, padding: int, columns: int) -> Tensor:
    """Return which weight connects each input to each output cell: (inputs, output cells, columns) bfloat16, 0 or 1.

    The number of inputs is rounded up to a multiple of 8. Column (3 i + j) * channels + c is channel c of neighbour (i, j).
    """
    rows_out, columns_out = height + 2 * padding - 2, width + 2 * padding - 2
    inputs = round_up(height * width * channels, 8)
    placement = torch.zeros(inputs, rows_out * columns_out, columns, dtype=torch.bfloat16)
    for row, column, i, j in itertools.product(range(rows_out), range(columns_out), range(3), range(3)):
        y, x = row + i - padding, column + j - padding
        if 0 <= y < height and 0 <= x < width:
            for c in range(channels):
                placement[(y * width + x) * channels + c, row * columns_out + column, (3 * i + j) * channels + c] = 1
    return placement


class Residual(nn.Module):
    """A residual block of two 3x3 convolutions. (B, H, W, C) -> the same shape."""

    def __init__(self, channels: int, norm: bool) -> None:
        super().__init__()
        self.convs = nn.ModuleList(Conv(channels, channels) for _ in range(2))
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for conv in self.convs:
            y = conv(activate(y, self.norm))
        return x + y


class PixelConv(nn.Linear):
    """A convolution without padding or bias of images with channels last: (B, H, W, C) -> (B, H', W', out).

    A strided convolution is computed with stride 1 over blocks of stride x stride cells, whose cells become channels (space
    to depth): four frames give 64 channels, which hardware multiplies efficiently. On a CPU, whose library computes gradients
    of convolutions slowly, training uses products of neighbourhoods (im2col): a whole step takes an eighth less time.
    Weights are stored in the order (block row, block column, cell row, cell column, channel).
    """

    channels_last = True  # memory layout of the images passed to torch's convolution; False: NCHW

    def __init__(self, channels: int, out: int, kernel: int, stride: int) -> None:
        """kernel: a multiple of stride."""
        super().__init__(kernel * kernel * channels, out, bias=False)
        self.stride, self.kernel_blocks = stride, kernel // stride

    def output_size(self, cells: int) -> int:
        """Return the output's height or width for an input height or width of `cells`; 0 or less if that is too small."""
        return cells // self.stride - self.kernel_blocks + 1

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """Return the convolution of x, whose channels are multiplied by `scale` (C,)."""
        weight = self.weight if scale is None else self.scaled_weight(scale).flatten(1)
        training = x.device.type == "cpu" and torch.is_grad_enabled()
        return (self.as_im2col if training else self.as_conv)(self.space_to_depth(x), weight)

    def accepts_uint8(self, planes: Tensor) -> bool:
        """Return whether `forward_uint8` can be called with `planes`."""
        if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
            return False
        aligned = self.stride == 4 and planes.shape[3] % 4 == 0 and planes.storage_offset() % 4 == 0
        return aligned and planes.device.type == "cpu" and planes.dtype == torch.uint8

    def forward_uint8(self, planes: Tensor, scale: Tensor) -> Tensor:
        """Return the convolution of images (B, C, H, W) uint8, which need no gradient.

        Rearranging them takes half the time it takes in `forward`: four bytes are moved as one int32.
        """
        batch, channels, rows = len(planes), planes.shape[1], planes.shape[2] // 4
        four = planes[:, :, : 4 * rows].contiguous().view(-1).view(torch.int32).view(batch, channels, rows, 4, -1)
        blocks = four.permute(0, 2, 4, 1, 3).contiguous().view(torch.uint8).flatten(3).to(self.weight.dtype)
        # Within a block, the order is now (channel, row, column): reorder the weights, which are few.
        weight = self.scaled_weight(scale).unflatten(1, (-1, 16)).transpose(2, 3).flatten(1)
        return (self.as_im2col if torch.is_grad_enabled() else self.as_conv)(blocks, weight)

    def scaled_weight(self, scale: Tensor) -> Tensor:
        """Return the weights (out, cells, C) times `scale` (C,): cheaper than scaling the inputs, which are more."""
        weight: Tensor = self.weight.unflatten(1, (-1, len(scale)))
        return weight * scale

    def as_conv(self, blocks: Tensor, weight: Tensor) -> Tensor:
        """Compute the convolution of blocks with torch's convolution."""
        filters = weight.view(len(weight), self.kernel_blocks, self.kernel_blocks, -1)
        planes, filters = blocks.permute(0, 3, 1, 2), filters.permute(0, 3, 1, 2)
        if not self.channels_last:
            planes, filters = planes.contiguous(), filters.contiguous()
        return F.conv2d(planes, filters).permute(0, 2, 3, 1)

    def as_im2col(self, blocks: Tensor, weight: Tensor) -> Tensor:
        """Compute the convolution of blocks as a product of each block's neighbourhood."""
        for axis in (2, 1):  # the columns of a row, then the rows
            size = blocks.shape[axis] - self.kernel_blocks + 1
            blocks = torch.cat([blocks.narrow(axis, start, size) for start in range(self.kernel_blocks)], 3)
        return F.linear(blocks, weight)

    def space_to_depth(self, x: Tensor) -> Tensor:
        """Return blocks (B, H / stride, W / stride, stride * stride * C) of x (B, H, W, C); remainders are cut off."""
        side = self.stride
        if side == 1:
            return x
        height, width = x.shape[1] // side, x.shape[2] // side
        x = x[:, : height * side, : width * side].unflatten(1, (height, side)).unflatten(3, (width, side))
        return x.transpose(2, 3).flatten(3)


class PixelBatchNorm(nn.Module):
    """Normalise each channel over the batch, scale and shift it, and apply a ReLU. (B, H, W, C) -> the same shape.

    With gradients enabled it uses and tracks the statistics of the batch; without (acting, targets, evaluation), the running
    statistics. So there is no train or eval mode to set wrongly, and the copies used for acting share the statistics.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        statistics = self.running_mean, self.running_var
        planes = x.permute(0, 3, 1, 2)
        out = F.batch_norm(planes, *statistics, self.weight, self.bias, training=torch.is_grad_enabled())
        return F.relu(out).permute(0, 2, 3, 1)


class PixelNorm(nn.Module):
    """Normalise each image, scale and shift its channels, and apply a ReLU. (B, H, W, C) -> the same shape.

    It is a group norm with one group. Normalising each cell separately would amplify noise to the level of the signal, and
    normalising many short rows takes longer than a few long ones.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        image = x.shape[1:]
        x = F.layer_norm(x, image, self.weight.expand(image), self.bias.expand(image)).to(x.dtype)
        return x.relu_()  # in place: the gradient needs the normalised input, not the output
