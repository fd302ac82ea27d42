"""Supervision of actor processes: one that crashes, hangs or is killed is reported and replaced, within a budget."""

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
from dataclasses import dataclass, field, replace
from typing import IO, Any

from redline.collect.actor_job import ActorJob
from redline.collect.actor_process import EXIT_CANNOT_START, EXIT_SPEC_MISMATCH
from redline.collect.actor_status import ActorState, ActorStatus
from redline.collect.child_process import (
    GRACE_SECONDS,
    START_SECONDS,
    CannotStart,
    child_environment,
    describe_exit,
)
from redline.collect.shared_ring import SharedRing
from redline.core.errors import UserError
from redline.envs.gym_envs import env_seeds

_POLL_SECONDS = 0.1
_STORM, _STORM_SECONDS = 5, 60.0  # so many failures of one actor within this time stop the run
_LOG_TAIL = 2_000  # characters of the actor log that are reported
_LOG_BYTES = 1 << 20  # length at which an actor log is emptied
_NUMBER_STEP = 1_000_003  # added to a job's `number` so that a replacement plays other episodes


class ActorsLost(Exception):
    """Actors failed too often: describes the last failure and the limit that was reached."""


@dataclass
class ActorHandle:
    """An actor: its job, its process, and the memory shared with it."""

    job: ActorJob
    status: ActorStatus
    rings: Sequence[SharedRing]
    log: IO[bytes]
    process: subprocess.Popen[bytes] | None = None
    failure_times: list[float] = field(default_factory=list)
    position: tuple[int, int] = (-1, -1)  # steps and environment when it was last polled
    moved: float = 0.0  # time at which the position last changed


class ActorSupervisor:
    """Starts actors, watches them from a thread, and ends them."""

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
        """Start an actor per job. A step may take `timeout` seconds; `restarts` failures are tolerated.

        `on_break` is called, with `lock` held, for each ring whose next row does not continue the one before. The inference
        server holds the lock while it serves actors.
        """
        self.timeout, self.restarts, self.notify = timeout, restarts, notify
        self.on_break, self.lock = on_break, lock
        self.failures = 0
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
        """Raise the failure that stopped the actors, if there was one."""
        if self.lost is not None:
            raise self.lost

    def close(self) -> None:
        """End all actors, whose stop flag is already set. A second call does nothing."""
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
        """Give actors time to see the stop flag, which they read after every step."""
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
        with contextlib.suppress(BrokenPipeError):  # it has ended already: its exit status says why
            process.stdin.write(actor.job.to_json().encode() + b"\n")
            process.stdin.flush()

    def _await_start(self) -> None:
        """Wait until each actor has made its environments or failed to; raise failures that a restart would not cure."""
        deadline = time.monotonic() + START_SECONDS + self.timeout
        for actor in self.actors:
            assert actor.process
            while (
                actor.status.state is ActorState.STARTING
                and actor.process.poll() is None
                and time.monotonic() < deadline
            ):
                time.sleep(0.01)
            log = self._log_tail(actor) or "nothing"
            if actor.process.poll() == EXIT_CANNOT_START:
                raise CannotStart(log.splitlines()[-1])
            if actor.process.poll() == EXIT_SPEC_MISMATCH:
                raise UserError(f"{self._name(actor)}: {log.splitlines()[-1]}")

    def _watch(self) -> None:
        while not self.closing.wait(_POLL_SECONDS):
            for actor in self.actors:
                if self.lost is None:
                    try:
                        self._poll(actor)
                    except Exception as error:  # nothing else would report an exception of this thread
                        self.lost = ActorsLost(f"Supervision of the actors failed: {type(error).__name__}: {error}.")
        self._await_end()  # here, because processes started by this thread die with it

    def _poll(self, actor: ActorHandle) -> None:
        """Replace an actor that has ended; kill and replace one that hangs."""
        assert actor.process
        status = actor.process.poll()
        if status is not None:
            self._replace(actor, describe_exit(status))
            return
        if os.fstat(actor.log.fileno()).st_size > _LOG_BYTES:
            actor.log.truncate(0)
        state, seconds = actor.status.state, (time.monotonic_ns() - actor.status.since_ns) / 1e9
        position = (actor.status.steps, actor.status.env_index)  # changes with every environment that is stepped
        if position != actor.position:
            actor.position, actor.moved = position, time.monotonic()
        seconds = min(seconds, time.monotonic() - actor.moved)
        allowed = self.timeout + (START_SECONDS if state is ActorState.STARTING else 0.0)
        if state in (ActorState.STARTING, ActorState.STEPPING) and seconds > allowed:
            actor.process.send_signal(signal.SIGUSR1)  # have it log where it hangs
            time.sleep(0.2)
            actor.process.kill()
            actor.process.wait()
            self._replace(actor, f"hung for more than {allowed:g} seconds and was killed")

    def _replace(self, actor: ActorHandle, failure: str) -> None:
        """Report a failure, discard the actor's unfinished row and start another process, or stop the run."""
        self.failures += 1
        now = time.monotonic()
        actor.failure_times = [then for then in actor.failure_times if now - then < _STORM_SECONDS] + [now]
        with self.lock:
            for ring in actor.rings:
                ring.recover()
                self.on_break(ring)
        report = f"{self._name(actor)} {failure}. {self._circumstances(actor)}"
        if self.failures > self.restarts:
            self.lost = ActorsLost(
                f"{report}\nThe run stops: actors failed {self.failures} times, "
                f"{self.restarts} are allowed (--env.restarts)."
            )
        elif len(actor.failure_times) >= _STORM:
            self.lost = ActorsLost(
                f"{report}\nThe run stops: this actor failed {_STORM} times within {_STORM_SECONDS:g} seconds."
            )
        else:
            self.notify(
                f"{report}\nRestarted ({self.failures} of {self.restarts}); its unfinished episodes are discarded."
            )
            assert actor.process
            _close_stdin(actor.process)
            actor.job = replace(actor.job, number=actor.job.number + _NUMBER_STEP)
            self._start(actor)

    def _name(self, actor: ActorHandle) -> str:
        job, number = actor.job, self.actors.index(actor) + 1
        return f"Actor {number} of {len(self.actors)} ({job.env}, environments {job.first} to {job.last})"

    def _circumstances(self, actor: ActorHandle) -> str:
        """Describe the environment it was stepping, its seed, its latest actions, and the end of the actor log."""
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
    with contextlib.suppress(BrokenPipeError):  # it died before it had read its job
        process.stdin.close()


def _open_log() -> IO[bytes]:
    """Return an unnamed file for an actor log, in append mode, so that it can be truncated while the actor writes."""
    file = tempfile.TemporaryFile()  # noqa: SIM115
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)
    return file
