"""An actor: a process that plays some of the environments and puts what came of it into rings. `python -m redline.collect.actor_process`.

The first line of its standard input is its job, in JSON; the pipe stays open for as long as the process that started it lives.
What it says on standard error is kept by that process for the case that it fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import sys
import threading
import traceback
from typing import Any, NamedTuple

CANNOT, DIFFERS = 3, 4  # exit status: the environment cannot be made here; it is another here than it should be
_PR_SET_PDEATHSIG = 1
_NICE = 10


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # sent to all processes, they are for the one that
        signal.signal(number, signal.SIG_IGN)  # started this one: it ends its actors when it has made use of them
    job = json.loads(sys.stdin.readline())
    die_with_parent(job["parent"])
    _watch_parent()
    if job["cores"]:
        os.sched_setaffinity(0, job["cores"])
    if job["shares"]:
        os.nice(_NICE)  # where all share the cores the learner comes first: actors that are ahead wait for it anyway
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # where it hangs
    from redline.collect.row_format import Differs
    from redline.core.errors import UserError

    try:
        actor = _Actor(job)
    except Differs as error:
        print(error, file=sys.stderr, flush=True)
        return DIFFERS
    except (UserError, ImportError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return CANNOT
    except Exception:
        traceback.print_exc()
        return 1
    try:
        actor.run()
    except Exception:
        traceback.print_exc()
        return 1
    actor.close()
    return 0


def die_with_parent(parent: int) -> None:
    """Also when it is killed, and also while an environment is stuck in a step; where the system can do that."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _watch_parent() -> None:
    """End when it does, whatever the system."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 1):
                pass
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


class _Group(NamedTuple):
    """Environments that move together, and their ring."""

    envs: Any  # HostEnvs
    ring: Any  # Ring
    first: int  # of its environments among the actor's
    env_index: Any  # (K,) int64: their numbers among all
    episode_start: Any  # (K,) bool: what is seen is the first of an episode


class _Actor:
    def __init__(self, job: dict[str, Any]) -> None:
        import numpy as np
        import torch

        from redline import algos
        from redline.collect.actor_policy import ActorPolicy
        from redline.collect.row_format import FROM_ENVS, check_spec
        from redline.collect.shared_memory import Backoff, Memory, State, Status, Weights
        from redline.collect.shared_ring import SharedRing, SharedRingSpec
        from redline.envs import make_rules
        from redline.envs.gym_envs import GymEnvs

        torch.set_num_threads(1)
        self.nap = Backoff()
        self.torch, self.job, self.State, self.fields = torch, job, State, FROM_ENVS
        memory = Memory.attach(job["fd"], job["bytes"])
        self.control = memory.array(job["control"], (2,), np.float64)  # stop; share of training done
        num_envs = sum(group["num_envs"] for group in job["groups"])
        self.status = Status(memory, job["status"], num_envs)
        self.status.begin()
        rules = make_rules(job["env"], job["options"], job["time_limit"])
        check_spec(job["env"], rules.game.spec(rules.config), job["spec"])
        self.groups = []
        first = job["groups"][0]["first"]
        for group in job["groups"]:
            own, count = group["first"], group["num_envs"]
            envs = GymEnvs(rules.game, rules.config, count, rules.time_limit, *job["practice"])
            envs.current_env = self.status.at
            envs.reset(job["seed"], job["number"], own)
            ring = SharedRing(memory, group["ring"], SharedRingSpec.from_json(group["plan"]))
            env_index = torch.arange(own, own + count)
            self.groups.append(_Group(envs, ring, own - first, env_index, np.ones(count, bool)))
        self.central = job["inference"] == "central"
        if not self.central:
            algo = algos.load(job["algo"])
            chosen = {k: tuple(v) if isinstance(v, list) else v for k, v in job["algo_options"].items()}
            self.player = ActorPolicy(rules, algo, algo.Config(**chosen), job["num_envs"], job["key"])
            self.outputs = [f"out.{name}" for name in algo.POLICY_OUTPUTS]
            self.weights = Weights(memory, job["weights"], self.player.size * 4, check=job["check"])
            self.flat = np.zeros(self.player.size, np.float32)

    def run(self) -> None:
        """Until it is told to stop."""
        step = self._ask_or_step if self.central else self._play
        wants = self.State.NEEDS_ACTIONS if self.central else self.State.NEEDS_ROOM
        while not self.control[0]:
            done = [step(group) for group in self.groups]  # every group is tried
            if any(done):
                self.nap.found()
            else:
                self.status.enter(wants)
                self.nap.take()

    def close(self) -> None:
        for group in self.groups:
            group.envs.close()

    def _play(self, group: _Group) -> bool:
        """A whole row: choose, step, write. False: there is no room."""
        ring = group.ring
        row = ring.open()
        if row is None:
            return False
        self.status.enter(self.State.STEPPING)
        self._refresh()
        self._see(group, row)
        obs, episode_start = self.torch.from_numpy(group.envs.obs), self.torch.from_numpy(group.episode_start)
        policy_input = self.job["acted"] + ring.written
        action, outputs = self.player.move(
            obs, episode_start, group.env_index, policy_input, policy_input, float(self.control[1])
        )
        row["action"][:] = action.numpy()
        row["version"][...] = self.player.version
        for name, output in zip(self.outputs, outputs, strict=True):
            row[name][:] = output.numpy()
        self._step(group, row)
        return True

    def _ask_or_step(self, group: _Group) -> bool:
        """With actions from outside: ask for them, or play those that have come. False: nothing could be done."""
        ring = group.ring
        stepped: bool = ring.is_open
        if stepped:
            if not ring.answered():
                return False
            self.status.enter(self.State.STEPPING)
            self._step(group, ring.open())
        row = ring.open()
        if row is None:
            return stepped
        self._see(group, row)
        ring.ask()
        return True

    def _refresh(self) -> None:
        """The newest weights."""
        version = self.weights.fetch(self.flat, self.player.version)
        if version is not None:
            self.player.load(self.torch.from_numpy(self.flat), version)
            self.status.version = version

    def _see(self, group: _Group, row: dict[str, Any]) -> None:
        row["obs"][...] = group.envs.obs
        row["episode_start"][:] = group.episode_start

    def _step(self, group: _Group, row: dict[str, Any]) -> None:
        envs, status = group.envs, self.status
        status.act(row["action"], group.first)
        envs.step(row["action"])
        for name in self.fields:
            row[name][...] = getattr(envs, name)
        group.episode_start[:] = envs.terminated | envs.truncated
        group.ring.commit()
        status.steps += len(group.episode_start)
        status.episodes += int(envs.episode_over.sum())


if __name__ == "__main__":
    os._exit(main())  # threads of environments do not hold it up
