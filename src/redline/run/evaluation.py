"""Evaluation results: scores, lengths and endings of games, and their statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from redline.run.statistics import bootstrap, iqm, poisson_interval, share_interval

# Figures of a level.
_OF_LEVEL = (
    "episodes",
    "score_mean",
    "score_low",
    "score_high",
    "length_mean",
    "win_rate",
    "win_rate_low",
    "win_rate_high",
)


@dataclass(frozen=True)
class Evaluation:
    """The results of E games, each (E,): the games of slot 0 in order, then those of slot 1, and so on."""

    scores: Tensor  # float64; of an unfinished game, the score so far
    lengths: Tensor  # float64
    wins: Tensor  # bool
    game_over: Tensor  # bool: terminated, neither truncated nor unfinished
    finished: Tensor  # bool: terminated or truncated
    stopped_by: str = "episodes"  # or max_steps
    levels: tuple[str, ...] = ()  # (E,) the level of each game; empty unless there are several levels

    def summary(self) -> dict[str, Any]:
        """Return the statistics of the games, named like the fields of `--json`.

        `score_mean` and similar statistics cover all games begun: a lower bound if some are unfinished.
        `score_censored` is the score per game over: unfinished games count with their score so far, but not as a game
        over. It estimates the mean score of complete games if the end is equally likely at any score.
        `_low` and `_high` are the ends of a 95 % interval; `score_ci95` is half its width. A figure that cannot be
        estimated (an interval from one game, a score per game over without a game over) is None.
        `levels`, present if there are several, has the main figures of each level by name.
        """
        count, scores = len(self.scores), self.scores.numpy()
        mean, middle = bootstrap(scores) if count > 1 else (None, None)
        wins = int(self.wins.sum())
        won, won_by = share_interval(wins, count)
        total, game_overs = float(self.scores.sum()), int(self.game_over.sum())
        fewest, most = poisson_interval(game_overs)
        return {
            "episodes": count,
            "finished": int(self.finished.sum()),
            "game_overs": game_overs,
            "eval_steps": int(self.lengths.sum()),
            "stopped_by": self.stopped_by,
            "score_mean": total / count,
            "score_ci95": (mean.high - mean.low) / 2 if mean else 0.0,
            "score_low": mean.low if mean else None,
            "score_high": mean.high if mean else None,
            "score_iqm": float(iqm(scores)),
            "score_iqm_low": middle.low if middle else None,
            "score_iqm_high": middle.high if middle else None,
            "score_median": float(np.median(scores)),
            "score_min": float(self.scores.min()),
            "score_max": float(self.scores.max()),
            "total_score": total,
            "score_censored": total / game_overs if game_overs else None,
            "score_censored_low": total / most if total >= 0 else total / fewest if fewest else None,
            "score_censored_high": total / most if total < 0 else total / fewest if fewest else None,
            "length_mean": float(self.lengths.mean()),
            "win_rate": wins / count,
            "win_rate_low": won.low,
            "win_rate_high": won.high,
            "win_rate_interval": won_by,
            "steps_per_win": float(self.lengths[self.wins].mean()) if wins else None,
        } | ({"levels": self._by_level()} if self.levels else {})

    def _by_level(self) -> dict[str, dict[str, Any]]:
        parts = {}
        for level in dict.fromkeys(self.levels):
            its = torch.tensor([played == level for played in self.levels])
            endings = self.wins[its], self.game_over[its], self.finished[its]
            summary = Evaluation(self.scores[its], self.lengths[its], *endings).summary()
            parts[level] = {name: summary[name] for name in _OF_LEVEL}
        return parts
