"""Record which environment this process is calling, for a watchdog in another thread or after the process has died.

Two numbers: the index of the environment called last, and a counter that is odd while a call is in progress. They are
kept in this process's memory, in memory that an actor shares with its supervisor, or in a file of the run folder, which
survives the process.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MAKING = -1  # instead of an index while an environment is being made
_SIZE = 16  # bytes of the two numbers

_numbers = memoryview(bytearray(_SIZE)).cast("q")


def numbers() -> memoryview:
    """Return this process's [index, count], a view of two int64 that GymEnvs writes."""
    return _numbers


def position() -> tuple[int, int] | None:
    """Return (count, index) of the call in progress, None between calls. If it stays the same for long, the call hangs."""
    index, count = _numbers
    return (count, index) if count % 2 else None


@contextmanager
def calling(index: int) -> Iterator[None]:
    """Record the body of the `with` statement as a call of environment `index`, or of MAKING."""
    record = _numbers
    outer, record[0] = record[0], index
    nested = record[1] % 2  # a call within a call is the same call
    record[1] += 1 - nested
    try:
        yield
    finally:
        record[1] += 1 - nested
        record[0] = outer


@contextmanager
def kept_in(path: Path) -> Iterator[None]:
    """Keep the numbers in a file during the `with` statement, and remove the file at its end.

    If an environment kills the process, the file remains for `ended_in` to read. If it cannot be written, the numbers
    stay in memory.
    """
    global _numbers
    before = _numbers
    try:
        with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644), "r+b") as file:
            file.truncate(_SIZE)
            file.flush()
            _numbers = memoryview(mmap.mmap(file.fileno(), _SIZE)).cast("q")
    except OSError:
        yield
        return
    try:
        yield
    finally:
        _numbers = before
        path.unlink(missing_ok=True)


def ended_in(path: Path) -> int | None:
    """Return the index of the environment that was being called when the process behind `path` died; None if unknown."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            content = file.read(_SIZE + 1)
    except OSError:
        return None
    if len(content) != _SIZE:
        return None
    index, count = memoryview(content).cast("q")
    return index if count % 2 else None
