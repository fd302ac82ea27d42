"""Transfers between a device and records on the host: rows go out, drawn records come in, while the learner continues.

    device            outbox, places ─► slot …                            slot … ─► inbox
    HostTransfer          │ copy ─► host row ─► records ─► gather ─► host batch ─► copy │   by a worker thread
    DirectTransfer        └ copy ─► records ─► gather by the device itself ─────────────┘   page-locked records only

There are SLOTS of these buffers, so a batch may be in transit for AHEAD iterations before the learner waits for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

from redline.core.faults import reach
from redline.engine.gather import copy_rows, pays
from redline.replay.record_storage import RecordStorage

Notify = Callable[[str], None]
AHEAD = 3  # iterations between drawing a batch and learning from it
SLOTS = AHEAD + 1  # batches and rows in transit
# Largest size of records that a device gathers from directly. On an H200 a gather of 32,768 records took 0.28 ms from
# 0.4 GB but 1.5 ms from 12.8 GB, where a host thread needs 0.6 ms: addresses are translated page by page.
_DIRECT_BYTES = 1 << 30


def page_locked_zeros(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, notify: Notify, pin_memory: bool = True
) -> Tensor:
    """Return zeros in page-locked host memory for a CUDA device; in ordinary memory, with a message, if that fails.

    pin_memory: False: always use ordinary memory.
    """
    if device.type == "cuda" and pin_memory:
        try:
            return torch.zeros(shape, dtype=dtype, pin_memory=True)
        except (RuntimeError, MemoryError) as error:
            notify(
                f"Replay uses ordinary host memory, which is slower: no memory could be page-locked ({_first_line(error)})."
            )
    return torch.zeros(shape, dtype=dtype)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no reason given"])[0][:120]


class TransferSpec(NamedTuple):
    """Device buffers that a transfer reads and fills."""

    row: Tensor  # (N, size) uint8: records of the newest row, to be stored
    places: Tensor  # (batches, W) int64: records to deliver
    inbox: Tensor  # (batches, W, size) uint8: delivered records


class _Slot(NamedTuple):
    """Buffers for one outgoing row and one iteration's incoming batches."""

    row: Tensor
    places: Tensor
    gathered: Tensor  # on the host
    arrived: Tensor  # on the device; without a GPU, `gathered` itself


class HostTransfer:
    """Transfers by a host thread, or in the calling thread if there is no GPU to wait for."""

    def __init__(
        self,
        storage: RecordStorage,
        spec: TransferSpec,
        rows: int,
        notify: Notify,
        threaded: bool | None = None,
        pin_memory: bool = True,
    ) -> None:
        self.storage, self.spec, self.rows, self.pin_memory = storage, spec, rows, pin_memory
        self.device = spec.row.device
        self._cuda = self.device.type == "cuda"
        self._threaded = self._cuda if threaded is None else threaded
        if self._cuda:
            self._out, self._in = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
            self._sent, self._ready, self._used = ([torch.cuda.Event() for _ in range(SLOTS)] for _ in range(3))
        self._slots = [self._make_slot(notify) for _ in range(SLOTS)]
        self.waited = 0.0  # seconds that the host waited for the worker; costs nothing while the device still has work
        self.timed: list[tuple[torch.cuda.Event, torch.cuda.Event]] | None = None  # before and after the device's waits
        self.delivered = 0  # iterations whose row is stored and whose batches are delivered
        self._progress = threading.Condition()
        self._failure: BaseException | None = None
        self._jobs: SimpleQueue[tuple[int, bool] | None] = SimpleQueue()
        self._worker: threading.Thread | None = None

    def _make_slot(self, notify: Notify) -> _Slot:
        row, places, inbox = (
            page_locked_zeros(tuple(x.shape), x.dtype, self.device, notify, self.pin_memory) for x in self.spec
        )
        return _Slot(row, places, inbox, torch.zeros_like(self.spec.inbox) if self._cuda else inbox)

    def fetch(self, iteration: int) -> None:
        """Copy the batches of an iteration into the inbox and free the outbox; wait only if the transfer is late."""
        self._raise()
        if self._cuda and iteration:  # the previous row must have left before the next is written
            torch.cuda.current_stream().wait_event(self._sent[(iteration - 1) % SLOTS])
        drawn_in = iteration - AHEAD
        if drawn_in < 0:
            return
        self.wait(drawn_in + 1)
        slot = drawn_in % SLOTS
        if self._cuda:
            with self._timing():
                torch.cuda.current_stream().wait_event(self._ready[slot])
        self.spec.inbox.copy_(self._slots[slot].arrived)
        if self._cuda:
            self._used[slot].record()

    def send(self, iteration: int) -> None:
        """Send the row of an iteration and the places drawn after it, to be fetched AHEAD iterations later."""
        self.wait(iteration - AHEAD)  # until its buffers are free
        slot = iteration % SLOTS
        self._copy_out(slot)
        self._submit(iteration, True)

    def resend(self, iteration: int, places: Tensor) -> None:
        """Deliver the records at `places` (batches, W) for an earlier iteration, of which the row is already stored."""
        self._slots[iteration % SLOTS].places.copy_(places)
        self._submit(iteration, False)

    def _copy_out(self, slot: int) -> None:
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

    def _submit(self, iteration: int, has_row: bool) -> None:
        if not self._threaded:
            self._handle(iteration, has_row)
            return
        if self._worker is None:
            self._worker = threading.Thread(target=self._work, name="replay", daemon=True)
            self._worker.start()
        self._jobs.put((iteration, has_row))

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._handle(*job)
            except BaseException as error:  # `wait` raises it in the learner's thread
                with self._progress:
                    self._failure = error
                    self._progress.notify_all()
                return

    def _handle(self, iteration: int, has_row: bool) -> None:
        """Store the row of an iteration if it has one, then gather and send the batches drawn after it."""
        reach("replay.write")
        slot = iteration % SLOTS
        buffers = self._slots[slot]
        if self._cuda:
            self._sent[slot].synchronize()
            self._ready[slot].synchronize()  # wait until the batches previously gathered there have left
        if has_row:
            self.storage.before_row(iteration)
            self._row_of(self.storage.records, iteration).copy_(buffers.row)
            self.storage.after_row(iteration)
        places, gathered = buffers.places.view(-1), buffers.gathered.flatten(0, 1)
        if self._cuda or not pays(self.storage.records, places):
            torch.index_select(self.storage.records, 0, places, out=gathered)
        else:
            copy_rows(self.storage.records, places, gathered)
        if self._cuda:
            with torch.cuda.stream(self._in):
                self._in.wait_event(self._used[slot])
                buffers.arrived.copy_(buffers.gathered, non_blocking=True)
                self._ready[slot].record()
        with self._progress:
            self.delivered = iteration + 1
            self._progress.notify_all()

    def _row_of(self, records: Tensor, row: int) -> Tensor:
        num_envs = self.spec.row.shape[0]
        first = (row % self.rows) * num_envs
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

    def wait(self, iterations: int) -> None:
        """Wait until `iterations` are delivered; raise the failure if the worker has stopped."""
        if self.delivered >= iterations:
            return
        started = time.perf_counter()
        with self._progress:
            self._progress.wait_for(lambda: self.delivered >= iterations or self._failure)
        self.waited += time.perf_counter() - started
        self._raise()

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure

    def flush(self, iterations: int) -> None:
        """Wait until the rows of `iterations` are stored, durably if the storage is a file."""
        self.wait(iterations)
        self.storage.flush()

    def close(self) -> None:
        """Stop the worker and wait for copies in progress."""
        if self._worker is not None:
            self._jobs.put(None)
            self._worker.join()
            self._worker = None
        if self._cuda:  # no copy in progress may write to released memory
            with suppress(RuntimeError):
                self._out.synchronize()
                self._in.synchronize()


