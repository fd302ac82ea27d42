"""Recipes: the plans they produce, the contract of every recipe, recipes from outside, environments without one."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import old_mario
import plan_table
import pytest
import torch
import toys

from redline import algos, recipes
from redline.core.errors import UserError
from redline.core.records import Hardware
from redline.engine import hardware
from redline.engine.fast import CompilerOptions
from redline.envs import gym_game, load_game
from redline.recipes import Recipe, Request, Setting, cpu_envs, tensor_games
from redline.recipes.recipe import RUN_SETTINGS, UNSET, ByClass, by_device, for_hardware, per_core
from redline.run.resolve import resolve
from redline.run.settings import DEFAULT_MINUTES, Settings

assert toys  # registers the environments of Gymnasium that the cases use
STORED = json.loads(plan_table.STORED.read_text())
TIERS = list(plan_table.MACHINES)


@pytest.fixture
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hardware]:
    """Resolve plans for the class of hardware in `request.param`, with a Mario that needs no emulator."""
    chosen = plan_table.MACHINES[request.param]
    monkeypatch.setattr(hardware, "pick_device", lambda _: torch.device(chosen.device))
    monkeypatch.setattr(hardware, "detect", lambda _: chosen)
    monkeypatch.setattr(gym_game.GymGame, "step_seconds", lambda *_: plan_table.STEP_SECONDS)
    with old_mario.installed():
        yield chosen


@pytest.mark.parametrize("machine", TIERS, indirect=True)
def test_plans_stay_as_they_were_measured(machine: Hardware) -> None:
    """Every option of 42 plans per class of hardware, as stored before settings moved into recipes.

    Whoever tunes a recipe or renames an option edits plans.json with it.
    """
    for label, arguments in plan_table.cases():
        plan = resolve(Settings(**arguments))
        expected = STORED["plans"][label]["all"] | STORED["plans"][label][machine.tier]
        assert plan_table.summary(plan) == expected, label
        names = {"algo": plan.settings.algo, "env": arguments["env"].partition(":")[0]}
        for group, defaults in plan_table.defaults(plan).items():
            stored = STORED["defaults"][f"{group} {names[group]}"]
            assert {name: defaults.get(name) for name in stored} == stored  # options may be added


ENVS = {"gymnasium": "gym:CartPole-v1", "tensor_games": "snake", "cpu_envs": "gym:CartPole-v1"}


@pytest.mark.parametrize("machine", TIERS, indirect=True)
@pytest.mark.parametrize("algo", algos.names())
@pytest.mark.parametrize("name", recipes.names())
def test_every_setting_is_an_option_and_has_a_reason(name: str, algo: str, machine: Hardware) -> None:
    recipe, game = recipes.load(name), load_game(ENVS.get(name, name))
    request = Request(game, machine, algo)
    assert recipe.algo is None or recipe.algo.value in algos.names()
    known = {field.name for field in dataclasses.fields(algos.load(algo).Config)}
    known |= {f"env.{field.name}" for field in dataclasses.fields(game.Config)} | set(RUN_SETTINGS)
    chosen = for_hardware(recipe.settings(request), machine)
    for option, setting in chosen.items():
        assert option in known
        assert isinstance(setting.reason, str)
        assert len(setting.reason) > 10, option
        assert setting.reason[-1] != "."
    assert all(setting.source for setting in recipes.collect(request).values())


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("machine", ["gpu-large"], indirect=True)
def test_the_support_of_snake_holds_the_return_of_a_full_board() -> None:
    """A return beyond the support would be learned as its end: a shorter game would look as good as a full board."""
    for size, food in ((10, 1.0), (20, 0.5)):
        board = {"width": size, "height": size, "reward_food": food}
        config = resolve(Settings("snake", "dqn", preset="rainbow", env_options=board)).algo_config
        assert config.distribution == "categorical"
        assert config.v_max == size * size * food + 5.0
        assert config.v_min < -5.0  # starvation, the worst that a game can earn


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("machine", ["gpu-large"], indirect=True)
def test_a_recipe_decides_the_minutes_of_a_run_without_a_limit() -> None:
    plan = resolve(Settings("snake", "dqn"))
    assert plan.minutes == 7
    assert plan.provenance["minutes"].source == "recipe snake"
    for limit in ({"steps": 1000}, {"episodes": 10}, {"minutes": 1.0}):
        plan = resolve(Settings("snake", "dqn", **limit))  # type: ignore[arg-type]
        assert plan.minutes == limit.get("minutes")
        assert "minutes" not in plan.provenance
    assert resolve(Settings("snake", "pqn")).minutes == DEFAULT_MINUTES


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("machine", ["gpu-mid", "gpu-large"], indirect=True)
def test_snake_limits_no_error_but_that_of_quantiles() -> None:
    quantile: list[dict[str, Any]] = [{"preset": "modern"}, {"algo_options": {"distribution": "quantile"}}]
    for arguments in quantile:
        assert resolve(Settings("snake", "dqn", **arguments)).algo_config.huber == 1.0
    squared = resolve(Settings("snake", "dqn")).algo_config
    assert squared.distribution == "none"
    assert squared.huber > 105  # a full board: no TD error is larger


def test_a_table_picks_by_class_device_and_cores() -> None:
    table = {
        "a": Setting(ByClass(1, 2, 3, 4, 5), "the class decides"),
        "b": Setting(by_device(gpu=7), by_device(cpu="never shown", gpu="only a GPU")),
        "c": Setting(per_core(at_least=8), "one per core"),
        "d": Setting((64, 64), "always"),
    }
    values = {
        tier: {name: row.value for name, row in for_hardware(table, machine).items()}
        for tier, machine in plan_table.MACHINES.items()
    }
    assert [values[tier]["a"] for tier in TIERS] == [1, 2, 3, 4, 5]
    assert [values[tier].get("b", UNSET) for tier in TIERS] == [UNSET, UNSET, 7, 7, 7]
    assert [values[tier]["c"] for tier in TIERS] == [8, 24, 8, 8, 16]
    assert for_hardware(table, plan_table.MACHINES["gpu-mid"])["b"].reason == "only a GPU"


def test_an_algorithm_without_a_table_keeps_its_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(load_game("snake"), plan_table.MACHINES["cpu-few"], "a2c")
    monkeypatch.setattr(recipes, "find", lambda _: Recipe())
    assert recipes.collect(request).keys() == {"num_envs"}
    cartpole = load_game("gym:CartPole-v1")
    assert recipes.collect(dataclasses.replace(request, game=cartpole)).keys() == {"num_envs"}
    assert set(recipes.collect(dataclasses.replace(request, algo="ppo"))) == set(tensor_games._PPO)
    assert set(recipes.collect(dataclasses.replace(request, algo="dqn", game=cartpole))) == set(cpu_envs._DQN)


def test_recipes_are_found_by_name_and_by_the_part_before_the_colon() -> None:
    assert [recipes.find(env).name for env in ("snake", "mario:8-4", "gym:CartPole-v1")] == [
        "snake",
        "mario",
        "gymnasium",
    ]
    assert recipes.find("no_such_game").name == ""
    assert recipes.compiler_options(load_game("tetris")) == CompilerOptions(gpu_inline=40, unroll=18, fusion=512)
    assert recipes.compiler_options(load_game("gym:CartPole-v1")) == CompilerOptions()


OUTSIDE = """
from redline.recipes import Phase, Setting
ALGO = Setting("dqn", "because it is tested here")
def settings(request):
    return {"num_envs": Setting(77, "a number of its own"), "gamma": Setting(0.5, "a discount of its own")}
