"""A watchdog thread that ends the process when an environment in this process hangs.

It needs Python's global interpreter lock: code that hangs while holding the lock cannot be stopped from inside the process.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from redline.collect.child_process import START_SECONDS
from redline.envs import env_activity
from redline.envs.gym_game import GymConfig
from redline.run.progress import Progress
from redline.run.run_folder import to_stderr
from redline.run.signals import exit_after

EXIT_HUNG = 70
_POLL_SECONDS = 0.25
_FRAMES = 12  # of the reported stack


class Watchdog:
    """End the process if a call to an environment exceeds its timeout while entered; `allow` sets the timeout.

    The report contains the environment, and the stack of the thread that created the watchdog.
    """

    def __init__(self, env: str, end_process: Callable[[str, int], None]) -> None:
        """env: name of the environment. end_process: prints a text and exits with a code; called in another thread."""
        self.env, self.end_process = env, end_process
        self.timeout: float = GymConfig.timeout
        self.describe: Callable[[int], str] = "environment {}".format
        self._watched = threading.get_ident()
        self._position: tuple[int, int] | None = None
        self._since = 0.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def allow(self, config: Any, describe: Callable[[int], str] | None = None) -> None:
        """Set the timeout from the environment's options. describe: returns an environment's seed and actions by index."""
        self.timeout = getattr(config, "timeout", GymConfig.timeout)
        self.describe = describe or self.describe

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(_POLL_SECONDS):
            if text := self.check():
                self.end_process(f"{text}\n{self._stack()}", EXIT_HUNG)
                return

    def check(self) -> str:
        """Return a sentence about the environment that hangs, or an empty string."""
        position, now = env_activity.position(), time.monotonic()
        if position != self._position:
            self._position, self._since = position, now
        if position is None:
            return ""
        making = position[1] == env_activity.MAKING
        allowed = self.timeout + (START_SECONDS if making else 0.0)
        if now - self._since <= allowed:
            return ""
        which = "an environment being made" if making else f"environment {position[1]}"
        with suppress(Exception):  # the loop may change the data being described
            which = which if making else self.describe(position[1])
        return f"{self.env} hung for more than {allowed:g} seconds (--env.timeout {self.timeout:g}): {which}."

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._watched)
        return "".join(traceback.format_stack(frame)[-_FRAMES:] if frame else []).rstrip()


def watch_command(env: str, progress: Progress, restore: Callable[[], None] = lambda: None) -> Watchdog:
    """Return the watchdog of a command that plays `env` without training; it ends the process with a diagnosis.

    progress: closed before the diagnosis is printed. restore: called next, to restore the terminal.
    """

    def end_process(text: str, code: int) -> None:
        def say() -> None:
            progress.close()
            restore()
            to_stderr(f"redline: {text}")

        exit_after(say, code)

    return Watchdog(env, end_process)
