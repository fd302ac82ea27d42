"""Tetris by placement: one decision a piece, legal placements, afterstates and their features."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from redline.core.bits import count_bits, count_bits_along, count_octets, fold_octets, heights, weigh_octets
from redline.core.records import where
from redline.games._tetris_board import full_rows, next_piece, remove_rows, settle, shape_reward, spawn, top_row
from redline.games._tetrominoes import ABOVE, PLACES, placements, property_of

if TYPE_CHECKING:
    from redline.games.tetris import Config, State


FEATURES = (  # of an afterstate, in this order; the heights of all columns follow, then the next pieces one-hot
    *("reward", "lines", "landing_height", "eroded_cells", "row_transitions", "column_transitions", "holes", "wells"),
    *("hole_depth", "rows_with_holes", "diversity", "bumpiness"),
)


class Afterstates(NamedTuple):
    """The board after each placement, full rows removed. A placements, W columns."""

    columns: Tensor  # (W, N, A) as State.columns; meaningless for illegal placements
    legal: Tensor  # (N, A) bool: the piece fits below the top
    lines: Tensor  # (N, A) int32: rows removed
    landing: Tensor  # (N, A) int32: twice the height of the piece's middle above the floor, less one row
    eroded: Tensor  # (N, A) int32: lines times the piece's cells that went with them


def num_placements(config: Config) -> int:
    """Return A: the placements of a piece with four orientations, the most any piece has."""
    return 4 * config.width - 6


def num_features(config: Config) -> int:
    return len(FEATURES) + config.width + 7 * config.previews


def place_piece(config: Config, state: State, action: Tensor) -> tuple[State, Tensor, Tensor, Tensor]:
    """Settle the falling piece: State, terminated, lines, whether it settled."""
    known = (action >= 0) & (action < num_placements(config))
    number = state.pieces[:, 0].to(torch.int32) * num_placements(config) + torch.where(known, action, 0)
    place, body = (table[number].unsqueeze(1) for table in placements(config.width, action.device))
    x, drop, fits = (entry.squeeze(1) for entry in drop_rows(config, heights(state.columns), place, body))
    fits = fits & known
    settled, lines = settle(config, state.columns, body.squeeze(1) & 0xFFFF, x, torch.where(fits, drop, 0))
    following = next_piece(config, state._replace(columns=settled), torch.ones_like(fits))
    after = where(fits, spawn(config, following), state)
    return after, ~fits | (room_for_placements(config, after) == 0), torch.where(fits, lines, 0), fits


def room_for_placements(config: Config, state: State) -> Tensor:
    """Return the legal placements of the falling piece as bits (N,) int64: bit 16 o + x is orientation o at column x.

    A column may be at most so high that the piece above it stays below the top: four sets of columns, for the 1 to 4 rows
    that a piece has above its lowest cell there. An orientation fits where all its columns are in their sets.
    """
    kind = state.pieces[:, 0].to(torch.int32)
    rows = (top_row(config) - heights(state.columns)).clamp(0, 4).to(torch.int64)  # (N, W): free rows, 4 or more as 4
    column = torch.arange(config.width, device=rows.device)
    # One bit for each set that the column is in. Joined column by column: triton fails to compile a sum over them.
    member = (0x0001000100010001 >> (64 - 16 * rows).clamp(max=63)) << column
    sets = functools.reduce(torch.bitwise_or, member.unbind(1))
    room = torch.zeros_like(sets)
    for orientation in range(4):
        fits = torch.full_like(sets, 0xFFFF)
        for k in range(4):
            place = property_of(PLACES[orientation][k], kind)
            fits = fits & (((sets >> 16 * (property_of(ABOVE[orientation][k], kind) - 1)) & 0xFFFF) >> place)
        room = room | (fits << 16 * orientation)
    return room


def table_entries(config: Config, state: State, table: Tensor) -> Tensor:
    """Return the entries (N, A) of a table of placements that belong to the falling piece."""
    number = torch.arange(num_placements(config), dtype=torch.int32, device=table.device)
    return table[state.pieces[:, 0].to(torch.int32).unsqueeze(1) * num_placements(config) + number]


def drop_rows(config: Config, stack: Tensor, place: Tensor, body: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return leftmost column, landing row and legality of placements. stack: heights (N, W); table entries (N, A)."""
    x, drop = (place >> 24) & 15, torch.zeros_like(place)
    for k in range(4):
        column = (x + k).clamp(max=config.width - 1)
        drop = torch.maximum(drop, stack.gather(1, column.to(torch.int64)) - ((place >> 6 * k) & 63))
    return x, drop, drop + (body >> 16) <= top_row(config)


