"""Colours of Tetris: each settled cell in the colour of its piece, and small boards of the next pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from redline.games._tetris_board import is_free, settle
from redline.games._tetris_planes import row_bits, shown_pieces
from redline.games._tetrominoes import rows_of, shape_of

if TYPE_CHECKING:
    from redline.games.tetris import Config, State

PALETTE = (  # name and colour of each cell value
    ("floor", (24, 26, 32)),
    ("settled", (110, 118, 136)),
    ("landing", (58, 62, 74)),
    ("I", (72, 190, 214)),
    ("O", (232, 196, 76)),
    ("T", (170, 104, 206)),
    ("S", (104, 190, 92)),
    ("Z", (222, 84, 84)),
    ("J", (84, 120, 214)),
    ("L", (232, 146, 66)),
)
SETTLED, LANDING, FIRST_PIECE = 1, 2, 3  # palette indices


def board_cells(config: Config, state: State) -> Tensor:
    """Return (N, H, W) uint8 palette indices: landing position, falling piece and settled cells, drawn in this order."""
    (falling,), (landing,), _ = shown_pieces(config, state)
    row = torch.arange(config.height - 1, -1, -1, dtype=torch.int32).to(state.x.device).unsqueeze(0)
    column = torch.arange(config.width, dtype=torch.int32, device=state.x.device)

    def covered(piece: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return ((row_bits(*piece, row).unsqueeze(2) >> column) & 1) == 1

    board = torch.where(covered(landing), LANDING, 0)
    board = torch.where(covered(falling), FIRST_PIECE + state.pieces[:, 0].to(torch.int64).view(-1, 1, 1), board)
    return torch.where(_filled(config, state.columns), SETTLED, board).to(torch.uint8)


def paint_settled(config: Config, painted: Tensor, before: State, after: State) -> Tensor:
    """Return the cells (N, H, W) of `after`, with settled cells coloured as in `painted` or as the piece just settled."""
    start, end = _filled(config, before.columns), _filled(config, after.columns)
    piece = FIRST_PIECE + before.pieces[:, 0].view(-1, 1, 1)
    colours = torch.where(start, painted, torch.where(end, piece, 0).to(torch.uint8))
    for game in (start & ~end).flatten(1).any(1).nonzero().flatten().tolist():  # rows were removed
        old = torch.where(start[game], painted[game], 0)
        colours[game] = _clear_rows(config, old, before.columns[game], after.columns[game], int(before.pieces[game, 0]))
    return torch.where(end, colours.clamp(min=SETTLED), board_cells(config, after))


def _clear_rows(config: Config, colours: Tensor, start: Tensor, end: Tensor, kind: int) -> Tensor:
    """Return colours (H, W) after piece `kind` has settled on columns `start` and full rows were removed, giving `end`.

    A State does not record where the last piece settled: all positions are tried, and the first that explains `end` is used.
    """
    sides = torch.arange(4), torch.arange(config.width), torch.arange(config.height)
    turn, x, y = (grid.flatten().to(torch.int32) for grid in torch.meshgrid(*sides, indexing="ij"))
    piece, columns = torch.full_like(turn, kind), start.expand(len(turn), -1)
    settled, _ = settle(config, columns, shape_of(piece, turn)[0], x, y)
    fits = is_free(config, columns, piece, turn, x, y) & (settled == end).all(1)
    place = int(fits.to(torch.int32).argmax())
    bits = int(rows_of(piece[:1], turn[place : place + 1]))
    for number in range(16):
        row, column = config.height - 1 - int(y[place]) - number // 4, int(x[place]) + number % 4
        if bits >> number & 1:
            colours[row, column] = FIRST_PIECE + kind
    kept = colours[~(colours > 0).all(1)]
    return torch.nn.functional.pad(kept, (0, 0, config.height - len(kept), 0))


def _filled(config: Config, columns: Tensor) -> Tensor:
    """Return (N, H, W) bool: True at settled cells."""
    row = torch.arange(config.height - 1, -1, -1, device=columns.device).view(1, -1, 1)
    return ((columns.unsqueeze(1) >> row) & 1) == 1


def small_boards(config: Config, state: State) -> dict[str, Tensor]:
    """Return boards (N, h, 4) uint8 of the next pieces and the held one, by title; each piece takes three rows."""
    boards = {}
    if config.previews:
        boards["next"] = torch.cat([_small(state.pieces[:, 1 + n]) for n in range(config.previews)], 1)
    if config.hold:
        boards["hold"] = _small(state.hold)
    return boards


def _small(kind: Tensor) -> Tensor:
    """Return (N, 3, 4) uint8 palette indices: an unturned piece above an empty row. kind (N,), -1: none."""
    piece = kind.to(torch.int32).clamp(min=0)
    bits = rows_of(piece, torch.zeros_like(piece)).view(-1, 1, 1)
    row, column = torch.tensor([1, 0, 2]).view(1, 3, 1), torch.arange(4).view(1, 1, 4)
    filled = ((bits >> (4 * row + column)) & 1 == 1) & (kind >= 0).view(-1, 1, 1)
    return torch.where(filled, FIRST_PIECE + piece.view(-1, 1, 1), 0).to(torch.uint8)
