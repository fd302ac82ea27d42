"""The contract of storage for records: rows of N records each, written in order, read in any order."""

from __future__ import annotations

from abc import ABC

import torch
from torch import Tensor


class RecordStorage(ABC):
    """Records off the device. The defaults suit memory, which is always up to date and lost with the process."""

    records: Tensor  # (entries, size) uint8, on the host
    rows: int  # entries / N
    saved_in_checkpoints = True  # False: the records outlive the process by themselves

    def before_row(self, row: int) -> None:  # noqa: B027
        """Prepare for writing the row of this number, counted from 0 since the memory was empty."""

    def after_row(self, row: int) -> None:  # noqa: B027
        """Finish writing the row of this number."""

    def flush(self) -> None:  # noqa: B027
        """Make all rows written so far durable."""

    def lost_rows(self, written: int) -> Tensor:
        """Return (rows,) bool: places of the ring that do not hold the row expected there after `written` rows."""
        del written
        return torch.zeros(self.rows, dtype=torch.bool)

    def histories(self) -> Tensor:
        """Return (K, 2) int64, to be saved in checkpoints: histories whose rows are valid, and below which row number.

        A history begins whenever a memory is created, cleared or continued.
        """
        return torch.zeros(0, 2, dtype=torch.int64)

    def begin_history(self, histories: Tensor, written: int) -> None:  # noqa: B027
        """Begin a new history after `written` rows of those in `histories`."""

    def close(self) -> None:  # noqa: B027
        """Release what the storage holds."""
