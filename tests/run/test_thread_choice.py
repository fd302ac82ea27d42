"""The number of CPU threads is measured, cached and kept."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.run import device_choice, thread_choice
from redline.run.plan import Plan
from redline.run.resolve import resolve
from redline.run.settings import Settings
from redline.run.thread_choice import _used_by_others, candidates, choose_threads, measure_threads
from redline.run.train import train


@pytest.fixture(autouse=True)
def fresh_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is cached, and the environment names no number of threads."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(thread_choice, "_used_by_others", lambda: lambda: 0.0)
    monkeypatch.chdir(tmp_path)


def plan_of(cores: int = 2, **options: Any) -> Plan:
    settings = Settings(**{"env": "snake", "device": "cpu", "num_envs": 32} | options)
    plan = resolve(settings)
    return dataclasses.replace(plan, hardware=dataclasses.replace(plan.hardware, cores=cores))


class Stopwatch:
    """Gives speeds by number of threads, and counts how often it is asked."""

    def __init__(self, *speeds: float) -> None:
        self.speeds, self.asked = speeds, 0

    def __call__(self, plan: Plan, counts: list[int]) -> dict[int, float]:
        del plan
        self.asked += 1
        return dict(zip(counts, self.speeds, strict=True))


def refuse(plan: Plan, counts: list[int]) -> dict[int, float]:
    pytest.fail(f"{plan.settings.env} was measured with {counts}")


@pytest.mark.parametrize(
    ("speeds", "threads"),
    [((100.0, 10.0), 1), ((100.0, 109.0), 1), ((100.0, 111.0), 2), ((10.0, 15.0, 20.0, 21.0), 8)],
)
def test_fewer_threads_win_unless_more_are_clearly_faster(speeds: tuple[float, ...], threads: int) -> None:
    plan = choose_threads(plan_of(2 if len(speeds) == 2 else 16), Stopwatch(*speeds))
    assert plan.threads == plan.describe()["threads"] == threads
    assert plan.provenance["threads"].source == "derived from a measurement"
    assert "samples/s by threads: 1: " in plan.reasons["threads"]


@pytest.mark.parametrize(
    ("cores", "limit", "expected"),
    [
        (1, "", [1]),
        (2, "", [1, 2]),
        (6, "", [1, 3, 6]),
        (16, "", [1, 4, 8, 16]),
        (16, "4", [1, 2, 4]),
        (16, "1", [1]),
        (4, "64", [1, 2, 4]),
        (4, "0", [1, 2, 4]),
    ],
)
def test_numbers_to_try(cores: int, limit: str, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", limit)
    assert candidates(cores) == expected


def test_the_measurement_is_cached_by_settings() -> None:
    watch = Stopwatch(1.0, 2.0)
    assert choose_threads(plan_of(), watch).threads == 2
    again = choose_threads(plan_of(seed=7, steps=100), refuse)  # neither decides the speed
    assert again.threads == 2
    assert choose_threads(plan_of(num_envs=64), Stopwatch(2.0, 1.0)).threads == 1
    path = device_choice.cache_file("threads")
    cached = json.loads(path.read_text())
    assert len(cached) == 2
    path.write_text(json.dumps({key: {"1": "fast"} for key in cached}))
    assert choose_threads(plan_of(), Stopwatch(2.0, 1.0)).threads == 1, "garbled figures are measured again"


@pytest.mark.parametrize(("options", "cached"), [({}, False), ({"episodes": 8}, False), ({"steps": 100}, True)])
def test_a_choice_beside_other_programs_does_not_outlast_them(
    options: dict[str, Any], cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is cached where a run is to repeat bit for bit."""
    monkeypatch.setattr(thread_choice, "_used_by_others", lambda: lambda: 1.9)
    assert choose_threads(plan_of(**options), Stopwatch(2.0, 1.0)).threads == 1
    assert device_choice.cache_file("threads").exists() == cached
    monkeypatch.setattr(thread_choice, "_used_by_others", lambda: lambda: 0.1)
    assert choose_threads(plan_of(**options), Stopwatch(1.0, 2.0)).threads == (1 if cached else 2)


def test_own_work_is_not_that_of_other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of four cores are busy for two seconds, one of them with this process."""
    now = own = 10.0
    monkeypatch.setattr(thread_choice.psutil, "cpu_percent", lambda: 75.0)
    monkeypatch.setattr(thread_choice.psutil, "cpu_count", lambda: 4)
    monkeypatch.setattr(thread_choice.time, "perf_counter", lambda: now)
    monkeypatch.setattr(thread_choice.time, "process_time", lambda: own)
    used = _used_by_others()
    now, own = 12.0, 12.0
    assert used() == pytest.approx(2.0)


@pytest.mark.parametrize("options", [{"threads": 3}, {"deterministic": True}])
def test_some_runs_are_not_measured(options: dict[str, Any]) -> None:
    plan = plan_of(**options)
    assert choose_threads(plan, refuse) == plan
    assert not device_choice.cache_file("threads").exists()


def test_runs_with_actors_share_the_cores_by_another_rule() -> None:
    plan = plan_of(env="gym:CartPole-v1", actors=1)
    assert choose_threads(plan, refuse) == plan


def test_a_failing_measurement_leaves_the_rule() -> None:
    def fail(plan: Plan, counts: list[int]) -> dict[int, float]:
        raise RuntimeError(f"no {plan.settings.env} with {counts}\nmore")

    plan = choose_threads(plan_of(), fail)
    assert plan.threads == plan_of().threads
    assert plan.reasons["threads"] == "threads could not be measured (RuntimeError: no snake with [1, 2])"


def test_the_measurement_times_every_number_and_puts_threads_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_choice, "_SECONDS", 0.01)
    before, used = torch.get_num_threads(), set()
    time_call = thread_choice._time

    def record(call: Any) -> float:
        used.add(torch.get_num_threads())
        return time_call(call)

    monkeypatch.setattr(thread_choice, "_time", record)
    speeds = measure_threads(plan_of(algo="dqn", batch_size=16, replay_capacity=4096), [1, 2])
    assert speeds.keys() == used == {1, 2}
    assert min(speeds.values()) > 0
    assert torch.get_num_threads() == before


def test_a_resumed_run_keeps_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit the same numbers need the same order of sums."""
    settings = Settings(
        "snake", device="cpu", num_envs=32, steps=1024, compile=False, eval_episodes=0, env_options={"width": 5}
    )
    monkeypatch.setattr(thread_choice, "measure_threads", Stopwatch(1.0, 3.0))
    monkeypatch.setattr(thread_choice, "candidates", lambda _: [1, 2])
    first = train(settings)
    assert first.result["settings"]["threads"] == 2
    device_choice.cache_file("threads").unlink()
    monkeypatch.setattr(thread_choice, "measure_threads", refuse)
    second = train(dataclasses.replace(settings, steps=2048))
    assert second.result["settings"]["threads"] == 2
    assert second.result["settings"]["provenance"]["threads"]["reason"] == "the run began with so many"
    assert train(dataclasses.replace(settings, steps=3072, threads=1)).result["settings"]["threads"] == 1
