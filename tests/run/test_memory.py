"""Estimates of memory against what is really allocated, and the micro-batches chosen from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from redline.core.errors import UserError
from redline.engine import hardware
from redline.run import memory
from redline.run.memory import check_memory, estimate, probe_plan
from redline.run.memory_probe import LiveBytes, measure
from redline.run.plan import Plan
from redline.run.resolve import resolve
from redline.run.session import Session
from redline.run.settings import Settings

CPU = torch.device("cpu")
SMALL = {"num_envs": 128, "device": "cpu", "compile": False}
ON_POLICY: dict[str, Any] = {"rollout_steps": 8}
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "ppo-mlp": ("snake", "ppo", {"batch_size": 1024}, ON_POLICY | {"net": "mlp", "hidden": (64, 64)}),
    "ppo-cnn": ("snake", "ppo", {"batch_size": 512}, ON_POLICY | {"net": "cnn", "channels": (16, 32)}),
    "pqn-resnet": (
        "snake",
        "pqn",
        {"batch_size": 64, "num_envs": 32},
        {"rollout_steps": 4, "net": "resnet", "channels": (8,)},
    ),
    "dqn-quantile": (
        "snake",
        "dqn",
        {"batch_size": 512, "replay_capacity": 50_000, "prioritized": True},
        {"distribution": "quantile", "learning_starts": 0, "hidden": (64,)},
    ),
    "tetris-dqn": ("tetris", "dqn", {"batch_size": 256, "replay_capacity": 50_000}, {"learning_starts": 0}),
}


def plan_of(name: str, **others: Any) -> Plan:
    env, algo, settings, options = CASES[name]
    return resolve(Settings(env, algo, algo_options=options, **SMALL | settings | others))


@pytest.mark.fault("E1")
@pytest.mark.parametrize("name", CASES)
def test_estimate_is_close_to_the_peak(name: str, tmp_path: Any) -> None:
    plan = plan_of(name, run_dir=str(tmp_path))
    expected = sum(estimate(plan, probe_plan(plan))[CPU].values())
    with LiveBytes() as counter:
        session = Session(plan, lambda _: None)
        session.iterate(1 + getattr(plan.algo_config, "n_step", 0) + 1)
    session.close()
    assert 0.9 < expected / counter.peak < 1.25


def test_live_bytes_are_counted_until_they_are_freed() -> None:
    def work() -> torch.Tensor:
        a = torch.zeros(1000)  # 4,000 bytes
        b = a + 1
        del a
        return (b * 2)[:10]  # a view of 4,000 bytes

    with LiveBytes() as counter:
        kept = work()
    assert (counter.peak, counter.live) == (8000, 4000)
    assert measure(lambda: torch.zeros(10))[0] == 40
    del kept
    assert counter.live == 0


def test_of_compiled_code_products_are_counted_and_pointwise_results_are_not() -> None:
    x = torch.zeros(10, 10)  # 400 bytes, created outside
    with LiveBytes(compiled=True) as counter:
        y = (x @ x).relu() * 2 + x
    assert counter.peak == 400
    with LiveBytes() as counter:
        y = (x @ x).relu() * 2 + x
    assert counter.peak >= 800
    del y


@pytest.mark.fault("E1")
def test_a_batch_that_does_not_fit_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of("ppo-cnn")
    whole = sum(estimate(plan, probe_plan(plan))[CPU].values())
    monkeypatch.setattr(hardware, "free_bytes", lambda _: int(whole * 0.6))
    parts = check_memory(plan)
    assert parts >= 2
    assert sum(estimate(plan, probe_plan(plan), parts)[CPU].values()) <= 0.6 * whole
    with pytest.raises(UserError, match="These settings need about"):
        check_memory(plan_of("ppo-cnn", oom="stop"))
    session = Session(plan, lambda _: None)
    assert session.learner.micro_batches == parts
    session.close()


def test_what_needs_little_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "measure_plan", lambda _: pytest.fail("measured"))
    monkeypatch.setattr(hardware, "free_bytes", lambda _: 1 << 40)
    assert check_memory(plan_of("ppo-cnn")) == 1


def test_a_learner_that_cannot_be_measured_is_estimated_by_its_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Plan) -> None:
        raise ValueError("unusual options")

    monkeypatch.setattr(memory, "measure_plan", refuse)
    plan = plan_of("ppo-cnn")
    assert probe_plan(plan) is None
    assert estimate(plan, None)[CPU]["rollout_steps"] > 0


def test_actors_are_counted_in_host_memory() -> None:
    plan = resolve(Settings("gym:CartPole-v1", "ppo", device="cpu", actors=2, num_envs=4))
    assert estimate(plan, None)[CPU]["actors"] == 2 * memory._ACTOR_BYTES