def curriculum(config):
    return (Phase("short", 0.0, 0.5, {}),)
"""


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package outside Redline with a module `toy`, imported as a game would be."""
    package = tmp_path / "outside_games"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "toy.py").write_text("VERSION = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    __import__("outside_games.toy")
    yield package
    recipes.refresh()
    for name in [name for name in sys.modules if name.startswith("outside_games")]:
        del sys.modules[name]


def test_a_game_from_outside_brings_its_recipe(outside: Path) -> None:
    assert recipes.find("outside_games.toy").name == ""
    (outside / "toy_recipe.py").write_text(OUTSIDE)
    recipe = recipes.find("outside_games.toy")
    game = dataclasses.replace(load_game("snake"), name="outside_games.toy")
    assert recipe.name == "outside_games.toy_recipe"
    request = Request(game, plan_table.MACHINES["cpu-few"], "dqn")
    settings = recipes.collect(request)
    assert (settings["num_envs"].value, settings["gamma"].value) == (77, 0.5)
    assert settings["gamma"].source == "recipe outside_games.toy_recipe"
    assert settings["batch_size"].source == "default for tensor games on cpu-few"
    assert recipes.choose_algo(recipes.Request(game, plan_table.MACHINES["cpu-few"])).value == "dqn"
    assert recipe.curriculum(None)[0].name == "short"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("1 / 0", "The recipe 'outside_games.toy_recipe' cannot be imported: ZeroDivisionError"),
        ("settings = 3", r"The recipe 'outside_games.toy_recipe' lacks settings\(request\)"),
        ("ALGO = 'dqn'\ndef settings(request): ...", "has ALGO = 'dqn'; expected a Setting"),
        ("COMPILER = {}\ndef settings(request): ...", "has COMPILER = {}; expected a CompilerOptions"),
    ],
)
def test_a_broken_recipe_is_named(text: str, sentence: str, outside: Path) -> None:
    (outside / "toy_recipe.py").write_text(text)
    with pytest.raises(UserError, match=sentence):
        recipes.find("outside_games.toy")
