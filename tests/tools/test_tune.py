"""Tuning: candidates keep the samples per step, the fastest is found, the defaults win where nothing is faster."""

from __future__ import annotations

import dataclasses
import io
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.cli import run
from redline.cli.command import COMMANDS
from redline.cli.parse import fold, merge_config, parse
from redline.core.errors import UserError
from redline.run.device_choice import samples_per_step
from redline.run.plan import Plan
from redline.run.resolve import resolve
from redline.run.settings import Settings, from_words
from redline.tools import tune as tune_module
from redline.tools import tune_search
from redline.tools.trial import Rate
from redline.tools.tune import tune
from redline.tools.tune_search import SCALES, Candidate, compare, largest_batch

Speed = Callable[[Plan], float]


class FakeTrial:
    """A trial whose speed is a function of its plan."""

    speed: Speed
    open = 0

    def __init__(self, settings: Settings, patience: float = 0.0) -> None:
        del patience
        self.plan, self.messages = resolve(settings), list[str]()
        self.per_second = type(self).speed(self.plan)
        self.iteration_seconds = 0.0
        FakeTrial.open += 1

    def wait_ready(self, timeout: float) -> float:
        del timeout
        return 0.0

    def measure(self, seconds: float) -> Rate:
        del seconds
        return Rate(self.per_second, self.per_second)

    def close(self) -> None:
        FakeTrial.open -= 1


def fake(monkeypatch: pytest.MonkeyPatch, eager: Speed, final: Speed | None = None) -> None:
    def kind(speed: Speed) -> type[FakeTrial]:
        return type("Fake", (FakeTrial,), {"speed": staticmethod(speed)})

    FakeTrial.open = 0
    monkeypatch.setattr(tune_search, "Trial", kind(eager))
    for module in (tune_search, tune_module):
        monkeypatch.setattr(module, "ChildTrial", kind(final or eager))
    monkeypatch.setattr(tune_module, "largest_batch", lambda plan, deadline: (4096, "as told"))  # noqa: ARG005


def tuned(tmp_path: Path, env: str = "snake", seconds: float = 100.0, **options: Any) -> dict[str, Any]:
    settings = Settings(env, **{"device": "cpu", "threads": 1, "compile": False} | options)
    record = tune(settings, seconds, tmp_path / "a.toml", io.StringIO(), io.StringIO())
    assert FakeTrial.open == 0, "every trial is closed"
    return record


@pytest.mark.parametrize("algo", ["ppo", "pqn", "dqn"])
@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize(("up", "down"), [(2, 1), (1, 2)])
def test_sizes_keep_the_samples_per_step(algo: str, name: str, up: int, down: int) -> None:
    base = Settings("snake", algo=algo, device="cpu", compile=False)
    plan = resolve(base)
    if algo == "dqn" and name == "rollout_steps":
        with pytest.raises(UserError, match="dqn has no rollouts"):
            SCALES[name](plan, up, down)
        return
    for _ in range(3):  # and again from where it led
        changed = resolve(Candidate("", *SCALES[name](plan, up, down)).settings(base))
        assert samples_per_step(changed) == samples_per_step(plan)
        values = changed.describe() | vars(changed.algo_config)
        before = plan.describe() | vars(plan.algo_config)
        assert values[name] * down == before[name] * up
        if algo == "dqn":
            assert min(changed.algo_config.updates, changed.algo_config.train_every) == 1
        plan, base = (
            changed,
            dataclasses.replace(base, num_envs=changed.num_envs, algo_options=vars(changed.algo_config)),
        )


