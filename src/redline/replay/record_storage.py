"""The contract of storage for records: rows of N records each, written in order, read in any order."""

from __future__ import annotations

from abc import ABC

import torch
from torch import Tensor


class RecordStorage(ABC):
    """Storage for records off the device. The defaults suit host memory, which needs no flushing and ends with the process."""

    records: Tensor  # (entries, size) uint8, on the host
    rows: int  # entries / N
    saved_in_checkpoints = True  # False: the records persist without checkpoints

    def before_row(self, row: int) -> None:  # noqa: B027
        """Prepare for writing row number `row`, counted from 0 since the memory was empty."""

    def after_row(self, row: int) -> None:  # noqa: B027
        """Finish writing row number `row`."""

    def flush(self) -> None:  # noqa: B027
        """Make all rows written so far durable."""

    def lost_rows(self, written: int) -> Tensor:
        """Return (rows,) bool: whether each place of the ring lacks the row expected there after `written` rows."""
        del written
        return torch.zeros(self.rows, dtype=torch.bool)

    def histories(self) -> Tensor:
        """Return (K, 2) int64 for checkpoints: histories, each with the row number below which its rows are valid.

        A history begins whenever a memory is created, cleared or resumed.
        """
        return torch.zeros(0, 2, dtype=torch.int64)

    def begin_history(self, histories: Tensor, written: int) -> None:  # noqa: B027
        """Begin a new history that continues those in `histories` after `written` rows."""

    def close(self) -> None:  # noqa: B027
        """Release the storage's resources."""
