"""Evaluation: every slot its quota, equal to games played one by one, and numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from redline import envs, oracles
from redline.core.errors import UserError
from redline.core.records import Events, Spec
from redline.envs import batch
from redline.run import evaluate_tensor_games as module
from redline.run.evaluate import HELD_OUT, Evaluation, evaluate, evaluate_net, greedy, sampled

CPU = torch.device("cpu")


def erratic(obs: Tensor, legal: Tensor | None = None) -> Tensor:  # noqa: ARG001
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
    envs = batch.reset(small(), batch.env_keys(HELD_OUT, torch.arange(4)))
    first: list[int] = []
    while len(first) < 8:
        envs, step = batch.step(small(), envs, erratic(small().game.observe(small().config, envs.game)))
        first += step.episode.length[step.terminated | step.truncated].tolist()
    assert sum(first[:8]) / 8 < mean


@pytest.mark.parametrize("look_every", [1, 3, 300])
def test_leaving_idle_slots_out_changes_nothing(look_every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = set()

    def watched(obs: Tensor, legal: Tensor | None) -> Tensor:
        sizes.add(len(obs))
        return erratic(obs, legal)

    monkeypatch.setattr(module, "_MAX_SLOTS", 16)
    monkeypatch.setattr(module, "_LOOK_EVERY", look_every)
    outcome = evaluate(small(), watched, 40, CPU)
    assert as_list(outcome) == one_by_one(small(), [3] * 8 + [2] * 8)
    assert (len(sizes) > 1) == (look_every < 300)  # it was done, and where it was not the result is the same


def test_a_budget_of_steps_is_played_in_as_many_slots_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_SLOTS", 4)
    sizes = set()

    def watched(obs: Tensor, legal: Tensor | None) -> Tensor:
        sizes.add(len(obs))
        return erratic(obs, legal)

    evaluate(small(), watched, 10, CPU, max_steps=200)
    assert sizes == {10}


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
        return set(batch.env_keys(seed, torch.arange(1024)).tolist())

    held_out = keys(HELD_OUT)
    assert all(not held_out & keys(seed) for seed in range(20))


def by_hand(scores: list[float], ended: str = "") -> Evaluation:
    """Games of 10, 20, … steps; of each `ended` says how: x terminated, w won, t truncated, . still going on."""
    ended = ended or "x" * len(scores)
    return Evaluation(
        torch.tensor(scores, dtype=torch.float64),
        torch.arange(1, len(scores) + 1).double() * 10,
        torch.tensor([how == "w" for how in ended]),
        torch.tensor([how in "xw" for how in ended]),
        torch.tensor([how != "." for how in ended]),
    )


def test_summary_by_hand() -> None:
    assert by_hand([1, 2, 3, 6], "xxww").summary() == {
        "episodes": 4,
        "finished": 4,
        "game_overs": 4,
        "eval_steps": 100,
        "stopped_by": "episodes",
        "score_mean": 3.0,
        "score_ci95": 1.75,  # of 256 equally likely resamples 5 have a mean below 1.5, 5 one above 5
        "score_low": 1.5,
        "score_high": 5.0,
        "score_iqm": 2.5,
        "score_iqm_low": 1.0,
        "score_iqm_high": 6.0,
        "score_median": 2.5,
        "score_min": 1.0,
        "score_max": 6.0,
        "total_score": 12.0,
        "score_censored": 3.0,
        "score_censored_low": pytest.approx(12 / 10.2416, rel=1e-5),
        "score_censored_high": pytest.approx(12 / 1.08987, rel=1e-5),
        "length_mean": 25.0,
        "win_rate": 0.5,
        "win_rate_low": pytest.approx(0.15, abs=1e-4),
        "win_rate_high": pytest.approx(0.85, abs=1e-4),
        "win_rate_interval": "Wilson",
        "steps_per_win": 35.0,
    }


def test_summary_of_one_game_without_a_win() -> None:
    summary = by_hand([4]).summary()
    assert (summary["score_mean"], summary["score_ci95"]) == (4.0, 0.0)
    assert (summary["win_rate"], summary["steps_per_win"]) == (0.0, None)
    assert (summary["score_iqm"], summary["score_median"]) == (4.0, 4.0)
    assert [summary[f"score{name}"] for name in ("_low", "_high", "_iqm_low", "_iqm_high")] == [None] * 4
    assert (summary["win_rate_low"], summary["win_rate_interval"]) == (0.0, "Wilson")
    assert 0.7 < summary["win_rate_high"] < 0.8


def test_summary_of_games_that_are_all_alike_and_all_won() -> None:
    summary = by_hand([13.0] * 256, "w" * 256).summary()
    assert {summary[f"score{name}"] for name in ("_mean", "_low", "_high", "_iqm", "_iqm_low", "_iqm_high")} == {13.0}
    assert (summary["score_ci95"], summary["win_rate"], summary["win_rate_high"]) == (0.0, 1.0, 1.0)
    assert summary["win_rate_interval"] == "Wilson"
    assert summary["win_rate_low"] == pytest.approx(256 / (256 + 1.96**2), abs=1e-5)


def test_summary_of_many_games_won_and_lost() -> None:
    summary = by_hand([0.0, 4.0] * 200, "xw" * 200).summary()
    assert summary["win_rate_interval"] == "bootstrap"
    assert (summary["win_rate_low"], summary["win_rate_high"]) == (
        pytest.approx(0.451, abs=6e-3),
        pytest.approx(0.549, abs=6e-3),
    )
    assert (summary["score_low"], summary["score_high"]) == (
        pytest.approx(1.804, abs=0.03),
        pytest.approx(2.196, abs=0.03),
    )
    assert summary["score_ci95"] == (summary["score_high"] - summary["score_low"]) / 2
    assert by_hand([0.0, 4.0] * 200, "xw" * 200).summary() == summary  # the same games, the same figures


def test_games_that_did_not_end_count_with_their_score_and_as_no_game_over() -> None:
    summary = replace(by_hand([5, 7, 10, 2], "xt.x"), stopped_by="max_steps").summary()
    assert (summary["episodes"], summary["finished"], summary["game_overs"]) == (4, 3, 2)
    assert (summary["total_score"], summary["score_mean"], summary["score_censored"]) == (24, 6, 12)
    assert summary["stopped_by"] == "max_steps"


def test_no_game_over_gives_a_lower_bound_only() -> None:
    summary = by_hand([50, 50], "..").summary()
    assert (summary["score_censored"], summary["score_censored_high"]) == (None, None)
    assert summary["score_censored_low"] == pytest.approx(100 / 3.68888, rel=1e-5)


def until_the_budget(rules: envs.Rules, slots: int, steps: int) -> list[tuple[int, int, bool]]:
    """Games one after another in each slot until it has played `steps`, the last one as it stands then."""
    oracle, results = oracles.load("snake"), []
    for slot in range(slots):
        left, episode = steps, 0
        while left:
            game = oracle(rules.config, oracles.episode_key(HELD_OUT, slot, episode))
            score = length = 0
            over = False
            while left and not over:
                _, terminated, truncated, points, _ = game.step(int(erratic(torch.tensor([game.observe()]))))
                score, length, left, over = score + points, length + 1, left - 1, terminated or truncated
            results.append((score, length, over))
            episode += 1
    return results


@pytest.mark.parametrize("look_every", [1, 7, 256])
def test_with_a_budget_every_slot_plays_on_until_it_is_spent(look_every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK_EVERY_LONG", look_every)
    told: list[int] = []
    outcome = evaluate(small(), erratic, 5, CPU, progress=told.append, max_steps=203)
    expected = until_the_budget(small(), 5, 41)  # 203 steps over 5 slots, rounded up
    found = zip(outcome.scores.tolist(), outcome.lengths.tolist(), outcome.finished.tolist(), strict=True)
    assert list(found) == expected
    assert len(expected) > 10
    assert not all(over for _, _, over in expected)
    summary = outcome.summary()
    assert (summary["stopped_by"], summary["eval_steps"]) == ("max_steps", 205)
    assert summary["total_score"] == sum(score for score, _, _ in expected)
    assert summary["game_overs"] == summary["finished"] == sum(over for _, _, over in expected)
    assert summary["score_censored"] == summary["total_score"] / summary["game_overs"]
    assert told == sorted(told)
    assert told[-1] == 203


def test_without_a_budget_the_estimate_is_the_mean() -> None:
    outcome = evaluate(small(), erratic, 12, CPU)
    assert outcome.game_over.all()
    assert outcome.summary()["score_censored"] == outcome.scores.mean().item()


def test_truncated_games_are_no_game_overs() -> None:
    outcome = evaluate(small(6), erratic, 12, CPU)
    assert torch.equal(outcome.game_over, outcome.lengths < 6)
    assert outcome.finished.all()


def test_a_slot_that_would_play_for_ever_is_stopped() -> None:
    """The rest of its quota is left; what has ended by then is as without the bound."""
    whole = as_list(evaluate(small(), erratic, 12, CPU))
    outcome = evaluate(small(), erratic, 12, CPU, slot_steps=5)
    assert [(min(length, 5), length <= 5) for _, length, _ in whole] == list(
        zip(outcome.lengths.tolist(), outcome.finished.tolist(), strict=True)
    )
    assert not outcome.finished.all()
    assert outcome.stopped_by == "max_steps"
    assert evaluate(small(), erratic, 12, CPU, slot_steps=10_000).stopped_by == "episodes"


class Counting(NamedTuple):
    at: Tensor  # (N,) int32
    key: Tensor


def one_legal() -> envs.Rules:
    """A game of four actions of which one is legal, another one every step; an illegal one ends it, the tenth step too."""

    def legal(config: Any, state: Counting) -> Tensor:  # noqa: ARG001
        return torch.arange(4) == ((state.at + state.key) % 4).unsqueeze(1)

    def step(config: Any, state: Counting, action: Tensor) -> Any:
        right = legal(config, state).gather(1, action.unsqueeze(1)).squeeze(1)
        after = state._replace(at=state.at + 1)
        false = torch.zeros_like(right)
        return after, right.float(), ~right | (after.at == 10), Events(right.to(torch.int32), false, false)

    spec = Spec((1,), torch.float32, (1.0,), 10, 4, "right ones", masked=True)
    return envs.Rules(
        SimpleNamespace(  # type: ignore[arg-type]
            name="one_legal",
            ON_CPU=False,
            spec=lambda config: spec,  # noqa: ARG005
            init=lambda config, key: Counting(torch.zeros_like(key), key),  # noqa: ARG005
            observe=lambda config, state: state.at.float().unsqueeze(1),  # noqa: ARG005
            step=step,
            legal=legal,
        ),
        None,
        0,
    )


def test_the_policy_is_told_what_is_legal() -> None:
    class Net(torch.nn.Module):
        """Likes action 2 best, of those it may take."""

        def forward(self, obs: Tensor, legal: Tensor | None = None) -> Tensor:
            assert legal is not None
            return torch.tensor([0.0, 1, 3, 2]).expand(len(obs), 4).masked_fill(~legal, -1e9)

    outcome = evaluate(one_legal(), greedy(Net(), CPU), 6, CPU)
    assert outcome.scores.tolist() == [10.0] * 6
    blind = evaluate(one_legal(), lambda obs, _: torch.full((len(obs),), 2), 6, CPU)
    assert blind.scores.max() < 2


def test_a_network_is_evaluated_as_its_greedy_policy_is() -> None:
    class Net(torch.nn.Module):
        def forward(self, obs: Tensor) -> Tensor:
            return torch.nn.functional.one_hot(erratic(obs), 4).float()

    rules, told = small(), []
    outcome = evaluate_net(Net(), rules, CPU, 12, 1, told.append)
    assert as_list(outcome) == one_by_one(rules, [1] * 12, seed=1)
    assert told[-1] == 12
    assert evaluate_net(Net(), rules, CPU, 5, max_steps=100).stopped_by == "max_steps"


class Logits(torch.nn.Module):
    """The same for every observation, those of illegal actions far below."""

    def forward(self, obs: Tensor, legal: Tensor | None = None) -> Tensor:
        logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log().expand(len(obs), 4)
        return logits if legal is None else logits.masked_fill(~legal, -1e9)


def test_actions_are_drawn_with_the_probabilities_of_the_network() -> None:
    policy, obs = sampled(Logits(), CPU, seed=3), torch.zeros(1000, 1)
    draws = torch.stack([policy(obs, None) for _ in range(40)])
    shares = torch.bincount(draws.flatten(), minlength=4) / draws.numel()
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.25, 0.125, 0.125]), rtol=0, atol=0.01)
    # No environment follows another, no step the one before: pairs are as likely as their parts.
    for first, second in ((draws[:-1], draws[1:]), (draws[:, :-1], draws[:, 1:])):
        assert (first == second).float().mean() == pytest.approx(0.34375, abs=0.01)
    legal = torch.tensor([[False, True, False, True]]).expand(1000, 4)
    assert set(policy(obs, legal).tolist()) == {1, 3}


def test_drawn_games_are_the_same_for_the_same_seed() -> None:
    def lengths(seed: int, sample: bool = True) -> list[float]:
        found: list[float] = evaluate_net(Logits(), small(), CPU, 12, seed, sample=sample).lengths.tolist()
        return found

    assert lengths(1) == lengths(1)
    assert len({tuple(lengths(seed, sample)) for seed in (1, 2) for sample in (False, True)}) == 4


def test_drawn_games_are_the_same_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    class Net(torch.nn.Module):
        def forward(self, obs: Tensor) -> Tensor:
            return obs.flatten(1).float() @ torch.arange(24.0).sin().view(12, 2)

    monkeypatch.setattr(module, "_COMPILE_AFTER", 32)
    torch.compiler.reset()
    counters.clear()
    rules, outcomes = envs.make_rules("toy_game"), []
    for compiled in (False, True):
        policy = sampled(Net(), CPU, seed=1)
        outcomes.append(evaluate(rules, policy, 8, CPU, max_steps=800, compile=compiled, notify=pytest.fail))
        assert counters["stats"]["unique_graphs"] == compiled
    assert as_list(outcomes[0]) == as_list(outcomes[1])
    assert len(set(as_list(outcomes[0]))) > 4


def test_wins_are_counted() -> None:
    """Along a closed path through all cells of a 4x4 board every game is won, with 13 foods."""
    path = torch.tensor([[2, 3, 3, 3], [2, 1, 2, 0], [2, 0, 2, 0], [1, 0, 1, 0]]).flatten()

    def around(obs: Tensor, legal: Tensor | None) -> Tensor:  # noqa: ARG001
        return path[obs[:, 1].flatten(1).to(torch.int64).argmax(1)]

    summary = evaluate(envs.make_rules("snake", {"width": 4, "height": 4}), around, 5, CPU).summary()
    assert (summary["win_rate"], summary["score_min"], summary["score_max"]) == (1.0, 13.0, 13.0)
    assert summary["steps_per_win"] == summary["length_mean"]


def test_a_negative_budget() -> None:
    with pytest.raises(UserError, match="max_steps is -1; expected 0"):
        evaluate(small(), erratic, 4, CPU, max_steps=-1)


@pytest.mark.parametrize("episodes", [0, -3])
def test_no_episodes(episodes: int) -> None:
    with pytest.raises(UserError, match=f"episodes is {episodes}; expected at least 1"):
        evaluate(small(), erratic, episodes, CPU)
