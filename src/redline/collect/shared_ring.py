"""Rows from an actor to the learner: a ring in shared memory with one writer, one reader and, if need be, a server of actions.

             actor                            server                  reader
    open ─► observations ─► ask ─► asking ─► actions ─► answer
    rest of the row      ◄─ answered ◄──────────────────┘
    commit ───────────────────────────────────────────────► available ─► take

The row that is open lies in its place in the ring already; nothing is moved but by `take`. Row n has the stamp 2 n + 1 from
`open` on and 2 n + 2 from `commit` on, by which the reader knows that it copied that row and no other.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from redline.collect.shared_memory import CELL, Array, Memory, SharedLayout, fence

Row = dict[str, Array]  # views of one row's fields: (K, …), or () where it has one of them
# Places of the numbers in the head, each on lines of its own. The reader writes READ and DROPPED, the server ANSWERED, the
# actor the others.
_PLAN, _WRITTEN, _READ, _DROPPED, _ASKED, _ANSWERED = range(0, 6 * CELL, CELL)


@dataclass(frozen=True)
class SharedRingSpec:
    """All that both sides must agree upon."""

    row: SharedLayout
    capacity: int  # rows
    drop_oldest: bool = False  # the writer overwrites what was not read in time; else it waits for room
    check: bool = False  # each row carries a checksum, which `take` verifies
    # A field that says no more than the next row does, unless one of `flags` is set: `take` leaves out what it need not copy.
    seldom: str = ""
    flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise ValueError(f"capacity is {self.capacity}; expected at least 1")

    @property
    def layout(self) -> SharedLayout:
        """Of the whole ring; `bytes` of it are needed."""
        own = {"head": ((6 * CELL,), np.int64), "stamps": ((self.capacity,), np.int64)}
        sums = {"sums": ((self.capacity * self.check,), np.uint32)}
        rows = {f"row {name}": ((self.capacity, *shape), dtype) for name, (shape, dtype) in self.row.fields.items()}
        return SharedLayout({**own, **sums, **rows})

    def to_json(self) -> dict[str, Any]:
        """As JSON can hold it."""
        how = {"drop_oldest": self.drop_oldest, "check": self.check, "seldom": self.seldom, "flags": list(self.flags)}
        return {"row": self.row.to_json(), "capacity": self.capacity, **how}

    @classmethod
    def from_json(cls, plan: Mapping[str, Any]) -> SharedRingSpec:
        return cls(**{**plan, "row": SharedLayout.from_json(plan["row"]), "flags": tuple(plan["flags"])})


class SharedRing:
    """One end of a ring. Each of the three is used by one thread of one process; the first made of new memory begins it."""

    def __init__(self, memory: Memory, offset: int, plan: SharedRingSpec) -> None:
        views = plan.layout.views(memory, offset)
        self.plan, self.capacity = plan, plan.capacity
        self._head, self._stamps, self._sums = views["head"].data, views["stamps"], views["sums"]
        self._stamp = self._stamps.data  # of single rows
        self._fields = [(name, views[f"row {name}"]) for name in plan.row.fields]
        self._seldom = views[f"row {plan.seldom}"] if plan.seldom and not plan.check else None
        self._always = [(name, x) for name, x in self._fields if name != plan.seldom or self._seldom is None]
        self._rows: list[Row | None] = [None] * self.capacity
        self._due = np.arange(self.capacity) * 2 + 2  # stamps of the rows written first
        self._drops, self._checks = plan.drop_oldest, plan.check
        known = zlib.crc32(json.dumps(plan.to_json()).encode()) + 1
        if self._head[_PLAN] not in (0, known):
            raise ValueError("another ring than the one described lies there")
        self._head[_PLAN] = known
        self._begin_writing()
        self._serving: int | None = None  # the request
        self._next = self._head[_READ]
        self._gap = 0  # rows dropped since the last that was copied
        self.skipped = 0  # rows dropped just before the first that the last `take` copied, which hence does not follow

    def _begin_writing(self) -> None:
        self._written, self._read, self._asked = (self._head[place] for place in (_WRITTEN, _READ, _ASKED))
        self.row: Row | None = None  # that is open
        self._waiting = False  # for an answer

    def _views(self, slot: int) -> Row:
        row = self._rows[slot]
        if row is None:
            row = self._rows[slot] = {name: array[slot, ...] for name, array in self._fields}
        return row

    # The writer's end.

    @property
    def is_open(self) -> bool:
        """A row was opened and not committed yet."""
        return self.row is not None

    def open(self) -> Row | None:
        """Views of the row to be written next; None where the reader has left no room for it."""
        if self.row is not None:
            return self.row
        number, capacity = self._written, self.capacity
        if not self._drops and number - self._read >= capacity:
            self._read = self._head[_READ]
            if number - self._read >= capacity:
                return None
            fence()  # the reader is done with the row before anything is written to it
        slot = number % capacity
        self._stamp[slot] = 2 * number + 1
        if self._drops:
            fence()  # whoever sees anything of this row sees that stamp
        self.row = self._rows[slot] or self._views(slot)
        return self.row

    def ask(self) -> None:
        """The open row holds what the server needs; it is the server's until `answered`."""
        if self.row is None or self._waiting:
            raise RuntimeError("no row is open to ask for")
        fence()  # whoever sees the request sees the observations
        self._asked += 1
        self._head[_ASKED] = self._asked
        self._waiting = True

    def answered(self) -> bool:
        """The open row holds what was asked for."""
        if self._head[_ANSWERED] != self._asked:
            return False
        if self._waiting:
            fence()  # the answer was seen before its actions are read
            self._waiting = False
        return True

    def commit(self) -> None:
        """The open row is complete."""
        if self.row is None or self._waiting:
            raise RuntimeError("the open row is the server's" if self._waiting else "no row is open")
        number = self._written
        slot = number % self.capacity
        if self._checks:
            self._sums[slot] = _checksum(number, self.row)
        self._stamp[slot] = 2 * number + 2
        fence()  # whoever sees the count sees the row
        self._written = self._head[_WRITTEN] = number + 1
        self.row = None

    # The server's end.

    def asking(self) -> Row | None:
        """Views of the row that waits for actions, if one does."""
        asked = self._head[_ASKED]
        if asked == self._head[_ANSWERED]:
            return None
        fence()  # the request was seen before the row's number and its observations
        self._serving = asked
        slot = self._head[_WRITTEN] % self.capacity
        return self._rows[slot] or self._views(slot)

    def answer(self) -> None:
        """The actions are in the row that `asking` gave."""
        if self._serving is None:
            raise RuntimeError("nobody asked")
        fence()  # whoever sees the answer sees the actions
        self._head[_ANSWERED] = self._serving
        self._serving = None

    # The reader's end.

    def available(self) -> int:
        """Rows that `take` would copy."""
        return self._ahead(self._head[_WRITTEN])

    def _ahead(self, written: int) -> int:
        """Rows there are. A reader that was overtaken goes on with the newer half of the ring: few long gaps, not many."""
        unread: int = written - self._next
        return max(1, self.capacity // 2) if self._drops and unread > self.capacity else unread

    def take(self, count: int, into: Mapping[str, Array], start: int = 0, breaks: Sequence[int] = ()) -> int:
        """Copy up to `count` rows to `into` (rows, K, …) from row `start` on and free them; gives how many were copied.

        They follow each other; `skipped` tells whether the first follows the last that was copied before. The field `seldom`
        is copied of rows with flags, of the last one, and of those before the numbers in `breaks`.
        """
        written = self._head[_WRITTEN]
        rows = min(count, self._ahead(written), self.capacity)
        self.skipped = 0
        if rows <= 0:
            return 0
        first = written - self._ahead(written)
        fence()  # the count was read before the rows
        slot = first % self.capacity
        here = min(rows, self.capacity - slot)
        for name, array in self._always:
            target = into[name]
            target[start : start + here] = array[slot : slot + here]
            if here < rows:
                target[start + here : start + rows] = array[: rows - here]
        if self._seldom is not None:
            wanted = {rows - 1, *(number - 1 - first for number in breaks if first < number < first + rows)}
            for name in self.plan.flags:
                wanted.update(np.flatnonzero(into[name][start : start + rows].reshape(rows, -1).any(1)).tolist())
            for row in wanted:
                into[self.plan.seldom][start + row] = self._seldom[(first + row) % self.capacity]
        sums = self._sums.take(range(slot, slot + rows), mode="wrap") if self._checks else self._sums
        fence()  # and they before their stamps
        late = self._overwritten(first, slot, here, rows)
        if late:  # what is left moves to where it belongs
            for name, _ in self._fields:
                into[name][start : start + rows - late] = into[name][start + late : start + rows]
        copied = rows - late
        if self._checks:
            for row in range(copied):
                number = first + late + row
                if _checksum(number, {name: into[name][start + row] for name, _ in self._fields}) != sums[late + row]:
                    raise RuntimeError(f"torn row {number}: it does not have the checksum it was given")
        lost = first + late - self._next
        if lost:
            self._head[_DROPPED] += lost
            self._gap += lost
        self._next = self._head[_READ] = first + rows
        if copied:
            self.skipped, self._gap = self._gap, 0
        return copied

    def _overwritten(self, first: int, slot: int, here: int, rows: int) -> int:
        """How many of the rows, counted from the first, were overwritten before they had been copied."""
        offset = 2 * (first - slot)  # from the stamps of the first time round to those of this one
        found = self._stamps[slot : slot + here] - self._due[slot : slot + here]
        if here < rows:
            rest = self._stamps[: rows - here] - self._due[: rows - here] - 2 * self.capacity
            found = np.concatenate([found, rest])
        if np.count_nonzero(found == offset) == rows:
            return 0
        wrong = np.flatnonzero(found < offset if self._drops else found != offset)  # overwritten, they are greater
        if len(wrong):
            row, stamp = first + int(wrong[0]), 2 * first + 2 + int(2 * wrong[0] + found[wrong[0]] - offset)
            raise RuntimeError(f"torn row {row}: its stamp is {stamp}; expected {2 * row + 2}")
        return int(np.flatnonzero(found != offset)[-1]) + 1

    @property
    def next(self) -> int:
        """Number of the row after the last that was copied."""
        return self._next

    # The parent's view.

    @property
    def written(self) -> int:
        """Rows completed so far."""
        return int(self._head[_WRITTEN])

    @property
    def dropped(self) -> int:
        """Rows that were never copied, and never will be."""
        return int(self._head[_DROPPED])

    def recover(self) -> int:
        """When the writer is dead: forget the row that was open and what was asked for it. Gives the number of the next row.

        The rows before stay readable. A late answer to the dead writer does no harm: requests count on.
        """
        self._head[_ANSWERED] = self._head[_ASKED]
        self._begin_writing()
        return self.written


def _checksum(number: int, row: Row) -> int:
    found = number & 0xFFFFFFFF
    for array in row.values():
        found = zlib.crc32(np.ascontiguousarray(array).data, found)
    return found
