"""Actor processes under supervision: one that crashes, hangs or is killed is named, and replaced within a budget."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import IO, Any

from redline.collect.actor_process import CANNOT, DIFFERS
from redline.collect.shared_memory import State, Status
from redline.collect.shared_ring import SharedRing
from redline.core.errors import UserError
from redline.envs.gym_envs import env_seeds

_LOOK_EVERY = 0.1  # seconds
START_SECONDS = 120.0  # that making environments may take, besides the time a step may
_STORM, _STORM_SECONDS = 5, 60.0  # failures of one actor within this time end the run
_TOLD = 2_000  # characters of what it said last
_DIARY = 1 << 20  # bytes kept of what it says
GRACE = 2.0  # seconds to stop by itself


class ActorsLost(Exception):
    """Actors failed too often: what happened, and which limit was reached."""


class CannotStart(Exception):
    """The environments cannot be made in processes of their own."""


@dataclass
class ActorHandle:
    """An actor: its job, its process and what is shared with it."""

    job: dict[str, Any]
    status: Status
    rings: Sequence[SharedRing]
    actor_log: IO[bytes]
    process: subprocess.Popen[bytes] | None = None
    failures: list[float] = field(default_factory=list)  # when
    at: tuple[int, int] = (-1, -1)  # where it was last seen, and since when
    moved: float = 0.0


class ActorSupervisor:
    """Starts the actors, looks after them in a thread, ends them."""

    def __init__(
        self,
        jobs: Sequence[dict[str, Any]],
        statuses: Sequence[Status],
        rings: Sequence[Sequence[SharedRing]],
        timeout: float,
        restarts: int,
        notify: Callable[[str], None],
        broken: Callable[[SharedRing], None],
        guard: AbstractContextManager[Any],
    ) -> None:
        """`timeout` seconds a step may take. `broken` is told of rings whose next row does not continue the one before, under
        `guard`: whoever answers actors holds it.
        """
        self.timeout, self.restarts, self.notify = timeout, restarts, notify
        self.broken, self.guard = broken, guard
        self.failed = 0
        self.lost: ActorsLost | None = None
        self.closing = threading.Event()
        self.members = [
            ActorHandle(job, status, own, _diary()) for job, status, own in zip(jobs, statuses, rings, strict=True)
        ]
        self.thread = threading.Thread(target=self._watch, name="redline-fleet", daemon=True)
        try:
            for member in self.members:
                self._start(member)
            self._await_start()
        except BaseException:
            self.close()
            raise
        self.thread.start()

    def check(self) -> None:
        """Raise what made an end of it."""
        if self.lost is not None:
            raise self.lost

    def close(self) -> None:
        """End all of them; twice is fine."""
        if self.closing.is_set():
            return
        self.closing.set()
        if self.thread.is_alive():
            self.thread.join()
        else:
            self._await_end()
        for process in self._started():
            if process.poll() is None:
                process.kill()
            process.wait()
            _let_go(process)
        for member in self.members:
            member.actor_log.close()

    def _started(self) -> list[subprocess.Popen[bytes]]:
        return [member.process for member in self.members if member.process is not None]

    def _await_end(self) -> None:
        """They have been told to stop, see `control`, and do so after their step."""
        deadline = time.monotonic() + GRACE
        for process in self._started():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))

    def _start(self, member: ActorHandle) -> None:
        member.status.begin()
        member.status.env_index = member.job["groups"][0]["first"]
        member.actor_log.truncate(0)
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "redline.collect.actor_process"],
                stdin=subprocess.PIPE,
                stdout=member.actor_log,
                stderr=member.actor_log,
                pass_fds=(member.job["fd"],),
                env=child_environment(),
            )
        except OSError as error:
            raise CannotStart(str(error)) from error
        member.process = process
        assert process.stdin
        with contextlib.suppress(BrokenPipeError):  # it is gone already: its exit says why
            process.stdin.write(json.dumps(member.job).encode() + b"\n")
            process.stdin.flush()

    def _await_start(self) -> None:
        """Until each has made its environments, or failed to; a failure that will not go away is raised."""
        deadline = time.monotonic() + START_SECONDS + self.timeout
        for member in self.members:
            assert member.process
            while (
                member.status.state is State.STARTING and member.process.poll() is None and time.monotonic() < deadline
            ):
                time.sleep(0.01)
            said = self._said(member).strip() or "nothing"
            if member.process.poll() == CANNOT:
                raise CannotStart(said.splitlines()[-1])
            if member.process.poll() == DIFFERS:
                raise UserError(f"{self._name(member)}: {said.splitlines()[-1]}")

    def _watch(self) -> None:
        while not self.closing.wait(_LOOK_EVERY):
            for member in self.members:
                if self.lost is None:
                    try:
                        self._look_after(member)
                    except Exception as error:  # a thread's exceptions are nobody's otherwise
                        self.lost = ActorsLost(
                            f"Actors can no longer be looked after: {type(error).__name__}: {error}."
                        )
        self._await_end()  # those that this thread started die with it

    def _look_after(self, member: ActorHandle) -> None:
        assert member.process
        status = member.process.poll()
        if status is not None:
            self._replace(member, ending(status))
            return
        if os.fstat(member.actor_log.fileno()).st_size > _DIARY:
            member.actor_log.truncate(0)
        state, seconds = member.status.state, (time.monotonic_ns() - member.status.since_ns) / 1e9
        at = (member.status.steps, member.status.env_index)  # changes with every environment that is stepped
        if at != member.at:
            member.at, member.moved = at, time.monotonic()
        seconds = min(seconds, time.monotonic() - member.moved)
        allowed = self.timeout + (START_SECONDS if state is State.STARTING else 0.0)
        if state in (State.STARTING, State.STEPPING) and seconds > allowed:
            member.process.send_signal(signal.SIGUSR1)  # says where it hangs
            time.sleep(0.2)
            member.process.kill()
            member.process.wait()
            self._replace(member, f"hung for more than {allowed:g} seconds and was killed")

    def _replace(self, member: ActorHandle, what: str) -> None:
        """Tell what happened, discard what was unfinished, start another in its place."""
        self.failed += 1
        now = time.monotonic()
        member.failures = [then for then in member.failures if now - then < _STORM_SECONDS] + [now]
        with self.guard:
            for ring in member.rings:
                ring.recover()
                self.broken(ring)
        text = f"{self._name(member)} {what}. {self._circumstances(member)}"
        if self.failed > self.restarts:
            self.lost = ActorsLost(
                f"{text}\nThe run stops: actors failed {self.failed} times, {self.restarts} are allowed (--env.restarts)."
            )
        elif len(member.failures) >= _STORM:
            self.lost = ActorsLost(
                f"{text}\nThe run stops: this actor failed {_STORM} times within {_STORM_SECONDS:g} seconds."
            )
        else:
            self.notify(f"{text}\nStarted again ({self.failed} of {self.restarts}); unfinished episodes are discarded.")
            assert member.process
            _let_go(member.process)
            member.job = member.job | {"number": member.job["number"] + 1_000_003}  # other episodes than before
            self._start(member)

    def _name(self, member: ActorHandle) -> str:
        groups = member.job["groups"]
        first, last = groups[0]["first"], groups[-1]["first"] + groups[-1]["num_envs"] - 1
        index = self.members.index(member) + 1
        return f"Actor {index} of {len(self.members)} ({member.job['env']}, environments {first} to {last})"

    def _circumstances(self, member: ActorHandle) -> str:
        """The environment it was at, its seed, its last actions, what was said."""
        env_index = member.status.env_index
        seed = env_seeds(member.job["seed"], member.job["number"], env_index, 1)[0]
        taken = member.status.last_actions(env_index - member.job["groups"][0]["first"])
        actions = ", ".join(map(str, taken)) or "none"
        said = self._said(member).strip()
        where = f"It was at environment {env_index} (seed {seed}); last actions: {actions}."
        return where + (f"\n{said}" if said else "")

    def _said(self, member: ActorHandle) -> str:
        size = os.fstat(member.actor_log.fileno()).st_size
        return os.pread(member.actor_log.fileno(), _TOLD, max(0, size - _TOLD)).decode(errors="replace")


def child_environment() -> dict[str, str]:
    """Of a process that plays: one thread, and the modules that are found here."""
    one = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return os.environ | one | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _let_go(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin
    with contextlib.suppress(BrokenPipeError):  # it died before it had read its job
        process.stdin.close()


def _diary() -> IO[bytes]:
    """A file without a name for what an actor says; written at its end, so that it can be cut."""
    file = tempfile.TemporaryFile()  # noqa: SIM115
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)
    return file


def ending(status: int) -> str:
    """What became of a process that ended."""
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-status).name}"
        return f"was ended by signal {-status}"
    return "raised an exception" if status == 1 else f"ended with exit status {status}"
