"""The recipe for Gymnasium environments: settings that follow from what an environment shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import toys
from gymnasium import spaces

from redline.envs.gym_game import GymGame
from redline.envs.random_play import RandomPlay
from redline.run.plan import Plan
from redline.run.resolve import resolve
from redline.run.settings import Settings
from redline.run.train import train

assert toys  # registers its environments


def plan(env: str, **arguments: object) -> Plan:
    return resolve(Settings(env=env, device="cpu", **arguments))  # type: ignore[arg-type]


def test_a_number_of_states_is_a_table_of_values() -> None:
    chosen = plan("gym:ToyMatch-v0")
    assert chosen.settings.algo == "dqn"
    assert chosen.algo_config.hidden == ()
    assert chosen.rules.config.obs_scale == (3**0.5,)
    assert "one of a number of states" in str(chosen.provenance["algo"].reason)
    assert chosen.algo_config.epsilon_steps == 10_000
    assert plan("gym:Taxi-v4").algo_config.epsilon_steps == 25_000, "fifty steps for each of 500 states"
    assert plan("gym:ToyMatch-v0", algo="ppo").algo_config.hidden != (), "a policy is no table of values"
    assert plan("gym:CartPole-v1").settings.algo == "ppo"
    assert plan("gym:ToyBoth-v0").settings.algo == "ppo", "a state and two numbers"


def test_replay_explores_where_random_play_reaches_nothing() -> None:
    chosen = plan("gym:MountainCar-v0")
    assert chosen.settings.algo == "dqn"
    assert "every step of random play costs the same" in str(chosen.provenance["algo"].reason)
    assert plan("gym:MountainCar-v0", actors=1).settings.algo == "ppo", "nothing is played in this process"
    assert plan("gym:MountainCar-v0", algo="ppo").settings.algo == "ppo"


def test_vectors_are_scaled_and_screens_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(plan("gym:CartPole-v1").rules.config.obs_scale) == 4
    assert plan("gym:CartPole-v1", env_options={"obs_scale": "2"}).rules.config.obs_scale == (2.0,)
    assert plan("gym:ToyImage-v0", env_options={"binary": "9"}).rules.config.obs_scale == ()
    monkeypatch.setattr(GymGame, "random_play", lambda *_: RandomPlay(1e-6, (9.0,)))
    assert plan("gym:ToyScreen-v0").rules.config.obs_scale == ()


def test_with_actors_nothing_is_played_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GymGame, "random_play", lambda *_: pytest.fail("played"))
    assert plan("gym:ToyMatch-v0", actors=2).rules.config.obs_scale == (3**0.5,)
    assert plan("gym:ToyBoth-v0", actors=0).rules.config.obs_scale == (3**0.5,) * 3 + (1.0, 1.0)


def test_a_continued_run_keeps_its_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"env_options": {"obs_scale": [0.5, 4.0, 1.0, 1.0]}}))
    monkeypatch.setattr(GymGame, "random_play", lambda *_: RandomPlay(1e-6, (9.0,)))
    assert plan("gym:CartPole-v1", run_dir=str(tmp_path)).rules.config.obs_scale == (0.5, 4.0, 1.0, 1.0)
    assert plan("gym:CartPole-v1", run_dir=str(tmp_path), resume="never").rules.config.obs_scale == (9.0,)
    (tmp_path / "config.json").write_text(json.dumps({"env_options": {"stack": 1}}))
    assert plan("gym:CartPole-v1", run_dir=str(tmp_path)).rules.config.obs_scale == (), (
        "trained before there was a scale"
    )
    other = plan("gym:CartPole-v1", run_dir=str(tmp_path), env_options={"obs_scale": "3"})
    assert other.rules.config.obs_scale == (3.0,)


class ManyStates(toys.Match):
    """Earns 1 where the action is the number seen modulo 3, of 100 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Discrete(100)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        return self._next(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        _, reward, terminated, truncated, info = super().step(action)
        return self._next(), reward, terminated, truncated, info

    def _next(self) -> int:
        number = int(self.np_random.integers(100))
        self.shown = number % 3
        return number


gymnasium.register("ToyManyStates-v0", ManyStates)


def test_the_bare_command_learns_every_state_of_many(tmp_path: Path) -> None:
    """Four thousand steps visit each of 100 states forty times. An untrained agent earns 2.7 of 8."""
    settings = Settings("gym:ToyManyStates-v0", device="cpu", steps=4_000, run_dir=str(tmp_path), eval_episodes=64)
    assert train(settings).result["score_mean"] > 7.5
