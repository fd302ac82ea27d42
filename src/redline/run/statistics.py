"""How far figures from a limited number of games can be believed: 95 % intervals, and the interquartile mean (IQM).

A bootstrap draws as many games again from those that were played, with replacement, and looks at how much the figure
varies. Its seed is fixed: the same games give the same interval. Intervals are percentiles of the resamples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Values = NDArray[np.float64]

RESAMPLES = 2000
_FEWEST_RESAMPLES = 250
_WORK = 4_000_000  # numbers drawn for a bootstrap before there are fewer resamples: about a third of a second
_CHUNK = 1_000_000  # of them in memory at once
_SEED = 0x5EED
_TAIL = 0.025
_Z = 1.959964  # standard deviations that hold 95 % of a normal distribution
_FEW = 10  # games won, or lost, below which a bootstrap of their share is too narrow


class Interval(NamedTuple):
    """95 %: 2.5 % lie below, 2.5 % above."""

    low: float
    high: float


def iqm(values: Any) -> Any:
    """The mean of the middle half of `values` (…, n) -> (…): where n is not divisible by 4, its edges count in part."""
    ordered = np.sort(np.asarray(values, dtype=np.float64), axis=-1)
    return ordered @ _middle(np.ones(ordered.shape[-1]))


def _middle(counts: NDArray[Any]) -> Values:
    """Weights (…, K) that the middle half gives to ascending values of which there are `counts` (…, K); they sum to 1."""
    upto = counts.cumsum(-1)
    total = float(upto.flat[-1])
    inside = np.clip(upto, total / 4, 3 * total / 4)
    weights: Values = np.diff(inside, prepend=total / 4) / (total / 2)
    return weights


def bootstrap(values: Values) -> tuple[Interval, Interval]:
    """Intervals of the mean and of the IQM of `values` (n,). All alike give intervals without width."""
    means, middles = _resampled(values, np.random.default_rng(_SEED))
    return _percentiles(means), _percentiles(middles)


def _resampled(values: Values, rng: np.random.Generator) -> tuple[Values, Values]:
    """Means and IQMs of resamples of `values`, each (B,).

    A resample is how often each distinct value was drawn. There are few of them, as scores are counts: a hundred
    thousand games cost no more than a hundred.
    """
    distinct, counts = np.unique(values, return_counts=True)
    total = len(values)
    left = max(_FEWEST_RESAMPLES, min(RESAMPLES, _WORK // len(distinct)))
    means, middles = [], []
    while left:
        rows = min(left, max(1, _CHUNK // len(distinct)))
        drawn = rng.multinomial(total, counts / total, size=rows)
        means.append(drawn @ distinct / total)
        middles.append((_middle(drawn) * distinct).sum(1))
        left -= rows
    return np.concatenate(means), np.concatenate(middles)


def _percentiles(figures: Values) -> Interval:
    low, high = np.quantile(figures, (_TAIL, 1 - _TAIL))
    return Interval(float(low), float(high))


def bootstrap_runs(runs: Sequence[Values]) -> tuple[Interval, Interval]:
    """Intervals of the mean and of the IQM of the runs' means; `runs` holds the values of each run's games, (n,) each.

    Runs are drawn with replacement, and games anew in every run that was drawn: both what another seed would have
    trained and what other games would have given is in the interval.
    """
    rng = np.random.default_rng(_SEED)
    means_of = [_resampled(values, rng)[0] for values in runs]
    chosen = rng.integers(len(runs), size=(RESAMPLES, len(runs)))
    means = np.empty(chosen.shape)
    for number, resampled in enumerate(means_of):
        here = chosen == number
        means[here] = rng.choice(resampled, int(here.sum()))
    return _percentiles(means.mean(1)), _percentiles(iqm(means))


def share_interval(count: int, total: int) -> tuple[Interval, str]:
    """The interval of a share, `count` of `total`, and how it was found: bootstrap, or Wilson where that says too little.

    If all games were won every resample is all won too, and the interval would have no width.
    """
    if min(count, total - count) < _FEW:
        return wilson_interval(count, total), "Wilson"
    drawn = np.random.default_rng(_SEED).binomial(total, count / total, size=RESAMPLES)  # what resampling comes to
    return _percentiles(drawn / total), "bootstrap"


def wilson_interval(count: int, total: int) -> Interval:
    """Wilson's score interval: the shares from which `count` of `total` is within 1.96 standard deviations."""
    rate, square = count / total, _Z**2 / total
    centre = rate + square / 2
    reach = math.sqrt(rate * (1 - rate) * square + square**2 / 4)
    low, high = ((centre - reach) / (1 + square), (centre + reach) / (1 + square))
    return Interval(low if count else 0.0, high if count < total else 1.0)


def poisson_interval(count: int, confidence: float = 0.95) -> tuple[float, float]:
    """The exact (Garwood) interval of the expected number of rare events where `count` were seen."""
    tail = (1 - confidence) / 2

    def solve(at_most: int, probability: float) -> float:
        """The expectation at which `at_most` events or fewer have this probability: it falls as the expectation grows."""
        low, high = 0.0, at_most + 10 * math.sqrt(at_most + 1) + 10
        for _ in range(100):
            middle = (low + high) / 2
            # Of a Poisson variable: P(X <= k) is the regularized upper incomplete gamma function of k + 1.
            found = torch.special.gammaincc(*torch.tensor([at_most + 1, middle], dtype=torch.float64))
            low, high = (middle, high) if float(found) > probability else (low, middle)
        return (low + high) / 2

    return (solve(count - 1, 1 - tail) if count else 0.0), solve(count, tail)
