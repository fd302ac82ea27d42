"""Memory that actors and the learner share, and what of it is not a ring of rows: weights, and how each actor is doing.

Nothing here takes a lock that another process could hold, so that a process may die at any time and no other waits for it.
Every number has one writer. Aligned int64 are stored and loaded whole; `fence` gives those stores and loads their order.
"""

from __future__ import annotations

import enum
import math
import mmap
import os
import shutil
import tempfile
import threading
import time
import weakref
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import psutil
from numpy.typing import DTypeLike

from redline.core.errors import UserError

Array = np.ndarray[Any, Any]
LINE = 128  # bytes apart that processors do not disturb each other: two cache lines, as they are fetched in pairs
CELL = LINE // 8  # int64 in them
ACTIONS = 32  # of each environment that are remembered


def fence(lock: Any = threading.Lock) -> None:
    """What was loaded and stored before is so to every process before anything that is loaded or stored after.

    Taking a lock keeps what comes after it from going ahead, releasing one keeps what comes before it from being late: both
    let things in, so that taking and releasing once orders nothing. But a release and a taking that follows it are ordered
    (on ARM a store-release before a load-acquire; on x86 each is a full fence), hence all before the one is before all after
    the other. The lock is new each time: no thread or signal handler can find it taken.
    """
    own = lock()
    own.acquire()
    own.release()
    own.acquire()


class Backoff:
    """Waiting without a lock: sleeps that grow while nothing is found, so that looking costs next to nothing."""

    def __init__(self, shortest: float = 20e-6, longest: float = 1e-3) -> None:
        """In seconds."""
        self.shortest, self.longest = shortest, longest
        self.next = shortest

    def take(self) -> None:
        time.sleep(self.next)
        self.next = min(2 * self.next, self.longest)

    def found(self) -> None:
        """There was something: look again soon."""
        self.next = self.shortest


