"""Signals during training: SIGTERM, SIGINT and SIGHUP save a checkpoint and stop, SIGUSR1 saves one and continues.

A signal sets a flag, which the training loop reads after each iteration. If an iteration does not end within the grace
period (an environment hangs, a compiler takes minutes), the process exits and names the last good checkpoint. A thread
measures the grace period: Python runs signal handlers only in the main thread, and not while that is in a native function.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from types import FrameType
from typing import Any

EXIT_CODES = {"SIGINT": 130, "SIGTERM": 75, "SIGHUP": 75}  # signals that stop training
DEFAULT_GRACE = 20.0  # seconds; Kubernetes, Slurm and spot machines kill after 30 or more
_SAVE = "SIGUSR1"
_SAME = 0.5  # seconds within which a repeated signal is the same one, sent to the process and to its group
_LAST_WORDS = 2.0  # seconds for the last message: writing to a full pipe blocks


class Stopped(KeyboardInterrupt):
    """Raised by a signal that ends training immediately; carries the signal's exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Unsaved(Enum):
    """What would be lost if training ended now, from least to most."""

    NOTHING = 0
    EXPERIENCE = 1  # collected, but not learned from yet
    TRAINING = 2


class StopSignals:
    """Record signals while entered, so that the loop can stop with a checkpoint.

    The first signal ends training immediately if nothing is unsaved; SIGINT also if only experience is unsaved. A second
    SIGINT ends it immediately unless the checkpoint is being written; a third signal always does. Handlers installed by the
    host program are called as well, and reinstalled on exit.
    """

    def __init__(
        self,
        notify: Callable[[str], None],
        grace: float = DEFAULT_GRACE,
        close: Callable[[], None] = lambda: None,
        ends_process: bool = False,
    ) -> None:
        """notify: called with the sentence that acknowledges a signal. close: closes the display before the process exits.

        ends_process: exit after the grace period on any signal. Otherwise exit only on signals that would kill the process
        by default: an interrupt must not end the kernel of a notebook.
        """
        self.caught = ""  # name of the first signal that asks to stop
        self.save_requested = False  # by SIGUSR1; reset when the checkpoint is saved
        self.unsaved = Unsaved.NOTHING
        self.circumstances = "before the first update: nothing was trained, nothing is lost"  # with nothing unsaved
        self.describe_saved: Callable[[], str] = lambda: ""  # a sentence about the last good checkpoint
        self.before_exit: Callable[[], None] = lambda: None  # waits for a checkpoint that is almost written
        self.notify, self.grace = notify, grace
        self._close, self._ends_process = close, ends_process
        self._saving = False
        self._received: list[tuple[str, float]] = []  # signals to stop, with their times
        self._back = threading.Event()  # the iteration has ended
        self._handlers: dict[int, Any] = {}  # of the host program
        self._wakeup: tuple[int, int] | None = None  # ends of the pipe to which the interpreter writes signal numbers

    # ---------------------------------------------------------------------------------------------------- for the loop

    @property
    def pending(self) -> bool:
        """Whether the loop should return from its iterations early, to stop or to save."""
        return bool(self.caught) or self.save_requested

    def loop_is_back(self) -> None:
        """Record that the iteration has ended: the grace period no longer applies, so the last checkpoint may take its time."""
        self._saving = True
        self._back.set()

    def stop_if_caught(self) -> None:
        """Raise Stopped if a signal has asked to stop; call it once everything is saved."""
        if self.caught:
            raise self._ended_by(self.caught)

    def saved(self, circumstances: str) -> None:
        """Record that everything is saved: from now on, any signal ends the command immediately, with this text."""
        self._saving = False
        self._back.clear()
        self.unsaved, self.circumstances = Unsaved.NOTHING, circumstances

    # -------------------------------------------------------------------------------------------------------- handlers

    def __enter__(self) -> StopSignals:
        global _active
        if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
            self.notify("Signals are not handled, as training does not run in the main thread: SIGTERM will not save.")
            return self
        _active = self
        for name in (*EXIT_CODES, _SAVE):
            number = signal.Signals[name]
            if name == "SIGHUP" and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup
            self._handlers[number] = signal.signal(number, self._handle)
        self._listen()
        return self

    def __exit__(self, *error: object) -> None:
        global _active
        self._back.set()
        self._stop_listening()
        self._restore()
        _active = None

    @property
    def handled(self) -> bool:
        """Whether this object handles signals."""
        return bool(self._handlers)

    def _restore(self) -> None:
        """Reinstall the handlers of the host program; None stands for one not installed from Python."""
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._handlers = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if name == _SAVE:
            self.save_requested = self.unsaved is not Unsaved.NOTHING
            doing = "writing a checkpoint, training goes on" if self.save_requested else "everything is saved"
            self.notify(f"{name} received: {doing}.")
        else:
            self._stop(name)
        host = self._handlers.get(number)
        if callable(host) and host is not signal.default_int_handler:
            host(number, frame)

    def _stop(self, name: str) -> None:
        now = time.monotonic()
        if any(other == name and now - at < _SAME for other, at in self._received):
            return
        self._received.append((name, now))
        if len(self._received) == 1:
            self._stop_first(name)
        elif (name == "SIGINT" and not self._saving) or len(self._received) > 2:
            again = "Interrupted again" if name == "SIGINT" else f"{name} received again"
            raise self._stopped(f"{again}: the steps since the last checkpoint are lost.")
        else:
            doing = "the checkpoint is being written" if self._saving else "waiting for the iteration to end"
            self.notify(f"{name} received again: {doing}; once more ends it at once, without a checkpoint.")

    def _stop_first(self, name: str) -> None:
        self.caught = name
        interrupted = name == "SIGINT"
        if self.unsaved is Unsaved.NOTHING or (interrupted and self.unsaved is Unsaved.EXPERIENCE):
            raise self._ended_by(name)
        if self._wakeup is None:
            threading.Thread(target=self._wait_for_loop, args=(name,), name="grace", daemon=True).start()
        more = "; press Ctrl-C again to end at once, without it" if interrupted else ""
        self.notify(f"{name} received: stopping with a checkpoint{more}.")

    def _ended_by(self, name: str) -> Stopped:
        """Return the exception that ends training when nothing is unsaved."""
        subject = "Interrupted" if name == "SIGINT" else f"{name} received"
        saved = "" if name == "SIGINT" else f" {self.describe_saved()}"
        return self._stopped(f"{subject} {self.circumstances}.{saved}".rstrip())

    def _stopped(self, message: str) -> Stopped:
        return Stopped(message, EXIT_CODES[self.caught])

    # -------------------------------------------------------------------------------------------------- the grace period

    def _listen(self) -> None:
        """Start a thread that receives signals even while the main thread is in a native function."""
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        if before != -1:  # an event loop of the host program needs it; handlers start the grace period instead
            signal.set_wakeup_fd(before)
            os.close(reading)
            os.close(writing)
            return
        self._wakeup = reading, writing
        threading.Thread(target=self._wait_for_signal, args=(reading,), name="signals", daemon=True).start()

    def _stop_listening(self) -> None:
        if self._wakeup is not None:
            signal.set_wakeup_fd(-1)
            os.close(self._wakeup[1])  # ends the thread, which closes the other end
            self._wakeup = None

    def _wait_for_signal(self, reading: int) -> None:
        stops = {int(signal.Signals[name]): name for name in EXIT_CODES}
        with open(reading, "rb", buffering=0) as pipe:
            while number := pipe.read(1):  # until closed: the interpreter warns about a pipe without a reader
                if number[0] in stops:
                    self._wait_for_loop(stops[number[0]])

    def _wait_for_loop(self, name: str) -> None:
        """End the process unless the iteration ends within the grace period."""
        host = self._handlers.get(signal.Signals[name])
        if self._back.wait(self.grace) or not (self._ends_process or host in (signal.SIG_DFL, None)):
            return
        self.end_process(
            f"{name} was received {self.grace:g} seconds ago and training has not come back since, so that it ends without "
            f"another checkpoint. {self.describe_saved()}",
            EXIT_CODES[name],
        )

    def end_process(self, message: str, code: int) -> None:
        """Print `message` and end the process; called from a thread other than the one that is stuck."""

        def say() -> None:
            self.before_exit()
            self._close()
            self.notify(message)

        exit_after(say, code, _LAST_WORDS + self.grace)


def exit_after(last_words: Callable[[], None], code: int, seconds: float = _LAST_WORDS) -> None:
    """End the process from any thread, after running `last_words` for at most `seconds`."""
    words = threading.Thread(target=last_words, daemon=True)
    words.start()
    words.join(seconds)
    os._exit(code)


_active: StopSignals | None = None


def _forget_in_child() -> None:
    """Restore the signal handlers in a forked process: stopping it must not stop training."""
    if _active is not None:
        with suppress(ValueError):
            signal.set_wakeup_fd(-1)
            _active._restore()


os.register_at_fork(after_in_child=_forget_in_child)
