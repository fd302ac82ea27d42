"""Stages: every moment is charged once, and declared stages exist."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from redline import algos
from redline.engine.stages import IDLE, HostClock, Stage, make_clock, time_stages
from redline.run.resolve import resolve
from redline.run.session import Session
from redline.run.settings import Settings

SIZES = {"ppo": {"rollout_steps": 4}, "pqn": {"rollout_steps": 4}, "dqn": {"replay_capacity": 1024}}


def test_nested_spans_are_charged_once() -> None:
    clock = HostClock()
    began = time.perf_counter()
    clock.start()
    with clock.span("outer"):
        time.sleep(0.02)
        with clock.span("inner"):
            time.sleep(0.03)
        time.sleep(0.01)
    time.sleep(0.02)
    clock.stop()
    wall = time.perf_counter() - began
    seconds = clock.read()
    assert set(seconds) == {"outer", "inner", IDLE}
    assert sum(seconds.values()) == pytest.approx(wall, rel=0.03)
    assert seconds["outer"] >= 0.03
    assert seconds["inner"] >= 0.03
    assert seconds[IDLE] >= 0.02
    assert dict(clock.calls) == {"outer": 1, "inner": 1}


def test_a_failing_stage_closes_its_span() -> None:
    def fail() -> None:
        raise ValueError

    owner = SimpleNamespace(part=SimpleNamespace(work=fail), other=lambda x: x + 1)
    clock = make_clock(torch.device("cpu"))
    compiled = []
    time_stages(
        owner,
        {"part.work": Stage("work", compiled=False), "other": Stage("other")},
        clock,
        lambda function: compiled.append(function) or function,
    )
    clock.start()
    with pytest.raises(ValueError):  # noqa: PT011
        owner.part.work()
    assert owner.other(1) == 2
    clock.stop()
    assert clock.calls == {"work": 1, "other": 1}
    assert len(compiled) == 1


@pytest.mark.parametrize("algo", algos.names())
def test_declared_stages_exist(algo: str) -> None:
    """Every declared attribute is a function that an iteration calls or may call."""
    settings = Settings(
        "snake",
        algo,
        num_envs=8,
        steps=10_000,
        device="cpu",
        compile=False,
        algo_options={"hidden": (16,), "net": "mlp", "batch_size": 8} | SIZES.get(algo, {}),
    )
    session = Session(resolve(settings), pytest.fail)
    clock = HostClock()
    for owner in (session.learner, session.collector):
        assert owner.stages
        time_stages(owner, owner.stages, clock, lambda function: function)
    session._build()
    session.learner.ready = lambda iterations: iterations > 8  # type: ignore[method-assign]
    clock.start()
    session.iterate(10)
    clock.stop()
    session.close()
    called = {"environment step", "inference", "observation", "replay write", "forward", "backward", "optimizer"}
    assert called <= clock.calls.keys()
