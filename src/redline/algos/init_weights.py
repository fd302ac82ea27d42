"""Weight initialisation: He or orthogonal, with outputs close to 0."""

from __future__ import annotations

import math

from torch import Tensor, nn

from redline.algos.conv import Conv, Residual
from redline.algos.dense import BlockDiagonalLinear, Head, TwinMLP

_OUTPUT_STD = 0.01  # deviation of the weights of output layers


def init_weights(net: nn.Module, init: str) -> None:
    """Draw the weights of `net` from torch's default generator. init: `he` or `orthogonal`."""
    for module in net.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            for weight in _blocks(module):
                _init_layer(weight, init)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    for module in net.modules():
        if isinstance(module, Head):  # initial values and logits are close to 0
            nn.init.normal_(module.out.weight, std=_OUTPUT_STD)
        if isinstance(module, TwinMLP):
            for block in module.first.weight.data.chunk(2):
                _init_layer(block, init)
            for block in _blocks(module.head):
                nn.init.normal_(block, std=_OUTPUT_STD)
        if isinstance(module, Conv):
            layer = module.product or module.conv
            assert layer is not None
            layer.weight.data.mul_(module.gain)
        if isinstance(module, Residual):  # every residual block starts as the identity
            last = module.convs[-1].conv
            assert isinstance(last, nn.Conv2d)
            nn.init.zeros_(last.weight)


def _blocks(layer: nn.Linear | nn.Conv2d) -> tuple[Tensor, ...]:
    """Return the weight of a layer, or the two diagonal blocks of a BlockDiagonalLinear, whose other blocks are set to zero."""
    if not isinstance(layer, BlockDiagonalLinear):
        return (layer.weight,)
    nn.init.zeros_(layer.weight)
    upper, lower = layer.weight.data.chunk(2)
    return upper.chunk(2, 1)[0], lower.chunk(2, 1)[1]


def _init_layer(weight: Tensor, init: str) -> None:
    """Draw the weight (outputs, inputs, …) of a layer."""
    if init == "he":
        nn.init.kaiming_normal_(weight, nonlinearity="relu")
    else:
        nn.init.orthogonal_(weight, math.sqrt(2.0))
