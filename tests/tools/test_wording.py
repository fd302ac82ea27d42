"""Evaluation results in words, with figures that cannot be estimated and games that cannot be won."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from redline.core.records import Spec
from redline.run.compare import _ranking, over_runs
from redline.run.evaluate import Evaluation
from redline.tools import wording

SPEC = Spec((4,), torch.float32, (1.0,) * 4, 1.0, 2, "return", winnable=False)
WINNABLE = dataclasses.replace(SPEC, winnable=True)


def played(scores: list[float], game_over: bool = False, finished: bool = True, wins: int = 0) -> Evaluation:
    count = len(scores)
    ended = torch.full((count,), game_over)
    lengths = torch.full((count,), 500.0, dtype=torch.float64)
    won = torch.arange(count) < wins
    return Evaluation(torch.tensor(scores, dtype=torch.float64), lengths, won, ended, torch.full((count,), finished))


def record(outcome: Evaluation, run: str = "a") -> dict[str, Any]:
    own = {"env": "gym:Acrobot-v1", "algo": "ppo", "run": run, "env_steps": 1000, "actions": "greedy"}
    return own | outcome.summary()


@pytest.mark.parametrize("scores", [[-500.0, -490.0], [0.0, 0.0], [-500.0]])
@pytest.mark.parametrize("finished", [True, False])
def test_no_game_ended_by_itself_and_the_score_is_at_most_0(scores: list[float], finished: bool) -> None:
    """Acrobot, Taxi, MountainCar before they have learned: every game is truncated by its time limit."""
    outcome = played(scores, finished=finished)
    text = wording.evaluation(record(outcome), SPEC)
    count = 500 * len(scores)
    expected = "unknown" if sum(scores) < 0 else "more than 0.00 (95 %)"
    line = f"per game over {expected}, since no game ended by itself in {count:,} steps"
    assert (line in text, "per game over" in text) == (
        not finished,
        not finished,
    )  # a mean of whole games needs no more
    assert f"{sum(scores) / len(scores):.2f}" in text
    closing = record(outcome) | {"eval_episodes": len(scores), "eval_max_steps": 4000}
    first, *notes = wording.final_score(closing, SPEC)
    assert first.startswith(f"Greedy score over {len(scores)} held-out games: ")
    ended = "no game" if sum(scores) < 0 else "score per game over: more than 0.00 (95 %), since no game"
    stopped = f"{len(scores)} of them were stopped after 4,000 steps and count as they stood; {ended} ended by itself"
    assert len(notes) == (not finished)
    assert finished or notes[0].startswith(stopped)


@pytest.mark.parametrize("finished", [True, False])
def test_the_table_of_several_such_runs(finished: bool) -> None:
    outcomes = [played([-500.0, -500.0], finished=finished), played([-400.0, -500.0], finished=finished)]
    records = [record(outcome, run) for outcome, run in zip(outcomes, ("a", "b"), strict=True)]
    best, worst = (pick(records, key=_ranking(records))["run"] for pick in (max, min))
    assert (best, worst) == ("b", "a")
    result = records[0] | over_runs(outcomes) | {"runs": records, "best": best, "worst": worst}
    text = wording.comparison(result, SPEC)
    assert "None" not in text
    assert ("unknown, since no game ended by itself in 2,000 steps" in text) == (not finished)
    assert ("per game over" in text.splitlines()[1]) == (not finished)


def test_wins_are_shown_only_where_games_can_be_won() -> None:
    outcomes = [played([3.0, 4.0], game_over=True, wins=1), played([5.0, 4.0], game_over=True, wins=1)]
    records = [record(outcome, run) for outcome, run in zip(outcomes, ("a", "b"), strict=True)]
    result = records[0] | over_runs(outcomes) | {"runs": records, "best": "b", "worst": "a"}
    closing = records[0] | {"eval_episodes": 2, "eval_max_steps": 4000}
    for spec, shown in ((SPEC, False), (WINNABLE, True)):
        assert ("won " in wording.evaluation(records[0], spec)) == shown
        assert (" won" in wording.comparison(result, spec)) == shown
        assert ("won 50.0 %" in wording.final_score(closing, spec)[0]) == shown


def test_the_score_per_game_over() -> None:
    figures = {"score_censored": 21.0, "score_censored_low": 15.5, "score_censored_high": 30.25, "eval_steps": 12_000}
    assert wording.per_game_over(figures | {"game_overs": 2_000}) == (
        "21.00 (95 %: 15.50 to 30.25): 2,000 game overs in 12,000 steps"
    )
    figures |= {"score_censored": None, "score_censored_high": None, "game_overs": 0}
    assert wording.per_game_over(figures) == "more than 15.50 (95 %), since no game ended by itself in 12,000 steps"


def test_the_best_score_is_not_rounded_up() -> None:
    outcome = played([0.93, 0.5], game_over=True)
    closing = record(outcome) | {"eval_episodes": 2, "eval_max_steps": 4000}
    assert "(best 0.93)" in wording.final_score(closing, SPEC)[0]
    assert "worst 0.50, best 0.93" in wording.evaluation(record(outcome), SPEC)
    assert "worst -500, best 1" in wording.evaluation(record(played([-500.0, 1.0])), SPEC)
