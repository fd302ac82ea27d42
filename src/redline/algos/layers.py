"""Parts that networks are made of: scaled inputs, dense and noisy layers, convolutions, and the weights they begin with."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from redline.core import random
from redline.core.records import Spec

# Up to so many cells of a board, and neighbours times channels of a cell, a product is the faster way.
_BOARD, _FEW = 1024, 128
_SMALL = 0.01  # deviation of the first weights of outputs
_WHOLE = 512  # inputs of a board up to which a GPU multiplies all of it at once


class Scale(nn.Module):
    """Observations of any dtype to floats of about 1, channel by channel, in the precision the network runs in."""

    scale: Tensor

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        scale = torch.tensor(spec.obs_scale).view(-1, *(1,) * (len(spec.obs_shape) - 1))
        self.register_buffer("scale", scale, persistent=False)

    def forward(self, obs: Tensor) -> Tensor:
        return (obs.to(torch.float32) * self.scale).to(precision(obs))


def precision(obs: Tensor) -> torch.dtype:
    """What a network that is asked about `obs` runs in."""
    device = obs.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32


class Head(nn.Module):
    """From features (B, F) to action values (B, A); dueling splits them into a state's value and advantages."""

    def __init__(self, features: int, num_actions: int, dueling: bool) -> None:
        super().__init__()
        self.num_actions, self.dueling = num_actions, dueling
        # Rows of 8 keep the matrix product aligned on a GPU; the unused outputs are cut off.
        self.out = nn.Linear(features, round_up(num_actions + dueling, 8))

    def forward(self, features: Tensor) -> Tensor:
        out: Tensor = self.out(features).to(torch.float32)
        if not self.dueling:
            return out[:, : self.num_actions]
        value, advantage = out[:, :1], out[:, 1 : 1 + self.num_actions]
        return value + advantage - advantage.mean(1, keepdim=True)


def activate(x: Tensor, norm: bool) -> Tensor:
    """The positive part of x (…, F), with `norm` of x brought to mean 0 and deviation 1 over its features.

    Normalised features are not scaled and shifted again: the next layer can do that, and the gradients of these few weights
    cost a GPU as much as a layer's own.
    """
    return F.relu(F.layer_norm(x, x.shape[-1:]).to(x.dtype) if norm else x)


class Dense(nn.Module):
    """Fully connected layers, each with a ReLU, and the head. (B, F) -> (B, A) float32."""

    def __init__(self, features: int, hidden: tuple[int, ...], num_actions: int, norm: bool, dueling: bool) -> None:
        super().__init__()
        widths = [features, *hidden]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.norm = norm
        self.head = Head(widths[-1], num_actions, dueling)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = activate(layer(x), self.norm)
        out: Tensor = self.head(x)
        return out


