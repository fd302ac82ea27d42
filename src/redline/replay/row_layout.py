"""Entries of several tables as one record, so that a transition lies in one place and moves as one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

Shape = tuple[tuple[int, ...], torch.dtype]  # of one entry of a table


class RowLayout:
    """Where each field lies in a record, those of wide types first."""

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self.shapes = dict(sorted(shapes.items(), key=lambda field: (-field[1][1].itemsize, field[0])))
        self.offsets: dict[str, int] = {}
        size = 0
        for name, (shape, dtype) in self.shapes.items():
            self.offsets[name] = size
            size += torch.Size(shape).numel() * dtype.itemsize
        self.size = -(-size // 16) * 16

    def view(self, records: Tensor, name: str) -> Tensor:
        """A field of contiguous records (M, size) uint8, (M, …)."""
        shape, dtype = self.shapes[name]
        first = self.offsets[name] // dtype.itemsize
        words = records.view(dtype)[:, first : first + torch.Size(shape).numel()]
        return words.unflatten(1, shape) if shape else words[:, 0]

    def describe(self) -> dict[str, list[object]]:
        """Fields by name, as JSON can hold them."""
        return {name: [list(shape), str(dtype)] for name, (shape, dtype) in self.shapes.items()}
