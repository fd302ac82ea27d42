"""Rows from an actor to the learner: a lock-free ring with one writer, one reader and, for central inference, one server.

             actor                              server                     reader
    open ─► observations ─► request ─► pending ─► actions ─► respond
    rest of the row      ◄─ has_response ◄──────────────────────┘
    commit ──────────────────────────────────────────────────────► available ─► take

The writer fills an open row in place in the ring; only `take` copies. The stamp of row n is 2 n + 1 from `open` on and
2 n + 2 from `commit` on, so the reader can tell whether it copied that row intact.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from redline.collect.shared_memory import CELL, Array, Memory, SharedLayout, fence

Row = dict[str, Array]  # views of one row's fields: (K, …), or () for a field shared by all environments
# Positions of the numbers in the head, each on its own cache lines. The reader writes READ and DROPPED, the server
# RESPONSES, the actor the others.
_SPEC, _WRITTEN, _READ, _DROPPED, _REQUESTS, _RESPONSES = range(0, 6 * CELL, CELL)
_MAX_ROWS = 1 << 60  # that can ever be written, because stamps are twice as large
_SPEC_TYPES = {"capacity": int, "drop_oldest": bool, "check": bool, "sparse_field": str}


@dataclass(frozen=True)
class SharedRingSpec:
    """Layout and options of a ring, which writer, server and reader must agree on."""

    row: SharedLayout
    capacity: int  # in rows
    drop_oldest: bool = False  # the writer overwrites rows that were not read in time; else it waits for room
    check: bool = False  # rows carry a checksum that `take` verifies
    # A field whose values the next row repeats unless one of `flags` is set in this row: `take` copies it only where needed.
    sparse_field: str = ""
    flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise ValueError(f"capacity is {self.capacity}; expected at least 1")
        if unknown := {self.sparse_field, *self.flags} - {"", *self.row.fields}:
            raise ValueError(f"a row has no field {min(unknown)!r}")

    @property
    def layout(self) -> SharedLayout:
        """Memory layout of the whole ring."""
        own = {"head": ((6 * CELL,), np.int64), "stamps": ((self.capacity,), np.int64)}
        sums = {"sums": ((self.capacity * self.check,), np.uint32)}
        rows = {f"row {name}": ((self.capacity, *shape), dtype) for name, (shape, dtype) in self.row.fields.items()}
        return SharedLayout({**own, **sums, **rows})

    def to_json(self) -> dict[str, Any]:
        """Return the spec as JSON-compatible values; `from_json` is the inverse."""
        sparse = {"sparse_field": self.sparse_field, "flags": list(self.flags)}
        return {
            "row": self.row.to_json(),
            "capacity": self.capacity,
            "drop_oldest": self.drop_oldest,
            "check": self.check,
            **sparse,
        }

    @classmethod
    def from_json(cls, spec: Mapping[str, Any]) -> SharedRingSpec:
        """Return the spec from the result of `to_json`; raise ValueError for anything else."""
        try:
            made = cls(**{**spec, "row": SharedLayout.from_json(spec["row"]), "flags": tuple(spec["flags"])})
            intact = made.to_json() == dict(spec) and all(
                type(getattr(made, name)) is kind for name, kind in _SPEC_TYPES.items()
            )
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError, MemoryError) as error:
            raise ValueError(f"this does not describe a ring: {error}") from error
        if not intact:
            raise ValueError("this does not describe a ring: its values are of other types")
        return made


class SharedRing:
    """The writer's, server's or reader's end of a ring. Each end is used by only one thread of one process.

    The first end constructed in zeroed memory initialises the ring.
    """

    def __init__(self, memory: Memory, offset: int, spec: SharedRingSpec) -> None:
        views = spec.layout.views(memory, offset)
        self.spec, self.capacity = spec, spec.capacity
        self._head, self._stamps, self._sums = views["head"].data, views["stamps"], views["sums"]
        self._stamp = self._stamps.data  # fast access to single stamps
        self._fields = [(name, views[f"row {name}"]) for name in spec.row.fields]
        self._sparse = views[f"row {spec.sparse_field}"] if spec.sparse_field and not spec.check else None
        self._dense = [(name, x) for name, x in self._fields if name != spec.sparse_field or self._sparse is None]
        self._rows: list[Row | None] = [None] * self.capacity
        self._first_stamps = np.arange(self.capacity) * 2 + 2  # of the first `capacity` rows, once committed
        self._drops, self._checks = spec.drop_oldest, spec.check
        fingerprint = zlib.crc32(json.dumps(spec.to_json()).encode()) + 1
        if self._head[_SPEC] not in (0, fingerprint):
            raise ValueError("the memory holds another ring than the one described")
        self._head[_SPEC] = fingerprint
        self._begin_writing()
        self._serving: int | None = None  # number of the request being served
        self._next = self._head[_READ]
        self._gap = 0  # rows dropped since the last copied row
        self.skipped = (
            0  # rows dropped just before the first row of the last `take`; if not 0, that row continues no copied row
        )

    def _begin_writing(self) -> None:
        self._written, self._read, self._requests = (self._head[place] for place in (_WRITTEN, _READ, _REQUESTS))
        if not (0 <= self._written < _MAX_ROWS and 0 <= self._requests < _MAX_ROWS):
            raise RuntimeError(f"the ring is damaged: {self._written} rows were written, {self._requests} requested")
        self.row: Row | None = None  # the open row
        self._waiting = False  # for the server's response

    def _views(self, slot: int) -> Row:
        row = self._rows[slot]
        if row is None:
            row = self._rows[slot] = {name: array[slot, ...] for name, array in self._fields}
        return row

    # ------------------------------------------------------------------------------------------------ the writer's end

    @property
    def is_open(self) -> bool:
        """Whether a row is open: not committed yet."""
        return self.row is not None

    def open(self) -> Row | None:
        """Return views of the next row to write; None if the ring is full and the writer must wait."""
        if self.row is not None:
            return self.row
        number, capacity = self._written, self.capacity
        if not self._drops and number - self._read >= capacity:
            self._read = self._head[_READ]
            if not number - capacity <= self._read <= number:
                raise RuntimeError(f"the ring is damaged: {self._read} of {number} rows were read")
            if number - self._read >= capacity:
                return None
            fence()  # write to the row only after the reader has finished with it
        slot = number % capacity
        self._stamp[slot] = 2 * number + 1
        if self._drops:
            fence()  # a reader that sees any part of this row sees that stamp
        self.row = self._rows[slot] or self._views(slot)
        return self.row

    def request(self) -> None:
        """Request actions for the observations in the open row. The server owns the row until `has_response` is True."""
        if self.row is None or self._waiting:
            raise RuntimeError("no row is open to request actions for")
        fence()  # a server that sees the request sees the observations
        self._requests += 1
        self._head[_REQUESTS] = self._requests
        self._waiting = True

    def has_response(self) -> bool:
        """Return whether the open row holds the requested actions."""
        if self._head[_RESPONSES] != self._requests:
            return False
        if self._waiting:
            fence()  # read the response before its actions
            self._waiting = False
        return True

    def commit(self) -> None:
        """Complete the open row and make it available to the reader."""
        if self.row is None or self._waiting:
            raise RuntimeError("the open row is the server's" if self._waiting else "no row is open")
        number = self._written
        slot = number % self.capacity
        if self._checks:
            self._sums[slot] = _checksum(number, self.row)
        self._stamp[slot] = 2 * number + 2
        fence()  # a reader that sees the count sees the row
        self._written = self._head[_WRITTEN] = number + 1
        self.row = None

    # ------------------------------------------------------------------------------------------------ the server's end

    def pending(self) -> Row | None:
        """Return views of the row that waits for actions; None if there is none."""
        requests = self._head[_REQUESTS]
        if requests == self._head[_RESPONSES]:
            return None
        fence()  # read the request before the row's number and its observations
        self._serving = requests
        slot = self._head[_WRITTEN] % self.capacity
        return self._rows[slot] or self._views(slot)

    def respond(self) -> None:
        """Signal that the row returned by `pending` now holds its actions."""
        if self._serving is None:
            raise RuntimeError("no request is being served")
        fence()  # an actor that sees the response sees the actions
        self._head[_RESPONSES] = self._serving
        self._serving = None

    # ------------------------------------------------------------------------------------------------ the reader's end

    def available(self) -> int:
        """Return the number of rows ready for `take`."""
        return self._unread(self._head[_WRITTEN])

    def _unread(self, written: int) -> int:
        """Return the number of rows to read. An overtaken reader skips to the newer half, for few long gaps, not many short."""
        unread: int = written - self._next
        if unread > self.capacity and self._drops and written < _MAX_ROWS:
            return max(1, self.capacity // 2)
        if not 0 <= unread <= self.capacity:
            raise RuntimeError(
                f"the ring is damaged: it holds rows {self._next} to {written}, and has room for {self.capacity}"
            )
        return unread

    def take(self, count: int, into: Mapping[str, Array], start: int = 0, breaks: Sequence[int] = ()) -> int:
        """Copy up to `count` consecutive rows to `into` (rows, K, …) from row `start` on, free them, and return their number.

        `skipped` is nonzero if the first of them does not continue the last row copied before. The sparse field is copied
        only for rows with flags, for the last row, and for rows that precede a row number in `breaks`.
        """
        written = self._head[_WRITTEN]
        unread = self._unread(written)
        rows = min(count, unread, self.capacity)
        self.skipped = 0
        if rows <= 0:
            return 0
        first = written - unread
        fence()  # read the count before the rows
        slot = first % self.capacity
        until_wrap = min(rows, self.capacity - slot)
        self._copy(slot, until_wrap, rows, into, start)
        if self._sparse is not None:
            self._copy_sparse(first, rows, into, start, breaks)
        sums = self._sums.take(range(slot, slot + rows), mode="wrap") if self._checks else self._sums
        fence()  # read the rows before their stamps
        late = self._overwritten(first, slot, until_wrap, rows)
        if late:  # move the intact rows to the front
            for name, _ in self._fields:
                into[name][start : start + rows - late] = into[name][start + late : start + rows]
        copied = rows - late
        if self._checks:
            self._verify(first + late, copied, sums[late:], into, start)
        dropped = first + late - self._next
        if dropped:
            self._head[_DROPPED] = (self._head[_DROPPED] + dropped) % _MAX_ROWS
            self._gap += dropped
        self._next = self._head[_READ] = first + rows
        if copied:
            self.skipped, self._gap = self._gap, 0
        return copied

    def _copy(self, slot: int, until_wrap: int, rows: int, into: Mapping[str, Array], start: int) -> None:
        for name, array in self._dense:
            target = into[name]
            target[start : start + until_wrap] = array[slot : slot + until_wrap]
            if until_wrap < rows:
                target[start + until_wrap : start + rows] = array[: rows - until_wrap]

    def _copy_sparse(self, first: int, rows: int, into: Mapping[str, Array], start: int, breaks: Sequence[int]) -> None:
        assert self._sparse is not None
        needed = {rows - 1, *(number - 1 - first for number in breaks if first < number < first + rows)}
        for name in self.spec.flags:
            needed.update(np.flatnonzero(into[name][start : start + rows].reshape(rows, -1).any(1)).tolist())
        for row in needed:
            into[self.spec.sparse_field][start + row] = self._sparse[(first + row) % self.capacity]

    def _overwritten(self, first: int, slot: int, until_wrap: int, rows: int) -> int:
        """Return the number of leading rows that were overwritten before or while they were copied."""
        offset = 2 * (first - slot)  # expected stamps minus `_first_stamps`
        offsets = self._stamps[slot : slot + until_wrap] - self._first_stamps[slot : slot + until_wrap]
        if until_wrap < rows:
            wrapped = rows - until_wrap
            rest = self._stamps[:wrapped] - self._first_stamps[:wrapped] - 2 * self.capacity
            offsets = np.concatenate([offsets, rest])
        if np.count_nonzero(offsets == offset) == rows:
            return 0
        torn = np.flatnonzero(offsets < offset if self._drops else offsets != offset)  # overwritten stamps are greater
        if len(torn):
            row, stamp = first + int(torn[0]), 2 * first + 2 + int(2 * torn[0] + offsets[torn[0]] - offset)
            raise RuntimeError(f"torn row {row}: its stamp is {stamp}; expected {2 * row + 2}")
        return int(np.flatnonzero(offsets != offset)[-1]) + 1

    def _verify(self, first: int, rows: int, sums: Array, into: Mapping[str, Array], start: int) -> None:
        """Raise RuntimeError if a copied row does not match its checksum."""
        for row in range(rows):
            number = first + row
            if _checksum(number, {name: into[name][start + row] for name, _ in self._fields}) != sums[row]:
                raise RuntimeError(f"torn row {number}: it does not match its checksum")

    @property
    def next(self) -> int:
        """Number of the next row to copy."""
        return self._next

    # ----------------------------------------------------------------------------------------------- the parent's view

    @property
    def written(self) -> int:
        """Number of rows committed so far."""
        return int(self._head[_WRITTEN])

    @property
    def dropped(self) -> int:
        """Number of rows that were overwritten before they were read."""
        return int(self._head[_DROPPED])

    def recover(self) -> int:
        """Discard the open row and the request of a dead writer; return the number of the next row.

        Committed rows stay readable. A late response to the dead writer does no harm, because request numbers keep increasing.
        """
        self._head[_RESPONSES] = self._head[_REQUESTS]
        self._begin_writing()
        return self.written


def _checksum(number: int, row: Row) -> int:
    checksum = number & 0xFFFFFFFF
    for array in row.values():
        checksum = zlib.crc32(np.ascontiguousarray(array).data, checksum)
    return checksum
