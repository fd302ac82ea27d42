"""Intervals and the interquartile mean: by hand, against plain loops, and how often the truth is inside."""

from __future__ import annotations

import math
import random
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redline.run import statistics
from redline.run.statistics import (
    RESAMPLES,
    Values,
    bootstrap,
    bootstrap_runs,
    iqm,
    poisson_interval,
    share_interval,
    wilson_interval,
)


def plain_iqm(values: list[float]) -> float:
    """Every value four times: then a quarter of them is a whole number, and is cut off at both ends."""
    ordered = sorted(values * 4)
    middle = ordered[len(values) : -len(values)]
    return sum(middle) / len(middle)


def plain_percentiles(figures: list[float]) -> tuple[float, float]:
    ordered = sorted(figures)
    return ordered[round(0.025 * (len(ordered) - 1))], ordered[round(0.975 * (len(ordered) - 1))]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def skewed(count: int, seed: int = 0) -> Values:
    return np.random.default_rng(seed).exponential(10, count)


# ---- interquartile mean


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([7], 7),
        ([1, 4], 2.5),
        ([0, 9, 3], 3.5),  # (0 / 4 + 3 + 9 / 4) / 1.5
        ([1, 2, 3, 4], 2.5),
        ([10, 0, 1, 3, 2], 2),  # (0.75 * 1 + 2 + 0.75 * 3) / 2.5
        ([100, 0, 5, 4, 3, 2, 1, 6], 3.5),  # the mean of 2, 3, 4, 5
        ([5] * 11, 5),
    ],
)
def test_iqm_by_hand(values: list[float], expected: float) -> None:
    assert iqm(values) == pytest.approx(expected)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40))
def test_iqm_is_the_mean_of_the_middle_half(values: list[float]) -> None:
    assert iqm(values) == pytest.approx(plain_iqm(values), rel=1e-9, abs=1e-6)


def test_iqm_of_rows() -> None:
    rows = skewed(60).reshape(5, 12)
    assert iqm(rows) == pytest.approx([plain_iqm(row.tolist()) for row in rows])


# ---- bootstrap over games


@pytest.mark.parametrize("values", [skewed(40), np.round(skewed(200))], ids=["distinct", "counts"])
def test_bootstrap_is_that_of_a_plain_loop(values: Values) -> None:
    draw = random.Random(1)
    resamples = [draw.choices(values.tolist(), k=len(values)) for _ in range(4000)]
    for found, figure in zip(bootstrap(values), (mean, plain_iqm), strict=True):
        expected = plain_percentiles([figure(resample) for resample in resamples])
        assert found == pytest.approx(expected, abs=0.06 * (expected[1] - expected[0]))


def test_bootstrap_of_all_resamples_there_are() -> None:
    """Of three games there are 27 resamples, each as likely; their 2.5 and 97.5 % are the ends, once in 27."""
    values = np.array([0.0, 3.0, 12.0])
    means = sorted(sum(resample) / 3 for resample in product(values, repeat=3))
    assert bootstrap(values)[0] == (means[0], means[-1])
    drawn, middles = statistics._resampled(values, np.random.default_rng(0))
    assert set(np.round(drawn, 9)) == {round(x, 9) for x in means}
    assert set(np.round(middles, 9)) == {round(plain_iqm(list(x)), 9) for x in product(values.tolist(), repeat=3)}
    for value in {round(x, 9) for x in means}:
        expected = sum(round(x, 9) == value for x in means) / 27
        assert np.mean(np.round(drawn, 9) == value) == pytest.approx(expected, abs=4 * math.sqrt(expected / RESAMPLES))


def test_bootstrap_of_many_games_is_the_normal_interval() -> None:
    values = skewed(4096)
    reach = 1.96 * values.std() / math.sqrt(len(values))
    assert bootstrap(values)[0] == pytest.approx((values.mean() - reach, values.mean() + reach), abs=0.1 * reach)


def test_bootstrap_holds_the_truth_as_often_as_it_says() -> None:
    draw = np.random.default_rng(2)
    inside = [low <= 5 <= high for low, high in (bootstrap(draw.poisson(5, 60).astype(float))[0] for _ in range(400))]
    assert 0.91 < np.mean(inside) < 0.98


def test_bootstrap_at_its_limits() -> None:
    assert bootstrap(np.array([4.0])) == ((4, 4), (4, 4))
    assert bootstrap(np.full(100, 7.0)) == ((7, 7), (7, 7))
    assert bootstrap(np.array([0.0, 1.0]))[0] == (0, 1)


def test_the_same_games_give_the_same_interval_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    values = skewed(50)
    found = bootstrap(values)
    assert bootstrap(values[::-1].copy()) == found
    assert bootstrap(skewed(50, seed=1)) != found
    monkeypatch.setattr(statistics, "_CHUNK", 120)  # two resamples at once
    assert np.array(bootstrap(values)) == pytest.approx(np.array(found), rel=1e-12)


def test_many_games_cost_little() -> None:
    """What is drawn is bounded: many games of few scores have all resamples, many scores fewer."""
    few = np.random.default_rng(0).integers(0, 100, 100_000).astype(float)
    assert len(statistics._resampled(few, np.random.default_rng(0))[0]) == RESAMPLES
    assert len(statistics._resampled(skewed(4096), np.random.default_rng(0))[0]) == 976
    assert len(statistics._resampled(skewed(20_000), np.random.default_rng(0))[0]) == 250


# ---- bootstrap over runs


