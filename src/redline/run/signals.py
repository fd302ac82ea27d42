"""SIGINT and SIGTERM during training: a request to stop at the next log point."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SAME = 0.5  # seconds in which a second SIGINT is the first one, sent to the process and to its group


class StopSignals:
    """While entered, records the first SIGINT or SIGTERM in `caught`, so that the loop can stop with a checkpoint.

    A second SIGINT raises KeyboardInterrupt; so does the first one while there is nothing to save. A second SIGTERM does
    not disturb the checkpoint: whoever sends it will send SIGKILL if it takes too long.
    """

    def __init__(self, notify: Callable[[str], None]) -> None:
        """notify: receives the sentence that acknowledges the signal."""
        self.caught = ""  # name of the signal
        self.notify = notify
        self._interrupted_at: float | None = None
        self._nothing_to_save = False
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # no other thread may set handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers[number] = signal.signal(number, self._record)
        return self

    @contextmanager
    def nothing_to_save(self, nothing: bool) -> Iterator[None]:
        """While entered with True, an interrupt ends training at once."""
        self._nothing_to_save = nothing
        yield
        self._nothing_to_save = False

    def _record(self, number: int, frame: FrameType | None) -> None:
        del frame
        name, now = signal.Signals(number).name, time.monotonic()
        if number == signal.SIGINT:
            if self._nothing_to_save:
                raise KeyboardInterrupt("Interrupted before the first update: nothing was trained, nothing is lost.")
            if self._interrupted_at is not None and now - self._interrupted_at > _SAME:
                raise KeyboardInterrupt("Interrupted again: the steps since the last checkpoint are lost.")
            self._interrupted_at = self._interrupted_at or now
        if not self.caught:
            self.caught = name
            more = "; press Ctrl-C again to end at once, without it" if number == signal.SIGINT else ""
            self.notify(f"{name} received: stopping with a checkpoint{more}.")

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
