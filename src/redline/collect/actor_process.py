"""An actor process: plays some of the environments and writes rows to rings. Run as `python -m redline.collect.actor_process`.

The first line of its standard input is an ActorJob in JSON; the pipe stays open as long as the parent lives. The parent
reads the end of its output, the actor log, to report why it failed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import traceback
from typing import Any, NamedTuple

from redline.collect.actor_job import ActorJob
from redline.collect.child_process import (
    EXIT_CANNOT_START,
    EXIT_INVALID_STEP,
    EXIT_RAISED,
    EXIT_SPEC_MISMATCH,
    die_with_parent,
    ignore_interrupts,
)

_NICE = 10


def main() -> int:
    """Play until the parent sets the stop flag; return the exit status."""
    ignore_interrupts()
    job = ActorJob.from_json(sys.stdin.readline())
    die_with_parent(job.parent)
    _exit_with_parent()
    if job.cores:
        os.sched_setaffinity(0, job.cores)
    if job.low_priority:
        os.nice(_NICE)  # actors that are ahead would wait for the learner anyway
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the supervisor makes it log where it hangs
    from redline.collect.row_format import SpecMismatch
    from redline.core.errors import InvalidStep, UserError
    from redline.core.faults import reach

    try:
        actor = _Actor(job)
    except SpecMismatch as error:
        print(error, file=sys.stderr, flush=True)
        return EXIT_SPEC_MISMATCH
    except InvalidStep as error:
        print(error, file=sys.stderr, flush=True)
        return EXIT_INVALID_STEP
    except (UserError, ImportError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return EXIT_CANNOT_START
    except Exception:
        traceback.print_exc()
        return EXIT_RAISED
    try:
        actor.status.enter(actor.ActorState.NEEDS_ROOM)  # no longer STARTING
        reach("actor")
        actor.run()
    except InvalidStep as error:
        print(error, file=sys.stderr, flush=True)
        return EXIT_INVALID_STEP
    except Exception:
        traceback.print_exc()
        return EXIT_RAISED
    actor.close()
    return 0


def _exit_with_parent() -> None:
    """Exit when standard input closes. Works on every system, except while an environment is stuck in a step."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 1):
                pass
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


class _Group(NamedTuple):
    """Environments that step together, and their ring."""

    envs: Any  # GymEnvs
    ring: Any  # SharedRing, the writer's end
    first: int  # index of its first environment among the actor's
    env_index: Any  # (K,) int64: indices of its environments among all
    episode_start: Any  # (K,) bool: the observation is the first of an episode


