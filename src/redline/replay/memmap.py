"""In a file of the run folder, for capacities beyond memory; found again when a run continues.

Checkpoints leave the records in the file. If the run was stopped regularly, a resumed run draws the same samples as an
uninterrupted one; after a crash, rows overwritten since the checkpoint are not sampled. With CPU environments, which
restart with new episodes, the memory is filled again.

The file consists of blocks of rows, see `block_file`. The generation of a block combines two numbers: the rows written
when the block was committed, from which it is known after a crash whether a row is present or lost; and the history that
wrote it, a random number drawn each time a memory is created, cleared or resumed. A checkpoint lists the histories it
descends from, each with its last row, so that rows left by an abandoned history are not mistaken for its own.
"""

from __future__ import annotations

import math
import os
import secrets
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from redline.core.errors import UserError
from redline.replay.block_file import BlockFile
from redline.replay.contract import Location, Replay, ReplayRequest, TransitionBytes
from redline.replay.host_replay import HostReplay
from redline.replay.record_storage import RecordStorage
from redline.replay.row_layout import RowLayout, record_bytes
from redline.replay.windows import STEP_FIELD

LOCATION = Location.DISK
FILE = "replay.bin"
FILES = (FILE,)
_BLOCK_BYTES = 16 << 20  # approximate size of a block
_PAGE = 4096
_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1
_MAX_HISTORIES = 32  # that a checkpoint lists


def make(request: ReplayRequest) -> Replay:
    """Return a replay memory in the file of `request.folder`, which is created if it does not exist."""
    return HostReplay(request, lambda entries, layout: FileRecords(request, entries, layout))


def bytes_per_transition(state_bytes: int) -> TransitionBytes:
    """Return the estimated size of one record."""
    return TransitionBytes(disk=record_bytes(state_bytes, STEP_FIELD))


def _new_history() -> int:
    return secrets.randbits(30) + 1


class FileRecords(RecordStorage):
    """Records in a memory-mapped file, written in order of rows and committed block by block."""

    saved_in_checkpoints = False

    def __init__(
        self, request: ReplayRequest, entries: int, layout: RowLayout, block_bytes: int = _BLOCK_BYTES
    ) -> None:
        if not hasattr(os, "posix_fallocate"):
            raise UserError("This kind of replay needs Linux; choose another --replay.")
        folder, num_envs = request.folder, request.num_envs
        self.rows, row_bytes = entries // num_envs, num_envs * layout.size
        page_rows = _PAGE // math.gcd(
            _PAGE, row_bytes
        )  # rows that fill whole pages, so that there are no gaps between blocks
        self.block_rows = max(1, min(block_bytes // row_bytes, self.rows // 8) // page_rows) * page_rows
        blocks = -(-self.rows // self.block_rows)
        schema = {"num_envs": num_envs, "rows": self.rows, "fields": layout.describe()}
        path, size = folder / FILE, self.block_rows * row_bytes
        if path.exists():
            self.file = BlockFile.open(path, blocks=blocks, block_bytes=size, schema=schema)
            if damaged := len(self.file.damaged):
                request.notify(f"{damaged} of {blocks} blocks of {path} are damaged: their transitions are dropped.")
        else:
            folder.mkdir(parents=True, exist_ok=True)
            self.file = BlockFile.create(path, blocks=blocks, block_bytes=size, schema=schema)
        self.records: Tensor = self.file.data.view(-1)[: entries * layout.size].view(entries, layout.size)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="replay-commit")
        self._open_block: int | None = None  # block being written
        self._begun: dict[int, Future[int]] = {}  # blocks emptied ahead of time -> their previous generations
        self._written = 0  # rows
        self._commits: list[Future[None]] = []  # in progress
        self.history = _new_history()
        self._trusted: dict[int, int] = {}  # earlier histories: rows below this number are valid

    def before_row(self, row: int) -> None:
        """Empty the block of this row, if the row is the first to be written to it."""
        block = (row % self.rows) // self.block_rows
        if block == self._open_block:
            return
        if block in self._begun:
            self._begun.pop(block).result()
        else:
            self._wait_for_commits()
            self.file.begin(block)
        self._open_block = block

    def after_row(self, row: int) -> None:
        """Commit the block in the background, if the row is its last."""
        self._written = row + 1
        place, blocks = row % self.rows, len(self.file.generations)
        if place != self.rows - 1 and (place + 1) % self.block_rows:
            return
        block = place // self.block_rows
        self._commits = [commit for commit in self._commits if not commit.done() or commit.result()]
        self._commits.append(self._writer.submit(self.file.commit, block, self._generation(row + 1)))
        self._open_block = None
        if blocks >= 4:  # empty the block after next in advance, so that no row waits for the disk
            ahead = (block + 2) % blocks
            if ahead not in self._begun:
                self._begun[ahead] = self._writer.submit(self._begin, ahead)

    def flush(self) -> None:
        """Commit the open block, and restore those that were emptied ahead of time but not written to."""
        self._wait_for_commits()
        for block, begun in self._begun.items():
            if generation := begun.result():
                self.file.commit(block, generation)
        self._begun.clear()
        if self._open_block is not None:
            self.file.commit(self._open_block, self._generation(self._written))
            self._open_block = None
        self.file.check()

    def lost_rows(self, written: int) -> Tensor:
        """Return (rows,) bool, see RecordStorage: rows in blocks that are empty, of another history, or out of date."""
        place = torch.arange(self.rows)
        row = written - 1 - (written - 1 - place) % self.rows
        valid_below = {self.history: written} | self._trusted
        committed = [generation & _ROW_MASK for generation in self.file.generations]
        limits = [valid_below.get(generation >> _ROW_BITS, 0) for generation in self.file.generations]
        block = place // self.block_rows
        until, limit = torch.tensor(committed)[block], torch.tensor(limits)[block]
        return (row >= 0) & ((row >= until) | (row < until - self.rows) | (row >= limit))

    def begin_history(self, histories: Tensor, written: int) -> None:
        self.history = _new_history()
        pairs = histories.tolist()
        self._trusted = {number: min(limit, written) for number, limit in pairs if number} if written else {}

    def histories(self) -> Tensor:
        """Return (32, 2) int64, the current history first; unused entries are 0."""
        pairs = [(self.history, 1 << 62), *reversed(self._trusted.items())][:_MAX_HISTORIES]
        return torch.tensor(pairs + [(0, 0)] * (_MAX_HISTORIES - len(pairs)))

    def _generation(self, written: int) -> int:
        return self.history << _ROW_BITS | written

    def _wait_for_commits(self) -> None:
        """Wait for all background work and raise its errors."""
        commits, self._commits = self._commits, []
        for commit in commits:
            commit.result()
        for begun in self._begun.values():
            begun.result()

    def _begin(self, block: int) -> int:
        generation = self.file.generations[block]
        self.file.begin(block)
        return generation

    def close(self) -> None:
        """Commit everything written and release the file."""
        self.flush()
        self._writer.shutdown()
        self.records = torch.empty(0, self.records.shape[1], dtype=torch.uint8)
        self.file.close()