class BlockDiagonalLinear(nn.Linear):
    """Two fully connected layers in one product: the first half of the outputs sees the first half of the inputs only.

    The other quarters of the weights are zeros and have no gradient, so they stay zeros.
    """

    apart: Tensor

    def __init__(self, features: int, out: int) -> None:
        """Of each of the two."""
        super().__init__(2 * features, 2 * out)
        ones = torch.ones(out, features)
        self.register_buffer("apart", torch.block_diag(ones, ones), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight * self.apart if torch.is_grad_enabled() else self.weight
        return F.linear(x, weight, self.bias)


class TwinMLP(nn.Module):
    """Two networks of fully connected layers that see the same and share nothing. (B, F) -> (B, 2, 4 or more) float32.

    Narrow layers leave a GPU waiting for their kernels to start: side by side there are half as many.
    """

    def __init__(self, features: int, hidden: tuple[int, ...], outputs: int, norm: bool) -> None:
        """`hidden` has at least one width."""
        super().__init__()
        self.norm = norm
        self.first = nn.Linear(features, 2 * hidden[0])
        self.layers = nn.ModuleList(BlockDiagonalLinear(a, b) for a, b in itertools.pairwise(hidden))
        self.head = BlockDiagonalLinear(hidden[-1], round_up(outputs, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self._activate(self.first(x))
        for layer in self.layers:
            x = self._activate(layer(x))
        out: Tensor = self.head(x).unflatten(1, (2, -1)).to(torch.float32)
        return out

    def _activate(self, x: Tensor) -> Tensor:
        return activate(x.unflatten(1, (2, -1)), True).flatten(1) if self.norm else activate(x, False)


class Conv(nn.Module):
    """A 3x3 convolution of boards whose channels come last: (B, H, W, C) -> (B, H', W', out).

    Of few channels it is written as a matrix product of each cell's neighbourhood: a GPU's convolution of three channels
    took a third of a training step's time, most of it for the gradient of a few weights. There a small board is multiplied
    whole, with a matrix that holds each weight wherever it applies and zeros elsewhere: ten times the arithmetic, but
    neighbourhoods need not be written out, and outputs of all cells are columns of one product.
    """

    everywhere: Tensor | None

    def __init__(
        self, channels: int, out: int, stride: int = 1, board: tuple[int, int] = (0, 0), padding: bool = True
    ) -> None:
        """`board` has the rows and columns of a board whose channels are few; (0, 0): there are many.

        With a `border` of zeros around the board it keeps its size.
        """
        super().__init__()
        self.padding = int(padding)
        few = 0 < math.prod(board) <= _BOARD and 9 * channels <= _FEW and stride == 1
        self.pad = round_up(9 * channels, 8) - 9 * channels if few else round_up(channels, 8) - channels
        self.product = nn.Linear(9 * channels + self.pad, out) if few else None
        self.conv = None if few else nn.Conv2d(channels + self.pad, out, 3, stride=stride, padding=self.padding)
        # Columns that are always 0 add nothing: first weights are those of the rest.
        self.gain = math.sqrt((9 * channels + self.pad) / (9 * channels) if few else (channels + self.pad) / channels)
        whole = few and math.prod(board) * channels <= _WHOLE
        places = _everywhere(*board, channels, self.padding, 9 * channels + self.pad) if whole else None
        self.register_buffer("everywhere", places, persistent=False)

    def forward(self, x: Tensor, relu: bool = False) -> Tensor:
        """With `relu` the positive part of what comes out."""
        if self.product is None:
            return self._convolved(x, relu)
        out = self.of_whole_boards(x) if self.everywhere is not None and x.is_cuda else self.of_neighbours(x)
        return F.relu(out) if relu else out

    def of_neighbours(self, x: Tensor) -> Tensor:
        """As a product of each cell's neighbourhood."""
        assert self.product is not None
        height, width = self._after(x)
        x = F.pad(x, (0, 0, *(self.padding,) * 4))
        around = [x[:, i : i + height, j : j + width] for i in range(3) for j in range(3)]
        out: Tensor = self.product(F.pad(torch.cat(around, 3), (0, self.pad)).flatten(0, 2))
        return out.view(-1, height, width, out.shape[1])

    def of_whole_boards(self, x: Tensor) -> Tensor:
        """As a product of the board."""
        assert self.product is not None
        assert self.everywhere is not None
        height, width = self._after(x)
        inputs, places = x.flatten(1), self.everywhere.to(x.dtype)
        inputs = F.pad(inputs, (0, len(places) - inputs.shape[1]))
        matrix = torch.mm(places.flatten(0, 1), self.product.weight.to(x.dtype).t()).view(len(places), -1)
        return torch.mm(inputs, matrix).view(len(x), height, width, -1) + self.product.bias.to(x.dtype)

    def _after(self, x: Tensor) -> tuple[int, int]:
        """Rows and columns that come out."""
        return x.shape[1] + 2 * self.padding - 2, x.shape[2] + 2 * self.padding - 2

    def _convolved(self, x: Tensor, relu: bool) -> Tensor:
        assert self.conv is not None
        assert self.conv.bias is not None
        x = F.pad(x, (0, self.pad)).permute(0, 3, 1, 2)
        if relu and x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and torch.backends.cudnn.enabled:
            weight, bias = self.conv.weight.to(x.dtype), self.conv.bias.to(x.dtype)
            boards: Tensor = _ConvReLU.apply(x, weight, bias, self.conv.stride[0], self.padding)
        else:
            boards = self.conv(x)
            boards = F.relu(boards) if relu else boards
        return boards.permute(0, 2, 3, 1)


def _everywhere(height: int, width: int, channels: int, padding: int, columns: int) -> Tensor:
    """Where each weight of a convolution applies: (inputs, cells that come out, columns) bfloat16 of zeros and ones.

    Inputs are rounded up to a multiple of 8. Column (3 i + j) * channels + c is of channel c of the neighbour (i, j).
    """
    high, wide = height + 2 * padding - 2, width + 2 * padding - 2
    found = torch.zeros(round_up(height * width * channels, 8), high * wide, columns, dtype=torch.bfloat16)
    for row, column, i, j in itertools.product(range(high), range(wide), range(3), range(3)):
        y, x = row + i - padding, column + j - padding
        if 0 <= y < height and 0 <= x < width:
            for c in range(channels):
                found[(y * width + x) * channels + c, row * wide + column, (3 * i + j) * channels + c] = 1
    return found


class _ConvReLU(torch.autograd.Function):
    """A convolution, its bias and a ReLU in one kernel of a GPU's library: what it gives is written and read once less."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, stride: int, padding: int) -> Tensor:
        out = torch.cudnn_convolution_relu(x, weight, bias, [stride, stride], [padding, padding], [1, 1], 1)
        ctx.save_for_backward(x, weight, out)
        ctx.stride, ctx.padding = stride, padding
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, out = ctx.saved_tensors
        gradient = torch.where(out > 0, gradient, 0)
        stride, padding = [ctx.stride] * 2, [ctx.padding] * 2
        found = torch.ops.aten.convolution_backward(
            gradient,
            x,
            weight,
            [weight.shape[0]],
            stride,
            padding,
            [1, 1],
            False,
            [0, 0],
            1,
            list(ctx.needs_input_grad[:3]),
        )
        return *found, None, None


class Residual(nn.Module):
    """What two 3x3 convolutions add to their input. (B, H, W, C) -> the same shape."""

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
    """A convolution without border or bias of images whose channels come last: (B, H, W, C) -> (B, H', W', out).

    In steps of `stride` cells it is one of stride 1 of blocks of so many cells, whose cells are channels: of four frames
    those are 64, as many as a processor likes to multiply at once. A CPU, whose library is slow at a convolution's gradients,
    learns from products of neighbourhoods: an eighth less time for a whole step. Weights are kept in the order (row, column,
    channel), blocks first, then their cells.
    """

    def __init__(self, channels: int, out: int, kernel: int, stride: int) -> None:
        """`kernel` is a multiple of `stride`."""
        super().__init__(kernel * kernel * channels, out, bias=False)
        self.stride, self.reach = stride, kernel // stride

    def after(self, cells: int) -> int:
        """Rows or columns that come out of so many; of too few none or less."""
        return cells // self.stride - self.reach + 1

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """`scale` (C,) is of each channel of x."""
        weight = self.weight if scale is None else self.scaled(scale).flatten(1)
        learning = x.device.type == "cpu" and torch.is_grad_enabled()
        return (self.of_neighbours if learning else self.convolved)(self.blocks(x), weight)

    def takes_bytes(self, planes: Tensor) -> bool:
        """`of_bytes` can be asked of them."""
        if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
            return False
        fours = self.stride == 4 and planes.shape[3] % 4 == 0 and planes.storage_offset() % 4 == 0
        return fours and planes.device.type == "cpu" and planes.dtype == torch.uint8

    def of_bytes(self, planes: Tensor, scale: Tensor) -> Tensor:
        """Of images (B, C, H, W) uint8, which need no gradient; in half the time to arrange them: four are moved as one."""
        batch, channels, rows = len(planes), planes.shape[1], planes.shape[2] // 4
        four = planes[:, :, : 4 * rows].contiguous().view(-1).view(torch.int32).view(batch, channels, rows, 4, -1)
        blocks = four.permute(0, 2, 4, 1, 3).contiguous().view(torch.uint8).flatten(3).to(self.weight.dtype)
        # Of a block: channels, in each its rows. There are few weights to be brought into that order.
        weight = self.scaled(scale).unflatten(1, (-1, 16)).transpose(2, 3).flatten(1)
        return (self.of_neighbours if torch.is_grad_enabled() else self.convolved)(blocks, weight)

    def scaled(self, scale: Tensor) -> Tensor:
        """The weights (out, cells, C) of inputs that are to be multiplied by `scale` (C,): they are fewer than those."""
        weight: Tensor = self.weight.unflatten(1, (-1, len(scale)))
        return weight * scale

    def convolved(self, blocks: Tensor, weight: Tensor) -> Tensor:
        filters = weight.view(len(weight), self.reach, self.reach, -1)
        return F.conv2d(blocks.permute(0, 3, 1, 2), filters.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)

    def of_neighbours(self, blocks: Tensor, weight: Tensor) -> Tensor:
        """As a product of each block's neighbourhood."""
        for axis in (2, 1):  # the columns of a row, then the rows
            size = blocks.shape[axis] - self.reach + 1
            blocks = torch.cat([blocks.narrow(axis, start, size) for start in range(self.reach)], 3)
        return F.linear(blocks, weight)

    def blocks(self, x: Tensor) -> Tensor:
        """(B, H, W, C) -> (B, H / stride, W / stride, stride * stride * C); rows and columns left over are cut off."""
        side = self.stride
        if side == 1:
            return x
        height, width = x.shape[1] // side, x.shape[2] // side
        x = x[:, : height * side, : width * side].unflatten(1, (height, side)).unflatten(3, (width, side))
        return x.transpose(2, 3).flatten(3)


class PixelNorm(nn.Module):
    """Each image brought to mean 0 and deviation 1, its channels scaled and shifted, and of that what is positive.

    (B, H, W, C) -> the same shape. It is a group norm of one group: normalised cell by cell, noise would be as loud as what
    stands out of it, and many short rows take longer than few long ones.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        image = x.shape[1:]
        x = F.layer_norm(x, image, self.weight.expand(image), self.bias.expand(image)).to(x.dtype)
        return x.relu_()  # in place: gradients need what was normalised, not what came out


class Noisy(nn.Module):
    """A fully connected layer whose weights may be shaken, each as much as it has learned to (Fortunato et al. 2018).

    The noise is factored: one number an input, one an output. It stays as it was drawn last; there is none at first.
    """

    noise: Tensor

    def __init__(self, layer: nn.Linear, sigma: float) -> None:
        """Takes over the weights of `layer`; all begin with a deviation of sigma / sqrt(inputs)."""
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        deviation = sigma / math.sqrt(layer.in_features)
        self.weight_sigma = nn.Parameter(torch.full_like(layer.weight, deviation))
        self.bias_sigma = nn.Parameter(torch.full_like(layer.bias, deviation))
        self.sizes = [layer.in_features, layer.out_features]
        self.register_buffer("noise", torch.zeros(sum(self.sizes)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        noise_in, noise_out = self.noise.split(self.sizes)
        weight = self.weight + self.weight_sigma * (noise_out.unsqueeze(1) * noise_in)
        return F.linear(x, weight, self.bias + self.bias_sigma * noise_out)


@torch.no_grad()
def draw_noise(net: nn.Module, key: Tensor | None) -> None:
    """New noise for all noisy layers of `net` from `key` () int32; None: no noise."""
    buffers = [module.noise for module in net.modules() if isinstance(module, Noisy)]
    if key is None:
        for noise in buffers:
            noise.zero_()
        return
    sizes = [len(noise) for noise in buffers]
    normal = gaussian(random.bits(key, torch.arange(sum(sizes), device=key.device)))
    for noise, part in zip(buffers, (normal.sign() * normal.abs().sqrt()).split(sizes), strict=True):
        noise.copy_(part)


def gaussian(random_bits: Tensor) -> Tensor:
    """Standard normal float32, -5.2 to 5.2, from the upper 23 of `random_bits` (…) int64."""
    centred = ((random_bits >> 9).to(torch.float32) + 0.5) * 2.0**-22 - 1.0  # never -1 or 1
    return math.sqrt(2.0) * torch.erfinv(centred)


def init_weights(net: nn.Module, init: str) -> None:
    for module in net.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            for weights in _blocks(module):
                _begin(weights, init)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    for module in net.modules():
        if isinstance(module, Head):  # small first values: nothing is believed before it is learned
            nn.init.normal_(module.out.weight, std=_SMALL)
        if isinstance(module, TwinMLP):
            for block in module.first.weight.data.chunk(2):
                _begin(block, init)
            for block in _blocks(module.head):
                nn.init.normal_(block, std=_SMALL)
        if isinstance(module, Conv):
            layer = module.product or module.conv
            assert layer is not None
            layer.weight.data.mul_(module.gain)
        if isinstance(module, Residual):  # every block begins as if it were not there
            last = module.convs[-1].conv
            assert isinstance(last, nn.Conv2d)
            nn.init.zeros_(last.weight)


def _blocks(layer: nn.Linear | nn.Conv2d) -> tuple[Tensor, ...]:
    """The weights of a layer, of each of the two in a pair; what belongs to neither becomes 0."""
    if not isinstance(layer, BlockDiagonalLinear):
        return (layer.weight,)
    nn.init.zeros_(layer.weight)
    upper, lower = layer.weight.data.chunk(2)
    return upper.chunk(2, 1)[0], lower.chunk(2, 1)[1]


def _begin(weights: Tensor, init: str) -> None:
    """First weights (outputs, inputs, …) of a layer."""
    if init == "he":
        nn.init.kaiming_normal_(weights, nonlinearity="relu")
    else:
        nn.init.orthogonal_(weights, math.sqrt(2.0))


def make_noisy(net: nn.Module, sigma: float) -> None:
    """Let every fully connected layer be noisy, with the weights it has; convolutions are left alone."""
    for dense in [module for module in net.modules() if isinstance(module, Dense)]:
        for parent in list(dense.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, Noisy(child, sigma))


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
