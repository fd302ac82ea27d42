"""Which of several levels is practised next."""

from __future__ import annotations

import numpy as np
import pytest

from redline.envs.level_choice import LevelChoice


def after(games: list[tuple[int, bool, int]], count: int = 3) -> LevelChoice:
    choice = LevelChoice(count)
    for _ in range(200):
        for level, won, length in games:
            choice.record(level, won, length)
    return choice


def test_without_games_all_levels_are_equally_likely() -> None:
    np.testing.assert_allclose(LevelChoice(4).probabilities(), 0.25)


def test_a_level_gets_steps_by_its_lost_games() -> None:
    choice = after([(0, True, 100), (1, False, 50), (2, True, 200), (2, False, 200)])
    steps = choice.probabilities() * [100, 50, 200]
    assert steps[1] / steps[0] == pytest.approx(11, rel=0.02), "a level that is always won is not forgotten"
    assert steps[2] / steps[0] == pytest.approx(6, rel=0.1), "half of its games are lost"


def test_a_level_without_games_counts_as_lost_and_as_long_as_the_others() -> None:
    choice = after([(0, False, 100), (1, False, 300)])
    probability = choice.probabilities()
    assert probability[2] / probability[0] == pytest.approx(100 / 200)


def test_levels_are_drawn_with_these_probabilities() -> None:
    choice, rng = after([(0, True, 100), (1, False, 50), (2, False, 100)]), np.random.default_rng(0)
    drawn = np.bincount([choice.draw(rng) for _ in range(4_000)], minlength=3) / 4_000
    np.testing.assert_allclose(drawn, choice.probabilities(), atol=0.03)
