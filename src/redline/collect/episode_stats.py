"""Statistics of the episodes since the last log point: on the device for tensor games, on the host for CPU environments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from redline.core.records import Step

Array = np.ndarray[Any, Any]


class DeviceEpisodeStats(NamedTuple):
    """Sums over the ended episodes of each environment, (N,) each.

    A step adds to each environment's own sums; only `read` sums over environments. A reduction over all environments in
    every step would occupy a single block of a GPU while the others wait.
    """

    episodes: Tensor  # int32
    length: Tensor  # int64
    score: Tensor  # int64
    score_max: Tensor  # int32
    reward: Tensor  # float32: episode returns
    wins: Tensor  # int32
    truncations: Tensor  # int32

    @staticmethod
    def zero(num_envs: int, device: torch.device) -> DeviceEpisodeStats:
        """Return statistics of no episodes."""
        wide, real = torch.int64, torch.float32
        dtypes = (torch.int32, wide, wide, torch.int32, real, torch.int32, torch.int32)
        return DeviceEpisodeStats(*(torch.zeros(num_envs, dtype=dtype, device=device) for dtype in dtypes))

    def add(self, step: Step, counts: Tensor | None = None) -> None:
        """Add the episodes that ended in a step; with `counts` (N,) bool, only where it is True."""
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
        """Return means over episodes, see `EpisodeStats`, and reset the sums in place; synchronizes with the device."""
        whole = {
            k: x for k, x in self._asdict().items() if not x.is_floating_point()
        }  # float32 would round large counts
        sums = [x.max().to(torch.int64) if k == "score_max" else x.sum(dtype=torch.int64) for k, x in whole.items()]
        totals: dict[str, float] = dict(zip(whole, torch.stack(sums).tolist(), strict=True))
        totals["reward"] = float(self.reward.sum())
        for x in self:
            x.zero_()
        episodes = totals["episodes"]
        if not episodes:
            return {"episodes": episodes}
        return {
            "episodes": episodes,
            "score": totals["score"] / episodes,
            "score_max": totals["score_max"],
            "length": totals["length"] / episodes,
            "reward": totals["reward"] / episodes,
            "win_rate": totals["wins"] / episodes,
            "truncated": totals["truncations"] / episodes,
        }


class CPUEpisodeStats:
    """Results of the ended episodes of CPU environments."""

    def __init__(self, levels: Sequence[str] = ()) -> None:
        """levels: names of the levels; empty if there is only one."""
        self.levels = levels
        self.ended: list[tuple[float, float, float, bool, bool]] = []  # score, length, return, truncated, won
        self.ended_in: list[int] = []  # index of each ended episode's level

    def add(self, step: Mapping[str, Array]) -> None:
        """Add the episodes that ended in a step.

        `step` holds (N,) arrays of all environments: `episode_over`, `score`, `length`, `episode_return`, `lost`, `won`, and
        `level` if there are several.
        """
        for env_index in np.flatnonzero(step["episode_over"]).tolist():
            score, length, episode_return, lost, won = (
                step[name][env_index] for name in ("score", "length", "episode_return", "lost", "won")
            )
            self.ended.append((score, length, episode_return, not (lost or won), won))
            if self.levels:
                self.ended_in.append(int(step["level"][env_index]))

    def read(self) -> dict[str, float]:
        """Return means over episodes, see `EpisodeStats`, and start over.

        With several levels, `level/NAME/episodes`, `…/score` and `…/win_rate` hold the statistics of each level.
        """
        episodes, self.ended, levels, self.ended_in = self.ended, [], np.array(self.ended_in), []
        if not episodes:
            return {"episodes": 0}
        score, length, episode_return, truncated, won = np.array(episodes, dtype=np.float64).T
        return {
            "episodes": len(episodes),
            "score": float(score.mean()),
            "score_max": float(score.max()),
            "length": float(length.mean()),
            "reward": float(episode_return.mean()),
            "win_rate": float(won.mean()),
            "truncated": float(truncated.mean()),
            **self._by_level(levels, score, won),
        }

    def _by_level(self, levels: Array, score: Array, won: Array) -> dict[str, float]:
        """Return the statistics of each level with ended episodes, from their levels, scores and wins, (E,) each."""
        figures: dict[str, float] = {}
        for index, level in enumerate(self.levels):
            its = levels == index
            if its.any():
                means = {"score": float(score[its].mean()), "win_rate": float(won[its].mean())}
                figures |= {f"level/{level}/{name}": x for name, x in {"episodes": int(its.sum()), **means}.items()}
        return figures
