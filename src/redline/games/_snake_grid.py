"""Cells, rows and directions of Snake's board."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from redline.games.snake import Config, State


def direction(heading: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows down and columns right of one move, int32."""
    down = (heading == 2).to(torch.int32) - (heading == 0).to(torch.int32)
    right = (heading == 1).to(torch.int32) - (heading == 3).to(torch.int32)
    return down, right


def row_column(config: Config, cell: Tensor) -> tuple[Tensor, Tensor]:
    """Return row and column of cells (…) int32; cell -1 has row -1."""
    row = torch.div(cell, config.width, rounding_mode="floor")
    return row, cell - row * config.width


def mark_cell(config: Config, cell: Tensor) -> Tensor:
    """Return (N, H, W) bool, True at the given cell of each board. cell (N,) integer, -1: nowhere.

    Compared in the narrowest dtype that holds a cell's number: on int8 sixteen cells are one instruction on a CPU.
    """
    dtype = age_dtype(config)
    every = torch.arange(config.cells, dtype=dtype, device=cell.device).view(1, config.height, config.width)
    return every == cell.to(dtype).view(-1, 1, 1)


def age_dtype(config: Config) -> torch.dtype:
    return torch.int8 if config.cells <= 127 else torch.int16


def age_at(state: State, cell: Tensor) -> Tensor:
    """Return the age of one cell of each board. cell (N,) int32."""
    return state.ages.flatten(1).gather(1, cell.to(torch.int64).unsqueeze(1)).squeeze(1)


def distance(config: Config, a: Tensor, b: Tensor) -> Tensor:
    """Return rows plus columns between two cells."""
    (row_a, column_a), (row_b, column_b) = row_column(config, a), row_column(config, b)
    return (row_a - row_b).abs() + (column_a - column_b).abs()
