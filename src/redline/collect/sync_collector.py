"""From policy and CPU environments to rollouts, in step: the learner chooses, the environments play, all wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from redline.collect.device_collector import CollectorBase
from redline.core.records import Episode, Step, Transition
from redline.envs.batch import Rules
from redline.envs.gym_envs import GymEnvs, GymState, frame_shape, stacked

Array = np.ndarray[Any, Any]
Prepare = Callable[[Callable[[], None]], Callable[[], None]]


class CPUEpisodeStats:
    """What became of the episodes that ended since the last log."""

    def __init__(self) -> None:
        self.ended: list[tuple[float, float, float, bool, bool]] = []  # score, length, reward, truncated, won

    def add(self, told: Mapping[str, Array]) -> None:
        """`episode_over`, `score`, `length`, `episode_return`, `lost` and `won` of a step of all environments, (N,) each."""
        for env_index in np.flatnonzero(told["episode_over"]):
            score, length, earned, lost, won = (
                told[name][env_index] for name in ("score", "length", "episode_return", "lost", "won")
            )
            self.ended.append((score, length, earned, not (lost or won), won))

    def read(self) -> dict[str, float]:
        """Means over the episodes counted, which start again."""
        found: dict[str, float] = {"episodes": len(self.ended)}
        if self.ended:
            score, length, reward, truncated, won = np.array(self.ended, dtype=np.float64).T
            found |= {"score": float(score.mean()), "score_max": float(score.max()), "length": float(length.mean())}
            found |= {
                "reward": float(reward.mean()),
                "win_rate": float(won.mean()),
                "truncated": float(truncated.mean()),
            }
        self.ended = []
        return found


class CPUCollector(CollectorBase):
    """N environments whose environments the host steps, as a learner meets them: a row at a time, in buffers of its device."""

    def __init__(self, rules: Rules, learner: Any, num_envs: int, device: torch.device) -> None:
        self.rules, self.learner, self.episode_stats = rules, learner, CPUEpisodeStats()
        spec = learner.spec
        self.frames = spec.frames
        frame = torch.zeros(num_envs, *frame_shape(spec), dtype=spec.obs_dtype, device=device)
        flag = torch.zeros(num_envs, dtype=torch.bool, device=device)
        self.state = GymState(frame)  # the newest frames
        stack = frame.unsqueeze(1).repeat_interleave(self.frames, 1)
        self.stack = GymState(stack) if self.frames > 1 else self.state  # what is seen
        self.episode_start = torch.ones_like(flag)  # the newest frame is an episode's first
        self.action = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self.final_obs = torch.zeros_like(frame)  # what was seen after it, before any reset
        self.reward = torch.zeros(num_envs, device=device)
        self.terminated, self.truncated = flag.clone(), flag.clone()
        self.nothing = flag  # what no learner asks for

    def see(self) -> Tensor:
        """The observation, with the newest frames."""
        if self.frames > 1:
            self.stack.obs.copy_(stacked(self.stack.obs, self.state.obs, self.episode_start))
        return self.rules.game.observe(self.rules.config, self.stack)

    def ingest(self) -> None:
        """Hand what came of the actions to the learner."""
        final, nothing = self.final_obs, self.nothing
        if self.frames > 1 and self.learner.wants_stacks:
            final = stacked(self.stack.obs, final)
        episode = Episode(nothing, nothing, self.reward)  # the host keeps count
        step = Step(self.reward, self.terminated, self.truncated, nothing, GymState(final), episode)
        self.learner.ingest(Transition(self.state, self.action, step))

    def tensors(self) -> dict[str, Tensor]:
        """Nothing: CPU environments cannot be saved. A continued run begins new episodes."""
        return {}


class SyncCollector(CPUCollector):
    """Environments of this process, and the policy that plays them."""

    def __init__(self, rules: Rules, learner: Any, envs: GymEnvs, device: torch.device, prepare: Prepare) -> None:
        """`prepare` makes a function of fixed buffers fast: compiles it, captures it."""
        super().__init__(rules, learner, len(envs.envs), device)
        self.envs = envs
        self._act, self._ingest = prepare(self.act), prepare(self.ingest_row)

    def step(self) -> None:
        """Every environment plays one action of the behaviour policy; the learner ingests what came of it."""
        envs = self.envs
        self.state.obs.copy_(torch.from_numpy(envs.obs))
        self._act()
        envs.step(self.action.cpu().numpy())
        for name in ("final_obs", "reward", "terminated", "truncated"):
            getattr(self, name).copy_(torch.from_numpy(getattr(envs, name)))
        self._ingest()
        self.episode_stats.add(vars(envs))

    @torch.no_grad()
    def act(self) -> None:
        self.action.copy_(self.learner.act(self.see(), None))

    @torch.no_grad()
    def ingest_row(self) -> None:
        self.ingest()
        self.episode_start.copy_(self.terminated | self.truncated)

    def begin_again(self, seed: int, number: int) -> None:
        """Episodes that were not played before: `number` differs from those of earlier calls."""
        self.envs.reset(seed, number)
        self.episode_start.fill_(True)

    def close(self) -> None:
        self.envs.close()