class Memory:
    """Zeros that processes share. They have no name, so that nothing is left when the last process that has them ends."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd, self.size = fd, size
        self._closer = weakref.finalize(self, os.close, fd)
        self._map: mmap.mmap | None = mmap.mmap(fd, size)

    @classmethod
    def create(cls, size: int) -> Memory:
        """In memory where the system has files without a name, in an unlinked temporary file where it has not."""
        if hasattr(os, "memfd_create"):
            _refuse(size, int(psutil.virtual_memory().available), "memory")
            fd = os.memfd_create("redline")
            try:
                os.ftruncate(fd, size)
            except OSError:
                os.close(fd)
                raise
            return cls(fd, size)
        folder = tempfile.gettempdir()
        _refuse(size, shutil.disk_usage(folder).free, f"disk in {folder}")
        with tempfile.TemporaryFile(dir=folder) as file:
            if hasattr(os, "posix_fallocate"):  # a disk that fills up later would end whoever writes by SIGBUS
                try:
                    os.posix_fallocate(file.fileno(), 0, size)
                except OSError:
                    _refuse(size, min(shutil.disk_usage(folder).free, size - 1), f"disk in {folder}")
            else:
                os.ftruncate(file.fileno(), size)
            return cls(os.dup(file.fileno()), size)

    @classmethod
    def attach(cls, fd: int, size: int) -> Memory:
        """What another process created, by the descriptor that was handed down; it is closed with this."""
        if (found := os.fstat(fd).st_size) < size:
            raise ValueError(f"descriptor {fd} holds {found} bytes; expected {size}")
        return cls(fd, size)

    def array(self, offset: int, shape: Sequence[int], dtype: DTypeLike) -> Array:
        """A view, which may outlive `close`."""
        if self._map is None:
            raise ValueError("the memory is closed")
        return np.ndarray(tuple(shape), dtype, buffer=self._map, offset=offset)

    def close(self) -> None:
        """Give it back, as soon as there are no views of it."""
        self._closer()
        self.fd, self._map = -1, None


def _refuse(size: int, free: int, what: str) -> None:
    if size > free:
        raise UserError(
            f"Collecting needs {size:,} bytes of shared {what}, of which {free:,} are free; "
            f"take fewer actors, fewer environments each, or shorter rings."
        )


class SharedLayout:
    """Arrays one behind the other, each on lines of its own."""

    def __init__(self, fields: Mapping[str, tuple[Sequence[int], DTypeLike]]) -> None:
        """Shape and dtype by name."""
        self.fields = {name: (tuple(shape), np.dtype(dtype)) for name, (shape, dtype) in fields.items()}
        self.offsets: dict[str, int] = {}
        self.bytes = 0
        for name, (shape, dtype) in self.fields.items():
            if dtype.hasobject:
                raise ValueError(f"{name} is of {dtype}, which only one process can hold")
            self.offsets[name] = self.bytes
            self.bytes += -(-math.prod(shape) * dtype.itemsize // LINE) * LINE

    def views(self, memory: Memory, offset: int = 0) -> dict[str, Array]:
        """By name, where the first begins at `offset`, a multiple of LINE."""
        if offset % LINE:
            raise ValueError(f"offset is {offset}; expected a multiple of {LINE}")
        return {name: memory.array(offset + self.offsets[name], *field) for name, field in self.fields.items()}

    def to_json(self) -> list[list[Any]]:
        """As JSON can hold it."""
        return [[name, list(shape), dtype.str] for name, (shape, dtype) in self.fields.items()]

    @classmethod
    def from_json(cls, fields: Sequence[Sequence[Any]]) -> SharedLayout:
        return cls({name: (shape, dtype) for name, shape, dtype in fields})


class Weights:
    """The newest weights of a network: one process publishes, any number fetch, none waits for another.

    The writer goes round the buffers, so that the newest are never the ones it writes. A buffer's stamp is odd while it is
    written: 2 version + 1, then 2 version + 2. Who finds another after copying was overtaken, and copies what is newest then.
    """

    def __init__(self, memory: Memory, offset: int, size: int, buffers: int = 2, check: bool = False) -> None:
        """`size` in bytes. `check`: what is fetched is held against its checksum, which costs about as much as copying."""
        if buffers < 2:
            raise ValueError(f"buffers is {buffers}; expected at least 2")
        views = self.layout(size, buffers).views(memory, offset)
        self.size, self.buffers, self.check = size, buffers, check
        self._newest = views["newest"].data  # (version + 1) * buffers + buffer; 0: nothing was published
        self._stamps, self._sums = views["stamps"].data, views["sums"].data
        self._data = views["data"]
        self.checksum = 0  # CRC-32 of what was last published or fetched
        self.retries = 0  # times a publication overtook fetching

    @staticmethod
    def layout(size: int, buffers: int = 2) -> SharedLayout:
        each = ((buffers * CELL,), np.int64)
        data = ((buffers, size), np.uint8)
        return SharedLayout({"newest": ((CELL,), np.int64), "stamps": each, "sums": each, "data": data})

    @property
    def version(self) -> int:
        """The newest; -1: there is none yet."""
        return int(self._newest[0] // self.buffers) - 1

    def publish(self, array: Array, version: int) -> None:
        """Versions only grow."""
        last, before = self.version, self._newest[0] % self.buffers
        if version <= last:
            raise ValueError(f"version is {version}; expected more than {last}, the last published")
        data = self._bytes(np.ascontiguousarray(array))
        buffer = (before + 1) % self.buffers
        self._stamps[buffer * CELL] = 2 * version + 1
        fence()  # whoever sees new bytes sees that stamp
        self._data[buffer] = data
        self._sums[buffer * CELL] = self.checksum = zlib.crc32(data.data)
        self._stamps[buffer * CELL] = 2 * version + 2
        fence()  # whoever sees the version sees its bytes
        self._newest[0] = (version + 1) * self.buffers + buffer

    def fetch(self, into: Array, newer_than: int = -1) -> int | None:
        """Copy the newest weights into a contiguous array and give their version; None where it is not newer."""
        while True:
            version, buffer = divmod(self._newest[0], self.buffers)
            version -= 1
            if version <= max(newer_than, -1):
                return None
            data = self._bytes(into)
            fence()  # the version was read before its bytes
            data[:] = self._data[buffer]
            checksum = self._sums[buffer * CELL]
            fence()  # and they before the stamp
            if self._stamps[buffer * CELL] != 2 * version + 2:
                self.retries += 1
                continue
            if self.check and zlib.crc32(data.data) != checksum:
                raise RuntimeError(f"torn weights: those of version {version} do not have the checksum they were given")
            self.checksum = checksum
            return int(version)

    def _bytes(self, array: Array) -> Array:
        if array.nbytes != self.size or not array.flags.c_contiguous:
            raise ValueError(f"the weights have {array.nbytes} bytes; expected {self.size}, contiguous")
        return array.reshape(-1).view(np.uint8)


class State(enum.IntEnum):
    """What an actor is doing."""

    STARTING = 0
    STEPPING = 1
    NEEDS_ACTIONS = 2
    NEEDS_ROOM = 3


class _Number:
    """An int64 of a Status."""

    def __init__(self, place: int) -> None:
        self.place = place

    def __get__(self, status: Status, kind: type[Status]) -> int:
        return int(status.numbers[self.place])

    def __set__(self, status: Status, value: int) -> None:
        status.numbers[self.place] = value


_BUSY, _WAIT, _DOING = 4, 5, 6  # places of numbers


class Status:
    """How one actor is doing. It writes, its parent reads; the counts go on when another process takes its place."""

    pid = _Number(0)
    steps = _Number(1)  # of all environments
    episodes = _Number(2)
    version = _Number(3)  # of the weights in use
    busy_ns = _Number(_BUSY)
    wait_ns = _Number(_WAIT)
    env_index = _Number(7)  # that is stepped or was last

    def __init__(self, memory: Memory, offset: int, num_envs: int) -> None:
        views = self.layout(num_envs).views(memory, offset)
        self.numbers = views["numbers"].data
        self._acted, self._actions = views["acted"], views["actions"]
        self.at = self.numbers[7:8]  # `environment`, for who steps them

    @staticmethod
    def layout(num_envs: int) -> SharedLayout:
        actions = {"acted": ((num_envs,), np.int64), "actions": ((ACTIONS, num_envs), np.int64)}
        return SharedLayout({"numbers": ((CELL,), np.int64), **actions})

    def begin(self) -> None:
        """This process is the actor now; nothing was done yet."""
        self._acted[:] = 0
        self.numbers[_DOING] = time.monotonic_ns() * 4 + State.STARTING
        self.pid = os.getpid()

    def enter(self, state: State) -> None:
        """At every change, and before every step. To wait on for the same changes nothing."""
        numbers, now = self.numbers, time.monotonic_ns()
        since, before = divmod(numbers[_DOING], 4)
        if before == State.STEPPING:
            numbers[_BUSY] += now - since
        elif before == state:
            return
        elif before != State.STARTING:
            numbers[_WAIT] += now - since
        numbers[_DOING] = now * 4 + state  # one number, as the two must be read together

    def act(self, actions: Array, first: int = 0) -> None:
        """Remember the actions (K,) that the environments from `first` on are about to take, always the same together."""
        num_envs = slice(first, first + len(actions))
        count = int(self._acted[first])
        self._actions[count % ACTIONS, num_envs] = actions
        self._acted[num_envs] = count + 1

    @property
    def state(self) -> State:
        return State(self.numbers[_DOING] % 4)

    @property
    def since_ns(self) -> int:
        """When it entered that state or began that step, by `time.monotonic_ns`."""
        return int(self.numbers[_DOING] // 4)

    def last_actions(self, env_index: int) -> list[int]:
        """Up to ACTIONS of them, the newest last."""
        count = int(self._acted[env_index])
        found: list[int] = self._actions[np.arange(max(0, count - ACTIONS), count) % ACTIONS, env_index].tolist()
        return found
