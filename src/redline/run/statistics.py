"""The interquartile mean (IQM) and 95 % intervals: bootstrap of means, Wilson for shares, Poisson for counts.

A bootstrap resamples the games with replacement and measures how much a statistic varies. Intervals are percentiles of the
resamples. The seed is fixed: the same games give the same interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

RESAMPLES = 2000
_FEWEST_RESAMPLES = 250
_WORK = 4_000_000  # numbers drawn per bootstrap; with more distinct values there are fewer resamples
_CHUNK = 1_000_000  # numbers in memory at once
_SEED = 0x5EED
_TAIL = 0.025
_Z = 1.959964  # standard deviations around the mean that contain 95 % of a normal distribution
_FEW = 10  # with fewer wins or losses, the bootstrap interval of a win rate is too narrow


class Interval(NamedTuple):
    """A 95 % interval: 2.5 % lie below it, 2.5 % above."""

    low: float
    high: float


def iqm(values: Any) -> Any:
    """Return the mean of the middle half of `values` (…, n) -> (…); if n is not divisible by 4, the edges count in part."""
    ordered = np.sort(np.asarray(values, dtype=np.float64), axis=-1)
    return ordered @ _middle(np.ones(ordered.shape[-1]))


def _middle(counts: NDArray[Any]) -> Values:
    """Return the weights (…, K) of ascending values with `counts` (…, K) in the mean of the middle half; they sum to 1."""
    cumulated = counts.cumsum(-1)
    total = float(cumulated.flat[-1])
    inside = np.clip(cumulated, total / 4, 3 * total / 4)
    weights: Values = np.diff(inside, prepend=total / 4) / (total / 2)
    return weights


def bootstrap(values: Values) -> tuple[Interval, Interval]:
    """Return intervals of the mean and of the IQM of `values` (n,). Equal values give intervals of width 0."""
    means, middles = _resampled(values, np.random.default_rng(_SEED))
    return _percentiles(means), _percentiles(middles)


def _resampled(values: Values, rng: np.random.Generator) -> tuple[Values, Values]:
    """Return the means and IQMs of resamples of `values`, each (B,).

    A resample is one multinomial draw of the count of each distinct value. Scores are counts with few distinct values, so a
    hundred thousand games cost no more than a hundred.
    """
    distinct, counts = np.unique(values, return_counts=True)
    total = len(values)
    remaining = max(_FEWEST_RESAMPLES, min(RESAMPLES, _WORK // len(distinct)))
    means, middles = [], []
    while remaining:
        rows = min(remaining, max(1, _CHUNK // len(distinct)))
        resamples = rng.multinomial(total, counts / total, size=rows)
        means.append(resamples @ distinct / total)
        middles.append((_middle(resamples) * distinct).sum(1))
        remaining -= rows
    return np.concatenate(means), np.concatenate(middles)


def _percentiles(figures: Values) -> Interval:
    low, high = np.quantile(figures, (_TAIL, 1 - _TAIL))
    return Interval(float(low), float(high))


def bootstrap_mean(values: Values) -> tuple[Values, Values]:
    """Return the ends (k,) of the intervals of the means over rows of `values` (n, k): n curves at k points.

    With two or three rows, the interval is the range of the rows: too narrow, but the best estimate from so few.
    """
    counts = np.random.default_rng(_SEED).multinomial(
        len(values), np.full(len(values), 1 / len(values)), size=RESAMPLES
    )
    low, high = np.quantile(counts @ values / len(values), (_TAIL, 1 - _TAIL), axis=0)
    return low, high


def bootstrap_runs(runs: Sequence[Values]) -> tuple[Interval, Interval]:
    """Return intervals of the mean and of the IQM of the runs' means. runs: values of each run's games, (n,) each.

    A stratified bootstrap: resample the runs, then the games of each chosen run. The interval covers both the choice of
    training seeds and the choice of games.
    """
    rng = np.random.default_rng(_SEED)
    resampled_means = [_resampled(values, rng)[0] for values in runs]
    chosen = rng.integers(len(runs), size=(RESAMPLES, len(runs)))
    means = np.empty(chosen.shape)
    for number, resampled in enumerate(resampled_means):
        mask = chosen == number
        means[mask] = rng.choice(resampled, int(mask.sum()))
    return _percentiles(means.mean(1)), _percentiles(iqm(means))


def share_interval(count: int, total: int) -> tuple[Interval, str]:
    """Return the interval of the share `count` of `total`, and its method: bootstrap, or Wilson for extreme shares.

    If all games were won, all resamples consist of wins, and the bootstrap interval would have no width.
    """
    if min(count, total - count) < _FEW:
        return wilson_interval(count, total), "Wilson"
    # The number of wins in a resample is binomial.
    resampled = np.random.default_rng(_SEED).binomial(total, count / total, size=RESAMPLES)
    return _percentiles(resampled / total), "bootstrap"


def wilson_interval(count: int, total: int) -> Interval:
    """Return Wilson's score interval: the shares for which `count` of `total` is within 1.96 standard deviations."""
    rate, square = count / total, _Z**2 / total
    centre = rate + square / 2
    reach = math.sqrt(rate * (1 - rate) * square + square**2 / 4)
    low, high = ((centre - reach) / (1 + square), (centre + reach) / (1 + square))
    return Interval(low if count else 0.0, high if count < total else 1.0)


def poisson_interval(count: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the exact (Garwood) interval of the expected number of rare events when `count` were observed."""
    from scipy.special import gammaincinv  # imported late: only evaluations need it, and training starts faster

    tail = (1 - confidence) / 2
    low = float(gammaincinv(count, tail)) if count else 0.0
    return low, float(gammaincinv(count + 1, 1 - tail))
