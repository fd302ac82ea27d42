"""Between a device and records of the host: rows travel out, the records drawn travel in, while the learner goes on.

    device   outbox, places ─► slot …                        slot … ─► inbox
    Courier      │ copy ─► host row ─► records ─► gather ─► host batch ─► copy │     by a worker thread
    Direct       └ copy ─► records ─► gather by the device itself ──────────────┘    page-locked records only

Of each there are SLOTS, so that a batch may be under way for AHEAD iterations before anybody waits for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

Notify = Callable[[str], None]
AHEAD = 3  # iterations between drawing a batch and learning from it
SLOTS = AHEAD + 1  # batches and rows under way
# Bytes of records that a device reads over the bus without losing its way: on an H200 32,768 records took 0.28 ms out of
# 0.4 GB, but 1.5 ms out of 12.8 GB, where a thread of the host needs 0.6. (Addresses are translated page by page.)
_REACH = 1 << 30


class Storage(Protocol):
    """Where records lie."""

    records: Tensor  # (entries, size) uint8

    def before_row(self, row: int) -> None: ...
    def after_row(self, row: int) -> None: ...
    def flush(self) -> None: ...
    def lost(self, written: int) -> Tensor: ...
    def histories(self) -> Tensor: ...
    def begin_history(self, before: Tensor, written: int) -> None: ...
    def close(self) -> None: ...


def pinned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, notify: Notify) -> Tensor:
    """Zeros in page-locked host memory for a CUDA device; in ordinary memory, and said so, where that cannot be had."""
    if device.type == "cuda":
        try:
            return torch.zeros(shape, dtype=dtype, pin_memory=True)
        except (RuntimeError, MemoryError) as error:
            reason = (str(error).strip().splitlines() or ["no reason given"])[0]
            notify(f"Replay in ordinary host memory, which copies slower: none could be page-locked ({reason[:120]}).")
    return torch.zeros(shape, dtype=dtype)


class TransferSpec(NamedTuple):
    """The device's ends: what is laid out for the host, and what has come from there."""

    row: Tensor  # (N, size) uint8
    places: Tensor  # (batches, W) int64: which records are wanted
    inbox: Tensor  # (batches, W, size) uint8: those records


class _Slot(NamedTuple):
    """Buffers of one row that travels out and one set of batches that travels in."""

    row: Tensor
    places: Tensor
    gathered: Tensor  # on the host
    arrived: Tensor  # on the device


class HostTransfer:
    """By way of a thread of the host, or in place where there is no device to wait for."""

    def __init__(
        self, storage: Storage, spec: TransferSpec, rows: int, notify: Notify, threaded: bool | None = None
    ) -> None:
        self.storage, self.spec, self.rows = storage, spec, rows
        self.device = spec.row.device
        self._cuda = self.device.type == "cuda"
        self._threaded = self._cuda if threaded is None else threaded
        if self._cuda:
            self._out, self._in = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
            self._sent, self._ready, self._used = ([torch.cuda.Event() for _ in range(SLOTS)] for _ in range(3))
        self._slots = [self._make_slot(notify) for _ in range(SLOTS)]
        self.waited = 0.0  # seconds the host waited for the worker: it runs ahead of the device, so this is no loss yet
        self.timed: list[tuple[torch.cuda.Event, torch.cuda.Event]] | None = None  # before and after the device's waits
        self.delivered = 0  # rows that are done with
        self._progress = threading.Condition()
        self._failure: BaseException | None = None
        self._jobs: SimpleQueue[tuple[int, bool] | None] = SimpleQueue()
        self._worker: threading.Thread | None = None

    def _make_slot(self, notify: Notify) -> _Slot:
        row, places, inbox = ((tuple(x.shape), x.dtype, self.device, notify) for x in self.spec)
        return _Slot(pinned(*row), pinned(*places), pinned(*inbox), torch.zeros_like(self.spec.inbox))

    def fetch(self, iteration: int) -> None:
        """Have the batches for an iteration in the inbox, and the outbox free. Waits only for what is late."""
        self._raise()
        if self._cuda and iteration:  # the row before must have left before the next is laid out
            torch.cuda.current_stream().wait_event(self._sent[(iteration - 1) % SLOTS])
        wanted = iteration - AHEAD
        if wanted < 0:
            return
        self.wait(wanted + 1)
        slot = wanted % SLOTS
        if self._cuda:
            with self._timing():
                torch.cuda.current_stream().wait_event(self._ready[slot])
        self.spec.inbox.copy_(self._slots[slot].arrived)
        if self._cuda:
            self._used[slot].record()

    def send(self, iteration: int) -> None:
        """Send out the row of an iteration and the places drawn after it; what lies there will be fetched later."""
        self.wait(iteration - AHEAD)  # its buffers are free
        slot = iteration % SLOTS
        self._leave(slot)
        self._do(iteration, True)

    def send_again(self, iteration: int, places: Tensor) -> None:
        """Of an earlier iteration, whose row is stored, only the records of places (batches, W)."""
        self._slots[iteration % SLOTS].places.copy_(places)
        self._do(iteration, False)

    def _leave(self, slot: int) -> None:
        buffers = self._slots[slot]
        if not self._cuda:
            buffers.row.copy_(self.spec.row)
            buffers.places.copy_(self.spec.places)
            return
        self._out.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._out):
            buffers.row.copy_(self.spec.row, non_blocking=True)
            buffers.places.copy_(self.spec.places, non_blocking=True)
            self._sent[slot].record()

    def _do(self, number: int, stores: bool) -> None:
        if not self._threaded:
            self._handle(number, stores)
            return
        if self._worker is None:
            self._worker = threading.Thread(target=self._work, name="replay", daemon=True)
            self._worker.start()
        self._jobs.put((number, stores))

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._handle(*job)
            except BaseException as error:  # raised again where the learner waits
                with self._progress:
                    self._failure = error
                    self._progress.notify_all()
                return

    def _handle(self, number: int, stores: bool) -> None:
        """Store the row of that number, then gather and send the batches drawn after it."""
        slot = number % SLOTS
        buffers = self._slots[slot]
        if self._cuda:
            self._sent[slot].synchronize()
            self._ready[slot].synchronize()  # what was gathered there before has left
        if stores:
            self.storage.before_row(number)
            self._row_of(self.storage.records, number).copy_(buffers.row)
            self.storage.after_row(number)
        whole = buffers.gathered.flatten(0, 1)
        torch.index_select(self.storage.records, 0, buffers.places.view(-1), out=whole)
        if self._cuda:
            with torch.cuda.stream(self._in):
                self._in.wait_event(self._used[slot])
                buffers.arrived.copy_(buffers.gathered, non_blocking=True)
                self._ready[slot].record()
        else:
            buffers.arrived.copy_(buffers.gathered)
        with self._progress:
            self.delivered = number + 1
            self._progress.notify_all()

    def _row_of(self, records: Tensor, number: int) -> Tensor:
        num_envs = self.spec.row.shape[0]
        first = (number % self.rows) * num_envs
        return records[first : first + num_envs]

    @contextmanager
    def _timing(self) -> Iterator[None]:
        if self.timed is None:
            yield
            return
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        yield
        end.record()
        self.timed.append((start, end))

    def wait(self, rows: int) -> None:
        """Until so many rows are done with."""
        if self.delivered >= rows:
            return
        started = time.perf_counter()
        with self._progress:
            self._progress.wait_for(lambda: self.delivered >= rows or self._failure)
        self.waited += time.perf_counter() - started
        self._raise()

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure

    def flush(self, rows: int) -> None:
        """All of so many rows are in the records, and the records are where they belong."""
        self.wait(rows)
        self.storage.flush()

    def close(self) -> None:
        """Stop the worker."""
        if self._worker is not None:
            self._jobs.put(None)
            self._worker.join()
            self._worker = None
        if self._cuda:  # nothing under way may write to memory that is given back
            with suppress(RuntimeError):
                self._out.synchronize()
                self._in.synchronize()


