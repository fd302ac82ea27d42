"""From policy and environments of the host to rollouts, in step: the learner chooses, the environments play, all wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from redline.core.records import Episode, Rollout, Step
from redline.envs.batch import Rules
from redline.envs.host import HostEnvs, HostState, stacked


class HostTally:
    """What became of the episodes that ended since the last log."""

    def __init__(self) -> None:
        self.ended: list[tuple[float, float, float, bool]] = []  # score, length, reward, truncated

    def add(self, envs: HostEnvs) -> None:
        for lane in np.flatnonzero(envs.over):
            self.ended.append((envs.score[lane], envs.length[lane], envs.earned[lane], not envs.lost[lane]))

    def read(self) -> dict[str, float]:
        """Means over the episodes counted, which start again."""
        found: dict[str, float] = {"episodes": len(self.ended)}
        if self.ended:
            score, length, reward, truncated = np.array(self.ended, dtype=np.float64).T
            found |= {"score": float(score.mean()), "score_max": float(score.max()), "length": float(length.mean())}
            found |= {"reward": float(reward.mean()), "win_rate": 0.0, "truncated": float(truncated.mean())}
        self.ended = []
        return found


class HostCollector:
    """N environments of the host, and the policy that plays them."""

    def __init__(
        self,
        rules: Rules,
        learner: Any,
        envs: HostEnvs,
        device: torch.device,
        prepare: Callable[[Callable[[], None]], Callable[[], None]],
    ) -> None:
        """`prepare` makes a function of fixed buffers fast: compiles it, captures it."""
        self.rules, self.learner, self.envs = rules, learner, envs
        self.tally = HostTally()
        count = len(envs.envs)
        self.action = torch.zeros(count, dtype=torch.int64, device=device)
        # What the host writes and the device reads; on a CPU both are the same memory.
        self.arrays = {"final": envs.final, "reward": envs.reward}
        self.arrays |= {"terminated": envs.terminated, "truncated": envs.truncated}
        self.inputs = {name: torch.from_numpy(array).to(device) for name, array in self.arrays.items()}
        self.state = HostState(torch.from_numpy(envs.obs).to(device, copy=True))  # the newest frames
        self.frames = learner.spec.frames
        self.begins = torch.ones(count, dtype=torch.bool, device=device)  # the newest frame is an episode's first
        stack = self.state.obs.unsqueeze(1).repeat_interleave(self.frames, 1)
        self.stack = HostState(stack) if self.frames > 1 else self.state  # what is seen
        self.nothing = torch.zeros(count, dtype=torch.bool, device=device)  # no environment says that it was won
        self._act, self._ingest = prepare(self.act), prepare(self.ingest)

    def step(self) -> None:
        """Every environment plays one action of the behaviour policy; the learner ingests what came of it."""
        self.state.obs.copy_(torch.from_numpy(self.envs.obs))
        self._act()
        self.envs.step(self.action.cpu().numpy())
        for name, tensor in self.inputs.items():
            if tensor.device.type != "cpu":
                tensor.copy_(torch.from_numpy(self.arrays[name]))
        self._ingest()
        self.tally.add(self.envs)

    @torch.no_grad()
    def act(self) -> None:
        if self.frames > 1:
            self.stack.obs.copy_(stacked(self.stack.obs, self.state.obs, self.begins))
        obs = self.rules.game.observe(self.rules.config, self.stack)
        self.action.copy_(self.learner.act(obs, None))

    @torch.no_grad()
    def ingest(self) -> None:
        reward, nothing = self.inputs["reward"], self.nothing
        terminated, truncated = self.inputs["terminated"], self.inputs["truncated"]
        episode = Episode(nothing, nothing, reward)  # the host keeps count
        final = self.inputs["final"]
        if self.frames > 1 and self.learner.wants_stacks:
            final = stacked(self.stack.obs, final)
        step = Step(reward, terminated, truncated, nothing, HostState(final), episode)
        self.learner.ingest(Rollout(self.state, self.action, step))
        self.begins.copy_(terminated | truncated)

    def begin_again(self, seed: int, number: int) -> None:
        """Episodes that were not played before: `number` differs from those of earlier calls."""
        self.envs.reset(seed, number)
        self.begins.fill_(True)

    def close(self) -> None:
        self.envs.close()

    def tensors(self) -> dict[str, Tensor]:
        """Nothing: environments of the host cannot be saved. A continued run begins new episodes."""
        return {}
