"""CPU environments stepped in parallel by several processes, so that evaluation uses all cores.

`ParallelEnvs` is a drop-in replacement for GymEnvs: the same arrays with the same numbers, however many processes there are.
Each process, `python -m redline.collect.parallel_envs`, plays some of the environments. The first line of its standard input
is its job in JSON, each later line a command. It answers every line through its own pipe, with null for success, and ends
with its parent.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Any

import numpy as np

from redline.collect.child_process import (
    GRACE_SECONDS,
    START_SECONDS,
    CannotStart,
    child_environment,
    describe_exit,
    die_with_parent,
    ignore_interrupts,
)
from redline.collect.row_format import SpecMismatch, check_spec, spec_to_json
from redline.collect.shared_memory import Array, Memory, SharedLayout
from redline.core.errors import EnvsLost, UserError
from redline.envs import Rules, make_rules
from redline.envs.gym_envs import GymEnvs

_ARRAYS = ("obs", "terminated", "truncated", "episode_over", "lost", "won", "length", "score")  # read by evaluation
_POLL_SECONDS = 0.2
_CHUNK_BYTES = 1 << 16


@dataclass
class EnvProcess:
    """A process and the environments it plays."""

    process: subprocess.Popen[bytes]
    answers: int  # file descriptor to read its answers from
    first: int
    num_envs: int
    activity: Array  # (2,) int64: see `env_activity`


class ParallelEnvs:
    """GymEnvs spread over processes. `reset` and `step` write their results to the arrays, (N, …) each."""

    obs: Array
    episode_over: Array
    lost: Array
    won: Array
    terminated: Array
    truncated: Array
    length: Array
    score: Array

    def __init__(self, rules: Rules, count: int, time_limit: int, processes: int) -> None:
        """Start the processes; raise CannotStart if they cannot make the environments."""
        self.name, self.timeout = rules.game.name, rules.config.timeout
        template = GymEnvs(rules.game, rules.config, 0)
        fields = {
            name: ((count, *getattr(template, name).shape[1:]), getattr(template, name).dtype) for name in _ARRAYS
        }
        fields |= {"actions": ((count,), np.dtype(np.int64)), "active": ((count,), np.dtype(bool))}
        layout = SharedLayout(fields | {"activity": ((processes, 2), np.dtype(np.int64))})
        self.processes: list[EnvProcess] = []
        self.memory = Memory.create(layout.bytes)
        views = layout.views(self.memory)
        self.actions, self.active, activity = (views.pop(name) for name in ("actions", "active", "activity"))
        vars(self).update(views)
        job = {
            "env": self.name,
            "options": vars(rules.config),
            "time_limit": time_limit,
            "parent": os.getpid(),
            "fd": self.memory.fd,
            "bytes": layout.bytes,
            "layout": layout.to_json(),
            "spec": spec_to_json(rules.game.spec(rules.config)),
        }
        bounds = np.linspace(0, count, processes + 1).astype(int).tolist()
        try:
            for number, (first, end) in enumerate(itertools.pairwise(bounds)):
                own = {"number": number, "first": first, "num_envs": end - first}
                self._start(job | own, activity[number])
            self._await(START_SECONDS + self.timeout, failure=CannotStart)
        except BaseException:
            self.close()
            raise

    def _start(self, job: dict[str, Any], activity: Array) -> None:
        ours, theirs = os.pipe()
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,  # another program may be parsing the parent's output
                pass_fds=(self.memory.fd, theirs),
                env=child_environment(),
            )
        except OSError as error:
            os.close(ours)
            raise CannotStart(str(error)) from error
        finally:
            os.close(theirs)
        self.processes.append(EnvProcess(process, ours, job["first"], job["num_envs"], activity))
        _send(self.processes[-1], json.dumps(job | {"answers": theirs}))

    def reset(self, seed: int) -> None:
        """Start new episodes in all environments. `seed` and i seed environment i."""
        self._command(f"reset {seed}", START_SECONDS)

    def step(self, actions: Array, active: Array) -> None:
        """Step the environments where `active` (N,) bool is True with their actions (N,) int64."""
        self.actions[:], self.active[:] = actions, active
        self._command("step", 0.0)

    def _command(self, command: str, extra_seconds: float) -> None:
        if not self.processes:
            raise RuntimeError(f"{command.split()[0]} of {self.name} was called after close; make it anew.")
        for process in self.processes:
            _send(process, command)
        self._await(extra_seconds + self.timeout)

    def _await(self, seconds: float, failure: type[Exception] = EnvsLost) -> None:
        """Wait for all answers, up to `seconds` per environment; raise `failure` if a process hangs or dies."""
        for process in self.processes:
            answer = self._receive(process, seconds, failure)
            if answer is None:
                continue
            kind, text = answer
            if kind == "cannot_start":
                raise CannotStart(text)
            raise UserError(text) if kind == "user" else RuntimeError(f"{self._describe(process)} failed.\n{text}")

    def _receive(self, process: EnvProcess, seconds: float, failure: type[Exception]) -> Any:
        line, current_env, since = b"", -1, time.monotonic()
        poll = select.poll()
        poll.register(process.answers, select.POLLIN)
        while not line.endswith(b"\n"):
            if not poll.poll(1e3 * _POLL_SECONDS):
                if int(process.activity[0]) != current_env:  # progress: it has moved on to another environment
                    current_env, since = int(process.activity[0]), time.monotonic()
                if time.monotonic() - since > seconds:
                    raise failure(f"{self._describe(process)} hung for more than {seconds:g} seconds (--env.timeout).")
                continue
            chunk = os.read(process.answers, _CHUNK_BYTES)
            if not chunk:
                raise failure(f"{self._describe(process)} {describe_exit(process.process.wait())}.")
            line += chunk
        return json.loads(line)

    def _describe(self, process: EnvProcess) -> str:
        return f"The process of {self.name}, environments {process.first} to {process.first + process.num_envs - 1},"

    def close(self) -> None:
        """Make the processes close their environments and exit, and kill those that do not; idempotent."""
        for process in self.processes:
            assert process.process.stdin
            with contextlib.suppress(BrokenPipeError):
                process.process.stdin.close()
        deadline = time.monotonic() + GRACE_SECONDS
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.process.wait(max(0.0, deadline - time.monotonic()))
            process.process.kill()
            process.process.wait()
            os.close(process.answers)
        self.processes = []
        self.memory.close()


def _send(process: EnvProcess, line: str) -> None:
    assert process.process.stdin
    with contextlib.suppress(BrokenPipeError):  # it has exited: the missing answer will be reported
        process.process.stdin.write(line.encode() + b"\n")
        process.process.stdin.flush()


def main() -> None:
    """Play the environments of a job until standard input closes."""
    ignore_interrupts()
    job = json.loads(sys.stdin.readline())
    die_with_parent(job["parent"])
    for descriptor in (job["answers"], job["fd"]):  # a program started by an environment must not keep the pipe open
        os.set_inheritable(descriptor, False)
    envs = None
    with os.fdopen(job["answers"], "w", buffering=1) as answers:
        try:
            envs, actions, active = _make_envs(job)
            print("null", file=answers)
            for line in sys.stdin:
                command, *arguments = line.split()
                if command == "reset":
                    envs.reset(int(arguments[0]))
                else:
                    envs.step(actions, active)
                print("null", file=answers)
        except SpecMismatch as error:
            print(json.dumps(["user", str(error)]), file=answers)
        except (UserError, ImportError) as error:
            print(json.dumps(["user" if envs else "cannot_start", str(error)]), file=answers)
        except Exception:
            print(json.dumps(["failed", traceback.format_exc()]), file=answers)
        finally:
            if envs is not None:
                envs.close()


def _make_envs(job: dict[str, Any]) -> tuple[GymEnvs, Any, Any]:
    """Return this process's environments, which write to the shared arrays, and its views of `actions` and `active`."""
    views = SharedLayout.from_json(job["layout"]).views(Memory.attach(job["fd"], job["bytes"]))
    activity = views.pop("activity")[job["number"]]
    own: dict[str, Any] = {k: v[job["first"] : job["first"] + job["num_envs"]] for k, v in views.items()}
    rules = make_rules(job["env"], job["options"], job["time_limit"])
    check_spec(job["env"], rules.game.spec(rules.config), job["spec"])
    envs = GymEnvs(rules.game, rules.config, job["num_envs"], job["time_limit"], first=job["first"])
    actions, active = own.pop("actions"), own.pop("active")
    vars(envs).update(own, activity=activity)
    return envs, actions, active


if __name__ == "__main__":
    main()
