"""The newest weights of a network in shared memory, lock-free: one process publishes them, any number fetch them."""

from __future__ import annotations

import zlib

import numpy as np

from redline.collect.shared_memory import CELL, Array, Memory, SharedLayout, fence


class SharedWeights:
    """Versions of a network's weights in a small circle of buffers.

    The writer never writes to the buffer that holds the newest version. A buffer's stamp is 2 version + 1 while it is being
    written, then 2 version + 2. A reader that finds another stamp after copying was overtaken, and copies again.
    """

    def __init__(self, memory: Memory, offset: int, size: int, buffers: int = 2, check: bool = False) -> None:
        """`size` is in bytes. `check`: verify the checksum of fetched weights, which takes about as long as copying them."""
        if buffers < 2:
            raise ValueError(f"buffers is {buffers}; expected at least 2")
        views = self.layout(size, buffers).views(memory, offset)
        self.size, self.buffers, self.check = size, buffers, check
        self._newest = views["newest"].data  # (version + 1) * buffers + buffer; 0: nothing published yet
        self._stamps, self._sums = views["stamps"].data, views["sums"].data
        self._data = views["data"]
        self.checksum = 0  # CRC-32 of the weights last published or fetched
        self.retries = 0  # times a publication overtook a fetch

    @staticmethod
    def layout(size: int, buffers: int = 2) -> SharedLayout:
        """Return the memory layout for weights of `size` bytes."""
        per_buffer = ((buffers * CELL,), np.int64)
        data = ((buffers, size), np.uint8)
        return SharedLayout({"newest": ((CELL,), np.int64), "stamps": per_buffer, "sums": per_buffer, "data": data})

    @property
    def version(self) -> int:
        """The newest version; -1 before the first publication."""
        return int(self._newest[0] // self.buffers) - 1

    def publish(self, array: Array, version: int) -> None:
        """Publish `array` as the newest weights. Versions must increase."""
        newest, current = self.version, self._newest[0] % self.buffers
        if version <= newest:
            raise ValueError(f"version is {version}; expected more than {newest}, the last published")
        data = self._bytes(np.ascontiguousarray(array))
        buffer = (current + 1) % self.buffers
        self._stamps[buffer * CELL] = 2 * version + 1
        fence()  # a reader of new bytes sees that stamp
        self._data[buffer] = data
        self._sums[buffer * CELL] = self.checksum = zlib.crc32(data.data)
        self._stamps[buffer * CELL] = 2 * version + 2
        fence()  # a reader of the new version sees its bytes
        self._newest[0] = (version + 1) * self.buffers + buffer

    def fetch(self, into: Array, newer_than: int = -1) -> int | None:
        """Copy the newest weights into a contiguous array and return their version; None if not above `newer_than`."""
        while True:
            version, buffer = divmod(self._newest[0], self.buffers)
            version -= 1
            if version <= max(newer_than, -1):
                return None
            data = self._bytes(into)
            fence()  # read the version before its bytes
            data[:] = self._data[buffer]
            checksum = self._sums[buffer * CELL]
            fence()  # and the bytes before the stamp
            if self._stamps[buffer * CELL] != 2 * version + 2:
                self.retries += 1
                continue
            if self.check and zlib.crc32(data.data) != checksum:
                raise RuntimeError(f"torn weights: those of version {version} do not match their checksum")
            self.checksum = checksum
            return int(version)

    def _bytes(self, array: Array) -> Array:
        if array.nbytes != self.size or not array.flags.c_contiguous:
            raise ValueError(f"the weights have {array.nbytes} bytes; expected {self.size}, contiguous")
        return array.reshape(-1).view(np.uint8)