class DirectTransfer(HostTransfer):
    """Transfers by the device, which writes and reads page-locked host records directly, on its own streams."""

    def __init__(self, storage: RecordStorage, spec: TransferSpec, rows: int, notify: Notify) -> None:
        super().__init__(storage, spec, rows, notify, threaded=False)
        self._mapped = map_to_device(self.device, storage.records)  # (entries, words) int64

    def _make_slot(self, notify: Notify) -> _Slot:
        del notify
        row, places, inbox = (torch.zeros_like(x) for x in self.spec)
        return _Slot(row, places, inbox[:0], inbox)

    def _copy_out(self, slot: int) -> None:
        self._out.wait_event(self._ready[slot])  # wait until the previous content of the slot has been read
        super()._copy_out(slot)

    def resend(self, iteration: int, places: Tensor) -> None:
        super().resend(iteration, places)
        torch.cuda.synchronize(self.device)

    def _handle(self, iteration: int, has_row: bool) -> None:
        slot = iteration % SLOTS
        buffers = self._slots[slot]
        if not has_row:
            self._in.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._in):
            self._in.wait_event(self._sent[slot])
            if has_row:
                self._row_of(self.storage.records, iteration).copy_(buffers.row, non_blocking=True)
            self._in.wait_event(self._used[slot])
            arrived = buffers.arrived.view(torch.int64).flatten(0, 1)
            torch.index_select(self._mapped, 0, buffers.places.view(-1), out=arrived)
            self._ready[slot].record()
        self.delivered = iteration + 1

    def flush(self, iterations: int) -> None:
        """Wait until the rows of `iterations` are stored."""
        super().flush(iterations)
        self._in.synchronize()


def map_to_device(device: torch.device, host: Tensor) -> Tensor:
    """Return page-locked host bytes (M, size) as a device tensor (M, size / 8) int64 that shares their memory.

    size must be a multiple of 8.
    """
    words = host.view(torch.int64)
    description = {"shape": tuple(words.shape), "typestr": "<i8", "data": (words.data_ptr(), False), "version": 2}
    # The tensor keeps this object alive, and the object keeps the host memory alive.
    shared = type("Words", (), {"__cuda_array_interface__": description, "words": words})()
    mapped = torch.as_tensor(shared, device=device)
    if mapped.data_ptr() != words.data_ptr():
        raise RuntimeError("the memory has another address on the device")
    return mapped


def make_transfer(
    storage: RecordStorage,
    spec: TransferSpec,
    rows: int,
    notify: Notify,
    threaded: bool | None = None,
    pin_memory: bool = True,
) -> HostTransfer:
    """Return the fastest transfer for the records of `storage`."""
    small = storage.records.nbytes <= _DIRECT_BYTES
    if spec.row.device.type == "cuda" and small and storage.records.is_pinned() and threaded is None:
        try:
            return DirectTransfer(storage, spec, rows, notify)
        except (RuntimeError, TypeError, ValueError) as error:
            notify(
                f"Replay transfers by a thread: the device cannot read page-locked memory itself ({_first_line(error)})."
            )
    return HostTransfer(storage, spec, rows, notify, threaded, pin_memory)
