"""Defaults by class of hardware: tuned values stay, small machines get what fits, larger ones never less."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from redline import algos
from redline.core.errors import UserError
from redline.core.records import Hardware, Tier
from redline.engine import hardware
from redline.envs import load_game
from redline.recipes import Request, cpu_envs, tensor_games
from redline.recipes.recipe import for_hardware
from redline.run import memory
from redline.run.memory import check_memory
from redline.run.resolve import resolve
from redline.run.settings import Settings


def cpu(cores: int, memory_gb: float) -> Hardware:
    return Hardware("cpu", "x", cores, memory_gb, bf16=False, compiler="g++")


def gpu(memory_gb: float, capability: tuple[int, int], cores: int = 8) -> Hardware:
    return Hardware("cuda:0", "x", cores, memory_gb, capability >= (8, 0), "g++", capability)


# The least of each class, in order; and others as they are met.
LEAST: dict[Tier, Hardware] = {
    "cpu-few": cpu(1, 2.0),
    "cpu-many": cpu(6, 8.0),
    "gpu-small": gpu(4.0, (7, 5)),
    "gpu-mid": gpu(10.6, (7, 5)),
    "gpu-large": gpu(31.4, (8, 0)),
}
LAPTOP, H100 = cpu(2, 16.0), gpu(79.2, (9, 0))


def defaults(algo: str, machine: Hardware, on_cpu: bool = False) -> dict[str, Any]:
    """The defaults for any environment of a kind, by name."""
    request = Request(load_game("gym:CartPole-v1" if on_cpu else "snake"), machine, algo)
    table = (cpu_envs if on_cpu else tensor_games).settings(request)
    return {name: row.value for name, row in for_hardware(table, machine).items()}


def test_tuned_defaults_stay() -> None:
    assert defaults("dqn", LAPTOP) == {
        "num_envs": 2_048,
        "batch_size": 512,
        "hidden": (64, 64),
        "replay_capacity": 500_000,
    }
    assert defaults("dqn", H100) == {
        "num_envs": 16_384,
        "batch_size": 16_384,
        "hidden": (256, 256),
        "replay_capacity": 4_000_000,
        "epsilon_steps": 20_000_000,
    }
    assert defaults("ppo", LAPTOP) == {"num_envs": 512, "rollout_steps": 32, "epochs": 3, "hidden": (64, 64)}
    assert defaults("ppo", H100) == {"num_envs": 16_384, "rollout_steps": 32, "epochs": 2, "hidden": (512, 512)}


@pytest.mark.parametrize("algo", algos.names())
def test_a_larger_machine_never_gets_less(algo: str) -> None:
    rows = [defaults(algo, machine) for machine in LEAST.values()]
    for name in ("num_envs", "batch_size", "replay_capacity", "hidden"):
        sizes = [row[name] for row in rows if name in row]
        assert sizes == sorted(sizes)
    assert len({row["num_envs"] for row in rows}) >= 4
    assert len({row["hidden"] for row in rows}) >= 3


@pytest.mark.parametrize("on_cpu", [False, True])
@pytest.mark.parametrize("tier", LEAST)
@pytest.mark.parametrize("name", ["dqn", "ppo"])
def test_defaults_fit_each_other(name: str, tier: Tier, on_cpu: bool) -> None:
    algo, row = algos.load(name), defaults(name, LEAST[tier], on_cpu)
    num_envs = row.pop("num_envs")
    config, _ = algo.fill_defaults(algo.Config(**row), num_envs, ())
    if name == "ppo":
        assert num_envs * config.rollout_steps % config.batch_size == 0
    else:
        assert config.learning_starts < config.replay_capacity
        assert config.replay_capacity >= 16 * num_envs


GPU_FLOOR: dict[str, dict[str, Any]] = {
    "dqn": {"batch_size": 128, "replay_capacity": 50_000, "hidden": (256, 256, 256)},
    "ppo": {"batch_size": 256, "rollout_steps": 512, "epochs": 10, "hidden": (256, 256)},
}
CPU_FLOOR: dict[str, dict[str, Any]] = {
    "dqn": {"batch_size": 32, "replay_capacity": 10_000},
    "ppo": {"batch_size": 64, "rollout_steps": 256, "epochs": 4, "hidden": (128, 128)},
}


@pytest.mark.parametrize("tier", LEAST)
@pytest.mark.parametrize("algo", ["dqn", "ppo"])
def test_cpu_environments_get_what_people_use_today(algo: str, tier: Tier) -> None:
    row = defaults(algo, LEAST[tier], on_cpu=True)
    for name, least in (GPU_FLOOR if LEAST[tier].kind == "cuda" else CPU_FLOOR)[algo].items():
        assert row[name] >= least, name


@pytest.mark.parametrize("algo", [*algos.names(), "an algorithm without a table"])
@pytest.mark.parametrize("cores", [1, 4, 8, 64])
def test_no_core_is_without_an_environment(cores: int, algo: str) -> None:
    for machine in (cpu(cores, 16.0), gpu(16.0, (7, 5), cores)):
        assert max(8, cores) <= defaults(algo, machine, on_cpu=True)["num_envs"] <= max(16, cores)


@pytest.mark.parametrize("algo", ["dqn", "ppo"])
@pytest.mark.parametrize("tier", LEAST)
def test_tensor_games_get_far_more_environments(tier: Tier, algo: str) -> None:
    tensor, process = (defaults(algo, LEAST[tier], on_cpu)["num_envs"] for on_cpu in (False, True))
    assert tensor >= 64 * process


@pytest.mark.parametrize("tier", LEAST)
@pytest.mark.parametrize("algo", algos.names())
def test_it_fits_into_half_of_the_memory(variant: Any, algo: str, tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the check that training makes, with half of the memory free, on the least machine of each class."""
    machine = LEAST[tier]
    assert machine.tier == tier
    monkeypatch.setattr(hardware, "pick_device", lambda _: torch.device(machine.device))
    monkeypatch.setattr(hardware, "detect", lambda _: machine)
    monkeypatch.setattr(hardware, "free_bytes", lambda _: int(machine.memory_gb * 2**30 / 2))
    plan = resolve(Settings(variant.game, algo, env_options=variant.options))
    assert plan.hardware == machine
    monkeypatch.setattr(memory, "probe_plan", lambda _: None)  # there is no such GPU; tests/run/test_memory.py measures
    check_memory(plan)


def test_what_does_not_fit_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: the settings of a large GPU are too much for a small one."""
    machine = LEAST["gpu-small"]
    monkeypatch.setattr(hardware, "pick_device", lambda _: torch.device(machine.device))
    monkeypatch.setattr(hardware, "detect", lambda _: dataclasses.replace(H100, device=machine.device))
    monkeypatch.setattr(hardware, "free_bytes", lambda _: int(machine.memory_gb * 2**30 / 2))
    with pytest.raises(UserError, match="These settings need about"):
        check_memory(resolve(Settings("tetris", "ppo")))
