"""Tetris as planes of bytes: settled cells, falling piece, landing place, next pieces."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from redline.games._tetris_board import fall_distance
from redline.games._tetrominoes import rows_of, shape_of

if TYPE_CHECKING:
    from redline.games.tetris import Config, State


def draw_planes(config: Config, state: State) -> Tensor:
    """Return planes (N, 4, H, W) uint8: settled cells, falling piece, its landing position, next pieces.

    Up to eight cells are written at once, as one integer: a multiplication spreads their bits over its bytes. Rows are
    joined so that their cells divide evenly into such groups.
    """
    cells, joined = grouping(config, state.x.device)
    word = torch.int32 if joined * config.width < 32 else torch.int64
    pieces = shown_pieces(config, state)
    planes: list[list[Tensor]] = [[], [], [], []]
    for i in range(joined):
        row = torch.arange(config.height - 1 - i, -1, -joined, dtype=torch.int32, device=state.x.device).unsqueeze(0)
        settled = torch.zeros_like(row)
        for column in range(config.width):
            settled = settled | (((state.columns[:, column].unsqueeze(1) >> row) & 1).to(torch.int32) << column)
        drawn = (_union([row_bits(*piece, row) for piece in plane]) for plane in pieces)
        for plane, rows in zip(planes, (settled, *drawn), strict=True):
            plane.append(rows.to(word) << config.width * i if i else rows.to(word))
    boards = torch.stack([_union(plane) for plane in planes], 1)  # (N, 4, H / joined)
    place = torch.arange(0, joined * config.width, cells, dtype=torch.int32, device=state.x.device)
    bits = ((boards.unsqueeze(3) >> place) & ((1 << cells) - 1)).to(torch.int32)
    return _spread(bits, cells).view(torch.uint8).view(-1, 4, config.height, config.width)


def _union(sets: list[Tensor]) -> Tensor:
    return functools.reduce(torch.bitwise_or, sets)


def grouping(config: Config, device: torch.device) -> tuple[int, int]:
    """Return the number of cells written at once, and the number of rows to join so that their cells divide evenly.

    A GPU gains from wide stores; a CPU loses more from computing with wide integers.
    """
    for cells in (8, 4, 2):
        joined = cells // math.gcd(config.width, cells)
        fits = config.height % joined == 0 and joined * config.width < 64
        if fits and (joined == 1 or device.type == "cuda"):
            return cells, joined
    return 1, 1


def _spread(bits: Tensor, cells: int) -> Tensor:
    """Return integers of `cells` bytes with bit k of each int32 in byte k."""

    def bytes_of(four: Tensor) -> Tensor:
        return (four * 0x00204081) & 0x01010101

    if cells == 8:
        return bytes_of(bits & 15).to(torch.int64) | (bytes_of(bits >> 4).to(torch.int64) << 32)
    return bytes_of(bits).to({1: torch.uint8, 2: torch.int16, 4: torch.int32}[cells])


def shown_pieces(config: Config, state: State) -> tuple[list[tuple[Tensor, Tensor, Tensor]], ...]:
    """Return the pieces in the planes falling, landing and next, each as rows of bits, column and row, (N,) int32 each."""
    kind, turn, x, y = (field.to(torch.int32) for field in (state.pieces[:, 0], state.turn, state.x, state.y))
    shape, width, _ = shape_of(kind, turn)
    # A placement drops from above the board: the spawn position may be occupied.
    above = torch.full_like(y, config.height) if config.actions == "placement" else y
    landing = above - fall_distance(config, state.columns, shape, width, x, above)
    lying = rows_of(kind, turn)
    upcoming = [
        _at_top(config, state.pieces[:, preview].to(torch.int32), 3 * (preview - 1))
        for preview in range(1, 1 + config.previews)
    ]
    if config.hold:
        held = state.hold.to(torch.int32)
        rows, column, _ = _at_top(config, held.clamp(min=0), 0)
        upcoming.append((torch.where(held < 0, 0, rows), column, torch.zeros_like(column)))  # on the floor
    return [(lying, x, y)], [(lying, x, landing)], upcoming or [(torch.zeros_like(x), x, y)]


def _at_top(config: Config, piece: Tensor, below: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a piece, as rows of bits, column and row, centred and `below` rows under the top."""
    none = torch.zeros_like(piece)
    _, width, height = shape_of(piece, none)
    x = torch.div(config.width - width, 2, rounding_mode="floor")
    return rows_of(piece, none), x, config.height - height - below


def row_bits(lying: Tensor, x: Tensor, y: Tensor, row: Tensor) -> Tensor:
    """Return board rows (N, H) as bits, for a piece with rows `lying` (N,) at column x and row y."""
    shift = 4 * (row - y.unsqueeze(1))
    inside = (shift >= 0) & (shift < 16)
    return torch.where(inside, ((lying.unsqueeze(1) >> shift.clamp(0, 12)) & 15) << x.unsqueeze(1), 0)
