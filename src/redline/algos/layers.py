"""Parts that networks are made of: scaled inputs, dense and noisy layers, convolutions, and the weights they begin with."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from redline.core import random
from redline.core.records import Spec

# Up to so many cells of a board, and neighbours times channels of a cell, a product is the faster way.
_BOARD, _FEW = 1024, 128


class Scale(nn.Module):
    """Observations of any dtype to floats of about 1, channel by channel, in the precision the network runs in."""

    scale: Tensor

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        scale = torch.tensor(spec.obs_scale).view(-1, *(1,) * (len(spec.obs_shape) - 1))
        self.register_buffer("scale", scale, persistent=False)

    def forward(self, obs: Tensor) -> Tensor:
        device = obs.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
        return (obs.to(torch.float32) * self.scale).to(dtype)


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


class Dense(nn.Module):
    """Fully connected layers, each with a ReLU, and the head. (B, F) -> (B, A) float32."""

    def __init__(self, features: int, hidden: tuple[int, ...], num_actions: int, norm: bool, dueling: bool) -> None:
        super().__init__()
        widths = [features, *hidden]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for width in hidden) if norm else None
        self.head = Head(widths[-1], num_actions, dueling)

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            x = F.relu(x if self.norms is None else self.norms[number](x).to(x.dtype))
        out: Tensor = self.head(x)
        return out


class Conv(nn.Module):
    """A 3x3 convolution of boards whose channels come last: (B, H, W, C) -> (B, H / stride, W / stride, out).

    Of few channels it is written as a matrix product of each cell's neighbourhood: a GPU's convolution of three channels
    took a third of a training step's time, most of it for the gradient of a few weights.
    """

    def __init__(self, channels: int, out: int, stride: int = 1, cells: int = 0) -> None:
        """`cells` are those of a board whose channels are few; 0: there are many."""
        super().__init__()
        few = 0 < cells <= _BOARD and 9 * channels <= _FEW and stride == 1
        self.pad = round_up(9 * channels, 8) - 9 * channels if few else round_up(channels, 8) - channels
        self.product = nn.Linear(9 * channels + self.pad, out) if few else None
        self.conv = None if few else nn.Conv2d(channels + self.pad, out, 3, stride=stride, padding=1)
        # Columns that are always 0 add nothing: first weights are those of the rest.
        self.gain = math.sqrt((9 * channels + self.pad) / (9 * channels) if few else (channels + self.pad) / channels)

    def forward(self, x: Tensor) -> Tensor:
        if self.product is None:
            assert self.conv is not None
            boards: Tensor = self.conv(F.pad(x, (0, self.pad)).permute(0, 3, 1, 2))
            return boards.permute(0, 2, 3, 1)
        height, width = x.shape[1:3]
        x = F.pad(x, (0, 0, 1, 1, 1, 1))
        around = [x[:, i : i + height, j : j + width] for i in range(3) for j in range(3)]
        out: Tensor = self.product(F.pad(torch.cat(around, 3), (0, self.pad)).flatten(0, 2))
        return out.view(-1, height, width, out.shape[1])


class Residual(nn.Module):
    """What two 3x3 convolutions add to their input. (B, H, W, C) -> the same shape."""

    def __init__(self, channels: int, norm: bool) -> None:
        super().__init__()
        self.convs = nn.ModuleList(Conv(channels, channels) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for _ in range(2)) if norm else None

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for number, conv in enumerate(self.convs):
            y = F.relu(y if self.norms is None else self.norms[number](y).to(y.dtype))
            y = conv(y)
        return x + y


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


def first_weights(net: nn.Module, init: str) -> None:
    for module in net.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            if init == "he":
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            else:
                nn.init.orthogonal_(module.weight, math.sqrt(2.0))
            assert module.bias is not None
            nn.init.zeros_(module.bias)
    for module in net.modules():
        if isinstance(module, Head):  # small first values: nothing is believed before it is learned
            nn.init.normal_(module.out.weight, std=0.01)
        if isinstance(module, Conv):
            weights = module.product or module.conv
            assert weights is not None
            weights.weight.data.mul_(module.gain)
        if isinstance(module, Residual):  # every block begins as if it were not there
            last = module.convs[-1].conv
            assert isinstance(last, nn.Conv2d)
            nn.init.zeros_(last.weight)


def make_noisy(net: nn.Module, sigma: float) -> None:
    """Let every fully connected layer be noisy, with the weights it has; convolutions are left alone."""
    for dense in [module for module in net.modules() if isinstance(module, Dense)]:
        for parent in list(dense.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, Noisy(child, sigma))


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
