"""Networks of convolutions over whole columns of a board.

When pieces fall, columns matter: their heights, their gaps, and the differences between neighbours. A filter over three whole
columns sees all of them, and its weights are shared between all places of the board. A 3x3 filter sees a tenth as much and is
applied to every cell.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from redline.algos.dense import Dense, Scale, activate, linear_relu, round_up
from redline.algos.network_config import NetworkConfig, gather, masked
from redline.core.records import Spec


class ColumnConv(nn.Linear):
    """A convolution over three neighbouring columns, with ReLU. (B, W, C) -> (B, W, out).

    The board is padded with a column of ones on each side: walls as high as the board.
    """

    def __init__(self, channels: int, out: int) -> None:
        super().__init__(round_up(3 * channels, 8), out)
        self.pad = self.in_features - 3 * channels

    def forward(self, x: Tensor, norm: bool) -> Tensor:  # type: ignore[override]
        batch, width, _ = x.shape
        x = F.pad(x, (0, 0, 1, 1), value=1.0)
        beside = torch.cat([x[:, :-2], x[:, 1:-1], x[:, 2:], x.new_zeros(batch, width, self.pad)], 2).flatten(0, 1)
        layer = (self.weight, self.bias)
        out = activate(F.linear(beside, *layer), True) if norm else linear_relu(beside, *layer)
        return out.view(batch, width, -1)


class ColumnNet(nn.Module):
    """Convolutions along the columns, then dense layers. (B, W, C) and extras (B, E) -> (B, A) float32.

    The last layer is always computed in float32: near 13, bfloat16 resolves values only in steps of 1/16.
    """

    def __init__(
        self, channels: int, width: int, extras: int, config: NetworkConfig, num_actions: int, dueling: bool
    ) -> None:
        super().__init__()
        widths = (channels, *config.channels)
        self.convs = nn.ModuleList(ColumnConv(a, b) for a, b in pairwise(widths))
        self.norm, self.pad = config.layer_norm, round_up(extras, 8) - extras
        features = width * config.channels[-1] + extras + self.pad
        self.dense = Dense(features, config.hidden[-1:], num_actions, config.layer_norm, dueling)

    def forward(self, x: Tensor, extras: Tensor | None = None) -> Tensor:
        for conv in self.convs:
            x = conv(x, self.norm)
        x = x.flatten(1)
        if extras is not None:
            x = torch.cat([x, extras, x.new_zeros(x.shape[0], self.pad)], 1)
        return self.dense.head.in_float32(self.dense.hidden(x))


class Columns(nn.Module):
    """A ColumnNet over planes; the channels of a column are its C * H cells. (B, C, H, W) -> (B, A) float32."""

    def __init__(self, spec: Spec, config: NetworkConfig, dueling: bool = False) -> None:
        super().__init__()
        planes, height, width = spec.obs_shape
        self.scale = Scale(spec)
        self.net = ColumnNet(planes * height, width, 0, config, spec.num_actions, dueling)

    def forward(self, obs: Tensor, legal: Tensor | None = None) -> Tensor:
        return masked(self.net(self.scale(obs).permute(0, 3, 1, 2).flatten(2)), legal)

    def chosen(self, obs: Tensor, action: Tensor) -> Tensor:
        return gather(self(obs), action)


class AfterstateColumns(nn.Module):
    """A ColumnNet over the board of an afterstate; other features go to the dense layers. (B, F) -> (B, A) float32.

    Features are the reward, the cells of the board row by row, and any others.
    """

    def __init__(self, spec: Spec, board: tuple[int, int], config: NetworkConfig) -> None:
        super().__init__()
        self.board, self.scale = board, Scale(spec)
        (features,), cells = spec.obs_shape, board[0] * board[1]
        self.sizes = [1, cells, features - 1 - cells]
        self.net = ColumnNet(*board, features - cells, config, spec.num_actions, dueling=False)

    def forward(self, rows: Tensor) -> Tensor:
        reward, cells, others = self.scale(rows).split(self.sizes, 1)
        out: Tensor = self.net(cells.unflatten(1, self.board).transpose(1, 2), torch.cat([reward, others], 1))
        return out
