"""A plan written as TOML is read back into the same plan."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from redline.cli.command import COMMANDS
from redline.cli.commands import train
from redline.cli.parse import fold, merge_config, parse
from redline.run.config_file import plan_to_toml, toml_value
from redline.run.plan import Plan
from redline.run.resolve import resolve
from redline.run.settings import ALGO_SHORTHANDS, from_words


def plan_of(*words: str) -> Plan:
    """The plan of `redline train WORDS`."""
    command = COMMANDS.load("train")
    merged = merge_config("train", command, parse("train", command, list(words)))
    return resolve(from_words(merged.arguments[0], fold(merged.options)))


def values(plan: Plan) -> dict[str, Any]:
    return {name: value for name, value in plan.describe().items() if name != "provenance"}


@pytest.mark.parametrize(
    "line",
    [
        "snake",
        "snake --env.width 6 --env.height 6 --steps 5k",  # with a curriculum
        "snake --algo pqn --no-curriculum --seed 3 --deterministic",
        "tetris --algo dqn --minutes 2 --no-compile",
        "snake --algo dqn --preset rainbow --no-dqn.noisy --batch-size 64 --replay pinned",
        "snake --ppo.gamma 0.9 --num-envs 100 --threads 2",
        "gym:CartPole-v1 --env.kwargs.sutton_barto_reward true --actors 2 --inference central",
    ],
)
def test_a_printed_config_gives_the_same_plan(line: str, tmp_path: Path) -> None:
    plan = plan_of(*line.split())
    path = tmp_path / "a.toml"
    path.write_text(plan_to_toml(plan))
    again = plan_of(line.split()[0], "--config", str(path))
    assert values(again) == values(plan)
    assert plan_to_toml(again).count("\n") == plan_to_toml(plan).count("\n")


def test_a_printed_config_names_every_option(tmp_path: Path) -> None:
    plan = plan_of("snake")
    text = plan_to_toml(plan)
    for option in COMMANDS.load("train").options():
        if option.name not in ("config", "print_config", *train.PAGE, *ALGO_SHORTHANDS):
            assert f"\n{option.name} = " in text or f"\n# {option.name} =" in text, option.name
    content = tomllib.loads(text)
    assert content["env"].keys() == vars(plan.rules.config).keys()
    assert content["ppo"].keys() == vars(plan.algo_config).keys()
    assert "# recipe snake: " in text, "the reasons are beside the values"
    assert "\n# minutes = 3.0" in text, "the default limit must not join a limit given later"
    (tmp_path / "a.toml").write_text(text)
    limited = plan_of("snake", "--config", str(tmp_path / "a.toml"), "--steps", "5k")
    assert (limited.settings.steps, limited.minutes) == (5000, None)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("batch_size = 64", "--ppo.batch-size 32"),
        ("[ppo]\nbatch_size = 64", "--batch-size 32"),
        ("train_every = 64\nbatch_size = 32", "--ppo.rollout-steps 32"),
        ("batch_size = 32\n[ppo]\nrollout_steps = 64", "--train-every 32"),
    ],
)
def test_the_command_line_wins_by_either_spelling(file: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(file)
    config = plan_of("snake", "--config", str(tmp_path / "a.toml"), *words.split()).algo_config
    assert config.batch_size == config.rollout_steps == 32


@pytest.mark.parametrize("value", [True, 3, -1e-5, 'a "b" \\ é', [1, 2], [], {"a b": 1}, [[1.5], [2.0]]])
def test_values_survive(value: Any) -> None:
    assert tomllib.loads(f"x = {toml_value(value)}")["x"] == value


def test_print_config_trains_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = COMMANDS.load("train")
    assert command.run(parse("train", command, ["snake", "--print-config", "--device", "cpu", "--num-envs", "64"])) == 0
    assert tomllib.loads(capsys.readouterr().out)["num_envs"] == 64
    assert not list(tmp_path.iterdir())
