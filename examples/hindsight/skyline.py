"""Skyline: drop blocks into columns until their heights match the goal, a skyline that is new in every game.

. . G . .      Actions: the column that the next block drops into. There are as many blocks as the goal needs. The only
. # G . #      reward is 1 for the finished skyline, and one block in the wrong column makes that impossible. With eight
# # # . #      columns, random play hardly ever succeeds, so without hindsight there is almost nothing to learn from.

In addition to the functions of every game, a game with goals defines `achieved`, `with_goal` and `judge` for `hindsight`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from redline.core import random
from redline.core.errors import UserError
from redline.core.records import Events, Spec

HIDDEN = ("key",)
PALETTE = (
    ("empty", (24, 26, 30)),
    ("block to come", (74, 82, 98)),
    ("block", (96, 190, 130)),
    ("extra block", (222, 92, 80)),
)


@dataclass(frozen=True)
class Config:
    """Options of Skyline."""

    width: int = 8  # columns
    height: int = 2  # maximum number of blocks in a column of the goal

    def __post_init__(self) -> None:
        for name, limit in (("width", 100), ("height", 20)):
            if not 2 <= getattr(self, name) <= limit:
                raise UserError(f"env.{name} is {getattr(self, name)}; expected 2 to {limit}.")


class State(NamedTuple):
    """N games of Skyline."""

    heights: Tensor  # (N, W) int16: blocks in each column
    goal: Tensor  # (N, W) int16: blocks in each column of the goal
    key: Tensor  # (N,) int32: random stream of the episode


def spec(config: Config) -> Spec:
    """Return the description of observations and actions."""
    return Spec(
        obs_shape=(2, config.height + 1, config.width),
        obs_dtype=torch.uint8,
        obs_scale=(1.0, 1.0),
        obs_high=1,
        num_actions=config.width,
        score_name="skylines",
    )


def init(config: Config, key: Tensor) -> State:
    """Start games with empty columns and a goal of at least one block. key (N,) int32."""
    column = torch.arange(config.width, device=key.device)
    goal = random.below(random.bits(key.unsqueeze(1), column), config.height + 1).to(torch.int16)
    empty = (goal == 0).all(1, keepdim=True)
    goal = torch.where(empty & (column == 0), 1, goal).to(torch.int16)
    return State(torch.zeros_like(goal), goal, key)


def step(config: Config, state: State, action: Tensor) -> tuple[State, Tensor, Tensor, Events]:
    """Drop a block; the game ends when all blocks are used, and is won if they match the goal. action (N,) integer."""
    column = torch.arange(config.width, device=action.device)
    dropped = (column == action.unsqueeze(1)).to(torch.int16)
    state = state._replace(heights=state.heights + dropped)
    reward, terminated = judge(config, state)
    won = reward > 0
    return state, reward, terminated, Events(won.to(torch.int32), won, torch.zeros_like(won))


def observe(config: Config, state: State) -> Tensor:
    """Return (N, 2, H + 1, W) uint8: blocks (up to one above the highest goal), blocks of the goal; lowest row last."""
    level = torch.arange(config.height, -1, -1, device=state.heights.device).view(1, 1, -1, 1)
    return (torch.stack([state.heights, state.goal], 1).unsqueeze(2) > level).to(torch.uint8)


def cells(config: Config, state: State) -> Tensor:
    """Return the boards as (N, H + 1, W) uint8 indices into PALETTE."""
    blocks, wanted = observe(config, state).unbind(1)
    return wanted * (1 - blocks) + blocks * (3 - wanted)


def achieved(config: Config, state: State) -> Tensor:
    """Return the goals (N, W) that these States achieve."""
    del config
    return state.heights


def with_goal(config: Config, state: State, goal: Tensor) -> State:
    """Return the States with other goals (N, W)."""
    del config
    return state._replace(goal=goal)


def judge(config: Config, state: State) -> tuple[Tensor, Tensor]:
    """Return the reward (N,) float32 for reaching these States, and whether the game ends there, (N,) bool."""
    del config
    reached = (state.heights == state.goal).all(1)
    used = state.heights.sum(1, dtype=torch.int32) >= state.goal.sum(1, dtype=torch.int32)
    return reached.to(torch.float32), used
