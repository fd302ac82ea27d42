"""Rings whose description or memory is damaged: clear errors only, no hang, no crash, no row that was not written.

REDLINE_FUZZ is the number of cases of each kind; 10,000 by hand.
"""

from __future__ import annotations

import copy
import os
import random
from typing import Any

import numpy as np
import pytest

from redline.collect.shared_memory import CELL, Memory, SharedLayout
from redline.collect.shared_ring import SharedRing, SharedRingSpec
from redline.core.errors import UserError

CASES = int(os.environ.get("REDLINE_FUZZ", "300"))
ROW = SharedLayout({"obs": ((3, 2), "f4"), "final": ((3, 2), "f4"), "over": ((3,), "?"), "number": ((), "i8")})
ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    7,
    2**31,
    2**63,
    10**30,
    0.5,
    float("nan"),
    "",
    "f4",
    "O",
    "x" * 300,
    [],
    [[]],
    {},
    [1],
]
NUMBERS = [0, 1, -1, 2, 3, 5, 8, 63, 2**31, -(2**31), 2**62, 2**63 - 1, -(2**63)]


def damaged(value: Any, rng: random.Random) -> Any:
    """Return JSON with one place replaced, removed, repeated or added."""
    value = copy.deepcopy(value)
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        kind = rng.randrange(6)
        if kind == 0:
            del value[key]
        elif kind == 1:
            value[rng.choice(["capacit", "", "rows"])] = rng.choice(ODD)
        else:
            value[key] = damaged(value[key], rng)
        return value
    if isinstance(value, list) and value and rng.random() < 0.9:
        place = rng.randrange(len(value))
        kind = rng.randrange(6)
        if kind == 0:
            del value[place]
        elif kind == 1:
            value.insert(place, copy.deepcopy(value[place]))
        else:
            value[place] = damaged(value[place], rng)
        return value
    return rng.choice(ODD)


@pytest.mark.fault("C15")
def test_descriptions_of_rings() -> None:
    rng, good = random.Random(1), SharedRingSpec(ROW, 5, False, True, "final", ("over",)).to_json()
    refused = 0
    for _ in range(CASES):
        record = damaged(good, rng)
        try:
            spec = SharedRingSpec.from_json(record)
        except ValueError as error:
            if "this does not describe a ring" not in str(error):
                pytest.fail(str(error))
            refused += 1
            continue
        assert spec.to_json() == record, "what is understood is understood whole"
        if spec.layout.bytes < 1 << 20:
            SharedRing(Memory.create(spec.layout.bytes), 0, spec).open()
        else:
            with pytest.raises((UserError, ValueError)):  # too large for the machine, or for the memory there is
                SharedRing(Memory.create(min(spec.layout.bytes, 1 << 20)), 0, spec)
    assert refused > CASES // 2


class Damaged:
    """A ring with rows in it, its memory damaged in some places, and its ends used in some order."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.check = rng.random() < 0.5
        self.spec = SharedRingSpec(ROW, rng.randint(1, 6), rng.random() < 0.5, self.check, "final", ("over",))
        self.memory = Memory.create(self.spec.layout.bytes)
        self.writer, self.server, self.reader = (SharedRing(self.memory, 0, self.spec) for _ in range(3))
        self.into = {name: np.zeros((8, *shape), dtype) for name, (shape, dtype) in ROW.fields.items()}
        self.rows_intact = True
        for _ in range(rng.randrange(10)):
            self.write()
            if rng.random() < 0.3:
                self.read()

    def write(self) -> None:
        row = self.writer.open()
        if row is None:
            return
        number = self.writer._written
        for array in row.values():
            array[...] = number % 2 if array.dtype == bool else number % 251
        if self.rng.random() < 0.3 and not self.writer._waiting:
            self.writer.request()
            if self.server.pending() is not None:
                self.server.respond()
            self.writer.has_response()
        if not self.writer._waiting:
            self.writer.commit()

    def read(self) -> None:
        assert self.reader.available() <= self.spec.capacity
        copied = self.reader.take(self.rng.randint(1, 8), self.into, breaks=[self.rng.choice(NUMBERS)])
        assert 0 <= copied <= 8
        for row in range(copied):
            number = self.reader.next - copied + row
            if self.check or self.rows_intact:
                assert self.into["number"][row] == number % 251, "a row that was not written"
                assert (self.into["obs"][row] == number % 251).all()

    def damage(self) -> None:
        views = self.spec.layout.views(self.memory)
        for _ in range(self.rng.randint(1, 3)):
            kind, value = self.rng.randrange(4), self.rng.choice([*NUMBERS, self.rng.getrandbits(63)])
            if kind == 0:
                views["head"][self.rng.randrange(6) * CELL] = value
            elif kind == 1:
                views["stamps"][self.rng.randrange(self.spec.capacity)] = value
            elif kind == 2 and self.check:
                views["sums"][self.rng.randrange(self.spec.capacity)] = value & 0xFFFFFFFF
            elif kind == 3:
                flat = views["row obs"].reshape(-1).view(np.uint8)
                flat[self.rng.randrange(len(flat))] ^= 1 << self.rng.randrange(8)
                self.rows_intact = False

    def use(self) -> None:
        for _ in range(12):
            self.rng.choice([self.write, self.read, self.read, self.writer.recover, self.reopen])()

    def reopen(self) -> None:
        self.writer = SharedRing(self.memory, 0, self.spec)


@pytest.mark.fault("C15")
def test_memory_of_rings() -> None:
    named = 0
    for case in range(CASES):
        ring = Damaged(random.Random(case))
        ring.damage()
        try:
            ring.use()
        except (RuntimeError, ValueError) as error:
            if not str(error).startswith(("torn row", "the ring is damaged", "the memory holds another ring")):
                pytest.fail(f"case {case}: {error}")
            named += 1
    assert named > CASES // 3, "most damage is seen"
