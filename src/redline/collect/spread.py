"""Environments of the host in several processes that step at the same time, so that evaluation is as fast as the cores allow.

To who asks, `SpreadEnvs` is HostEnvs: the same arrays with the same numbers, however many processes there are. Each of them,
`python -m redline.collect.spread`, plays some of the lanes. The first line it reads is its job, each one after it what is to
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

from redline.collect.actor import die_with_parent
from redline.collect.fleet import CannotStart, child_environment, ending
from redline.collect.shared import Layout, Memory
from redline.core.errors import UserError
from redline.envs import Rules, make_rules
from redline.envs.host import HostEnvs

_ARRAYS = ("obs", "final", "reward", "terminated", "truncated", "over", "lost", "won", "length", "score", "earned")
_START_SECONDS = 120.0  # that making environments may take, besides the time a step may
_READ = 1 << 16


@dataclass
class _Member:
    """A process, and the lanes it plays."""

    process: subprocess.Popen[bytes]
    answers: int  # descriptor
    first: int
    lanes: int


class SpreadEnvs:
    """HostEnvs in `processes`."""

    obs: np.ndarray[Any, Any]
    over: np.ndarray[Any, Any]
    lost: np.ndarray[Any, Any]
    won: np.ndarray[Any, Any]
    terminated: np.ndarray[Any, Any]
    truncated: np.ndarray[Any, Any]
    length: np.ndarray[Any, Any]
    score: np.ndarray[Any, Any]

    def __init__(self, rules: Rules, count: int, time_limit: int, processes: int) -> None:
        self.name, self.timeout = rules.game.name, rules.config.timeout  # type: ignore[attr-defined]
        none = HostEnvs(rules.game, rules.config, 0)
        fields = {name: ((count, *getattr(none, name).shape[1:]), getattr(none, name).dtype) for name in _ARRAYS}
        layout = Layout(fields | {"actions": ((count,), np.int64), "busy": ((count,), bool)})
        self.members: list[_Member] = []
        self.memory = Memory.create(layout.bytes)
        views = layout.views(self.memory)
        self.actions, self.busy = views.pop("actions"), views.pop("busy")
        vars(self).update(views)
        job = {"env": self.name, "options": vars(rules.config), "time_limit": time_limit, "parent": os.getpid()}
        job |= {"fd": self.memory.fd, "bytes": layout.bytes, "layout": layout.to_json()}
        bounds = np.linspace(0, count, processes + 1).astype(int).tolist()
        try:
            for first, end in itertools.pairwise(bounds):
                self._start(job, first, end - first)
            self._await(_START_SECONDS + self.timeout)
        except BaseException:
            self.close()
            raise

    def _start(self, job: dict[str, Any], first: int, lanes: int) -> None:
        theirs: int | None = None
        try:
            ours, theirs = os.pipe()
            process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,  # ours may be read by a program
                pass_fds=(self.memory.fd, theirs),
                env=child_environment(),
            )
        except OSError as error:
            raise CannotStart(str(error)) from error
        finally:
            if theirs is not None:
                os.close(theirs)
        member = _Member(process, ours, first, lanes)
        self.members.append(member)
        _tell(member, json.dumps(job | {"answers": theirs, "first": first, "lanes": lanes}))

    def reset(self, seed: int) -> None:
        """Begin all episodes anew. Environment i is seeded by `seed` and i."""
        self._do(f"reset {seed}", _START_SECONDS)

    def step(self, actions: np.ndarray[Any, Any], busy: np.ndarray[Any, Any]) -> None:
        """One step of those that are `busy` (N,) bool."""
        self.actions[:], self.busy[:] = actions, busy
        self._do("step", 0.0)

    def _do(self, what: str, more: float) -> None:
        """In all processes; environments of one take turns, and each has its time."""
        for member in self.members:
            _tell(member, what)
        self._await(more + self.timeout * max(member.lanes for member in self.members))

    def _await(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for member in self.members:
            said = self._answer(member, deadline)
            if said is None:
                continue
            kind, text = said
            if kind == "cannot":
                raise CannotStart(text)
            raise UserError(text) if kind == "user" else RuntimeError(f"{self._which(member)} failed.\n{text}")

    def _answer(self, member: _Member, deadline: float) -> Any:
        line = b""
        while not line.endswith(b"\n"):
            if not select.select([member.answers], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise UserError(f"{self._which(member)} hung for more than {self.timeout:g} seconds (--env.timeout).")
            part = os.read(member.answers, _READ)
            if not part:
                raise UserError(f"{self._which(member)} {ending(member.process.wait())}.")
            line += part
        return json.loads(line)

    def _which(self, member: _Member) -> str:
        return f"The process of {self.name}, environments {member.first} to {member.first + member.lanes - 1},"

    def close(self) -> None:
        """End all of them; twice is fine."""
        for member in self.members:
            assert member.process.stdin
            with contextlib.suppress(BrokenPipeError):
                member.process.stdin.close()
            member.process.kill()
            member.process.wait()
            os.close(member.answers)
        self.members = []
        self.memory.close()


def _tell(member: _Member, line: str) -> None:
    assert member.process.stdin
    with contextlib.suppress(BrokenPipeError):  # it is gone: what it does not answer says so
        member.process.stdin.write(line.encode() + b"\n")
        member.process.stdin.flush()


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # sent to all processes, they are for the one that
        signal.signal(number, signal.SIG_IGN)  # started this one
    job = json.loads(sys.stdin.readline())
    die_with_parent(job["parent"])
    with os.fdopen(job["answers"], "w", buffering=1) as answers:
        made = False
        try:
            envs, actions, busy = _make(job)
            made = True
            print("null", file=answers)
            for line in sys.stdin:
                _obey(envs, line.split(), actions, busy, job["first"])
                print("null", file=answers)
        except (UserError, ImportError) as error:
            print(json.dumps(["user" if made else "cannot", str(error)]), file=answers)
        except Exception:
            print(json.dumps(["failed", traceback.format_exc()]), file=answers)


def _make(job: dict[str, Any]) -> tuple[HostEnvs, Any, Any]:
    """This process's environments, whose arrays are its part of what is shared; actions and busy lanes."""
    views = Layout.from_json(job["layout"]).views(Memory.attach(job["fd"], job["bytes"]))
    mine: dict[str, Any] = {k: v[job["first"] : job["first"] + job["lanes"]] for k, v in views.items()}
    rules = make_rules(job["env"], job["options"], job["time_limit"])
    envs = HostEnvs(rules.game, rules.config, job["lanes"], job["time_limit"])
    actions, busy = mine.pop("actions"), mine.pop("busy")
    vars(envs).update(mine)
    return envs, actions, busy


def _obey(envs: HostEnvs, words: list[str], actions: Any, busy: Any, first: int) -> None:
    if words[0] == "reset":
        envs.reset(int(words[1]), first=first)
    else:
        envs.step(actions, busy)


if __name__ == "__main__":
    main()
