"""RowStaging: gathers the rows of all rings on the host and, for a GPU, copies them to the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import DTypeLike

from redline.collect.shared_memory import Array, Backoff
from redline.collect.shared_ring import SharedRing
from redline.engine.fast import first_line

_LONG_WAIT_NS = 10_000_000_000


class RowStaging:
    """Rows of all environments, (rows, N, …) by field, moved from the rings many at a time.

    The newest row stays staged until the next one arrives, which shows whether it continues the row. It does not where an
    actor was replaced or rows were dropped; there the row is marked as truncated, so that no sample spans the break.
    """

    def __init__(
        self,
        rings: Sequence[SharedRing],
        slices: Sequence[slice],
        fields: Mapping[str, tuple[tuple[int, ...], DTypeLike]],
        device_fields: Iterable[str],
        min_rows: int,
        device: torch.device,
        check: Callable[[], None],
        notify: Callable[[str], None],
        pin_memory: bool = True,
    ) -> None:
        """`slices`: environments of each ring; `min_rows`: rows to wait for; `check` raises if no more rows will arrive."""
        self.rings, self.min_rows, self.check, self.notify = rings, min_rows, check, notify
        self.capacity = rings[0].capacity + 1  # a ring's rows, and the row that stays staged
        on_gpu = device.type == "cuda"
        fields = {**fields, "version": ((len(rings),), np.int64)}
        shapes = {name: ((self.capacity, *shape), dtype) for name, (shape, dtype) in fields.items()}
        self.arrays = _host_arrays(shapes, on_gpu and pin_memory, notify)
        self.parts = [  # views of each ring's environments
            {name: array[:, ring] if name == "version" else array[:, envs] for name, array in self.arrays.items()}
            for ring, envs in enumerate(slices)
        ]
        self.host = {name: torch.from_numpy(self.arrays[name]) for name in device_fields}
        self.device = {k: x.to(device, copy=True) for k, x in self.host.items()} if on_gpu else self.host
        self.stream = torch.cuda.Stream(device) if on_gpu else None
        self.copied = torch.cuda.Event() if on_gpu else None
        self.breaks: list[list[int]] = [
            [] for _ in rings
        ]  # for each ring, numbers of the rows that do not continue the previous row
        self.rows = self.position = 0  # number of staged rows, and index of the next to learn from
        self.wait_ns = self.move_ns = 0.0

    def next_row(self) -> int:
        """Return the index of the next staged row to learn from; the row after it is staged, too."""
        if self.position + 1 >= self.rows:
            self._refill()
        self.position += 1
        return self.position - 1

    def add_break(self, ring: SharedRing) -> None:
        """Record that a ring's next row does not continue the previous one, because its actor was replaced."""
        self.breaks[self.rings.index(ring)].append(ring.written)

    def _refill(self) -> None:
        """Wait until all rings have enough rows, and stage them."""
        if self.copied is not None:
            self.copied.synchronize()  # the previous rows have left the host
        if self.rows:  # the last row stays staged, as the first
            for array in self.arrays.values():
                array[0] = array[self.rows - 1]
        start = min(self.rows, 1)
        began = time.perf_counter_ns()
        available = self.wait(self.min_rows + 1 - start, began)
        ready = time.perf_counter_ns()
        count = min(available, self.capacity - start)
        for ring in range(len(self.rings)):
            self.move(ring, count, start)
        self.rows, self.position = start + count, 0
        self.copy_to_device()
        self.wait_ns += ready - began
        self.move_ns += time.perf_counter_ns() - ready

    def wait(self, count: int, began: int) -> int:
        """Wait until every ring has `count` rows; return the number of rows that every ring has."""
        backoff, notified = Backoff(), False
        while (available := min(ring.available() for ring in self.rings)) < count:
            self.check()
            backoff.sleep()
            if not notified and time.perf_counter_ns() - began > _LONG_WAIT_NS:
                self.notify("Waiting for the environments: no actor has delivered a step for ten seconds.")
                notified = True
        return available

    def copy_to_device(self) -> None:
        """Start copying the staged rows to the GPU; do nothing on a CPU."""
        if self.stream is None or self.copied is None:
            return
        self.stream.wait_stream(torch.cuda.current_stream())  # the learner has read the previous rows
        with torch.cuda.stream(self.stream):
            for name, tensor in self.device.items():
                tensor[: self.rows].copy_(self.host[name][: self.rows], non_blocking=True)
            self.copied.record()
        torch.cuda.current_stream().wait_event(self.copied)

    def move(self, index: int, rows: int, start: int) -> None:
        """Move `rows` rows of one ring to staged rows `start` onwards; mark the row before each break as truncated."""
        ring, part, breaks = self.rings[index], self.parts[index], self.breaks[index]
        moved = 0
        while moved < rows:
            here = start + moved
            copied = ring.take(rows - moved, part, here, breaks)
            if not copied:  # all rows were overwritten while being copied
                self.check()
                time.sleep(0)
                continue
            first = ring.next - copied
            starts = [here] if ring.skipped else []  # staged rows that do not continue the previous one
            while breaks and breaks[0] < ring.next:
                starts.append(here + max(0, breaks.pop(0) - first))
            for row in starts:
                part["episode_start"][row] = True  # its frame stack must not hold frames from before the break
                if row:
                    part["truncated"][row - 1] |= ~part["terminated"][row - 1]
            moved += copied


def _host_arrays(
    shapes: Mapping[str, tuple[tuple[int, ...], DTypeLike]], pinned: bool, notify: Callable[[str], None]
) -> dict[str, Array]:
    """Return zero-filled arrays by name; in page-locked memory if `pinned`, unless there is too little of it."""
    if pinned:
        try:
            return {name: _page_locked(shape, dtype) for name, (shape, dtype) in shapes.items()}
        except (RuntimeError, MemoryError) as error:
            notify(f"Rows of actors are staged in ordinary memory, which is slower: {first_line(error)}.")
    return {name: np.zeros(shape, dtype) for name, (shape, dtype) in shapes.items()}


def _page_locked(shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    torch_dtype = torch.from_numpy(np.zeros(1, dtype)).dtype
    array: Array = torch.zeros(shape, dtype=torch_dtype, pin_memory=True).numpy()
    return array
