"""A watchdog outside the loop that plays: it ends the process when an environment in this process hangs.

It is a thread, and needs Python's interpreter lock: code that hangs while it holds the lock cannot be ended from inside.
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
_FRAMES = 12  # of the stack that is reported


class Watchdog:
    """While entered, ends the process if one call of an environment takes longer than `allow` says.

    The report names the environment, and the line at which the thread that made the watchdog hangs.
    """

    def __init__(self, env: str, end_process: Callable[[str, int], None]) -> None:
        """env: its name. end_process: says a text and ends the process with an exit code; called in another thread."""
        self.env, self.end_process = env, end_process
        self.timeout: float = GymConfig.timeout
        self.describe: Callable[[int], str] = "environment {}".format
        self._watched = threading.get_ident()
        self._position: tuple[int, int] | None = None
        self._since = 0.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def allow(self, config: Any, describe: Callable[[int], str] | None = None) -> None:
        """Allow the `timeout` of the environment's options. describe: names an environment, seed and actions by number."""
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
        """Return which environment hangs, as a sentence, or an empty string."""
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
        with suppress(Exception):  # the loop may change what is described
            which = which if making else self.describe(position[1])
        return f"{self.env} hung for more than {allowed:g} seconds (--env.timeout {self.timeout:g}): {which}."

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._watched)
        return "".join(traceback.format_stack(frame)[-_FRAMES:] if frame else []).rstrip()


def watch_command(env: str, progress: Progress, restore: Callable[[], None] = lambda: None) -> Watchdog:
    """Return the watchdog of a command that plays `env` without training it; the process ends with a diagnosis.

    progress: closed before the diagnosis is printed. restore: called as well, to leave the terminal in order.
    """

    def end_process(text: str, code: int) -> None:
        def say() -> None:
            progress.close()
            restore()
            to_stderr(f"redline: {text}")

        exit_after(say, code)

    return Watchdog(env, end_process)
