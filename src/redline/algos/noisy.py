"""Noisy networks (Fortunato et al. 2018): linear layers with learned, factorised Gaussian noise."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from redline.algos.dense import Dense
from redline.core import random


class NoisyLinear(nn.Module):
    """A linear layer with noisy weights, each with a learned standard deviation.

    The noise is factorised: one number per input and one per output. It is zero at first and changes only in `draw_noise`.
    """

    noise: Tensor

    def __init__(self, layer: nn.Linear, sigma: float) -> None:
        """Take over the weights of `layer`; every deviation starts as sigma / sqrt(inputs)."""
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
    """Draw new noise for all noisy layers of `net` with `key` () int32; None sets the noise to zero."""
    buffers = [module.noise for module in net.modules() if isinstance(module, NoisyLinear)]
    if key is None:
        for noise in buffers:
            noise.zero_()
        return
    sizes = [len(noise) for noise in buffers]
    normal = gaussian(random.bits(key, torch.arange(sum(sizes), device=key.device)))
    for noise, part in zip(buffers, (normal.sign() * normal.abs().sqrt()).split(sizes), strict=True):
        noise.copy_(part)


def gaussian(random_bits: Tensor) -> Tensor:
    """Return standard normal float32, within ±5.2, from the upper 23 of `random_bits` (…) int64."""
    centred = ((random_bits >> 9).to(torch.float32) + 0.5) * 2.0**-22 - 1.0  # never -1 or 1
    return math.sqrt(2.0) * torch.erfinv(centred)


def make_noisy(net: nn.Module, sigma: float) -> None:
    """Replace every fully connected layer of `net` with a NoisyLinear with the same weights; convolutions stay."""
    for dense in [module for module in net.modules() if isinstance(module, Dense)]:
        for parent in list(dense.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, NoisyLinear(child, sigma))
