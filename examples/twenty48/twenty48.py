"""2048. Slide all tiles to one side; equal tiles that meet merge into their sum, and the score is the sum of merged tiles.

.  .  2  .      The board is kept as exponents, 0 for an empty cell: tile 2 is 1, tile 4 is 2, tile 2048 is 11.
.  4  .  .      Actions: 0 up, 1 right, 2 down, 3 left. A move that changes nothing is illegal; played all the
2  .  .  .      same, it leaves the board alone and draws no tile. The game ends when no move is legal.
8  4  2  .
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from redline.core import random, select
from redline.core.errors import UserError
from redline.core.records import Events, Spec

EXPONENTS = 14  # planes of an observation: empty, 2, 4, … 8192 and above
HIDDEN = ("drawn", "key")
LIVE = ("reward_scale",)
PALETTE = (
    ("empty", (205, 193, 180)),
    *((str(2**n), (238 - 4 * n, 228 - 12 * n, 218 - 12 * n)) for n in range(1, 18)),
)


@dataclass(frozen=True)
class Config:
    """Options of 2048."""

    fours: float = 0.1  # probability that a new tile is a 4
    reward_scale: float = 1 / 128  # reward for each point of the score

    def __post_init__(self) -> None:
        if not 0 <= self.fours <= 1:
            raise UserError(f"env.fours is {self.fours}; expected a probability from 0 to 1.")


class State(NamedTuple):
    """N games of 2048."""

    board: Tensor  # (N, 4, 4) int8: exponents, 0 empty
    drawn: Tensor  # (N,) int32: tiles drawn, the counter of the random stream
    key: Tensor  # (N,) int32: random stream of the episode


def spec(config: Config) -> Spec:
    """Describe observations and actions."""
    del config
    scale = (1.0,) * (EXPONENTS + 2)
    shape = (EXPONENTS + 2, 4, 4)
    return Spec(shape, torch.uint8, scale, 1, num_actions=4, score_name="points", masked=True, winnable=False)


def init(config: Config, key: Tensor) -> State:
    """Start games with two tiles. key (N,) int32."""
    board = torch.zeros(key.shape[0], 4, 4, dtype=torch.int8, device=key.device)
    state = State(board, torch.zeros_like(key), key)
    return _add_tile(config, _add_tile(config, state))


def step(config: Config, state: State, action: Tensor) -> tuple[State, Tensor, Tensor, Events]:
    """Slide the tiles to one side and add a new one. action (N,) integer."""
    board, points = _slide(state.board, action)
    moved = (board != state.board).flatten(1).any(1)
    added = _add_tile(config, state._replace(board=board))
    after = State(
        board=torch.where(moved.view(-1, 1, 1), added.board, state.board),
        drawn=torch.where(moved, added.drawn, state.drawn),
        key=state.key,
    )
    terminated = ~legal(config, after).any(1)
    never = torch.zeros_like(terminated)
    return after, points.to(torch.float32) * config.reward_scale, terminated, Events(points, never, never)


def observe(config: Config, state: State) -> Tensor:
    """(N, 16, 4, 4) uint8: a plane for each exponent, then cells that equal the one to the right, or below."""
    del config
    kinds = torch.arange(EXPONENTS, dtype=torch.int8, device=state.board.device).view(1, -1, 1, 1)
    planes = state.board.clamp(max=EXPONENTS - 1).unsqueeze(1) == kinds
    right, below = (_pad(equal, axis) for axis, equal in ((2, _equal(state.board, 2)), (1, _equal(state.board, 1))))
    return torch.cat([planes, right.unsqueeze(1), below.unsqueeze(1)], 1).to(torch.uint8)


def legal(config: Config, state: State) -> Tensor:
    """(N, 4) bool: a move must slide or merge a tile."""
    del config
    moves = []
    for axis in (1, 2):
        first, second = state.board.narrow(axis, 0, 3), state.board.narrow(axis, 1, 3)
        merges = _equal(state.board, axis)
        back = (((first == 0) & (second > 0)) | merges).flatten(1).any(1)  # up or left
        ahead = (((first > 0) & (second == 0)) | merges).flatten(1).any(1)  # down or right
        moves += [back, ahead]
    up, down, left, right = moves
    return torch.stack([up, right, down, left], 1)


def cells(config: Config, state: State) -> Tensor:
    """(N, 4, 4) uint8 indices into PALETTE."""
    del config
    return state.board.to(torch.uint8)


def _slide(board: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Return the boards after the move, before a new tile, and the points (N,) int32 of it."""
    vertical = ((action == 0) | (action == 2)).view(-1, 1, 1)
    mirrored = ((action == 1) | (action == 2)).view(-1, 1, 1)
    turned = torch.where(vertical, board.transpose(1, 2), board)
    turned = torch.where(mirrored, turned.flip(2), turned)
    row = _pack(list(turned.unbind(2)))  # four tensors (N, 4), slid to the left
    points = torch.zeros_like(row[0], dtype=torch.int32)
    for i in range(3):
        merges = (row[i] == row[i + 1]) & (row[i] > 0)
        row[i] = row[i] + merges.to(torch.int8)
        row[i + 1] = torch.where(merges, 0, row[i + 1])
        points = points + torch.where(merges, torch.ones_like(points) << row[i].to(torch.int32), 0)
    turned = torch.stack(_pack(row), 2)
    turned = torch.where(mirrored, turned.flip(2), turned)
    return torch.where(vertical, turned.transpose(1, 2), turned), points.sum(1, dtype=torch.int32)


def _pack(row: list[Tensor]) -> list[Tensor]:
    """Move empty cells to the end, keeping the order of the others."""
    for last in (3, 2, 1):
        for i in range(last):
            empty = row[i] == 0
            row[i], row[i + 1] = torch.where(empty, row[i + 1], row[i]), torch.where(empty, 0, row[i + 1])
    return row


def _add_tile(config: Config, state: State) -> State:
    """Put a 2 or a 4 on an empty cell, each as likely as any other; a full board stays as it is."""
    empty = state.board.flatten(1) == 0
    cell = select.draw(empty, random.bits(state.key, 2 * state.drawn))
    four = random.uniform(random.bits(state.key, 2 * state.drawn + 1)) < config.fours
    here = torch.arange(16, device=cell.device) == cell.unsqueeze(1)
    tile = (1 + four.to(torch.int8)).unsqueeze(1)
    board = torch.where(here & empty, tile, state.board.flatten(1)).view(-1, 4, 4)
    return State(board, state.drawn + 1, state.key)


def _equal(board: Tensor, axis: int) -> Tensor:
    """Pairs of neighbours along an axis that hold the same tile, bool, 3 long on that axis."""
    return (board.narrow(axis, 0, 3) == board.narrow(axis, 1, 3)) & (board.narrow(axis, 0, 3) > 0)


def _pad(pairs: Tensor, axis: int) -> Tensor:
    return torch.cat([pairs, torch.zeros_like(pairs.narrow(axis, 0, 1))], axis)