def test_the_fastest_size_is_found_and_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fastest with 2,048 environments and batches twice as large: two doublings of one, then a halving of the other."""

    def speed(plan: Plan) -> float:
        size, batch = plan.num_envs, plan.algo_config.batch_size
        return 1e6 / ((1 + abs(size / 2048 - 1)) * (1 + abs(batch / (2 * size) - 1)))

    fake(monkeypatch, speed)
    record = tuned(tmp_path)
    assert (record["defaults"]["num_envs"], record["tuned"]["num_envs"]) == (512, 2048)
    assert record["tuned"]["batch_size"] == 4096
    assert record["ratio"] > 1.5
    labels = [row["label"] for row in record["rows"]]
    assert labels[:4] == ["defaults", "num_envs 1,024", "num_envs 2,048", "num_envs 4,096"]
    assert labels[-1] == "best sizes"
    command = COMMANDS.load("train")
    request = parse("train", command, ["snake", "--config", str(tmp_path / "a.toml"), "--threads", "1"])
    merged = merge_config("train", command, request)
    plan = resolve(from_words("snake", fold(merged.options)))
    assert (plan.num_envs, plan.algo_config.batch_size, plan.compile) == (2048, 4096, False)


def test_what_is_faster_only_without_compilation_does_not_win(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake(monkeypatch, lambda plan: min(plan.num_envs, 1024), lambda plan: 1 / plan.num_envs)
    record = tuned(tmp_path)
    assert record["rows"][1]["ratio"] == 2.0
    assert record["tuned"] == record["defaults"]
    assert record["ratio"] == 1.0


def test_candidates_that_fail_are_rows_with_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def speed(plan: Plan) -> float:
        if plan.num_envs > 512:
            raise torch.OutOfMemoryError("CUDA out of memory. More.")
        if plan.algo_config.batch_size > 2048:
            raise UserError("batch_size is too large")
        return 1.0

    fake(monkeypatch, speed)
    reasons = {row["label"]: row["reason"] for row in tuned(tmp_path)["rows"]}
    assert reasons["num_envs 1,024"] == "out of memory"
    assert reasons["batch_size 4,096"] == "batch_size is too large"
    assert reasons["num_envs 256"] == ""


def test_an_unready_comparison_leaves_the_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake(monkeypatch, lambda plan: min(plan.num_envs, 1024))
    monkeypatch.setattr(tune_search, "_wait", lambda trial, deadline: "not ready")  # noqa: ARG005
    out = io.StringIO()
    settings = Settings("snake", device="cpu", threads=1, compile=False)
    record = tune(settings, 50.0, tmp_path / "a.toml", out, io.StringIO())
    assert record["tuned"] == record["defaults"]
    assert (
        "The defaults stay: nothing else was ready in time to compare with them; give more --seconds." in out.getvalue()
    )


def test_a_comparison_is_measured_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, lambda plan: plan.num_envs)
    first, second = Candidate("defaults"), Candidate("more", {"num_envs": 1536})
    base = Settings("snake", device="cpu", compile=False)
    rows: list[Any] = []
    ratios = compare([first, second], base, {}, (float("inf"), float("inf")), rows.append)
    assert ratios == {first: 1.0, second: 3.0}
    assert [row.compiled for row in rows] == [True, True]
    assert FakeTrial.open == 0


def test_the_largest_batch_is_a_gradient_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def learn(size: int) -> Callable[[], None]:
        sizes.append(size)
        if size > 1000:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return lambda: None

    monkeypatch.setattr(tune_search, "workloads", lambda _: (None, learn))
    plan = resolve(Settings("snake", algo="dqn", device="cpu", batch_size=100))
    assert largest_batch(plan, float("inf")) == (800, "1,600 do not fit")
    assert sizes == [100, 200, 400, 800, 1600]
    assert largest_batch(plan, 0.0) == (0, "there was no time for larger ones")


def test_the_command_tunes_a_tiny_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "tune snake --algo dqn --no-compile --device cpu --seconds 0.5 --env.width 5 --dqn.hidden 8"
    words += f" --dqn.learning-starts 0 --dqn.replay-capacity 20000 --out {tmp_path / 'a.toml'}"
    assert run(words.split()) == 0
    out = capsys.readouterr().out
    assert "env-steps/s" in out
    assert f"redline train snake --config {tmp_path / 'a.toml'}" in out
    content = tomllib.loads((tmp_path / "a.toml").read_text())
    assert content["env"] == {"width": 5}
    assert content["dqn"]["hidden"] == [8]
    assert content["compile"] is False
    with pytest.raises(UserError, match="expected a number above 0"):
        run(["tune", "snake", "--seconds", "0"])
