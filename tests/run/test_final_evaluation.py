"""The final evaluation: how long games may last, and the hint at --sample afterwards."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import redline
from redline.run.final_evaluation import max_steps, sampling_hint


def plan(stochastic: bool = True) -> Any:
    return SimpleNamespace(algo=SimpleNamespace(STOCHASTIC=stochastic), run_dir=Path("runs/here"))


@pytest.mark.parametrize(
    ("training", "greedy", "interval", "hinted"),
    [
        (0.95, 0.0, 0.0, True),  # a tie between two actions
        (10.0, 7.0, 0.5, True),
        (10.0, 7.0, 2.0, False),  # within the noise of the evaluation
        (10.0, 8.0, 0.1, False),
        (10.0, 30.0, 1.0, False),  # the usual case: exploration costs points
        (-100.0, -200.0, 3.0, True),
        (None, 0.0, 0.0, False),  # no episode has ended in training
    ],
)
def test_a_much_lower_greedy_score_is_explained(
    training: float | None, greedy: float, interval: float, hinted: bool
) -> None:
    hint = sampling_hint(plan(), {"score_mean": greedy, "score_ci95": interval}, training)
    assert bool(hint) == hinted
    assert not hinted or "redline eval runs/here --sample" in hint


def test_no_hint_where_actions_cannot_be_sampled_or_nothing_was_evaluated() -> None:
    assert sampling_hint(plan(stochastic=False), {"score_mean": 0.0, "score_ci95": 0.0}, 5.0) == ""
    assert sampling_hint(plan(), {}, 5.0) == ""


def test_no_hint_if_the_evaluation_stopped_games_early() -> None:
    stopped = {"score_mean": 180.0, "score_ci95": 1.0, "eval_stopped_by": "max_steps"}
    assert sampling_hint(plan(), stopped, 370.0) == ""
    assert sampling_hint(plan(), stopped | {"eval_stopped_by": "episodes"}, 370.0)


def test_games_that_can_be_won_may_last_until_they_are() -> None:
    snake, tetris = (redline.make(name).spec for name in ("snake", "tetris"))
    assert max_steps(snake) >= 4 * 9_000  # a filled 20x20 board of Snake takes 9,000 steps
    assert max_steps(tetris) <= 4_000  # Tetris has no end
