"""Greedy play on fixed held-out seeds, in parallel, with every slot its quota of episodes.

Counting the first games to finish would favour short ones; here each slot plays the same number of games to their end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from redline.core.errors import UserError
from redline.envs import batch
from redline.envs.batch import Rules

HELD_OUT = 0x4E1D_0000_0000  # above any training seed: evaluation never plays a training game
MAX_SEED = 2**46  # training seeds end here
_MAX_SLOTS = 4096
_LOOK_EVERY = 32  # steps between looks at whether all are done: the only host synchronisation


@dataclass(frozen=True)
class Evaluation:
    """Results of complete episodes, each list in the order of slots."""

    scores: Tensor  # (E,) float64
    lengths: Tensor  # (E,) float64
    wins: Tensor  # (E,) bool

    def summary(self) -> dict[str, Any]:
        """Fields of `--json`."""
        count = len(self.scores)
        spread = float(self.scores.std(correction=1)) if count > 1 else 0.0
        wins = int(self.wins.sum())
        return {
            "episodes": count,
            "score_mean": float(self.scores.mean()),
            "score_ci95": 1.96 * spread / math.sqrt(count),
            "score_min": float(self.scores.min()),
            "score_max": float(self.scores.max()),
            "length_mean": float(self.lengths.mean()),
            "win_rate": wins / count,
            "steps_per_win": float(self.lengths[self.wins].mean()) if wins else None,
        }


def greedy(net: nn.Module, device: torch.device) -> Callable[[Tensor], Tensor]:
    """The policy that takes the action of the highest value: observations (N, …) of any device -> actions (N,) int64."""

    @torch.no_grad()
    def policy(obs: Tensor) -> Tensor:
        values: Tensor = net(obs.to(device))
        return values.argmax(1)

    return policy


@torch.no_grad()
def evaluate(
    rules: Rules,
    policy: Callable[[Tensor], Tensor],
    episodes: int,
    device: torch.device,
    seed: int = 0,
    progress: Callable[[int], None] = lambda _: None,
) -> Evaluation:
    """Play `episodes` games with `policy`: observations (N, …) -> actions (N,)."""
    if episodes < 1:
        raise UserError(f"episodes is {episodes}; expected at least 1.")
    if not 0 <= seed < MAX_SEED:
        raise UserError(f"seed is {seed}; expected 0 to {MAX_SEED - 1:,}.")
    slots = min(episodes, _MAX_SLOTS)
    slot = torch.arange(slots, device=device)
    quota = episodes // slots + (slot < episodes % slots).to(torch.int32)
    first = torch.cumsum(quota, 0) - quota  # where a slot's results begin
    # The last column takes what is not counted. int64: not every device has float64.
    results = torch.zeros(3, episodes + 1, dtype=torch.int64, device=device)
    lanes = batch.reset(rules, batch.lane_keys(HELD_OUT + seed, slot))
    steps = 0
    while True:
        played = lanes.played
        action = policy(rules.game.observe(rules.config, lanes.game))
        lanes, step = batch.step(rules, lanes, action)
        counts = (step.terminated | step.truncated) & (played < quota)
        place = torch.where(counts, first + played, episodes)
        results[0, place] = step.episode.score.to(torch.int64)
        results[1, place] = step.episode.length.to(torch.int64)
        results[2, place] = step.won.to(torch.int64)
        steps += 1
        if steps % _LOOK_EVERY == 0:
            busy = lanes.played < quota
            left = int((quota - lanes.played).clamp(min=0).sum())
            progress(episodes - left)
            if left == 0:
                break
            if int(busy.sum()) <= len(busy) // 2:  # half the slots have nothing to do: go on with the others
                lanes, quota, first = _keep(lanes, busy), quota[busy], first[busy]
    scores, lengths, wins = results[:, :episodes].cpu().to(torch.float64)
    return Evaluation(scores, lengths, wins > 0)


def _keep(record: Any, mask: Tensor) -> Any:
    """The lanes where `mask` is True."""
    return record._make(_keep(x, mask) if isinstance(x, tuple) else x[mask] for x in record)
