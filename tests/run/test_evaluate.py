"""Evaluation: every slot its quota, equal to games played one by one, and numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from redline import envs, oracles
from redline.core.errors import UserError
from redline.envs import batch
from redline.run import evaluate as module
from redline.run.evaluate import HELD_OUT, Evaluation, evaluate

CPU = torch.device("cpu")


def erratic(obs: Tensor) -> Tensor:
    """A policy that looks at every cell, so that a wrong board shows: games of many lengths, some with food."""
    flat = obs.flatten(1).to(torch.int64)
    weights = torch.arange(1, flat.shape[1] + 1) * 2654435761 % 1013
    return (flat * weights).sum(1) // 7 % 4


def small(time_limit: int = 0) -> envs.Rules:
    return envs.make_rules("snake", {"width": 5, "height": 4, "start": "random"}, time_limit)


def one_by_one(rules: envs.Rules, quotas: list[int], seed: int = 0) -> list[tuple[int, int, bool]]:
    """The same games in plain Python, one after another: score, length and whether it was won, slot by slot."""
    oracle, results = oracles.load("snake"), []
    for slot, quota in enumerate(quotas):
        for episode in range(quota):
            game = oracle(rules.config, oracles.episode_key(HELD_OUT + seed, slot, episode))
            score = length = 0
            ended = won = False
            while not ended:
                action = int(erratic(torch.tensor([game.observe()])))
                _, terminated, truncated, points, won = game.step(action)
                score, length = score + points, length + 1
                ended = terminated or truncated or length == rules.time_limit
            results.append((score, length, won))
    return results


def as_list(outcome: Evaluation) -> list[tuple[float, float, bool]]:
    return list(zip(outcome.scores.tolist(), outcome.lengths.tolist(), outcome.wins.tolist(), strict=True))


@pytest.mark.parametrize("time_limit", [0, 6])
def test_parallel_games_are_the_games_one_by_one(time_limit: int) -> None:
    rules = small(time_limit)
    outcome = evaluate(rules, erratic, 12, CPU)
    expected = one_by_one(rules, [1] * 12)
    assert as_list(outcome) == expected
    lengths = {length for _, length, _ in expected}
    assert len(lengths) > 3  # games of one length would not tell the order
    assert (max(lengths) == 6) == bool(time_limit)
    assert any(score for score, _, _ in expected)


def test_more_episodes_than_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 games in 4 slots: two slots play three, two play two, however short their games are."""
    monkeypatch.setattr(module, "_MAX_SLOTS", 4)
    outcome = evaluate(small(), erratic, 10, CPU)
    assert as_list(outcome) == one_by_one(small(), [3, 3, 2, 2])


def test_the_first_to_finish_are_not_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taking the first 8 games to end, as a careless evaluation does, would give shorter ones."""
    monkeypatch.setattr(module, "_MAX_SLOTS", 4)
    mean = evaluate(small(), erratic, 8, CPU).lengths.mean().item()
    lanes = batch.reset(small(), batch.lane_keys(HELD_OUT, torch.arange(4)))
    first: list[int] = []
    while len(first) < 8:
        lanes, step = batch.step(small(), lanes, erratic(small().game.observe(small().config, lanes.game)))
        first += step.episode.length[step.terminated | step.truncated].tolist()
    assert sum(first[:8]) / 8 < mean


@pytest.mark.parametrize("look_every", [1, 3, 300])
def test_leaving_idle_slots_out_changes_nothing(look_every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = set()

    def watched(obs: Tensor) -> Tensor:
        sizes.add(len(obs))
        return erratic(obs)

    monkeypatch.setattr(module, "_MAX_SLOTS", 16)
    monkeypatch.setattr(module, "_LOOK_EVERY", look_every)
    outcome = evaluate(small(), watched, 40, CPU)
    assert as_list(outcome) == one_by_one(small(), [3] * 8 + [2] * 8)
    assert (len(sizes) > 1) == (look_every < 300)  # it was done, and where it was not the result is the same


def test_progress_counts_up_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK_EVERY", 2)
    told: list[int] = []
    evaluate(small(), erratic, 9, CPU, progress=told.append)
    assert told == sorted(told)
    assert told[-1] == 9


def test_seeds_choose_the_games() -> None:
    rules = small()
    first, again, other = (evaluate(rules, erratic, 12, CPU, seed) for seed in (0, 0, 1))
    assert as_list(first) == as_list(again)
    assert as_list(first) != as_list(other)
    assert as_list(other) == one_by_one(rules, [1] * 12, seed=1)


def test_held_out_games_are_not_those_of_training() -> None:
    def keys(seed: int) -> set[int]:
        return set(batch.lane_keys(seed, torch.arange(1024)).tolist())

    held_out = keys(HELD_OUT)
    assert all(not held_out & keys(seed) for seed in range(20))


def test_summary_by_hand() -> None:
    outcome = Evaluation(
        torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=torch.float64),
        torch.tensor([10.0, 20.0, 30.0, 40.0], dtype=torch.float64),
        torch.tensor([False, False, True, True]),
    )
    assert outcome.summary() == {
        "episodes": 4,
        "score_mean": 3.0,
        "score_ci95": pytest.approx(1.96 * math.sqrt((4 + 1 + 0 + 9) / 3) / 2),
        "score_min": 1.0,
        "score_max": 6.0,
        "length_mean": 25.0,
        "win_rate": 0.5,
        "steps_per_win": 35.0,
    }


def test_summary_of_one_game_without_a_win() -> None:
    one: Any = torch.tensor([4.0], dtype=torch.float64)
    summary = Evaluation(one, one, torch.tensor([False])).summary()
    assert (summary["score_mean"], summary["score_ci95"]) == (4.0, 0.0)
    assert (summary["win_rate"], summary["steps_per_win"]) == (0.0, None)


def test_wins_are_counted() -> None:
    """Along a closed path through all cells of a 4x4 board every game is won, with 13 foods."""
    path = torch.tensor([[2, 3, 3, 3], [2, 1, 2, 0], [2, 0, 2, 0], [1, 0, 1, 0]]).flatten()

    def around(obs: Tensor) -> Tensor:
        return path[obs[:, 1].flatten(1).to(torch.int64).argmax(1)]

    summary = evaluate(envs.make_rules("snake", {"width": 4, "height": 4}), around, 5, CPU).summary()
    assert (summary["win_rate"], summary["score_min"], summary["score_max"]) == (1.0, 13.0, 13.0)
    assert summary["steps_per_win"] == summary["length_mean"]


@pytest.mark.parametrize("episodes", [0, -3])
def test_no_episodes(episodes: int) -> None:
    with pytest.raises(UserError, match=f"episodes is {episodes}; expected at least 1"):
        evaluate(small(), erratic, episodes, CPU)
