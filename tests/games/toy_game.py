"""A correct game with the six required members only: walk right five times along a row of seeded coins.

Tests replace one member at a time to break one rule of the contract.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from redline.core import random
from redline.core.records import Events, Spec


@dataclass(frozen=True)
class Config:
    cells: int = 6
    reward_coin: float = 1.0


class State(NamedTuple):
    place: Tensor  # (N,) int16: cell of the player
    coins: Tensor  # (N, C) bool: coins left
    key: Tensor  # (N,) int32


def spec(config: Config) -> Spec:
    return Spec((2, config.cells), torch.uint8, (1.0, 1.0), 1, 2, "coins")


def init(config: Config, key: Tensor) -> State:
    draws = random.bits(key.unsqueeze(1), torch.arange(config.cells, device=key.device))
    return State(torch.zeros_like(key, dtype=torch.int16), random.below(draws, 2) == 1, key)


def step(config: Config, state: State, action: Tensor) -> tuple[State, Tensor, Tensor, Events]:
    place = (state.place + (action == 1)).clamp(max=config.cells - 1).to(torch.int16)
    here = F.one_hot(place.to(torch.int64), config.cells).to(torch.bool)
    coin = (here & state.coins).any(1)
    ended = place == config.cells - 1
    events = Events(coin.to(torch.int32), ended, torch.zeros_like(ended))
    return State(place, state.coins & ~here, state.key), config.reward_coin * coin.to(torch.float32), ended, events


def observe(config: Config, state: State) -> Tensor:
    here = F.one_hot(state.place.to(torch.int64), config.cells)
    return torch.stack([here, state.coins], 1).to(torch.uint8)