class DirectTransfer(HostTransfer):
    """The device itself writes and reads page-locked records over the bus, on a stream of its own: no thread takes part."""

    def __init__(self, storage: Storage, spec: TransferSpec, rows: int, notify: Notify) -> None:
        super().__init__(storage, spec, rows, notify, threaded=False)
        self._there = as_seen_by(self.device, storage.records)  # (entries, words) int64

    def _make_slot(self, notify: Notify) -> _Slot:
        del notify
        row, places, inbox = (torch.zeros_like(x) for x in self.spec)
        return _Slot(row, places, inbox[:0], inbox)

    def _leave(self, slot: int) -> None:
        self._out.wait_event(self._ready[slot])  # what was there before has been read
        super()._leave(slot)

    def send_again(self, iteration: int, places: Tensor) -> None:
        super().send_again(iteration, places)
        torch.cuda.synchronize(self.device)

    def _handle(self, number: int, stores: bool) -> None:
        slot = number % SLOTS
        buffers = self._slots[slot]
        if not stores:
            self._in.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._in):
            self._in.wait_event(self._sent[slot])
            if stores:
                self._row_of(self.storage.records, number).copy_(buffers.row, non_blocking=True)
            self._in.wait_event(self._used[slot])
            arrived = buffers.arrived.view(torch.int64).flatten(0, 1)
            torch.index_select(self._there, 0, buffers.places.view(-1), out=arrived)
            self._ready[slot].record()
        self.delivered = number + 1

    def flush(self, rows: int) -> None:
        """All of so many rows are in the records."""
        super().flush(rows)
        self._in.synchronize()


def as_seen_by(device: torch.device, host: Tensor) -> Tensor:
    """Page-locked bytes (M, size), a multiple of eight, as the device reads them over the bus: (M, size / 8) int64."""
    words = host.view(torch.int64)
    description = {"shape": tuple(words.shape), "typestr": "<i8", "data": (words.data_ptr(), False), "version": 2}
    # What is shared keeps the memory it is in.
    shared = type("Words", (), {"__cuda_array_interface__": description, "words": words})()
    there = torch.as_tensor(shared, device=device)
    if there.data_ptr() != words.data_ptr():
        raise RuntimeError("it has another address there")
    return there


def transfer(
    storage: Storage, spec: TransferSpec, rows: int, notify: Notify, threaded: bool | None = None
) -> HostTransfer:
    """The fastest there is for these records."""
    near = storage.records.nbytes <= _REACH
    if spec.row.device.type == "cuda" and near and storage.records.is_pinned() and threaded is None:
        try:
            return DirectTransfer(storage, spec, rows, notify)
        except (RuntimeError, TypeError, ValueError) as error:
            reason = (str(error).strip().splitlines() or ["no reason given"])[0]
            notify(f"Replay by way of a thread: the device cannot read page-locked memory itself ({reason[:120]}).")
    return HostTransfer(storage, spec, rows, notify, threaded)
