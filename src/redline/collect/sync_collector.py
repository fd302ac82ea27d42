"""Collect from CPU environments in this process: the learner chooses actions and the environments step, in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from redline.algos.learner import Learner
from redline.collect.collector import Collector, Prepare
from redline.collect.env_supervisor import EnvSupervisor
from redline.collect.episode_stats import CPUEpisodeStats
from redline.core.records import Episode, Step, Transition
from redline.engine.stages import Stage, Stages
from redline.envs.batch import Rules
from redline.envs.gym_game import GymState, frame_shape, stacked

_ENDLESS = 100_000  # episode length from which a time limit is recommended


class CPUCollector(Collector):
    """Base of collectors for N CPU environments: static device buffers for one transition, and the policy's frame stacks.

    Subclasses fill `state`, `episode_start`, `action` and the results of the step. CPU environments cannot be saved, so a
    resumed run starts new episodes.
    """

    episode_stats: CPUEpisodeStats

    def __init__(
        self, rules: Rules, learner: Learner, num_envs: int, device: torch.device, notify: Callable[[str], None]
    ) -> None:
        self.rules, self.learner, self.notify = rules, learner, notify
        self._advised = False  # a time limit has been recommended
        game: Any = rules.game
        self.episode_stats = CPUEpisodeStats(game.levels)
        spec = learner.spec
        self.frames = spec.frames
        frame = torch.zeros(num_envs, *frame_shape(spec), dtype=spec.obs_dtype, device=device)
        flag = torch.zeros(num_envs, dtype=torch.bool, device=device)
        self.state = GymState(frame)  # newest frames, (N, …)
        stack = frame.unsqueeze(1).repeat_interleave(self.frames, 1)
        self.stack = GymState(stack) if self.frames > 1 else self.state  # (N, F, …), newest last
        self.episode_start = torch.ones_like(flag)  # the newest frame is the first of an episode
        self.action = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self.final_obs = torch.zeros_like(frame)  # frame after the action, before any reset
        self.reward = torch.zeros(num_envs, device=device)
        self.terminated, self.truncated = flag.clone(), flag.clone()
        self.unused = flag  # placeholder for fields that learners do not read: episodes are counted on the host

    def observe(self) -> Tensor:
        """Push the newest frames onto the frame stacks and return the observations (N, …)."""
        if self.frames > 1:
            self.stack.obs.copy_(stacked(self.stack.obs, self.state.obs, self.episode_start))
        return self.rules.game.observe(self.rules.config, self.stack)

    def ingest(self) -> None:
        """Hand the transition in the buffers to the learner."""
        final_obs = self.final_obs
        if self.frames > 1 and self.learner.needs_frame_stack:
            final_obs = stacked(self.stack.obs, final_obs)
        episode = Episode(self.unused, self.unused, self.reward)
        step = Step(self.reward, self.terminated, self.truncated, self.unused, GymState(final_obs), episode)
        self.learner.ingest(Transition(self.state, self.action, step))

    def advise_limit(self, length: int) -> None:
        """Recommend a time limit, once, if `length` steps are suspiciously long for an episode and nothing limits it."""
        if length >= _ENDLESS and not self.rules.time_limit and not self.learner.spec.limit and not self._advised:
            self._advised = True
            self.notify(
                f"An episode of {self.rules.game.name} has lasted {length:,} steps. If episodes may never end, limit them with "
                "--time-limit."
            )


class SyncCollector(CPUCollector):
    """Steps CPU environments in this process.

    An environment that raises an exception is replaced. Its episode ends with the step before, and the learner forgets
    the failed step.
    """

    def __init__(
        self,
        rules: Rules,
        learner: Learner,
        supervisor: EnvSupervisor,
        device: torch.device,
        prepare: Prepare,
    ) -> None:
        self.supervisor, self.envs = supervisor, supervisor.envs
        super().__init__(rules, learner, len(self.envs.envs), device, supervisor.notify)
        self._act, self._ingest = prepare(self.act), prepare(self.ingest_step)

    def step(self) -> None:
        self.copy_in("obs")
        self._act()
        actions = self.copy_actions()
        self.supervisor.record_actions(actions)
        self.envs.step(actions)
        self.copy_in("final_obs", "reward", "terminated", "truncated")
        self._ingest()
        self.episode_stats.add(vars(self.envs))
        if self.envs.discarded:
            self._forget()

    def _forget(self) -> None:
        """Make the learner forget the steps in which an environment failed and was replaced."""
        lost = torch.zeros(len(self.envs.envs), dtype=torch.bool)
        lost[self.envs.discarded] = True
        self.envs.discarded.clear()
        self.learner.forget(lost.to(self.action.device))

    def copy_in(self, *names: str) -> None:
        """Copy the named arrays of the environments to the device buffers."""
        for name in names:
            buffer = self.state.obs if name == "obs" else getattr(self, name)
            buffer.copy_(torch.from_numpy(getattr(self.envs, name)))

    def copy_actions(self) -> np.ndarray[Any, Any]:
        """Return the actions (N,) int64 on the host; synchronizes with the device."""
        return self.action.cpu().numpy()

    @property
    def stages(self) -> Stages:
        return {
            "copy_in": Stage("host-device copies", compiled=False),
            "copy_actions": Stage("host-device copies", compiled=False),
            "_act": Stage("inference", compiled=False),
            "envs.step": Stage("environment step", compiled=False),
            "_ingest": Stage("replay write", compiled=False),
        }

    @torch.no_grad()
    def act(self) -> None:
        self.action.copy_(self.learner.act(self.observe(), None))

    @torch.no_grad()
    def ingest_step(self) -> None:
        self.ingest()
        self.episode_start.copy_(self.terminated | self.truncated)

    def metrics(self) -> dict[str, float]:
        """Return the number of replaced environments and, if masking is enabled, of masked values."""
        self.advise_limit(int(self.envs.length.max(initial=0)))
        masked = {"masked_values": float(self.envs.masked)} if self.rules.config.nonfinite == "mask" else {}
        return {"restarts": float(self.supervisor.budget.failures)} | masked

    def describe_env(self, env_index: int) -> str:
        return self.supervisor.describe(env_index)

    def restart_episodes(self, seed: int, number: int) -> None:
        self.envs.reset(seed, number)
        self.episode_start.fill_(True)

    def close(self) -> None:
        self.envs.close()
