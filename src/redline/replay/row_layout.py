"""Records: the fields of one transition packed side by side, so that it is read and copied in one piece."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
Shape = tuple[tuple[int, ...], torch.dtype]  # of one entry of a table
_ALIGNMENT = 16


def record_bytes(other_bytes: int, fields: Mapping[str, Shape]) -> int:
    """Return the size in bytes of a record of `fields` plus `other_bytes`, aligned."""
    size = other_bytes + sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in fields.values())
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class RowLayout:
    """Offsets of the fields in a record, wide types first so that every field is aligned."""

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self.shapes = dict(sorted(shapes.items(), key=lambda field: (-field[1][1].itemsize, field[0])))
        self.size = record_bytes(0, self.shapes)
        self.offsets: dict[str, int] = {}
        offset = 0
        for name in self.shapes:
            self.offsets[name] = offset
            offset += self.bytes_of(name)

    def view(self, records: Tensor, name: str) -> Tensor:
        """Return a view (M, …) of one field of contiguous records (M, size) uint8."""
        shape, dtype = self.shapes[name]
        first = self.offsets[name] // dtype.itemsize
        words = records.view(dtype)[:, first : first + torch.Size(shape).numel()]
        return words.unflatten(1, shape) if shape else words[:, 0]

    def words(self, records: Tensor, name: str) -> Tensor:
        """Return a view (M, W) of one field of contiguous records (M, size) uint8, as the widest integers that fit.

        Compilers copy single bytes slowly.
        """
        word = self._word_type(name)
        first = self.offsets[name] // word.itemsize
        return records.view(word)[:, first : first + self.bytes_of(name) // word.itemsize]

    def to_words(self, entries: Tensor, name: str) -> Tensor:
        """Return entries (M, …) of a field as integers (M, W), see `words`."""
        return entries.contiguous().view(len(entries), -1).view(self._word_type(name))

    def from_words(self, words: Tensor, name: str) -> Tensor:
        """Return the entries (…) of a field from words (…, W): the inverse of `to_words`."""
        shape, dtype = self.shapes[name]
        # The compiler of torch 2.11 gives a gathered column of single words a stride that cannot be viewed as another type.
        rows = (words.flatten() if words.shape[-1] == 1 else words).contiguous()
        return rows.view(dtype).view(*words.shape[:-1], *shape)

    def _word_type(self, name: str) -> torch.dtype:
        """Return the widest integer dtype that fits the size and the offset of a field."""
        size, offset = self.bytes_of(name), self.offsets[name]
        return next(word for word in _WORDS if size % word.itemsize == 0 == offset % word.itemsize)

    def bytes_of(self, name: str) -> int:
        """Return the size of a field in bytes."""
        shape, dtype = self.shapes[name]
        return torch.Size(shape).numel() * dtype.itemsize

    def convert(self, records: Tensor, earlier: RowLayout) -> Tensor:
        """Return records (M, earlier.size) uint8 converted to this layout; a field that has grown is padded with zeros."""
        known = earlier.offsets.keys() == self.offsets.keys() and records.shape[1] == earlier.size
        if (
            not known
            or earlier.offsets == self.offsets
            or any(earlier.bytes_of(x) > self.bytes_of(x) for x in self.shapes)
        ):
            return records  # copying them will report the difference
        converted = records.new_zeros(len(records), self.size)
        for name in earlier.shapes:
            first, size = earlier.offsets[name], earlier.bytes_of(name)
            converted[:, self.offsets[name] :][:, :size] = records[:, first : first + size]
        return converted

    def describe(self) -> dict[str, list[object]]:
        """Return the shape and dtype of every field as JSON-compatible values."""
        return {name: [list(shape), str(dtype)] for name, (shape, dtype) in self.shapes.items()}