def test_bootstrap_over_runs_is_that_of_a_plain_loop() -> None:
    runs = [skewed(30, seed) + 3 * seed for seed in range(5)]
    draw = random.Random(3)
    means, middles = [], []
    for _ in range(4000):
        chosen = [draw.choice(runs).tolist() for _ in runs]
        of_runs = [mean(draw.choices(run, k=len(run))) for run in chosen]
        means.append(mean(of_runs))
        middles.append(plain_iqm(of_runs))
    for found, figures in zip(bootstrap_runs(runs), (means, middles), strict=True):
        expected = plain_percentiles(figures)
        assert found == pytest.approx(expected, abs=0.06 * (expected[1] - expected[0]))


def test_games_of_one_run_are_not_taken_for_runs() -> None:
    """Runs far apart: the interval is theirs, however many games were played; of all games together it would be narrow."""
    runs = [np.full(1000, level) for level in (0.0, 10.0, 20.0, 30.0)]
    (low, high), _ = bootstrap_runs(runs)
    assert (low, high) == pytest.approx((5, 25), abs=2.5)  # 15 ± 1.96 * 11.2 / 2, in steps of 2.5
    narrow = bootstrap(np.concatenate(runs))[0]
    assert high - low > 10 * (narrow.high - narrow.low)


def test_games_count_where_runs_are_alike() -> None:
    """Runs of the same games: what is left is the chance of the games, that of one run over the root of their number."""
    runs = [skewed(200)] * 4
    low, high = bootstrap_runs(runs)[0]
    alone = bootstrap(runs[0])[0]
    assert high - low == pytest.approx((alone.high - alone.low) / 2, rel=0.1)
    assert bootstrap_runs([np.ones(3), np.ones(5)]) == ((1, 1), (1, 1))


def test_bootstrap_over_runs_holds_the_truth_as_often_as_it_says() -> None:
    draw = np.random.default_rng(4)
    inside = []
    for _ in range(100):
        levels = draw.normal(50, 5, 12)
        low, high = bootstrap_runs([draw.poisson(level, 20).astype(float) for level in levels])[0]
        inside.append(low <= 50 <= high)
    assert 0.86 < np.mean(inside) < 0.99  # a dozen runs are few: somewhat less than 95 %


# ---- shares and counts


@pytest.mark.parametrize(
    ("count", "total", "low", "high"),
    [
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (5, 10, 0.2366, 0.7634),
        (1, 1, 0.2065, 1.0),
        (81, 263, 0.2553, 0.3662),
    ],
)
def test_wilson_interval_of_the_tables(count: int, total: int, low: float, high: float) -> None:
    assert wilson_interval(count, total) == (pytest.approx(low, abs=6e-5), pytest.approx(high, abs=6e-5))


@pytest.mark.parametrize(("count", "total"), [(1, 8), (30, 31), (200, 1000)])
def test_wilson_interval_ends_where_the_count_is_too_far_off(count: int, total: int) -> None:
    for rate in wilson_interval(count, total):
        assert abs(count / total - rate) == pytest.approx(1.96 * math.sqrt(rate * (1 - rate) / total), rel=1e-4)


@pytest.mark.parametrize(("count", "total"), [(0, 4096), (4096, 4096), (9, 256), (247, 256), (1, 1)])
def test_a_share_of_all_or_nearly_all_has_the_interval_of_wilson(count: int, total: int) -> None:
    interval, found_by = share_interval(count, total)
    assert found_by == "Wilson"
    assert interval == wilson_interval(count, total)
    assert interval.low < interval.high


@pytest.mark.parametrize(("count", "total"), [(10, 256), (128, 256), (246, 256), (60_000, 100_000)])
def test_a_share_of_some_is_bootstrapped(count: int, total: int) -> None:
    interval, found_by = share_interval(count, total)
    assert found_by == "bootstrap"
    wins = np.repeat([0.0, 1.0], [total - count, count])
    expected = bootstrap(wins)[0]
    assert interval == pytest.approx(expected, abs=0.06 * (expected.high - expected.low) + 1 / total)


def test_a_share_holds_the_truth_as_often_as_it_says() -> None:
    for truth, total in ((0.5, 200), (0.99, 256), (0.02, 300)):
        counts = np.random.default_rng(5).binomial(total, truth, 300)
        intervals = [share_interval(int(count), total)[0] for count in counts]
        assert 0.91 < np.mean([low <= truth <= high for low, high in intervals]) <= 1.0


@pytest.mark.parametrize(
    ("count", "low", "high"), [(0, 0.0, 3.6889), (1, 0.0253, 5.5716), (2, 0.2422, 7.2247), (10, 4.7954, 18.3904)]
)
def test_poisson_interval_of_the_tables(count: int, low: float, high: float) -> None:
    """Values of Garwood (1936), as statistics books print them."""
    assert poisson_interval(count) == (pytest.approx(low, abs=6e-5), pytest.approx(high, abs=6e-5))


@pytest.mark.parametrize("count", [1, 7, 100])
def test_poisson_interval_leaves_the_tails(count: int) -> None:
    def at_most(events: int, expected: float) -> float:
        return sum(math.exp(k * math.log(expected) - expected - math.lgamma(k + 1)) for k in range(events + 1))

    low, high = poisson_interval(count)
    assert at_most(count, high) == pytest.approx(0.025, rel=1e-6)
    assert 1 - at_most(count - 1, low) == pytest.approx(0.025, rel=1e-6)


def test_poisson_interval_of_many() -> None:
    low, high = poisson_interval(1_000_000)
    assert (low, high) == (pytest.approx(1e6 - 1960, abs=3), pytest.approx(1e6 + 1960, abs=4))
