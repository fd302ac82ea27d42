"""Random play: the scale of observations and the duration of a step, as an environment shows them."""

from __future__ import annotations

import math
import time
from typing import Any

import gymnasium
import numpy as np
import pytest
import toys
from gymnasium import spaces

from redline.core.errors import UserError
from redline.envs import load_game, make_rules, random_play
from redline.envs.array_wrapper import ArrayWrapper
from redline.envs.gym_game import GymConfig


class Shows(toys.Seen):
    """An environment that shows the same observation for ever."""

    def __init__(self, space: spaces.Space[Any], shown: Any) -> None:
        super().__init__(space)
        self.shown = shown

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        return self.shown, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        del action
        return self.shown, 0.0, False, False, {}


def scale(space: spaces.Space[Any], shown: Any) -> tuple[float, ...]:
    return random_play.play(ArrayWrapper(Shows(space, shown), "toy"), "toy").obs_scale


def test_one_of_n_states_has_the_length_of_n_numbers() -> None:
    assert scale(spaces.Discrete(500), 7) == (math.sqrt(500),)
    assert scale(spaces.MultiDiscrete([4, 4]), np.array([0, 3])) == (2.0,)
    assert scale(spaces.Tuple((spaces.Discrete(4), spaces.Discrete(9))), (1, 2)) == (2.0,) * 4 + (3.0,) * 9


def test_a_number_is_brought_to_about_one() -> None:
    free = spaces.Box(-np.inf, np.inf, (4,), np.float32)
    assert scale(free, np.array([0.24, 7.7, 1e-6, 0], np.float32)) == (4.0, 0.125, 16.0, 1.0)
    assert scale(free, np.array([np.nan, np.inf, 1, 2], np.float32)) == (1.0, 1.0, 1.0, 0.5)


def test_bounds_limit_the_scale_of_a_number() -> None:
    """Values far below a bound are raised four times at most; those at the bound become 1."""
    box = spaces.Box(-8, 8, (3,), np.float32)
    assert scale(box, np.array([8, 2, 0.01], np.float32)) == (0.125, 0.5, 0.5)


def test_bounds_of_whole_numbers_say_little() -> None:
    """Cells that are coded by a few numbers are often announced as bytes."""
    cells = spaces.Dict({"cells": spaces.Box(0, 255, (3,), np.uint8), "facing": spaces.Discrete(4)})
    shown = {"cells": np.array([2, 8, 0], np.uint8), "facing": 0}
    assert scale(cells, shown) == (0.5, 0.125, 1 / 255, 2.0, 2.0, 2.0, 2.0)


def test_an_image_has_one_factor_per_channel() -> None:
    image = np.stack([np.full((6, 5), level, np.uint8) for level in (2, 4, 64)], 2)
    assert scale(spaces.Box(0, 255, (6, 5, 3), np.uint8), image) == (0.5, 0.25, 1 / 64)


class Slow(Shows):
    """An environment whose every tenth step takes long."""

    steps = 0

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        if self.steps == 20:
            time.sleep(0.2)
        return super().step(action)


def test_one_slow_step_does_not_count() -> None:
    slow = Slow(spaces.Box(0, 1, (1,), np.float32), np.ones(1, np.float32))
    assert random_play.play(ArrayWrapper(slow, "toy"), "toy").step_seconds < 0.2 / 16


def test_requested_factors_are_used_and_checked() -> None:
    rules = make_rules("gym:CartPole-v1", {"obs_scale": (1.0, 2.0, 3.0, 4.0)})
    assert rules.game.spec(rules.config).obs_scale == (1.0, 2.0, 3.0, 4.0)
    assert load_game("gym:CartPole-v1").spec(GymConfig(obs_scale=(2.0,), stack=2)).obs_scale == (2.0,) * 8
    assert load_game("gym:CartPole-v1").spec(GymConfig()).obs_scale[1] == 1.0
    assert hash(GymConfig(obs_scale=[2.0])) == hash(GymConfig(obs_scale=(2.0,))), "a list, as JSON has it"  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"env\.obs_scale has 3 factors; expected 4, or one for all\."):
        load_game("gym:CartPole-v1").spec(GymConfig(obs_scale=(1.0, 2.0, 3.0)))
    with pytest.raises(UserError, match=r"env\.obs_scale is \(0\.0,\); expected factors above 0"):
        GymConfig(obs_scale=(0.0,))


def test_a_failure_in_random_play_names_the_environment() -> None:
    class Broken(Shows):
        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            del action
            raise ZeroDivisionError("oh")

    broken: gymnasium.Env[Any, Any] = Broken(spaces.Discrete(2), 0)
    with pytest.raises(UserError, match="toy failed in the first steps: ZeroDivisionError: oh"):
        random_play.play(ArrayWrapper(broken, "toy"), "toy")


def test_a_failure_after_a_while_is_left_to_the_run() -> None:
    class Breaks(Slow):
        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            if self.steps == 100:
                raise ZeroDivisionError("oh")
            return super().step(action)

    breaks = Breaks(spaces.Box(-8, 8, (1,), np.float32), np.full(1, 2, np.float32))
    assert random_play.play(ArrayWrapper(breaks, "toy"), "toy").obs_scale == (0.5,)


class Costs(Shows):
    """Pays `rewards` step by step, the last one for ever; truncated every five steps, terminated at step `end`."""

    def __init__(self, *rewards: float, end: int = 0) -> None:
        super().__init__(spaces.Box(0, 1, (1,), np.float32), np.ones(1, np.float32))
        self.rewards, self.end, self.steps, self.episodes = rewards, end, 0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.episodes += 1
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        del action
        self.steps += 1
        reward = self.rewards[min(self.steps, len(self.rewards)) - 1]
        return self.shown, reward, self.steps == self.end, self.steps % 5 == 0, {}


def are_constant(env: Costs) -> bool:
    return random_play.costs_are_constant(ArrayWrapper(env, "toy"))


def test_costs_are_constant_where_random_play_reaches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_play, "_LONG_STEPS", 100)
    env = Costs(-0.5)
    assert are_constant(env)
    assert (env.steps, env.episodes) == (100, 20 + 1)
    assert not are_constant(Costs(-1.0, end=60)), "a goal is reached"
    assert not are_constant(Costs(*[-1.0] * 60, -2.0)), "some steps cost more"
    assert not are_constant(Costs(1.0)), "surviving is rewarded: episodes that end early are worse"
    assert not are_constant(Costs(0.0)), "nothing is known of a goal, and nothing drives the agent away"


def test_costs_are_unknown_of_environments_that_are_slow_or_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    class Breaks(Costs):
        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            if self.steps == 50:
                raise ZeroDivisionError("oh")
            return super().step(action)

    assert not are_constant(Breaks(-1.0))
    monkeypatch.setattr(random_play, "_LONG_SECONDS", 0.0)
    slow = Costs(-1.0)
    assert not are_constant(slow)
    assert slow.steps == 1
