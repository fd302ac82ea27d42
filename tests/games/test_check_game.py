# ruff: noqa: ARG001, ARG005
"""check_game finds a broken game for each rule of the contract, and says so in the right sentence."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import toy_game

from redline.core.errors import UserError
from redline.core.records import Events, Spec
from redline.oracles import below, bits
from redline.testing import check_game


def broken(**members: Any) -> Any:
    correct = {name: value for name, value in vars(toy_game).items() if not name.startswith("_")}
    return SimpleNamespace(__name__="toy", **{**correct, **members})


def after_step(change: Callable[..., Any]) -> Callable[..., Any]:
    """The toy game's step with its results changed: change(config, state, action, results)."""
    return lambda config, state, action: change(config, state, action, toy_game.step(config, state, action))


def writes_in_place(config: Any, state: Any, action: Any) -> Any:
    state.place.add_(1)
    return toy_game.step(config, state, action)


def mixes_games(config: Any, state: Any, action: Any) -> Any:
    after, reward, terminated, events = toy_game.step(config, state, action)
    return after, reward + reward.sum(), terminated, events


def follows_the_neighbour(config: Any, state: Any, action: Any) -> Any:
    if len(action) > 1:
        action = torch.where(torch.arange(len(action)) == 0, action.roll(-1), action)
    return toy_game.step(config, state, action)


def indexes(config: Any, state: Any, action: Any) -> Any:
    return toy_game.step(config, state, torch.arange(2)[action.to(torch.int64)])


def draws(config: Any, state: Any, action: Any) -> Any:
    after, reward, terminated, events = toy_game.step(config, state, action)
    return after, reward + torch.rand(len(reward)), terminated, events


def same_start(config: Any, key: Any) -> Any:
    return toy_game.init(config, torch.zeros_like(key))._replace(key=key)


def spec_with(**fields: Any) -> Callable[[Any], Spec]:
    return lambda config: Spec(**{**vars(toy_game.spec(config)), **fields})


def draws_places(config: Any, state: Any) -> Any:
    return state.place.to(torch.uint8).view(-1, 1, 1)


def late_mask(config: Any, state: Any) -> Any:
    return (state.place < 2).unsqueeze(1).expand(-1, 2)


def wins_early(config: Any, state: Any, action: Any, results: Any) -> Any:
    after, reward, terminated, events = results
    return after, reward, terminated, events._replace(won=torch.ones_like(terminated))


def truncates(config: Any, state: Any, action: Any, results: Any) -> Any:
    after, reward, terminated, events = results
    return after, reward, terminated, Events(events.score, events.won, ~terminated)


def branches(config: Any, state: Any, action: Any) -> Any:
    return toy_game.step(toy_game.Config(config.cells, float(str(config.reward_coin))), state, action)


FAULTS: list[tuple[str, dict[str, Any], str, str]] = [
    ("members", {"observe": lambda config, state: state.coins}, "members", "observe is (5, 6) bool"),
    ("purity", {"step": writes_in_place}, "purity", "step changes State.place of its input"),
    ("randomness", {"step": draws}, "purity", "step returns something else for the same inputs"),
    ("batch", {"step": mixes_games}, "batch equals singles", "differs at step"),
    ("neighbours", {"step": follows_the_neighbour}, "environments are independent", "in environment 0, after action"),
    ("actions", {"step": lambda c, s, a: toy_game.step(c, s, a * 0 + 1)}, "environments are independent", "step ignores"),
    ("indices", {"step": indexes}, "out-of-range actions", "An out-of-range or illegal action fails with IndexError"),
    ("bounds", {"spec": spec_with(obs_high=0.5)}, "observations", "observe returns 0 to 1"),
    ("mask", {"legal": late_mask, "spec": spec_with(masked=True)}, "observations", "legal allows no action at step"),
    ("won", {"step": after_step(wins_early)}, "endings", "Events.won without terminated at step 1 in environment 0"),
    ("truncated", {"step": after_step(truncates)}, "endings", "Events.truncated although spec.truncates is False"),
    ("hidden", {"HIDDEN": ("coins",)}, "hidden fields", "observe reads State.coins, which HIDDEN names"),
    ("live", {"LIVE": ("reward_coin",), "step": branches}, "live options", "The options in LIVE (reward_coin) cannot be"),
    ("seeds", {"init": same_start}, "seeds", "Two seeds give the same games"),
    ("cells", {"cells": draws_places, "PALETTE": (("a", (0, 0, 0)),)}, "observations", "cells returns"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("members", "check", "sentence"), [case[1:] for case in FAULTS], ids=[case[0] for case in FAULTS]
)
def test_a_broken_game_is_caught(members: dict[str, Any], check: str, sentence: str) -> None:
    report = check_game(broken(**members))
    assert not report.ok
    failures = [failure for failure in report.failures if failure.startswith(check)]
    assert any(sentence in failure for failure in failures), report
    assert str(report).endswith("toy breaks the contract.")


class Oracle:
    """The toy game, without observe and legal: these are then not compared."""

    def __init__(self, config: Any, key: int) -> None:
        self.config, self.key, self.place = config, key, 0
        self.coins = [below(bits(key, cell), 2) for cell in range(config.cells)]

    def step(self, action: int) -> tuple[float, bool, bool, int, bool]:
        self.place = min(self.place + (action == 1), self.config.cells - 1)
        coin, self.coins[self.place] = self.coins[self.place], 0
        ended = self.place == self.config.cells - 1
        return coin * self.config.reward_coin, ended, False, coin, ended

    def state(self) -> dict[str, Any]:
        return {"place": self.place, "coins": self.coins, "key": self.key}


def test_a_correct_game_passes() -> None:
    report = check_game(broken(), oracle=Oracle)
    assert report.ok, report
    assert "ok     oracle" in report.lines()
    assert report.lines()[-1] == "toy keeps the contract."


def test_the_oracle_finds_a_wrong_rule() -> None:
    """Its report names step, environment and action."""

    class Generous(Oracle):
        def step(self, action: int) -> tuple[float, bool, bool, int, bool]:
            reward, *rest = super().step(action)
            return (reward + 0.5 * (self.place == 3), *rest)  # type: ignore[return-value]

    report = check_game(broken(), oracle=Generous)
    (failure, *_) = [failure for failure in report.failures if failure.startswith("oracle")]
    assert "the reward differs from the oracle's at step" in failure
    assert "in environment 0, after action 1: " in failure


def test_float_observations_are_compared_as_floats() -> None:
    class Half(Oracle):
        def observe(self) -> Any:
            here = [float(cell == self.place) for cell in range(self.config.cells)]
            return [here, [0.5 * coin for coin in self.coins]]

    def observe(config: Any, state: Any) -> Any:
        planes = toy_game.observe(config, state).to(torch.float32)
        return planes * torch.tensor([1.0, 0.5]).view(1, 2, 1)

    spec = spec_with(obs_dtype=torch.float32)
    assert check_game(broken(observe=observe, spec=spec), oracle=Half).ok
    wrong = check_game(broken(observe=lambda c, s: observe(c, s).ceil(), spec=spec), oracle=Half)
    assert any("the observation differs" in failure and "1.0 here, 0.5 there" in failure for failure in wrong.failures)


def test_an_unknown_game_and_oracle() -> None:
    with pytest.raises(UserError, match=r"There is no game 'snak'; did you mean 'snake'\?"):
        check_game("snak")
    with pytest.raises(UserError, match="There is no oracle 'no_such_oracle'"):
        check_game(toy_game, oracle="no_such_oracle")