class _Actor:
    def __init__(self, job: ActorJob) -> None:
        import numpy as np
        import torch

        from redline.collect.actor_memory import Control
        from redline.collect.actor_status import ActorState, ActorStatus
        from redline.collect.row_format import ENV_FIELDS, check_spec
        from redline.collect.shared_memory import Backoff, Memory
        from redline.collect.shared_ring import SharedRing, SharedRingSpec
        from redline.envs import make_rules
        from redline.envs.gym_envs import GymEnvs

        torch.set_num_threads(1)
        self.backoff = Backoff()
        self.torch, self.job, self.ActorState, self.env_fields = torch, job, ActorState, ENV_FIELDS
        memory = Memory.attach(job.fd, job.bytes)
        self.control = Control(memory, job.control_offset)
        self.status = ActorStatus(memory, job.status_offset, sum(group.num_envs for group in job.groups))
        self.status.begin()
        rules = make_rules(job.env, job.env_options, job.time_limit)
        check_spec(job.env, rules.game.spec(rules.config), job.spec)
        self.groups = []
        for group in job.groups:
            backplay = (job.backplay, job.backplay_steps)
            envs = GymEnvs(
                rules.game, rules.config, group.num_envs, rules.time_limit, *backplay, group.first, choose_levels=True
            )
            envs.activity = self.status.activity
            envs.reset(job.seed, job.number)
            ring = SharedRing(memory, group.ring_offset, SharedRingSpec.from_json(group.ring_spec))
            env_index = torch.arange(group.first, group.first + group.num_envs)
            episode_start = np.ones(group.num_envs, bool)
            self.groups.append(_Group(envs, ring, group.first - job.first, env_index, episode_start))
        if not job.central:
            self._make_policy(rules, memory)

    def _make_policy(self, rules: Any, memory: Any) -> None:
        import numpy as np

        from redline import algos
        from redline.collect.actor_policy import ActorPolicy
        from redline.collect.shared_weights import SharedWeights

        job = self.job
        algo = algos.load(job.algo)
        options = {k: tuple(v) if isinstance(v, list) else v for k, v in job.algo_options.items()}
        self.policy = ActorPolicy(rules, algo, algo.Config(**options), job.num_envs, job.key)
        self.outputs = [f"out.{name}" for name in algo.POLICY_OUTPUTS]
        self.weights = SharedWeights(memory, job.weights_offset, self.policy.size * 4, check=job.check)
        self.flat_weights = np.zeros(self.policy.size, np.float32)

    def run(self) -> None:
        """Play until the stop flag is set."""
        step = self._request_or_step if self.job.central else self._act_and_step
        waiting = self.ActorState.NEEDS_ACTIONS if self.job.central else self.ActorState.NEEDS_ROOM
        while not self.control.stopped:
            progressed = [step(group) for group in self.groups]  # a list, so that every group is tried
            if any(progressed):
                self.backoff.reset()
            else:
                self.status.enter(waiting)
                self.backoff.sleep()

    def close(self) -> None:
        for group in self.groups:
            group.envs.close()

    def _act_and_step(self, group: _Group) -> bool:
        """Play one step with actions of this process's policy and write its row. Return False if the ring is full."""
        ring = group.ring
        row = ring.open()
        if row is None:
            return False
        self.status.enter(self.ActorState.STEPPING)
        self._load_weights()
        self._write_obs(group, row)
        obs, episode_start = self.torch.from_numpy(group.envs.obs), self.torch.from_numpy(group.episode_start)
        acted = self.job.acted + ring.written
        action, outputs = self.policy.act(obs, episode_start, group.env_index, acted, acted, self.control.progress)
        row["action"][:] = action.numpy()
        row["version"][...] = self.policy.version
        for name, output in zip(self.outputs, outputs, strict=True):
            row[name][:] = output.numpy()
        self._step(group, row)
        return True

    def _request_or_step(self, group: _Group) -> bool:
        """Play the actions of the inference server, then request the next ones. Return False if neither is possible yet."""
        ring = group.ring
        stepped: bool = ring.is_open
        if stepped:
            if not ring.has_response():
                return False
            self.status.enter(self.ActorState.STEPPING)
            self._step(group, ring.open())
        row = ring.open()
        if row is None:
            return stepped
        self._write_obs(group, row)
        ring.request()
        return True

    def _load_weights(self) -> None:
        version = self.weights.fetch(self.flat_weights, self.policy.version)
        if version is not None:
            self.policy.load(self.torch.from_numpy(self.flat_weights), version)
            self.status.version = version

    def _write_obs(self, group: _Group, row: dict[str, Any]) -> None:
        row["obs"][...] = group.envs.obs
        row["episode_start"][:] = group.episode_start

    def _step(self, group: _Group, row: dict[str, Any]) -> None:
        """Play the row's actions, write the results and commit the row."""
        envs, status = group.envs, self.status
        status.record_actions(row["action"], group.first)
        envs.step(row["action"])
        for name in self.env_fields:
            row[name][...] = getattr(envs, name)
        group.episode_start[:] = envs.terminated | envs.truncated
        group.ring.commit()
        status.steps += len(group.episode_start)
        status.episodes += int(envs.episode_over.sum())
        if envs.masked:
            status.masked = sum(other.envs.masked for other in self.groups)


if __name__ == "__main__":
    os._exit(main())  # without waiting for threads that environments started
