"""Anonymous memory shared between processes, arrays laid out in it, and the memory fence that orders accesses to it.

The structures built on it (rings, weights, status) are lock-free: if a process dies, no other waits for it. Every number
has a single writer. Aligned int64 are stored and loaded atomically; `fence` orders these stores and loads.
"""

from __future__ import annotations

import math
import mmap
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import psutil
from numpy.typing import DTypeLike

from redline.core.errors import UserError

Array = np.ndarray[Any, Any]
LINE = 128  # bytes between numbers of different writers: two cache lines, because processors fetch them in pairs
CELL = LINE // 8  # the same distance in int64


def fence(lock: Any = threading.Lock) -> None:
    """Order memory accesses: every load and store before this call happens before any load or store after it.

    Acquiring a lock keeps later accesses from moving before it, and releasing one keeps earlier accesses from moving after
    it. Both let accesses move in between, so a single acquire and release order nothing. A release followed by an acquire,
    however, is ordered (on ARM a store-release before a load-acquire; on x86 each is a full fence): everything before the
    release precedes everything after the acquire. A new lock each time cannot be held by a thread or signal handler.
    """
    own = lock()
    own.acquire()
    own.release()
    own.acquire()


class Backoff:
    """Exponential backoff for polling: sleeps twice as long each time while there is nothing to do."""

    def __init__(self, shortest: float = 20e-6, longest: float = 1e-3) -> None:
        """`shortest` and `longest` sleep, in seconds."""
        self.shortest, self.longest = shortest, longest
        self.next = shortest

    def sleep(self) -> None:
        """Sleep, then double the next sleep, up to the longest."""
        time.sleep(self.next)
        self.next = min(2 * self.next, self.longest)

    def reset(self) -> None:
        """Start again with the shortest sleep: there was something to do."""
        self.next = self.shortest


class Memory:
    """Zero-initialised memory shared by processes. It has no name, so nothing is left behind when the last process ends."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd, self.size = fd, size
        self._closer = weakref.finalize(self, os.close, fd)
        self._map: mmap.mmap | None = mmap.mmap(fd, size)

    @classmethod
    def create(cls, size: int) -> Memory:
        """Allocate `size` bytes: a memfd where the system supports it, else an unlinked temporary file."""
        if hasattr(os, "memfd_create"):
            _check_free(size, int(psutil.virtual_memory().available), "memory")
            fd = os.memfd_create("redline")
            try:
                os.ftruncate(fd, size)
            except OSError:
                os.close(fd)
                raise
            return cls(fd, size)
        folder = tempfile.gettempdir()
        _check_free(size, shutil.disk_usage(folder).free, f"disk in {folder}")
        with tempfile.TemporaryFile(dir=folder) as file:
            if hasattr(os, "posix_fallocate"):  # on a disk that fills up later, writing would end in SIGBUS
                try:
                    os.posix_fallocate(file.fileno(), 0, size)
                except OSError:
                    _check_free(size, min(shutil.disk_usage(folder).free, size - 1), f"disk in {folder}")
            else:
                os.ftruncate(file.fileno(), size)
            return cls(os.dup(file.fileno()), size)

    @classmethod
    def attach(cls, fd: int, size: int) -> Memory:
        """Map memory created by the parent process, given an inherited descriptor, which is closed with it."""
        if (actual := os.fstat(fd).st_size) < size:
            raise ValueError(f"descriptor {fd} holds {actual} bytes; expected {size}")
        return cls(fd, size)

    def array(self, offset: int, shape: Sequence[int], dtype: DTypeLike) -> Array:
        """Return a view of the bytes from `offset` on. It may outlive `close`."""
        if self._map is None:
            raise ValueError("the memory is closed")
        end = offset + math.prod(shape) * np.dtype(dtype).itemsize
        if not 0 <= offset <= end <= self.size:
            raise ValueError(f"bytes {offset} to {end} lie outside of the {self.size} bytes of shared memory")
        return np.ndarray(tuple(shape), dtype, buffer=self._map, offset=offset)

    def close(self) -> None:
        """Close the descriptor; the memory is freed with its last view."""
        self._closer()
        self.fd, self._map = -1, None


def _check_free(size: int, free: int, kind: str) -> None:
    """Raise UserError if `size` bytes are more than are free."""
    if size > free:
        raise UserError(
            f"Collecting needs {size:,} bytes of shared {kind}, of which {free:,} are free; "
            f"use fewer actors, fewer environments or shorter rollouts."
        )


class SharedLayout:
    """Named arrays laid out consecutively in shared memory, each on its own cache lines."""

    def __init__(self, fields: Mapping[str, tuple[Sequence[int], DTypeLike]]) -> None:
        """`fields`: shape and dtype of each array by name."""
        self.fields = {name: (tuple(shape), np.dtype(dtype)) for name, (shape, dtype) in fields.items()}
        self.offsets: dict[str, int] = {}
        self.bytes = 0
        for name, (shape, dtype) in self.fields.items():
            if dtype.hasobject:
                raise ValueError(f"{name} has dtype {dtype}, which processes cannot share")
            if any(isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 0 for size in shape):
                raise ValueError(f"{name} has shape {shape}; expected whole numbers")
            self.offsets[name] = self.bytes
            self.bytes += -(-math.prod(shape) * dtype.itemsize // LINE) * LINE

    def views(self, memory: Memory, offset: int = 0) -> dict[str, Array]:
        """Return the arrays by name; the first starts at `offset`, a multiple of LINE."""
        if offset % LINE:
            raise ValueError(f"offset is {offset}; expected a multiple of {LINE}")
        return {name: memory.array(offset + self.offsets[name], *field) for name, field in self.fields.items()}

    def to_json(self) -> list[list[Any]]:
        """Return the fields as JSON-compatible values; `from_json` is the inverse."""
        return [[name, list(shape), dtype.str] for name, (shape, dtype) in self.fields.items()]

    @classmethod
    def from_json(cls, fields: Sequence[Sequence[Any]]) -> SharedLayout:
        return cls({name: (shape, dtype) for name, shape, dtype in fields})
