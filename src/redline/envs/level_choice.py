"""Which level to practise next, where an agent learns several: the less a level is won, the more of the steps it gets."""

from __future__ import annotations

import numpy as np

_RATE = 0.05  # weight of the newest game in a level's averages
_LEAST = 0.1  # share of a level that is always won, relative to one that is never won: it must not be forgotten


class LevelChoice:
    """Averages over the games of each level in one process, and the choice of the next level."""

    def __init__(self, count: int) -> None:
        self.win_rate = np.zeros(count)
        self.length = np.full(count, np.nan)  # of a game, in steps; NaN before the first one

    def record(self, level: int, won: bool, length: int) -> None:
        """Add a game of `length` steps to the averages of `level`."""
        if np.isnan(self.length[level]):
            self.length[level] = length
        self.length[level] += _RATE * (length - self.length[level])
        self.win_rate[level] += _RATE * (won - self.win_rate[level])

    def probabilities(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Return the probability of each level to be played next.

        A level's share of steps grows with its fraction of lost games. Its share of games also depends on how long they are.
        """
        known = self.length[~np.isnan(self.length)]
        length = np.where(np.isnan(self.length), known.mean() if len(known) else 1.0, self.length)
        games = (1 - self.win_rate + _LEAST) / length
        shares: np.ndarray[tuple[int], np.dtype[np.float64]] = games / games.sum()
        return shares

    def draw(self, rng: np.random.Generator) -> int:
        """Return a level to play next."""
        return int(rng.choice(len(self.win_rate), p=self.probabilities()))
