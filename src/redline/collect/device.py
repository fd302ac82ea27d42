"""From policy and games to rollouts, in step, on the device: nothing leaves it between log points."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from redline.collect import retry
from redline.core.records import Rollout, Step, assign, leaves, map_record
from redline.envs import batch
from redline.envs.batch import Rules

MOMENTS = "moments."  # what names of tensors begin with that practice needs


class Tally(NamedTuple):
    """Sums over the episodes that ended since the last log, for each lane (N,): a step adds, only a log adds up lanes.

    A sum over all lanes in every step would be one block's work on a GPU while the others wait.
    """

    episodes: Tensor  # int32
    length: Tensor  # int64
    score: Tensor  # int64
    score_max: Tensor  # int32
    reward: Tensor  # float32
    wins: Tensor  # int32
    truncations: Tensor  # int32

    @staticmethod
    def zero(lanes: int, device: torch.device) -> Tally:
        wide, real = torch.int64, torch.float32
        dtypes = (torch.int32, wide, wide, torch.int32, real, torch.int32, torch.int32)
        return Tally(*(torch.zeros(lanes, dtype=dtype, device=device) for dtype in dtypes))

    def add(self, step: Step, counts: Tensor | None = None) -> None:
        """A step of all lanes, or of those that count, (N,) bool."""
        ended, won, truncated = step.terminated | step.truncated, step.won, step.truncated
        if counts is not None:
            ended, won, truncated = ended & counts, won & counts, truncated & counts
        score = torch.where(ended, step.episode.score, 0)
        self.episodes.add_(ended)
        self.length.add_(torch.where(ended, step.episode.length, 0))
        self.score.add_(score)
        self.score_max.copy_(torch.maximum(self.score_max, score))
        self.reward.add_(torch.where(ended, step.episode.reward, 0.0))
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


class Collecting:
    """What every collector is told and asked by the loop; most have nothing to do or to say."""

    def learned(self, share: float) -> None:
        """After every update, with the share of training done."""

    def measures(self) -> dict[str, float]:
        """How collecting goes, since the last time this was asked."""
        return {}


class Collector(Collecting):
    """N lanes in static buffers, and the policy that plays them."""

    def __init__(
        self, rules: Rules, learner: Any, lanes: batch.Lanes, again: float = 0.0, again_steps: int = 32
    ) -> None:
        """The share `again` of games begins some moves before the lane's last loss, see `retry`."""
        self.rules, self.learner = rules, learner
        self.lanes = map_record(torch.clone, lanes)
        self.again, self.again_steps = again, again_steps
        self.moments = retry.keep(lanes) if again else None
        self.tally = Tally.zero(len(lanes.key), lanes.key.device)

    @torch.no_grad()
    def step(self) -> None:
        """Every lane plays one action of the behaviour policy; the learner ingests what came of it."""
        state = self.lanes.game
        obs = self.rules.game.observe(self.rules.config, state)
        action = self.learner.act(obs, batch.legal(self.rules, state))
        kept = self.moments
        lanes, step = batch.step(self.rules, self.lanes, action, None if kept is None else kept.left == 1)
        self.learner.ingest(Rollout(state, action, step))
        self.tally.add(step, None if kept is None else kept.left == 0)
        if kept is not None:
            lanes, moments = retry.go_back(lanes, kept, step, self.again, self.again_steps)
            assign(kept, moments)
        assign(self.lanes, lanes)

    def close(self) -> None:
        """There is nothing to let go of."""

    def tensors(self) -> dict[str, Tensor]:
        kept = {} if self.moments is None else leaves(self.moments, MOMENTS)
        return leaves(self.lanes) | kept
