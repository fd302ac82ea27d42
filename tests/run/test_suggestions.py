"""Settings by class of machine: those that were tuned stay, small machines get what fits, larger ones never less."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from redline import algos
from redline.algos import dqn, ppo
from redline.core.errors import UserError
from redline.core.records import Hardware, Tier
from redline.engine import hardware
from redline.run import session
from redline.run.config import Settings, resolve


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


def values(suggested: dict[str, tuple[Any, str]]) -> dict[str, Any]:
    return {name: value for name, (value, _) in suggested.items()}


def test_what_was_tuned_stays() -> None:
    assert values(dqn.suggest(LAPTOP)) == {
        "num_envs": 2_048,
        "batch_size": 512,
        "hidden": (64, 64),
        "replay_capacity": 500_000,
    }
    assert values(dqn.suggest(H100)) == {
        "num_envs": 16_384,
        "batch_size": 16_384,
        "hidden": (256, 256),
        "replay_capacity": 4_000_000,
        "epsilon_steps": 20_000_000,
    }
    assert values(ppo.suggest(LAPTOP)) == {"num_envs": 512, "rollout_steps": 32, "epochs": 3, "hidden": (64, 64)}
    assert values(ppo.suggest(H100)) == {"num_envs": 16_384, "rollout_steps": 32, "epochs": 2, "hidden": (512, 512)}


@pytest.mark.parametrize("algo", [dqn, ppo], ids=["dqn", "ppo"])
def test_a_larger_machine_never_gets_less(algo: Any) -> None:
    found = [values(algo.suggest(machine)) for machine in LEAST.values()]
    for name in ("num_envs", "batch_size", "replay_capacity", "hidden"):
        sizes = [settings[name] for settings in found if name in settings]
        assert sizes == sorted(sizes)
    assert len({settings["num_envs"] for settings in found}) >= 4
    assert len({settings["hidden"] for settings in found}) >= 3


@pytest.mark.parametrize("kind", ["tensor", "process"])
@pytest.mark.parametrize("tier", LEAST)
@pytest.mark.parametrize("algo", [dqn, ppo], ids=["dqn", "ppo"])
def test_every_suggestion_is_a_setting_with_its_reason(algo: Any, tier: Tier, kind: Any) -> None:
    suggested = algo.suggest(LEAST[tier], kind)
    assert all(len(why) > 10 for _, why in suggested.values())
    found = values(suggested)
    games = found.pop("num_envs")
    config, _ = algos.load(algo.__name__.rpartition(".")[2]).fill_defaults(algo.Config(**found), games, ())
    if algo is ppo:
        assert games * config.rollout_steps % config.batch_size == 0
    else:
        assert config.learning_starts < config.replay_capacity
        assert config.replay_capacity >= 16 * games


GPU_FLOOR = {"dqn": {"batch_size": 128, "replay_capacity": 50_000, "hidden": (256, 256, 256)}}
GPU_FLOOR["ppo"] = {"batch_size": 256, "rollout_steps": 512, "epochs": 10, "hidden": (256, 256)}
CPU_FLOOR: dict[str, dict[str, Any]] = {"dqn": {"batch_size": 32, "replay_capacity": 10_000}}
CPU_FLOOR["ppo"] = {"batch_size": 64, "rollout_steps": 256, "epochs": 4, "hidden": (128, 128)}


@pytest.mark.parametrize("tier", LEAST)
@pytest.mark.parametrize("algo", [dqn, ppo], ids=["dqn", "ppo"])
def test_processes_get_what_people_use_today(algo: Any, tier: Tier) -> None:
    machine = LEAST[tier]
    found = values(algo.suggest(machine, "process"))
    floor = (GPU_FLOOR if machine.kind == "cuda" else CPU_FLOOR)[algo.__name__.rpartition(".")[2]]
    for name, least in floor.items():
        assert found[name] >= least, name


@pytest.mark.parametrize("algo", [dqn, ppo], ids=["dqn", "ppo"])
@pytest.mark.parametrize("cores", [1, 4, 8, 64])
def test_no_core_is_without_an_environment(cores: int, algo: Any) -> None:
    for machine in (cpu(cores, 16.0), gpu(16.0, (7, 5), cores)):
        found = algo.suggest(machine, "process")["num_envs"][0]
        assert found >= max(8, cores)
        assert found <= max(16, cores)


@pytest.mark.parametrize("algo", [dqn, ppo], ids=["dqn", "ppo"])
@pytest.mark.parametrize("tier", LEAST)
def test_games_of_tensors_get_far_more(tier: Tier, algo: Any) -> None:
    tensor, process = (values(algo.suggest(LEAST[tier], kind)) for kind in ("tensor", "process"))
    assert tensor["num_envs"] >= 64 * process["num_envs"]
    assert values(algo.suggest(LEAST[tier])) == tensor


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
    session._check_memory(plan)


def test_what_does_not_fit_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: the settings of a large GPU are too much for a small one."""
    machine = LEAST["gpu-small"]
    monkeypatch.setattr(hardware, "pick_device", lambda _: torch.device(machine.device))
    monkeypatch.setattr(hardware, "detect", lambda _: dataclasses.replace(H100, device=machine.device))
    monkeypatch.setattr(hardware, "free_bytes", lambda _: int(machine.memory_gb * 2**30 / 2))
    with pytest.raises(UserError, match="These settings need about"):
        session._check_memory(resolve(Settings("tetris", "ppo")))
