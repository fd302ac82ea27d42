"""The pieces of Tetris: shapes, orientations, and tables of their placements.

A property of all pieces is stored in one number of seven hexadecimal digits, piece p's at bit 4 p, so that a lookup is a
shift.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_SHAPES = ("####", "##/##", ".#./###", ".##/##.", "##./.##", "#../###", "..#/###")  # upper row first


def _turned(shape: list[str]) -> list[str]:
    return ["".join(row[column] for row in reversed(shape)) for column in range(len(shape[0]))]


def _orientations() -> list[list[list[str]]]:
    """Return the four orientations of each piece, with equal ones repeated."""
    pieces = []
    for drawing in _SHAPES:
        shape, turns = drawing.split("/"), []
        for _ in range(4):
            turns.append(shape)
            shape = _turned(shape)
        distinct = [turn for index, turn in enumerate(turns) if turn not in turns[:index]]
        pieces.append([distinct[index % len(distinct)] for index in range(4)])
    return pieces


_TURNS = _orientations()


def _digits(value: Any) -> int:
    """Return `value` of the orientations of all seven pieces, packed into hexadecimal digits."""
    return sum(value(turns) << 4 * piece for piece, turns in enumerate(_TURNS))


def _column_bits(shape: list[str], column: int) -> int:
    return sum(1 << row for row, line in enumerate(reversed(shape)) if line[column : column + 1] == "#")


def _lowest(shape: list[str], column: int) -> int:
    """Return the row of the lowest cell in a column; 63 if the shape has no such column."""
    bits = _column_bits(shape, column)
    return (bits & -bits).bit_length() - 1 if bits else 63


def _row_bits(shape: list[str], row: int) -> int:
    lines = shape[::-1]
    return sum(1 << column for column, cell in enumerate(lines[row]) if cell == "#") if row < len(lines) else 0


def _each(value: Any, turns: int, parts: int = 4) -> tuple[tuple[int, ...], ...]:
    """Return `value(shape, part)` of all pieces, packed into digits, by orientation and part."""
    return tuple(
        tuple(_digits(lambda shapes, o=o, k=k: value(shapes[o], k)) for k in range(parts)) for o in range(turns)
    )


_WIDTHS = _each(lambda shape, _: len(shape[0]), 2, 1)
_HEIGHTS = _each(lambda shape, _: len(shape), 2, 1)
_COLUMNS = _each(_column_bits, 4)
_ROWS = _each(_row_bits, 4)
# For a piece without a column k, its first column is repeated.
PLACES = _each(lambda shape, k: k if k < len(shape[0]) else 0, 4)
ABOVE = _each(lambda shape, k: len(shape) - _lowest(shape, k if k < len(shape[0]) else 0), 4)


def property_of(digits: int, piece: Tensor) -> Tensor:
    return (torch.full_like(piece, digits) >> (4 * piece)) & 15


def shape_of(piece: Tensor, turn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return shape (columns of four bits each), width and height. piece and turn: int32, broadcast together."""
    odd = (turn & 1) == 1
    width = torch.where(odd, property_of(_WIDTHS[1][0], piece), property_of(_WIDTHS[0][0], piece))
    height = torch.where(odd, property_of(_HEIGHTS[1][0], piece), property_of(_HEIGHTS[0][0], piece))
    return _pick(_COLUMNS, piece, turn), width, height


def rows_of(piece: Tensor, turn: Tensor) -> Tensor:
    """Return pieces as rows of four bits each, the lowest row first."""
    return _pick(_ROWS, piece, turn)


def _pick(digits: tuple[tuple[int, ...], ...], piece: Tensor, turn: Tensor) -> Tensor:
    shapes = [_join([property_of(part, piece) for part in parts]) for parts in digits]
    return torch.where(
        turn == 0, shapes[0], torch.where(turn == 1, shapes[1], torch.where(turn == 2, shapes[2], shapes[3]))
    )


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] | (parts[1] << 4) | (parts[2] << 8) | (parts[3] << 12)


def lowest_of(column: Tensor) -> Tensor:
    """Return the lowest row of a piece's column of four bits: 0, 1 or 2."""
    return ((column & 1) ^ 1) + ((column & 3) == 0).to(torch.int32)


_tables: dict[tuple[int, str, int | None], tuple[Tensor, Tensor]] = {}


def placements(width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return two tables (7 A,) int32 of the placements of all pieces, by orientation, left to right; cached by device.

    First table: from bit 0 the lowest row of each of the piece's columns, 6 bits each, 63 for a missing column; from bit 24
    the leftmost column; from bit 28 the orientation. Second table: the shape, and from bit 16 the height, which is higher
    than any board if there is no such placement.
    """
    key = (width, device.type, device.index)
    if key not in _tables:
        rows: list[tuple[int, int]] = []
        for number, turns in enumerate(_TURNS, 1):
            distinct = [turn for index, turn in enumerate(turns) if turn not in turns[:index]]
            for orientation, shape in enumerate(distinct):
                lowest = sum(_lowest(shape, k) << 6 * k for k in range(4)) | orientation << 28
                body = sum(_column_bits(shape, k) << 4 * k for k in range(4)) | len(shape) << 16
                rows += [(lowest | x << 24, body) for x in range(width + 1 - len(shape[0]))]
            none = (0xFFFFFF | 15 << 24, 64 << 16)  # (no piece lies flat at column 15)
            rows += [none] * (number * (4 * width - 6) - len(rows))
        first, second = (torch.tensor(table, dtype=torch.int32, device=device) for table in zip(*rows, strict=True))
        _tables[key] = first, second
    return _tables[key]
