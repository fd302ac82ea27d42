"""Records: the fields of one transition packed side by side, so that it is read and copied in one piece."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

Shape = tuple[tuple[int, ...], torch.dtype]  # of one entry of a table
_ALIGNMENT = 16


def record_bytes(other_bytes: int, fields: Mapping[str, Shape]) -> int:
    """Return the size of a record of `fields` and of `other_bytes` besides."""
    size = other_bytes + sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in fields.values())
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class RowLayout:
    """Offsets of the fields in a record: wide types first, so that each is aligned."""

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self.shapes = dict(sorted(shapes.items(), key=lambda field: (-field[1][1].itemsize, field[0])))
        self.size = record_bytes(0, self.shapes)
        self.offsets: dict[str, int] = {}
        offset = 0
        for name, (shape, dtype) in self.shapes.items():
            self.offsets[name] = offset
            offset += torch.Size(shape).numel() * dtype.itemsize

    def view(self, records: Tensor, name: str) -> Tensor:
        """Return a view (M, …) of one field of contiguous records (M, size) uint8."""
        shape, dtype = self.shapes[name]
        first = self.offsets[name] // dtype.itemsize
        words = records.view(dtype)[:, first : first + torch.Size(shape).numel()]
        return words.unflatten(1, shape) if shape else words[:, 0]

    def convert(self, records: Tensor, earlier: RowLayout) -> Tensor:
        """Return records (M, earlier.size) uint8 in this layout: the bytes of each field, then zeros if it has grown."""
        if earlier.offsets == self.offsets or earlier.offsets.keys() != self.offsets.keys():
            return records
        converted = records.new_zeros(len(records), self.size)
        for name, (shape, dtype) in earlier.shapes.items():
            first, size = earlier.offsets[name], torch.Size(shape).numel() * dtype.itemsize
            converted[:, self.offsets[name] :][:, :size] = records[:, first : first + size]
        return converted

    def describe(self) -> dict[str, list[object]]:
        """Return shape and dtype of every field as JSON values."""
        return {name: [list(shape), str(dtype)] for name, (shape, dtype) in self.shapes.items()}
