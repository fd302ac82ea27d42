"""Boards of Tetris as columns of bits: free cells, falling, settling, full rows, new pieces, shaping of rewards."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from redline.core import random
from redline.core.bits import count_all_bits, count_bits, heights
from redline.games._tetrominoes import lowest_of, shape_of

if TYPE_CHECKING:
    from redline.games.tetris import Config, State


_START = -1  # random counter of the starting stack's height; its rows use -2 and below, pieces use 0 and above


def is_free(config: Config, columns: Tensor, piece: Tensor, turn: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return (N,) bool: whether the piece lies inside the board and overlaps no settled cell."""
    shape, width, height = shape_of(piece, turn)
    free: Tensor = (x >= 0) & (x + width <= config.width) & (y + height <= top_row(config))
    for k in range(4):
        column = columns.gather(1, (x + k).clamp(0, config.width - 1).to(torch.int64).unsqueeze(1)).squeeze(1)
        free = free & ((((column >> y) & (shape >> 4 * k)) & 15) == 0)
    return free


def fall_distance(config: Config, columns: Tensor, shape: Tensor, width: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the number of rows (N,) int32 that the piece can fall. shape, width, x and y are (N,) int32."""
    room = y
    for k in range(4):
        column = columns.gather(1, (x + k).clamp(0, config.width - 1).to(torch.int64).unsqueeze(1)).squeeze(1)
        bottom = y + lowest_of((shape >> 4 * k) & 15)
        below = heights(column & ((torch.ones_like(column) << bottom) - 1))
        room = torch.where(k < width, torch.minimum(room, bottom - below), room)
    return room


def settle(config: Config, columns: Tensor, shape: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return columns (N, W) after a piece has settled and full rows are removed, and the removed lines (N,) int32."""
    place = torch.arange(config.width, dtype=torch.int32, device=x.device)
    shift = 4 * (place - x.unsqueeze(1))
    inside = (shift >= 0) & (shift < 16)
    piece = torch.where(inside, (shape.unsqueeze(1) >> shift.clamp(0, 12)) & 15, 0)
    settled = columns | (piece.to(columns.dtype) << y.unsqueeze(1))
    full = settled[:, 0]
    for column in range(1, config.width):
        full = full & settled[:, column]
    lows, lines = full_rows(full)
    return remove_rows(settled, [low.unsqueeze(1) for low in lows]), lines


def full_rows(full: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return masks of the rows below each full row, lowest first, and the number of full rows.

    Each mask accounts for the rows removed before it. A piece fills at most four rows; a mask of all rows removes nothing.
    """
    lows, lines = [], torch.zeros_like(full, dtype=torch.int32)
    for _ in range(4):
        row = full & -full
        lows.append(row - 1)
        lines = lines + (row != 0)
        full = (full & ~row) >> 1
    return lows, lines


def remove_rows(columns: Tensor, lows: list[Tensor]) -> Tensor:
    for low in lows:
        columns = (columns & low) | ((columns >> 1) & ~low)
    return columns


def next_piece(config: Config, state: State, due: Tensor) -> State:
    """Return the State with the next piece falling and another one drawn, where `due` (N,) bool is True."""
    drawn, bag = draw_piece(config, state.key, state.bag.to(torch.int32), state.drawn)
    pieces = torch.cat([state.pieces[:, 1:], drawn.to(torch.int8).unsqueeze(1)], 1)
    return state._replace(
        pieces=torch.where(due.unsqueeze(1), pieces, state.pieces),
        bag=torch.where(due, bag.to(torch.int8), state.bag),
        drawn=state.drawn + due.to(torch.int32),
    )


def draw_piece(config: Config, key: Tensor, bag: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
    """Return the piece drawn with random counter `number`, and the bag without it, each (N,) int32."""
    bits = random.bits(key, number)
    if config.pieces == "uniform":
        return random.below(bits, 7).to(torch.int32), bag
    rank = random.below(bits, count_bits(bag)).to(torch.int32)
    piece = torch.zeros_like(bag)
    for kind in range(1, 7):  # select the last kind in the bag with at most `rank` others before it
        held = (bag >> kind) & 1
        before = count_bits(bag & ((1 << kind) - 1))
        piece = torch.where((held == 1) & (before <= rank), kind, piece)
    left = bag & ~(torch.ones_like(bag) << piece)
    return piece, torch.where(left == 0, 127, left)


def spawn(config: Config, state: State) -> State:
    """Return the State with the falling piece at the top centre, not turned."""
    kind = state.pieces[:, 0].to(torch.int32)
    _, width, height = shape_of(kind, torch.zeros_like(kind))
    x = torch.div(config.width - width, 2, rounding_mode="floor").to(torch.int8)
    none = torch.zeros_like(x)
    return state._replace(turn=none, x=x, y=(top_row(config) - height).to(torch.int8), ticks=none)


def top_row(config: Config) -> Any:
    """Return the number of rows that a piece may reach: an int, or a () tensor if the option is live."""
    ceiling: Any = config.ceiling
    return (
        torch.where(ceiling == 0, config.height, ceiling) if isinstance(ceiling, Tensor) else ceiling or config.height
    )


def starting_stack(config: Config, key: Tensor) -> Tensor:
    """Return columns (N, W) with a stack of 0 to start_height rows with random gaps; no row is full."""
    dtype = torch.int32 if config.height <= 24 else torch.int64
    if isinstance(config.start_height, int) and config.start_height == 0:
        return torch.zeros(1, config.width, dtype=dtype, device=key.device).expand(key.shape[0], -1)
    height = random.below(random.bits(key, _START), config.start_height + 1)
    row = torch.arange(config.height, device=key.device)
    cells = random.below(random.bits(key.unsqueeze(1), _START - 1 - row), (1 << config.width) - 1)  # (N, H)
    cells = torch.where(row < height.unsqueeze(1), cells, 0)
    column = torch.arange(config.width, device=key.device).view(1, -1, 1)
    return (((cells.unsqueeze(1) >> column) & 1) << row).sum(2).to(dtype)


def shape_reward(
    config: Config, reward: Tensor, before: Sequence[Tensor], after: Sequence[Tensor], settled: Tensor
) -> Tensor:
    """Return the reward plus shaping for holes, height and settled pieces. Boards are W columns (…), settled is (…) bool."""
    if _used(config.reward_hole) or _used(config.reward_height):
        low, high = [heights(column) for column in before], [heights(column) for column in after]
        cells = count_all_bits(after) - count_all_bits(before)
        holes = functools.reduce(torch.add, high) - functools.reduce(torch.add, low) - cells
        growth = functools.reduce(torch.maximum, high) - functools.reduce(torch.maximum, low)
        reward = reward + config.reward_hole * torch.where(settled, holes, 0).to(torch.float32)
        reward = reward + config.reward_height * torch.where(settled, growth, 0).to(torch.float32)
    if _used(config.reward_piece):
        reward = reward + config.reward_piece * settled.to(torch.float32)
    return reward


def _used(weight: Any) -> bool:
    """Return whether a weight is, or can become, nonzero: a tensor may change during training."""
    return isinstance(weight, Tensor) or weight != 0
