"""Write the log records of a run: metrics.jsonl always, TensorBoard and W&B on request. A failing log never stops training."""

from __future__ import annotations

import json
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from redline.core.errors import StorageError, UserError
from redline.core.faults import reach
from redline.run import wandb_log
from redline.run.metric_names import to_scalars
from redline.run.run_folder import METRICS, Notify, reason

_KEPT = 10_000  # records kept while a log cannot be written: hours of training
_RETRY_SECONDS = 5.0  # between two attempts to write a log that fails
_CLOSE_SECONDS = 30.0  # for the records that TensorBoard has not written at the end of training


class Metrics:
    """All logs of a run. Each fails and recovers independently."""

    def __init__(
        self, run_dir: Path, env_steps: int, tensorboard: bool, notify: Notify, wandb: Mapping[str, Any] | None = None
    ) -> None:
        """Continue after `env_steps`: drop garbled lines and those written after the resumed checkpoint.

        wandb: the settings of the run, to log to W&B; None: do not use W&B.
        """
        path = run_dir / METRICS
        _repair(path, env_steps)
        self._logs: list[_Log] = [BufferedLog(METRICS, lambda record: _append(path, record), notify)]
        if tensorboard:
            self._logs.append(_open_tensorboard(run_dir / "tensorboard", env_steps, notify))
        self._wandb = None if wandb is None else wandb_log.open_wandb(run_dir, wandb, notify)

    def write(self, record: dict[str, Any]) -> None:
        """Write the record of a log point."""
        for log in self._logs:
            log.write(record)
        if self._wandb:
            self._wandb.write(to_scalars(record))

    def close(self) -> None:
        """Write the remaining records, for a limited time."""
        for log in self._logs:
            log.close()
        if self._wandb:
            self._wandb.close()


class NoMetrics:
    """Drop-in replacement for Metrics on ranks that do not log."""

    def write(self, record: dict[str, Any]) -> None:
        """Drop a record."""

    def close(self) -> None:
        """Do nothing."""


class _Log(Protocol):
    def write(self, record: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class BufferedLog:
    """A log that keeps records while they cannot be written, and writes them later. Warns once."""

    def __init__(
        self,
        name: str,
        write: Callable[[dict[str, Any]], None],
        notify: Notify,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """name: of the log, for messages. write: writes one record atomically, or raises."""
        self.name, self.notify = name, notify
        self._write, self._close = write, close
        self._waiting: deque[dict[str, Any]] = deque(maxlen=_KEPT)
        self._failed_at: float | None = None
        self._warned = False

    def write(self, record: dict[str, Any]) -> None:
        """Write the record and any waiting ones; while that fails, retry only every few seconds."""
        self._waiting.append(record)
        if self._failed_at is None or time.monotonic() - self._failed_at >= _RETRY_SECONDS:
            self._write_waiting()

    def close(self) -> None:
        """Make a last attempt and report how many records are lost."""
        self._write_waiting()
        if self._waiting:
            self.notify(f"{len(self._waiting):,} records could not be written to {self.name}.")
        with suppress(Exception):
            self._close()

    def _write_waiting(self) -> None:
        try:
            while self._waiting:
                self._write(self._waiting[0])
                self._waiting.popleft()
            self._failed_at = None
        except Exception as error:  # whatever a library raises: a failing log must not stop training
            self._failed_at = time.monotonic()
            if not self._warned:
                self.notify(
                    f"Writing {self.name} fails: {reason(error)}. Training goes on, and the records are kept until it works."
                )
            self._warned = True


class BackgroundLog:
    """Write records to a log in a separate thread, so that a slow or blocked log does not delay training."""

    def __init__(self, log: BufferedLog) -> None:
        self._log = log
        self._records: queue.Queue[dict[str, Any] | None] = queue.Queue(_KEPT)  # None: the end
        self._thread = threading.Thread(target=self._run, name=log.name, daemon=True)
        self._thread.start()

    def write(self, record: dict[str, Any]) -> None:
        """Queue the record; drop it if the log has been blocked for hours."""
        with suppress(queue.Full):
            self._records.put_nowait(record)

    def close(self) -> None:
        """Wait until everything is written, for at most half a minute."""
        with suppress(queue.Full):
            self._records.put_nowait(None)
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            self._log.notify(f"{self._log.name} does not answer: its last records are lost.")

    def _run(self) -> None:
        while (record := self._records.get()) is not None:
            self._log.write(record)
        self._log.close()


class _TensorBoard:
    """Event files in a folder, opened at the first record and reopened after a failure."""

    def __init__(self, folder: Path, env_steps: int) -> None:
        self._folder, self._purge_step = folder, env_steps or None  # events after the checkpoint will be repeated
        self._writer: Any = None

    def write(self, record: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        try:
            if self._writer is None:
                self._writer = SummaryWriter(str(self._folder), purge_step=self._purge_step)
                self._purge_step = None
            for name, value in to_scalars(record).items():
                self._writer.add_scalar(name, value, record["env_steps"])
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with suppress(Exception):
                writer.close()


def _open_tensorboard(folder: Path, env_steps: int, notify: Notify) -> BackgroundLog:
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError:
        raise UserError("TensorBoard is not installed; install it with pip install 'redline[tensorboard]'.") from None
    board = _TensorBoard(folder, env_steps)
    return BackgroundLog(BufferedLog("the TensorBoard log", board.write, notify, board.close))


def _append(path: Path, record: dict[str, Any]) -> None:
    """Append a record as one line, atomically even on a full disk."""
    reach("log")
    line = (json.dumps(finite_record(record)) + "\n").encode()
    with open(path, "ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        try:
            while line:
                line = line[file.write(line) :]
        except OSError:
            with suppress(OSError):
                file.truncate(size)
            raise


def finite_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with None instead of NaN and infinity, which JSON cannot represent."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


def _repair(path: Path, env_steps: int) -> None:
    """Drop the lines of metrics.jsonl that are garbled or from later steps."""
    try:
        if path.exists():
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            part = path.with_name(".metrics.jsonl.part")
            part.write_text("".join(line + "\n" for line in lines if _up_to(line, env_steps)), encoding="utf-8")
            os.replace(part, path)
    except OSError as error:  # nothing has been trained yet
        raise StorageError(f"{path} could not be repaired: {reason(error)}; move it away.") from error


def _up_to(line: str, env_steps: int) -> bool:
    try:
        return bool(json.loads(line)["env_steps"] <= env_steps)
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
