"""Cells, rows and directions of Snake's board, and the ages of its cells in words.

Ages are packed into int32 words, the first cell in the lowest bits: four of 8 bits or, on boards of more than 127 cells,
two of 16 bits. An update of all cells thus takes a quarter or half as many operations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from redline.games.snake import Config


def direction(heading: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows down and the columns right, int32, of one move in direction `heading`."""
    down = (heading == 2).to(torch.int32) - (heading == 0).to(torch.int32)
    right = (heading == 1).to(torch.int32) - (heading == 3).to(torch.int32)
    return down, right


def row_column(config: Config, cell: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row and column of cells (…) int32; cell -1 has row -1."""
    row = torch.div(cell, config.width, rounding_mode="floor")
    return row, cell - row * config.width


def mark_cell(config: Config, cell: Tensor) -> Tensor:
    """Return (N, H, W) bool, True at the given cell of each board. cell (N,) integer, -1: nowhere."""
    every = torch.arange(config.cells, dtype=torch.int16, device=cell.device).view(1, config.height, config.width)
    return every == cell.view(-1, 1, 1)


def age_bits(config: Config) -> int:
    """Return the number of bits that store the age of a cell."""
    return 8 if config.cells <= 127 else 16


def mark_word(config: Config, cell: Tensor, value: Tensor | int, bits: int) -> Tensor:
    """Return words (…, W) int32 of packed `bits`-bit numbers: `value` at the given cell of each board, zero elsewhere.

    cell (…) int32, -1: nowhere. value: (…) int32, or one number for all boards.
    """
    every = torch.arange(-(-config.cells * bits // 32), dtype=torch.int32, device=cell.device)
    word, place = _find(cell, bits)
    marked = (torch.zeros_like(cell) + value) << place
    return torch.where(every == word.unsqueeze(-1), marked.unsqueeze(-1), 0)


def occupied(config: Config, ages: Tensor) -> Tensor:
    """Return words (N, V) int32 with 1 for every cell whose age is not zero. No sum overflows the bits of its cell."""
    bits = age_bits(config)
    ones = sum(1 << bit for bit in range(0, 32, bits))
    low = ones * ((1 << (bits - 2)) - 1)
    return ((((ages & low) + low) | ages) >> (bits - 2)) & ones


def age_at(config: Config, ages: Tensor, cell: Tensor) -> Tensor:
    """Return the ages (N, …) int32 of cells (N, …) int32."""
    bits = age_bits(config)
    word, place = _find(cell, bits)
    words = ages.gather(1, word.to(torch.int64).view(len(cell), -1)).view_as(cell)
    return (words >> place) & ((1 << bits) - 1)


def every_age(config: Config, ages: Tensor) -> Tensor:
    """Return the ages (N, H, W) int32 of all cells."""
    bits = age_bits(config)
    place = torch.arange(0, 32, bits, dtype=torch.int32, device=ages.device)
    cells = ((ages.unsqueeze(2) >> place) & ((1 << bits) - 1)).flatten(1)
    return cells[:, : config.cells].reshape(-1, config.height, config.width)


def _find(cell: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the index of the word that holds a cell, and the cell's lowest bit in it."""
    shift = 2 if bits == 8 else 1
    return cell >> shift, bits * (cell & ((1 << shift) - 1))


def distance(config: Config, a: Tensor, b: Tensor) -> Tensor:
    """Return the Manhattan distance between cells a and b."""
    (row_a, column_a), (row_b, column_b) = row_column(config, a), row_column(config, b)
    return (row_a - row_b).abs() + (column_a - column_b).abs()
