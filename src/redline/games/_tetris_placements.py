"""Tetris by placement: one decision a piece, legal placements, afterstates and their features."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from redline.core.bits import (
    count_all_bits,
    count_bits,
    count_octets,
    fold_halves,
    fold_octets,
    heights,
    pair_octets,
    weigh_octets,
)
from redline.core.records import where
from redline.games._tetris_board import full_rows, next_piece, remove_rows, shape_reward, spawn, top_row
from redline.games._tetrominoes import ABOVE, PLACES, placements, property_of

if TYPE_CHECKING:
    from redline.games.tetris import Config, State


FEATURES = (  # of an afterstate, in this order; the heights of all columns follow, then the next pieces one-hot
    *("reward", "lines", "landing_height", "eroded_cells", "row_transitions", "column_transitions", "holes", "wells"),
    *("hole_depth", "rows_with_holes", "diversity", "bumpiness"),
)


class Landing(NamedTuple):
    """Boards after pieces were dropped and full rows removed: N boards, A placements each, W columns."""

    columns: list[Tensor]  # W columns (N, A), as in State.columns; meaningless for illegal placements
    legal: Tensor  # (N, A) bool: the piece fits below the top
    lines: Tensor  # (N, A) int32: rows removed
    landing: Tensor  # (N, A) int32: twice the height of the piece's middle above the floor, minus one row
    eroded: Tensor  # (N, A) int32: lines times the number of the piece's cells removed with them


def num_placements(config: Config) -> int:
    """Return A, the number of placements of a piece with four orientations: the most that any piece has."""
    return 4 * config.width - 6


def place_piece(config: Config, state: State, action: Tensor) -> tuple[State, Tensor, Tensor, Tensor]:
    """Return State, terminated, lines, and whether the falling piece settled, after placement (N,) int32."""
    known = (action >= 0) & (action < num_placements(config))
    land = afterstates(config, state, torch.where(known, action, 0))
    fits = land.legal & known.unsqueeze(1)
    columns = [torch.where(fits, *pair) for pair in zip(land.columns, state.columns.split(1, 1), strict=True)]
    fits = fits.squeeze(1)
    following = where(fits, spawn(config, next_piece(config, state, torch.ones_like(fits))), state)
    kind = following.pieces[:, 0].to(torch.int32)
    blocked = room_for_placements(config, kind, [column.squeeze(1) for column in columns]) == 0
    after = following._replace(columns=torch.cat(columns, 1))
    return after, ~fits | blocked, torch.where(fits, land.lines.squeeze(1), 0), fits


def room_for_placements(config: Config, kind: Tensor, columns: Sequence[Tensor]) -> Tensor:
    """Return the legal placements of a piece as bits (N,) int64: bit 16 o + x is orientation o at column x.

    The piece above a column must stay below the top. Set k of the four sets holds the columns with at least k free rows,
    for a piece with k rows from its lowest cell there up. An orientation fits where all its columns are in their sets.
    kind (N,) int32; columns: W tensors (N,).
    """
    sets = torch.zeros_like(kind, dtype=torch.int64)
    for number, column in enumerate(columns):
        rows = (top_row(config) - heights(column)).clamp(0, 4).to(torch.int64)  # free rows, at most 4
        # One bit for each set that the column is in.
        sets = sets | ((0x0001000100010001 >> (64 - 16 * rows).clamp(max=63)) << number)
    room = torch.zeros_like(sets)
    for orientation in range(4):
        fits = torch.full_like(sets, 0xFFFF)
        for k in range(4):
            place = property_of(PLACES[orientation][k], kind)
            fits = fits & (((sets >> 16 * (property_of(ABOVE[orientation][k], kind) - 1)) & 0xFFFF) >> place)
        room = room | (fits << 16 * orientation)
    return room


def table_entries(config: Config, state: State, table: Tensor) -> Tensor:
    """Return the entries (N, A) of the falling piece in a table of `placements`."""
    number = torch.arange(num_placements(config), dtype=torch.int32, device=table.device)
    return table[state.pieces[:, 0].to(torch.int32).unsqueeze(1) * num_placements(config) + number]


def afterstates(config: Config, state: State, action: Tensor | None = None) -> Landing:
    """Return the boards after every placement of the falling piece; with action (N,), after this placement only, A = 1."""
    tables = placements(config.width, state.x.device)
    if action is None:
        place, body = (table_entries(config, state, table) for table in tables)
    else:
        number = state.pieces[:, 0].to(torch.int32) * num_placements(config) + action
        place, body = (table[number].unsqueeze(1) for table in tables)
    x, drop, fits = drop_rows(config, state.columns, place, body)
    shape, height = body & 0xFFFF, body >> 16
    drop = torch.where(fits, drop, 0)
    piece = shape.to(torch.int64) << 4 * x  # four bits for each column of the board
    settled = [
        board | (((piece >> 4 * column) & 15).to(board.dtype) << drop)
        for column, board in enumerate(state.columns.split(1, 1))
    ]
    full = functools.reduce(torch.bitwise_and, settled)
    lows, lines = full_rows(full)
    went = count_bits(shape & (((full >> drop) & 15).to(torch.int32) * 0x1111))  # the piece's cells in full rows
    columns = [remove_rows(column, lows) for column in settled]
    return Landing(columns, fits, lines, 2 * drop + height - 1, lines * went)


def drop_rows(config: Config, columns: Tensor, place: Tensor, body: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return leftmost column, landing row and legality of placements, (N, A) each. columns (N, W); place, body (N, A)."""
    x, drop = (place >> 24) & 15, torch.zeros_like(place)
    for k in range(4):
        below = columns.gather(1, (x + k).clamp(max=config.width - 1).to(torch.int64))
        drop = torch.maximum(drop, heights(below) - ((place >> 6 * k) & 63))
    return x, drop, drop + (body >> 16) <= top_row(config)


