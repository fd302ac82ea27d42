"""A user's own environments: found in the current folder, with arguments, and with their faults explained in a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import toys
from gymnasium import spaces

from redline.core.errors import EnvFailure, UserError
from redline.envs import load_game, make_rules
from redline.envs.gym_envs import GymEnvs
from redline.envs.gym_game import GymConfig, GymGame
from redline.envs.gym_make import constructor_arguments

CORRIDOR = """
import gymnasium, numpy as np
from gymnasium import spaces

class Corridor(gymnasium.Env):
    def __init__(self, length=5, slippery=True, map_name="4x4", render_mode=None):
        self.observation_space, self.action_space = spaces.Box(0, length, (1,), np.float32), spaces.Discrete(2)
        self.length, self.render_mode = length, render_mode
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = 0
        return self._observe(), {}
    def step(self, action):
        self.place += int(action)
        return self._observe(), 1.0, self.place == self.length, False, {}
    def _observe(self):
        return np.array([self.place], np.float32)

gymnasium.register("my/Corridor-v0", Corridor)
"""


@pytest.fixture
def corridor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of an environment whose module is in the current folder only."""
    module = f"corridor_{abs(hash(tmp_path)) % 10**8}"
    (tmp_path / f"{module}.py").write_text(CORRIDOR, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    gymnasium.registry.pop("my/Corridor-v0", None)
    return f"gym:{module}:my/Corridor-v0"


def test_a_module_in_the_current_folder_is_found(corridor: str) -> None:
    rules = make_rules(corridor)
    assert rules.game.spec(rules.config).num_actions == 2
    with pytest.raises(UserError, match=r"gym:nowhere:A-v0 cannot be made: there is no module 'nowhere'"):
        make_rules("gym:nowhere:A-v0").game.spec(GymConfig())


def test_a_module_of_environments_is_no_game(corridor: str) -> None:
    module = corridor.split(":")[1]
    with pytest.raises(UserError, match=f"The module '{module}' defines none; .* with Gymnasium is gym:{module}:ID"):
        load_game(module)


def test_constructor_arguments_reach_the_environment(corridor: str) -> None:
    rules = make_rules(corridor, {"kwargs": {"length": 2, "slippery": False}})
    assert rules.config.kwargs == {"length": 2, "slippery": False}
    assert rules.game.spec(rules.config).obs_high == 2
    assert make_rules(corridor).game.spec(GymConfig()).obs_high == 5, "other arguments, another environment"
    envs = GymEnvs(rules.game, rules.config, 1)
    envs.reset(0)
    envs.step(np.array([1]))
    assert not envs.terminated[0]
    envs.step(np.array([1]))
    assert envs.terminated[0]
    assert list(constructor_arguments(corridor.removeprefix("gym:")))[:3] == ["length", "slippery", "map_name"]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"lenght": 2}, "takes no argument 'lenght'; did you mean 'length'? Arguments: length, slippery, map_name."),
        ({"slippery": "False"}, "env.kwargs.slippery is 'False'; expected true or false."),
        ({"length": "long"}, "env.kwargs.length is 'long'; expected a number."),
        ({"length": {1, 2}}, "env.kwargs is {'length': {1, 2}}; expected numbers, text"),
        ({"render_mode": "human"}, "takes no argument 'render_mode'"),
    ],
)
def test_wrong_constructor_arguments_are_named(corridor: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as raised:
        make_spec(corridor, kwargs)
    assert message in str(raised.value)


def make_spec(name: str, kwargs: dict[str, Any]) -> None:
    rules = make_rules(name, {"kwargs": kwargs})
    rules.game.spec(rules.config)


@pytest.mark.fault("G1")
def test_an_id_of_a_package_hints_at_the_package() -> None:
    with pytest.raises(UserError, match="gym:minigrid:MiniGrid-Empty-5x5-v0"):
        make_rules("gym:MiniGrid-Empty-5x5-v0").game.spec(GymConfig())


# Observations with entries that are not numeric.


class Mission(spaces.Space[str]):
    """A space of the environment's own, which Gymnasium cannot flatten."""


class Told(toys.Seen):
    """An observation of a number, a text and a space of its own."""

    def __init__(self) -> None:
        super().__init__(spaces.Dict({"number": spaces.Box(0, 9, (2,), np.float32), "mission": spaces.Text(8)}))
        self.observation_space.spaces["goal"] = Mission()  # type: ignore[attr-defined]

    def _observe(self) -> dict[str, Any]:
        return {"number": np.array([3, 4], np.float32), "mission": "go", "goal": "there"}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        del options
        gymnasium.Env.reset(self, seed=seed)
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        del action
        return self._observe(), 0.0, False, False, {}


gymnasium.register("ToyTold-v0", Told, disable_env_checker=True)


def test_entries_that_are_no_numbers_are_dropped_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    envs = GymEnvs(load_game("gym:ToyTold-v0"), GymConfig(), 2)
    said = capsys.readouterr().err
    assert said.count("gym:ToyTold-v0: dropped from the observation") == 1
    assert "mission (Text)" in said
    assert "goal (Mission)" in said
    envs.reset(0)
    envs.step(np.zeros(2, np.int64))
    assert envs.obs.tolist() == [[3, 4], [3, 4]]


class Pair(Told):
    """An observation of a text, a number and a pair of a number and a text."""

    def __init__(self) -> None:
        super().__init__()
        inner = spaces.Tuple((spaces.Discrete(3), spaces.Text(8)))
        self.observation_space = spaces.Tuple((spaces.Text(8), spaces.Box(0, 9, (2,), np.float32), inner))

    def _observe(self) -> Any:
        return "go", np.array([3, 4], np.float32), (1, "there")


gymnasium.register("ToyPair-v0", Pair, disable_env_checker=True)


def test_entries_of_a_tuple_are_dropped_alike(capsys: pytest.CaptureFixture[str]) -> None:
    envs = GymEnvs(load_game("gym:ToyPair-v0"), GymConfig(), 2)
    assert "because they are not numeric: 0 (Text), 2.1 (Text)." in capsys.readouterr().err
    envs.reset(0)
    assert envs.obs.tolist() == [[3, 4, 0, 1, 0]] * 2


def test_warnings_of_gymnasium_are_one_line(
    capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    game = load_game("gym:CartPole")
    assert game.spec(GymConfig()).num_actions == 2
    assert capsys.readouterr().err == (
        "gym:CartPole: Using the latest versioned environment `CartPole-v1` instead of the unversioned environment "
        "`CartPole`.\n"
    )
    with pytest.raises(UserError, match="Please use `Taxi-v4` instead"):
        load_game("gym:Taxi-v3").spec(GymConfig())
    assert capsys.readouterr().err == ""
    assert not recwarn.list


# Environments that fail.


class Faulty(toys.Count):
    """Fails where it is told to."""

    def __init__(self, where: str = "", time: int = 0) -> None:
        if where == "constructor":
            raise RuntimeError("no licence")
        super().__init__()
        self.where, self.fails_at, self.steps = where, time, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if self.where == "reset":
            raise KeyError("door")
        return super().reset(seed=seed, options=options)

    def step(self, action: int) -> Any:
        self.steps += 1
        if self.where == "step" and self.steps > self.fails_at:
            raise ZeroDivisionError("division by zero")
        obs, reward, terminated, truncated, info = super().step(action)
        if self.where == "tuple" and self.steps > self.fails_at:
            return obs, reward, terminated, truncated
        return obs, reward, terminated, truncated, info


gymnasium.register("ToyFaulty-v0", Faulty, disable_env_checker=True, order_enforce=False)


@pytest.mark.fault("C1")
@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"where": "constructor"}, r"gym:ToyFaulty-v0 failed in its constructor: RuntimeError: no licence \(test_gym_users"),
        ({"where": "reset"}, r"gym:ToyFaulty-v0 failed in its first reset: KeyError: 'door' \("),
        ({"where": "step"}, r"gym:ToyFaulty-v0 failed in its first step: ZeroDivisionError: division by zero \("),
        ({"where": "tuple"}, "gym:ToyFaulty-v0 returned 4 values from step, the last of them of type bool; expected obs"),
        ({"where": "step", "time": 2}, r"failed in step \(environment 0\): ZeroDivisionError: division by zero"),
        ({"where": "tuple", "time": 2}, r"gym:ToyFaulty-v0 \(environment 0\) returned 4 values from step; expected obs"),
    ],
)  # fmt: skip
def test_failures_name_the_environment_in_one_sentence(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvFailure, match=message) as raised:
        play(GymConfig(kwargs=kwargs))
    assert "\n" not in str(raised.value)


def play(config: GymConfig) -> None:
    envs = GymEnvs(GymGame("gym:ToyFaulty-v0"), config, 2)
    envs.reset(0)
    for _ in range(4):
        envs.step(np.zeros(2, np.int64))


@pytest.mark.parametrize("name", ["MiniGrid-Empty-5x5-v0", "MiniGrid-DoorKey-5x5-v0"])
def test_the_mission_of_minigrid_is_dropped(name: str) -> None:
    pytest.importorskip("minigrid")
    spec = load_game(f"gym:minigrid:{name}").spec(GymConfig())
    assert spec.obs_shape == (7 * 7 * 3 + 4,), "image and direction"
