"""CPU environments in several processes that step at the same time, so that evaluation is as fast as the cores allow.

To who asks, `SpreadEnvs` is HostEnvs: the same arrays with the same numbers, however many processes there are. Each of them,
`python -m redline.collect.parallel_envs`, plays some of the environments. The first line it reads is its job, each one after it what is to
be done; every line is answered through a pipe of its own, null where all went well. It ends with whoever started it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Any

import numpy as np

from redline.collect.actor_process import die_with_parent
from redline.collect.actor_supervisor import GRACE, START_SECONDS, CannotStart, child_environment, ending
from redline.collect.row_format import Differs, check_spec, plain_spec
from redline.collect.shared_memory import Memory, SharedLayout
from redline.core.errors import UserError
from redline.envs import Rules, make_rules
from redline.envs.gym_envs import GymEnvs

_ARRAYS = ("obs", "terminated", "truncated", "episode_over", "lost", "won", "length", "score")  # what evaluation reads
_LOOK_EVERY = 0.2  # seconds
_READ = 1 << 16


@dataclass
class ActorHandle:
    """A process, and the environments it plays."""

    process: subprocess.Popen[bytes]
    answers: int  # descriptor
    first: int
    num_envs: int
    at: np.ndarray[Any, Any]  # (1,) int64: the environment it is at


class ParallelEnvs:
    """HostEnvs in `processes`."""

    obs: np.ndarray[Any, Any]
    episode_over: np.ndarray[Any, Any]
    lost: np.ndarray[Any, Any]
    won: np.ndarray[Any, Any]
    terminated: np.ndarray[Any, Any]
    truncated: np.ndarray[Any, Any]
    length: np.ndarray[Any, Any]
    score: np.ndarray[Any, Any]

    def __init__(self, rules: Rules, count: int, time_limit: int, processes: int) -> None:
        self.name, self.timeout = rules.game.name, rules.config.timeout
        none = GymEnvs(rules.game, rules.config, 0)
        fields = {name: ((count, *getattr(none, name).shape[1:]), getattr(none, name).dtype) for name in _ARRAYS}
        fields |= {"actions": ((count,), np.dtype(np.int64)), "busy": ((count,), np.dtype(bool))}
        layout = SharedLayout(fields | {"at": ((processes,), np.dtype(np.int64))})
        self.members: list[ActorHandle] = []
        self.memory = Memory.create(layout.bytes)
        views = layout.views(self.memory)
        self.actions, self.busy, at = (views.pop(name) for name in ("actions", "busy", "at"))
        vars(self).update(views)
        job = {"env": self.name, "options": vars(rules.config), "time_limit": time_limit, "parent": os.getpid()}
        job |= {"fd": self.memory.fd, "bytes": layout.bytes, "layout": layout.to_json()}
        job |= {"spec": plain_spec(rules.game.spec(rules.config))}
        bounds = np.linspace(0, count, processes + 1).astype(int).tolist()
        try:
            for number, (first, end) in enumerate(itertools.pairwise(bounds)):
                self._start(job | {"number": number, "first": first, "num_envs": end - first}, at[number : number + 1])
            self._await(START_SECONDS + self.timeout, kind=CannotStart)
        except BaseException:
            self.close()
            raise

    def _start(self, job: dict[str, Any], at: np.ndarray[Any, Any]) -> None:
        ours, theirs = os.pipe()
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,  # ours may be read by a program
                pass_fds=(self.memory.fd, theirs),
                env=child_environment(),
            )
        except OSError as error:
            os.close(ours)
            raise CannotStart(str(error)) from error
        finally:
            os.close(theirs)
        self.members.append(ActorHandle(process, ours, job["first"], job["num_envs"], at))
        _tell(self.members[-1], json.dumps(job | {"answers": theirs}))

    def reset(self, seed: int) -> None:
        """Begin all episodes anew. Environment i is seeded by `seed` and i."""
        self._do(f"reset {seed}", START_SECONDS)

    def step(self, actions: np.ndarray[Any, Any], busy: np.ndarray[Any, Any]) -> None:
        """One step of those that are `busy` (N,) bool."""
        self.actions[:], self.busy[:] = actions, busy
        self._do("step", 0.0)

    def _do(self, what: str, more: float) -> None:
        if not self.members:
            raise RuntimeError(f"{what.split()[0]} of {self.name} was called after close; make it anew.")
        for member in self.members:
            _tell(member, what)
        self._await(more + self.timeout)

    def _await(self, seconds: float, kind: type[Exception] = UserError) -> None:
        """Answers of all, each of whose environments may take so long; who gives none is an error of that `kind`."""
        for member in self.members:
            said = self._answer(member, seconds, kind)
            if said is None:
                continue
            what, text = said
            if what == "cannot":
                raise CannotStart(text)
            raise UserError(text) if what == "user" else RuntimeError(f"{self._which(member)} failed.\n{text}")

    def _answer(self, member: ActorHandle, seconds: float, kind: type[Exception]) -> Any:
        line, at, since = b"", -1, time.monotonic()
        ready = select.poll()
        ready.register(member.answers, select.POLLIN)
        while not line.endswith(b"\n"):
            if not ready.poll(1e3 * _LOOK_EVERY):
                if int(member.at[0]) != at:  # it goes on: another environment is stepped
                    at, since = int(member.at[0]), time.monotonic()
                if time.monotonic() - since > seconds:
                    raise kind(f"{self._which(member)} hung for more than {seconds:g} seconds (--env.timeout).")
                continue
            part = os.read(member.answers, _READ)
            if not part:
                raise kind(f"{self._which(member)} {ending(member.process.wait())}.")
            line += part
        return json.loads(line)

    def _which(self, member: ActorHandle) -> str:
        return f"The process of {self.name}, environments {member.first} to {member.first + member.num_envs - 1},"

    def close(self) -> None:
        """Let them close their environments, and end them; twice is fine."""
        for member in self.members:
            assert member.process.stdin
            with contextlib.suppress(BrokenPipeError):
                member.process.stdin.close()
        deadline = time.monotonic() + GRACE
        for member in self.members:
            with contextlib.suppress(subprocess.TimeoutExpired):
                member.process.wait(max(0.0, deadline - time.monotonic()))
            member.process.kill()
            member.process.wait()
            os.close(member.answers)
        self.members = []
        self.memory.close()


def _tell(member: ActorHandle, line: str) -> None:
    assert member.process.stdin
    with contextlib.suppress(BrokenPipeError):  # it is gone: what it does not answer says so
        member.process.stdin.write(line.encode() + b"\n")
        member.process.stdin.flush()


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # sent to all processes, they are for the one that
        signal.signal(number, signal.SIG_IGN)  # started this one
    job = json.loads(sys.stdin.readline())
    die_with_parent(job["parent"])
    for descriptor in (job["answers"], job["fd"]):  # not for what environments start: who reads sees this process end
        os.set_inheritable(descriptor, False)
    envs = None
    with os.fdopen(job["answers"], "w", buffering=1) as answers:
        try:
            envs, actions, busy = _make(job)
            print("null", file=answers)
            for line in sys.stdin:
                _obey(envs, line.split(), actions, busy, job["first"])
                print("null", file=answers)
        except Differs as error:
            print(json.dumps(["user", str(error)]), file=answers)
        except (UserError, ImportError) as error:
            print(json.dumps(["user" if envs else "cannot", str(error)]), file=answers)
        except Exception:
            print(json.dumps(["failed", traceback.format_exc()]), file=answers)
        finally:
            if envs is not None:
                envs.close()


def _make(job: dict[str, Any]) -> tuple[GymEnvs, Any, Any]:
    """This process's environments, whose arrays are its part of what is shared; actions and busy environments."""
    views = SharedLayout.from_json(job["layout"]).views(Memory.attach(job["fd"], job["bytes"]))
    at = views.pop("at")[job["number"] : job["number"] + 1]
    mine: dict[str, Any] = {k: v[job["first"] : job["first"] + job["num_envs"]] for k, v in views.items()}
    rules = make_rules(job["env"], job["options"], job["time_limit"])
    check_spec(job["env"], rules.game.spec(rules.config), job["spec"])
    envs = GymEnvs(rules.game, rules.config, job["num_envs"], job["time_limit"])
    actions, busy = mine.pop("actions"), mine.pop("busy")
    vars(envs).update(mine, current_env=at)
    return envs, actions, busy


def _obey(envs: GymEnvs, words: list[str], actions: Any, busy: Any, first: int) -> None:
    if words[0] == "reset":
        envs.reset(int(words[1]), first=first)
    else:
        envs.step(actions, busy)


if __name__ == "__main__":
    main()
