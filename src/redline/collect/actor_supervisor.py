"""Supervise actor processes: report and replace those that crash, hang or are killed, within a restart budget."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import IO, Any

from redline.collect.actor_job import ActorJob
from redline.collect.actor_status import ActorState, ActorStatus
from redline.collect.child_process import (
    EXIT_CANNOT_START,
    EXIT_INVALID_STEP,
    EXIT_RAISED,
    EXIT_SPEC_MISMATCH,
    GRACE_SECONDS,
    START_SECONDS,
    CannotStart,
    child_environment,
    describe_exit,
)
from redline.collect.restart_budget import RestartBudget
from redline.collect.shared_ring import SharedRing
from redline.core.errors import EnvsLost, UserError
from redline.envs.gym_envs import env_seeds

_POLL_SECONDS = 0.1
_LOG_TAIL = 2_000  # bytes from the end of an actor log to report
_LOG_BYTES = 1 << 20  # size above which an actor log is truncated to zero
_NUMBER_STEP = 1_000_003  # added to a job's `number` so that a replacement plays other episodes


class ActorsLost(EnvsLost):
    """Actors failed too often; the message describes the last failure and the limit reached."""


@dataclass
class ActorHandle:
    """An actor: its job, its process, and the memory shared with it."""

    job: ActorJob
    status: ActorStatus
    rings: Sequence[SharedRing]
    log: IO[bytes]
    process: subprocess.Popen[bytes] | None = None
    position: tuple[int, int] = (-1, -1)  # steps and environment index at the last poll
    moved: float = 0.0  # time at which the position last changed
    told_masks: bool = False  # the user has been told that it masks values


class ActorSupervisor:
    """Starts actors, watches them from a thread, and stops them."""

    def __init__(
        self,
        jobs: Sequence[ActorJob],
        statuses: Sequence[ActorStatus],
        rings: Sequence[Sequence[SharedRing]],
        timeout: float,
        restarts: int,
        notify: Callable[[str], None],
        on_break: Callable[[SharedRing], None],
        lock: AbstractContextManager[Any],
    ) -> None:
        """Start one actor per job. A step may take `timeout` seconds; up to `restarts` failures are tolerated.

        `on_break` is called, with `lock` held, for every ring of a failed actor: its next row does not continue the last
        one. The inference server holds the lock while it serves actors.
        """
        self.timeout, self.notify = timeout, notify
        self.on_break, self.lock = on_break, lock
        self.budget = RestartBudget(restarts, "actor")
        self.lost: ActorsLost | None = None
        self.closing = threading.Event()
        self.actors = [
            ActorHandle(job, status, own, _open_log()) for job, status, own in zip(jobs, statuses, rings, strict=True)
        ]
        self.thread = threading.Thread(target=self._watch, name="redline-supervisor", daemon=True)
        try:
            for actor in self.actors:
                self._start(actor)
            self._await_start()
        except BaseException:
            self.close()
            raise
        self.thread.start()

    def check(self) -> None:
        """Raise ActorsLost if a failure has stopped the actors."""
        if self.lost is not None:
            raise self.lost

    def close(self) -> None:
        """Wait for the actors to stop, and kill those that do not; idempotent. Set their stop flag before."""
        if self.closing.is_set():
            return
        self.closing.set()
        if self.thread.is_alive():
            self.thread.join()
        else:
            self._await_end()
        for process in self._processes():
            if process.poll() is None:
                process.kill()
            process.wait()
            _close_stdin(process)
        for actor in self.actors:
            actor.log.close()

    def _processes(self) -> list[subprocess.Popen[bytes]]:
        return [actor.process for actor in self.actors if actor.process is not None]

    def _await_end(self) -> None:
        """Give actors up to GRACE_SECONDS to see the stop flag, which they check after every step."""
        deadline = time.monotonic() + GRACE_SECONDS
        for process in self._processes():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))

    def _start(self, actor: ActorHandle) -> None:
        actor.status.begin()
        actor.status.env_index = actor.job.first
        actor.log.truncate(0)
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "redline.collect.actor_process"],
                stdin=subprocess.PIPE,
                stdout=actor.log,
                stderr=actor.log,
                pass_fds=(actor.job.fd,),
                env=child_environment(),
            )
        except OSError as error:
            raise CannotStart(str(error)) from error
        actor.process = process
        assert process.stdin
        with contextlib.suppress(BrokenPipeError):  # it has already exited: its exit status gives the reason
            process.stdin.write(actor.job.to_json().encode() + b"\n")
            process.stdin.flush()

    def _await_start(self) -> None:
        """Wait until every actor has made its environments; raise if one cannot, since a restart would not help."""
        deadline = time.monotonic() + START_SECONDS + self.timeout
        for actor in self.actors:
            assert actor.process
            while (
                actor.status.state is ActorState.STARTING
                and actor.process.poll() is None
                and time.monotonic() < deadline
            ):
                time.sleep(0.01)
            if actor.status.state is ActorState.STARTING:
                self._cannot_start(actor)

    def _cannot_start(self, actor: ActorHandle) -> None:
        """Raise the error for an actor that exited or hung while making its environments.

        CannotStart where it is safe to make them in this process instead; UserError where this process could crash or hang.
        """
        assert actor.process
        status = actor.process.poll()
        last_line = (self._log_tail(actor) or "nothing").splitlines()[-1]
        if status in (EXIT_RAISED, EXIT_CANNOT_START):
            raise CannotStart(last_line)
        if status in (EXIT_SPEC_MISMATCH, EXIT_INVALID_STEP):
            raise UserError(f"{self._name(actor)}: {last_line}")
        failure = f"hung for more than {START_SECONDS + self.timeout:g} seconds"
        if status is None:
            self._kill_hung(actor)
        else:
            failure = describe_exit(status)
        log = self._log_tail(actor)
        raise UserError(f"{self._name(actor)} {failure} while it made its environments.{chr(10) + log if log else ''}")

    def _watch(self) -> None:
        while not self.closing.wait(_POLL_SECONDS):
            for actor in self.actors:
                if self.lost is None:
                    try:
                        self._poll(actor)
                    except Exception as error:  # otherwise an exception in this thread would go unnoticed
                        self.lost = ActorsLost(f"Supervision of the actors failed: {type(error).__name__}: {error}.")
        self._await_end()  # here, because processes started by this thread are killed when it ends

    def _poll(self, actor: ActorHandle) -> None:
        """Replace an actor that has exited; kill and replace one that hangs."""
        assert actor.process
        status = actor.process.poll()
        if status is not None:
            self._replace(actor, describe_exit(status), status != EXIT_INVALID_STEP)
            return
        if actor.status.masked and not actor.told_masks:
            actor.told_masks = True
            lines = [line for line in self._log_tail(actor).splitlines() if "are masked:" in line]
            self.notify(f"{self._name(actor)}: {lines[-1] if lines else 'values are masked.'}")
        if os.fstat(actor.log.fileno()).st_size > _LOG_BYTES:
            actor.log.truncate(0)
        state, seconds = actor.status.state, (time.monotonic_ns() - actor.status.since_ns) / 1e9
        position = (actor.status.steps, actor.status.env_index)  # changes whenever an environment is stepped
        if position != actor.position:
            actor.position, actor.moved = position, time.monotonic()
        seconds = min(seconds, time.monotonic() - actor.moved)
        allowed = self.timeout + (START_SECONDS if state is ActorState.STARTING else 0.0)
        if state in (ActorState.STARTING, ActorState.STEPPING) and seconds > allowed:
            self._kill_hung(actor)
            self._replace(actor, f"hung for more than {allowed:g} seconds and was killed")

    def _kill_hung(self, actor: ActorHandle) -> None:
        assert actor.process
        actor.process.send_signal(signal.SIGUSR1)  # make it log where it hangs
        time.sleep(0.2)
        actor.process.kill()
        actor.process.wait()

    def _replace(self, actor: ActorHandle, failure: str, curable: bool = True) -> None:
        """Report a failure, discard the actor's unfinished rows and start another process, or stop the run."""
        stop = self.budget.spend(self.actors.index(actor)) if curable else "The run stops."
        with self.lock:
            for ring in actor.rings:
                ring.recover()
                self.on_break(ring)
        report = f"{self._name(actor)} {failure}. {self._circumstances(actor)}"
        if stop:
            self.lost = ActorsLost(f"{report}\n{stop}")
        else:
            budget = self.budget
            self.notify(
                f"{report}\nRestarted ({budget.failures} of {budget.restarts}); its unfinished episodes are discarded."
            )
            assert actor.process
            _close_stdin(actor.process)
            actor.job = replace(actor.job, number=actor.job.number + _NUMBER_STEP)
            self._start(actor)

    def _name(self, actor: ActorHandle) -> str:
        job, number = actor.job, self.actors.index(actor) + 1
        return f"Actor {number} of {len(self.actors)} ({job.env}, environments {job.first} to {job.last})"

    def _circumstances(self, actor: ActorHandle) -> str:
        """Return the environment that a failed actor was stepping, its seed and latest actions, and the end of the log."""
        job, env_index = actor.job, actor.status.env_index
        seed = env_seeds(job.seed, job.number, env_index, 1)[0]
        actions = ", ".join(map(str, actor.status.last_actions(env_index - job.first))) or "none"
        log = self._log_tail(actor)
        text = f"It was stepping environment {env_index} (seed {seed}); last actions: {actions}."
        return text + (f"\n{log}" if log else "")

    def _log_tail(self, actor: ActorHandle) -> str:
        size = os.fstat(actor.log.fileno()).st_size
        return os.pread(actor.log.fileno(), _LOG_TAIL, max(0, size - _LOG_TAIL)).decode(errors="replace").strip()


def _close_stdin(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin
    with contextlib.suppress(BrokenPipeError):  # it died before reading its job
        process.stdin.close()


def _open_log() -> IO[bytes]:
    """Return an unnamed file for an actor log, in append mode, so that it can be truncated while the actor writes."""
    file = tempfile.TemporaryFile()  # noqa: SIM115
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)
    return file
