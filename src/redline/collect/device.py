"""From policy and games to rollouts, in step, on the device: nothing leaves it between log points."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from redline.core.records import Rollout, Step, assign, leaves, map_record
from redline.envs import batch
from redline.envs.batch import Rules


class Tally(NamedTuple):
    """Device accumulators over the episodes that ended since the last log. Each ()."""

    episodes: Tensor  # int64
    length: Tensor  # int64
    score: Tensor  # int64
    score_max: Tensor  # int64
    reward: Tensor  # float32
    wins: Tensor  # int64
    truncations: Tensor  # int64

    @staticmethod
    def zero(device: torch.device) -> Tally:
        def whole() -> Tensor:
            return torch.zeros((), dtype=torch.int64, device=device)

        return Tally(whole(), whole(), whole(), whole(), torch.zeros((), device=device), whole(), whole())

    def add(self, step: Step) -> None:
        ended = step.terminated | step.truncated
        score = torch.where(ended, step.episode.score, 0)
        self.episodes.add_(ended.sum())
        self.length.add_(torch.where(ended, step.episode.length, 0).sum())
        self.score.add_(score.sum())
        self.score_max.copy_(torch.maximum(self.score_max, score.max().to(torch.int64)))
        self.reward.add_(torch.where(ended, step.episode.reward, 0.0).sum())
        self.wins.add_(step.won.sum())
        self.truncations.add_(step.truncated.sum())

    def read(self) -> dict[str, float]:
        """Means over the episodes counted; the accumulators start again. The one host synchronisation of a log."""
        values = {name: float(x) for name, x in zip(self._fields, torch.stack([x.double() for x in self]).tolist())}
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


class Collector:
    """N lanes in static buffers, and the policy that plays them."""

    def __init__(self, rules: Rules, learner: Any, lanes: batch.Lanes) -> None:
        self.rules, self.learner = rules, learner
        self.lanes = map_record(torch.clone, lanes)
        self.tally = Tally.zero(lanes.key.device)

    @torch.no_grad()
    def step(self) -> None:
        """Every lane plays one action of the behaviour policy; the learner ingests what came of it."""
        state = self.lanes.game
        action = self.learner.act(self.rules.game.observe(self.rules.config, state))
        lanes, step = batch.step(self.rules, self.lanes, action)
        self.learner.ingest(Rollout(state, action, step))
        self.tally.add(step)
        assign(self.lanes, lanes)

    def tensors(self) -> dict[str, Tensor]:
        return leaves(self.lanes)

    def load(self, tensors: dict[str, Tensor]) -> None:
        for name, value in self.tensors().items():
            value.copy_(tensors[name])
