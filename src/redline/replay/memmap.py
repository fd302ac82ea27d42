"""Records of a ring in a file, for capacities beyond memory: written in order, declared valid block by block.

A block's generation holds the number of rows ever written when it was committed, so that after a crash each row of the ring
is known to be there or not: lost are the blocks being written or next in turn. It also holds the history it was written in,
a random number for each time a memory was begun, cleared or continued. A checkpoint knows the histories it comes from, and up
to which row; what another history left in the file is not taken for its own.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from redline.core.errors import UserError
from redline.replay.block_file import BlockFile
from redline.replay.row_layout import RowLayout

FILE = "replay.bin"  # in the run folder
_BLOCK = 16 << 20  # bytes of a block, about
_PAGE = 4096
_ROW_BITS = 32
_ROWS = (1 << _ROW_BITS) - 1
_HISTORIES = 32  # that a checkpoint remembers


def _new_history() -> int:
    return secrets.randbits(30) + 1


class OnDisk:
    """`entries` records in a file; rows of `environments` records are written one after the other."""

    def __init__(
        self,
        folder: Path,
        entries: int,
        layout: RowLayout,
        num_envs: int,
        notify: Callable[[str], None],
        block: int = _BLOCK,
    ) -> None:
        if not hasattr(os, "posix_fallocate"):
            raise UserError("replay is memmap, which needs Linux; take --replay device or pinned.")
        self.rows, row = entries // num_envs, num_envs * layout.size
        whole = _PAGE // math.gcd(_PAGE, row)  # rows that fill pages: records of all blocks then lie side by side
        self.block_rows = max(1, min(block // row, self.rows // 8) // whole) * whole
        blocks = -(-self.rows // self.block_rows)
        schema = {"num_envs": num_envs, "rows": self.rows, "fields": layout.describe()}
        path, size = folder / FILE, self.block_rows * row
        if path.exists():
            self.file = BlockFile.open(path, blocks=blocks, block_bytes=size, schema=schema)
            if self.file.damaged:
                notify(
                    f"{len(self.file.damaged)} of {blocks} blocks of {path} are damaged; what they held is forgotten."
                )
        else:
            folder.mkdir(parents=True, exist_ok=True)
            self.file = BlockFile.create(path, blocks=blocks, block_bytes=size, schema=schema)
        self.records: Tensor = self.file.data.view(-1)[: entries * layout.size].view(entries, layout.size)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="replay-commit")
        self._open: int | None = None  # block that is being written
        self._begun: dict[int, Future[int]] = {}  # blocks declared empty ahead of time: the generations they had
        self._last = 0  # rows written
        self.history = _new_history()
        self._trusted: dict[int, int] = {}  # earlier histories: rows below this number are ours, too
        self._pending: list[Future[None]] = []

    def before_row(self, row: int) -> None:
        """A row of that number, ever counted, is about to be written."""
        block = (row % self.rows) // self.block_rows
        if block == self._open:
            return
        if block in self._begun:
            self._begun.pop(block).result()
        else:
            self._settle()
            self.file.begin(block)
        self._open = block

    def after_row(self, row: int) -> None:
        """It was written: its block is committed with its last row, beside what goes on."""
        self._last = row + 1
        place, blocks = row % self.rows, len(self.file.generations)
        if place != self.rows - 1 and (place + 1) % self.block_rows:
            return
        block = place // self.block_rows
        self._pending = [future for future in self._pending if not future.done() or future.result()]
        self._pending.append(self._writer.submit(self.file.commit, block, self._stamp(row + 1)))
        self._open = None
        if blocks >= 4:  # the one after next, so that nobody waits for its entry to reach the disk
            ahead = (block + 2) % blocks
            if ahead not in self._begun:
                self._begun[ahead] = self._writer.submit(self._begin, ahead)

    def flush(self) -> None:
        """All that was written is on the disk and valid, the block under way and those begun ahead included."""
        self._settle()
        for block, begun in self._begun.items():
            if generation := begun.result():
                self.file.commit(block, generation)
        self._begun.clear()
        if self._open is not None:
            self.file.commit(self._open, self._stamp(self._last))
            self._open = None
        self.file.check()

    def lost(self, written: int) -> Tensor:
        """(rows,) bool: places in the ring where the row that should be there, after so many were written, is not."""
        place = torch.arange(self.rows)
        row = written - 1 - (written - 1 - place) % self.rows
        stamps = [generation & _ROWS for generation in self.file.generations]
        known = {self.history: written} | self._trusted
        limits = [known.get(generation >> _ROW_BITS, 0) for generation in self.file.generations]
        block = place // self.block_rows
        until, limit = torch.tensor(stamps)[block], torch.tensor(limits)[block]
        return (row >= 0) & ((row >= until) | (row < until - self.rows) | (row >= limit))

    def begin_history(self, before: Tensor, written: int) -> None:
        """What is written from now on is a new history, after so many rows of those in `before` (see `histories`)."""
        self.history = _new_history()
        pairs = before.tolist()
        self._trusted = {number: min(limit, written) for number, limit in pairs if number} if written else {}

    def histories(self) -> Tensor:
        """(32, 2) int64: numbers of the histories this memory comes from, the present one first; rows below are theirs."""
        pairs = [(self.history, 1 << 62), *reversed(self._trusted.items())][:_HISTORIES]
        return torch.tensor(pairs + [(0, 0)] * (_HISTORIES - len(pairs)))

    def _stamp(self, written: int) -> int:
        return self.history << _ROW_BITS | written

    def _settle(self) -> None:
        """Wait for the commits under way; what went wrong there is raised here."""
        pending, self._pending = self._pending, []
        for commit in pending:
            commit.result()
        for begun in self._begun.values():
            begun.result()

    def _begin(self, block: int) -> int:
        generation = self.file.generations[block]
        self.file.begin(block)
        return generation

    def close(self) -> None:
        """Commit and let go of the file."""
        self.flush()
        self._writer.shutdown()
        self.records = torch.empty(0, self.records.shape[1], dtype=torch.uint8)
        self.file.close()
