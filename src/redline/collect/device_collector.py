"""From policy and games to rollouts, in step, on the device: nothing leaves it between log points."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from redline.collect import backplay
from redline.core.records import Step, Transition, assign, leaves, map_record
from redline.envs import batch
from redline.envs.batch import Rules

SNAPSHOTS = "snapshots."  # what names of tensors begin with that practice needs


class EpisodeStats(NamedTuple):
    """Sums over the episodes that ended since the last log, for each environment (N,): a step adds, only a log adds up environments.

    A sum over all environments in every step would be one block's work on a GPU while the others wait.
    """

    episodes: Tensor  # int32
    length: Tensor  # int64
    score: Tensor  # int64
    score_max: Tensor  # int32
    reward: Tensor  # float32
    wins: Tensor  # int32
    truncations: Tensor  # int32

    @staticmethod
    def zero(envs: int, device: torch.device) -> EpisodeStats:
        wide, real = torch.int64, torch.float32
        dtypes = (torch.int32, wide, wide, torch.int32, real, torch.int32, torch.int32)
        return EpisodeStats(*(torch.zeros(envs, dtype=dtype, device=device) for dtype in dtypes))

    def add(self, step: Step, counts: Tensor | None = None) -> None:
        """A step of all environments, or of those that count, (N,) bool."""
        ended, won, truncated = step.terminated | step.truncated, step.won, step.truncated
        if counts is not None:
            ended, won, truncated = ended & counts, won & counts, truncated & counts
        score = torch.where(ended, step.episode.score, 0)
        self.episodes.add_(ended)
        self.length.add_(torch.where(ended, step.episode.length, 0))
        self.score.add_(score)
        self.score_max.copy_(torch.maximum(self.score_max, score))
        self.reward.add_(torch.where(ended, step.episode.episode_return, 0.0))
        self.wins.add_(won)
        self.truncations.add_(truncated)

    def read(self) -> dict[str, float]:
        """Means over the episodes counted; the accumulators start again. Waits for the device."""
        whole = {
            k: x for k, x in self._asdict().items() if not x.is_floating_point()
        }  # float32 would round large counts
        sums = [x.max().to(torch.int64) if k == "score_max" else x.sum(dtype=torch.int64) for k, x in whole.items()]
        values: dict[str, float] = dict(zip(whole, torch.stack(sums).tolist(), strict=True))
        values["reward"] = float(self.reward.sum())
        for x in self:
            x.zero_()
        count = max(values["episodes"], 1.0)
        found = {"episodes": values["episodes"]}
        if values["episodes"]:
            found |= {
                "score": values["score"] / count,
                "score_max": values["score_max"],
                "length": values["length"] / count,
                "reward": values["reward"] / count,
                "win_rate": values["wins"] / count,
                "truncated": values["truncations"] / count,
            }
        return found


class CollectorBase:
    """What every collector is told and asked by the loop; most have nothing to do or to say."""

    def on_update(self, progress: float) -> None:
        """After every update, with the share of training done."""

    def measures(self) -> dict[str, float]:
        """How collecting goes, since the last time this was asked."""
        return {}


class DeviceCollector(CollectorBase):
    """N environments in static buffers, and the policy that plays them."""

    def __init__(
        self, rules: Rules, learner: Any, envs: batch.EnvState, again: float = 0.0, again_steps: int = 32
    ) -> None:
        """The share `again` of games begins some moves before the environment's last loss, see `retry`."""
        self.rules, self.learner = rules, learner
        self.envs = map_record(torch.clone, envs)
        self.again, self.again_steps = again, again_steps
        self.snapshots = backplay.keep(envs) if again else None
        self.episode_stats = EpisodeStats.zero(len(envs.key), envs.key.device)

    @torch.no_grad()
    def step(self) -> None:
        """Every environment plays one action of the behaviour policy; the learner ingests what came of it."""
        state = self.envs.game
        obs = self.rules.game.observe(self.rules.config, state)
        action = self.learner.act(obs, batch.legal(self.rules, state))
        kept = self.snapshots
        envs, step = batch.step(self.rules, self.envs, action, None if kept is None else kept.left == 1)
        self.learner.ingest(Transition(state, action, step))
        self.episode_stats.add(step, None if kept is None else kept.left == 0)
        if kept is not None:
            envs, snapshots = backplay.go_back(envs, kept, step, self.again, self.again_steps)
            assign(kept, snapshots)
        assign(self.envs, envs)

    def close(self) -> None:
        """There is nothing to let go of."""

    def tensors(self) -> dict[str, Tensor]:
        kept = {} if self.snapshots is None else leaves(self.snapshots, SNAPSHOTS)
        return leaves(self.envs) | kept