def afterstates(config: Config, state: State) -> Afterstates:
    """Return the boards after every placement of the falling piece."""
    place, body = (table_entries(config, state, table) for table in placements(config.width, state.x.device))
    x, drop, fits = drop_rows(config, heights(state.columns), place, body)
    shape, height = body & 0xFFFF, body >> 16
    board = state.columns.t().unsqueeze(2)  # (W, N, 1)
    drop = torch.where(fits, drop, 0)
    column = torch.arange(config.width, dtype=torch.int32, device=x.device).view(-1, 1, 1)
    shift = 4 * (column - x)  # (W, N, A): where a column lies in the piece's 16 bits
    inside = (shift >= 0) & (shift < 16)
    settled = board | (torch.where(inside, (shape >> shift.clamp(0, 12)) & 15, 0).to(board.dtype) << drop)
    full = functools.reduce(torch.bitwise_and, settled.unbind(0))
    lows, lines = full_rows(full)
    went = count_bits(shape & (((full >> drop) & 15).to(torch.int32) * 0x1111))  # the piece's cells in those rows
    return Afterstates(remove_rows(settled, lows), fits, lines, 2 * drop + height - 1, lines * went)


def features(config: Config, state: State, after: Afterstates) -> Tensor:
    """Return (N, A, F) float32: FEATURES in order, then the heights of the columns and the next pieces.

    The features are those of Dellacherie and of Thiery and Scherrer, counted after full rows are removed; walls and floor
    count as filled. Their papers leave wells and hole depth open to interpretation: with the definitions here, published
    controllers reach their published scores (docs/log.md). `landing_height` is doubled and without an offset, so that it
    is an integer. `reward` is that of the placement, without the penalty for a next piece that has no room.
    """
    height = heights(after.columns)  # (W, N, A)
    counts = board_features(config, after.columns, height)
    reward = config.reward_line * after.lines.to(torch.float32)
    reward = shape_reward(config, reward, state.columns.t().unsqueeze(2), after.columns, after.legal, dim=0)
    known = {"reward": reward, "lines": after.lines, "landing_height": after.landing, "eroded_cells": after.eroded}
    rows = [(known | counts)[name].to(torch.float32) for name in FEATURES]
    rows += list(height.to(torch.float32).unbind(0))
    for preview in range(1, 1 + config.previews):
        piece = state.pieces[:, preview].unsqueeze(1)
        rows += [(piece == kind).to(torch.float32).expand_as(reward) for kind in range(7)]
    return torch.stack(rows, 2)


def board_features(config: Config, columns: Tensor, height: Tensor) -> dict[str, Tensor]:
    """Count features of boards: columns (W, …) and their heights (W, …) -> each (…) int32.

    row_transitions     from filled to empty or back along rows, walls filled
    column_transitions  the same along columns, floor filled, above the top empty
    holes               empty cells with a filled one above        hole_depth       for each of them, filled cells above
    wells               columns lower than both neighbours, walls are as high as the board: 1 + … + depth
    rows_with_holes     rows                                       diversity        how many of -2 … 2 occur as differences
    bumpiness           absolute differences of neighbours
    """
    octets, places = count_octets(columns)
    filled = fold_octets(octets)  # cells of each column
    wall = (1 << config.height) - 1
    beside = (
        count_bits_along(columns[1:] ^ columns[:-1]) + count_bits(columns[0] ^ wall) + count_bits(columns[-1] ^ wall)
    )
    covered = ((torch.ones_like(columns) << height) - 1) & ~columns
    rows = functools.reduce(torch.bitwise_or, covered.unbind(0))
    sides = (height[1] - height[0]).clamp(min=0), (height[-2] - height[-1]).clamp(min=0)
    well = (torch.minimum(height[:-2], height[2:]) - height[1:-1]).clamp(min=0)
    difference = height[1:] - height[:-1]
    seen = functools.reduce(torch.bitwise_or, (1 << (difference + 3).clamp(0, 6)).unbind(0)) & 0b0111110
    # Columns begin at a filled floor and end in empty air; each run of filled cells above a gap adds two transitions.
    runs = count_bits_along(columns & ~((columns << 1) | 1))
    # A filled cell in row r has r cells below it, of which all that are filled are no holes.
    depth = fold_octets(places) + 8 * weigh_octets(octets) - filled * (filled - 1) // 2
    return {
        "row_transitions": beside,
        "column_transitions": config.width + 2 * runs,
        "holes": _add(height - filled),
        "wells": _add(_triangle(well)) + _triangle(sides[0]) + _triangle(sides[1]),
        "hole_depth": _add(depth),
        "rows_with_holes": count_bits(rows),
        "diversity": count_bits(seen),
        "bumpiness": _add(difference.abs()),
    }


def _add(x: Tensor) -> Tensor:
    return x.sum(0, dtype=torch.int32)


def _triangle(depth: Tensor) -> Tensor:
    """1 + 2 + … + depth."""
    return (depth * (depth + 1)) >> 1
