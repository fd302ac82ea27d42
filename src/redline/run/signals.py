"""SIGINT and SIGTERM during training: a request to stop at the next log point."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class StopSignals:
    """While entered, records the first SIGINT or SIGTERM in `caught`, so that the loop can stop with a checkpoint."""

    def __init__(self) -> None:
        self.caught = ""  # name of the signal
        self._count = 0
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # no other thread may set handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers[number] = signal.signal(number, self._record)
        return self

    def _record(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._count += 1
        if self._count > 2:  # a second signal does not disturb the checkpoint; a third one means that nobody will wait
            raise KeyboardInterrupt
        self.caught = self.caught or signal.Signals(number).name

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