def features(config: Config, state: State, after: Landing) -> Tensor:
    """Return the features of afterstates (N, A, F) float32: FEATURES in order, then column heights and next pieces.

    The features are those of Dellacherie and of Thiery and Scherrer, counted after full rows are removed; walls and floor
    count as filled. Their papers leave the definitions of wells and hole depth open: with those used here, published
    controllers reach their published scores (docs/log.md). `landing_height` is doubled and has no offset, so that it is an
    integer. `reward` is the placement's, without the penalty if the next piece has no room.
    """
    reward = _placement_reward(config, state, after)
    known = {"reward": reward, "lines": after.lines, "landing_height": after.landing, "eroded_cells": after.eroded}
    known |= board_features(config, after.columns)
    rows = [known[name].to(torch.float32) for name in FEATURES]
    rows += [heights(column).to(torch.float32) for column in after.columns]
    return torch.stack(rows + _next_pieces(config, state, reward), 2)


def boards(config: Config, state: State, after: Landing) -> Tensor:
    """Return afterstates (N, A, 1 + H * W + 7 * previews) float32: `reward` as in `features`, board cells, next pieces.

    Cells are 1 where settled, in row order, the top row first.
    """
    reward = _placement_reward(config, state, after)
    row = torch.arange(config.height - 1, -1, -1, dtype=torch.int32, device=reward.device).view(-1, 1)
    cells = (torch.stack(after.columns, 2).unsqueeze(2) >> row) & 1
    coming = [piece.unsqueeze(2) for piece in _next_pieces(config, state, reward)]
    return torch.cat([reward.unsqueeze(2), cells.flatten(2).to(torch.float32), *coming], 2)


def _placement_reward(config: Config, state: State, after: Landing) -> Tensor:
    """Return the rewards (N, A) float32 of placements, without the penalty if the next piece has no room."""
    reward = config.reward_line * after.lines.to(torch.float32)
    return shape_reward(config, reward, state.columns.split(1, 1), after.columns, after.legal)


def _next_pieces(config: Config, state: State, like: Tensor) -> list[Tensor]:
    """Return the next pieces one-hot: seven float32 tensors per piece, in the shape (N, A) of `like`."""
    coming = [state.pieces[:, preview].unsqueeze(1) for preview in range(1, 1 + config.previews)]
    return [(piece == kind).to(torch.float32).expand_as(like) for piece in coming for kind in range(7)]


def board_features(config: Config, columns: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the features (…) int32, by name, of boards given as W columns (…).

    Columns are separate tensors, so that all of them stay in the registers of one kernel.

    row_transitions     changes between filled and empty along rows; walls count as filled
    column_transitions  the same along columns; the floor counts as filled, above the top is empty
    holes               empty cells with a filled cell above       hole_depth       filled cells above each hole, summed
    wells               1 + … + depth of each column lower than both neighbours; walls are as high as the board
    rows_with_holes     number of rows with a hole                 diversity        how many of -2 … 2 occur as differences
    bumpiness           absolute height differences of neighbours, summed
    """
    height = [heights(column) for column in columns]
    wall = (1 << config.height) - 1
    beside = [columns[0] ^ wall, columns[-1] ^ wall]
    beside += [columns[i - 1] ^ columns[i] for i in range(1, config.width)]
    covered = [((torch.ones_like(column) << top) - 1) & ~column for top, column in zip(height, columns, strict=True)]
    differences = [height[i] - height[i - 1] for i in range(1, config.width)]
    seen = _union([1 << (difference + 3).clamp(0, 6) for difference in differences]) & 0b0111110
    lower = [height[1], *(torch.minimum(a, b) for a, b in zip(height[:-2], height[2:], strict=True)), height[-2]]
    wells = [_triangle((beside - top).clamp(min=0)) for beside, top in zip(lower, height, strict=True)]
    # Columns start at a filled floor and end empty; each run of filled cells above a gap adds two transitions.
    runs = [column & ~((column << 1) | 1) for column in columns]
    # A filled cell in row r has r cells below it; those that are not filled are holes.
    counted = [count_octets(column) for column in columns]
    filled = [fold_octets(octets) for octets, _ in counted]
    rows_below = fold_halves(_add([pair_octets(places) for _, places in counted]))
    rows_below = rows_below + 8 * weigh_octets(_add([octets for octets, _ in counted]))
    return {
        "row_transitions": count_all_bits(beside),
        "column_transitions": config.width + 2 * count_all_bits(runs),
        "holes": _add(height) - _add(filled),
        "wells": _add(wells),
        "hole_depth": rows_below - _add([_triangle(cells - 1) for cells in filled]),
        "rows_with_holes": count_bits(_union(covered)),
        "diversity": count_bits(seen),
        "bumpiness": _add([difference.abs() for difference in differences]),
    }


def _add(counts: list[Tensor]) -> Tensor:
    return functools.reduce(torch.add, counts)


def _union(sets: list[Tensor]) -> Tensor:
    return functools.reduce(torch.bitwise_or, sets)


def _triangle(depth: Tensor) -> Tensor:
    """Return 1 + 2 + … + depth."""
    return (depth * (depth + 1)) >> 1
