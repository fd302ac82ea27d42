"""Gradients that are NaN or infinite: skipped and counted; a row of them restores good weights, or ends the run."""

from __future__ import annotations

import gc
import itertools
import json
import math
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

import redline
from redline.algos import dqn, ppo
from redline.algos.optimizer import Optimizer
from redline.core import faults
from redline.engine.runtime import Runtime
from redline.envs import batch, make_rules
from redline.run import divergence, trainer
from redline.run import train as module
from redline.run.divergence import MAX_SKIPPED
from redline.run.train import EXIT_CODES

OPTIONS: dict[str, Any] = {
    "num_envs": 32,
    "device": "cpu",
    "compile": False,
    "eval_episodes": 0,
    "batch_size": 64,
    "steps": 32 * 8 * 20,
}


ALGOS = {
    "ppo": {"rollout_steps": 8, "epochs": 2, "hidden": (16,), "net": "mlp"},
    "pqn": {"rollout_steps": 8, "epochs": 2, "hidden": (16,), "net": "mlp"},
    "dqn": {"hidden": (16,), "replay_capacity": 2000, "learning_starts": 128, "n_step": 3, "learning_rate_end": None},
}


def train(folder: Path, algo: str = "ppo", **others: Any) -> redline.Run:
    options = OPTIONS | {"algo": algo, "algo_options": ALGOS[algo] | others.pop("algo_options", {})} | others
    return redline.train("snake", run_dir=str(folder), **options)


def newest_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(max((folder / "checkpoints").glob("ckpt-*")) / "model.safetensors")


def messages(capfd: pytest.CaptureFixture[str]) -> str:
    return " ".join(capfd.readouterr().err.split())


def spoil_gradients(patch: pytest.MonkeyPatch, spoiled: range, value: float = math.nan) -> None:
    """Make the gradients with these numbers, counted from 0, NaN or infinite."""
    original, count = Optimizer.gradient, itertools.count()

    def gradient(self: Optimizer, loss: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gradients = original(self, loss)
        return tuple(g * value for g in gradients) if next(count) in spoiled else gradients

    patch.setattr(Optimizer, "gradient", gradient)


@pytest.mark.fault("D3", "D5")
@pytest.mark.parametrize("algo", ALGOS)
def test_a_learning_rate_that_diverges_stops_with_a_diagnosis(
    algo: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Three rollbacks with lower learning rates do not help; the checkpoint holds weights that were good."""
    rates = {"learning_rate": 1e30} | ({} if algo == "dqn" else {"learning_rate_end": 1e30})
    bad = train(tmp_path, algo, algo_options=rates, steps=32 * 8 * 200, log_seconds=0.05).result
    assert bad["stopped_by"] == "diverged"
    assert EXIT_CODES["diverged"] == 70
    said = messages(capfd)
    assert "Updates are skipped because the" in said
    assert "(rollback 3 of 3)" in said
    assert "Training has diverged after 3 rollbacks: the last" in said
    assert "the last good ones, are restored. Continue with a lower learning rate" in said
    assert all(bool((weights.abs() < 1e3).all()) for weights in newest_weights(tmp_path).values())
    lines = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in lines
    assert "Infinity" not in lines
    assert any(json.loads(line).get("loss", 0.0) is None for line in lines.splitlines())
    rates = dict.fromkeys(rates, 1e-3)
    assert train(tmp_path, algo, algo_options=rates, steps=bad["env_steps"] + 512).result["stopped_by"] == "steps"


@pytest.mark.fault("D3")
@pytest.mark.parametrize("algo", ALGOS)
@pytest.mark.parametrize("steps", [32 * 8 * 20, 32 * 8 * 3])
def test_a_run_that_ends_before_it_recovers_has_diverged(
    algo: str, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its limit is reached at the first log point, when hardly a step was taken: it must not end as if all were well."""
    spoil_gradients(monkeypatch, range(1, 1000), math.inf)
    options = {"train_every": 1} if algo == "dqn" else {}
    assert train(tmp_path, algo, steps=steps, log_seconds=60.0, algo_options=options).result["stopped_by"] == "diverged"
    assert "Training has diverged" in messages(capfd)


@pytest.mark.fault("D3")
@pytest.mark.parametrize("algo", ALGOS)
def test_a_row_of_bad_gradients_is_survived_with_a_lower_learning_rate(
    algo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    rates = {} if algo == "dqn" else {"learning_rate": 1e-3, "learning_rate_end": 1e-3}
    with monkeypatch.context() as patch:
        spoil_gradients(patch, range(48, 48 + MAX_SKIPPED))  # ends with an iteration, and so at a log point
        patch.setattr(divergence, "_COPY_SECONDS", 0.0)
        result = train(tmp_path, algo, algo_options=rates, steps=32 * 8 * 24, log_seconds=0.001).result
    assert result["stopped_by"] == "steps"
    said = messages(capfd)
    assert (
        f"for the last {MAX_SKIPPED} updates were skipped because the gradient is NaN or infinite (rollback 1 of 3)"
        in said
    )
    assert "Going back to the weights of step 0 " not in said
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    learned = [record["learning_rate"] for record in records if "learning_rate" in record]
    assert learned[-1] == pytest.approx(learned[0] / 4)
    assert records[-1]["skipped_updates"] == MAX_SKIPPED
    train(tmp_path, algo, algo_options=rates, steps=32 * 8 * 26)  # a continued run keeps the lower learning rate
    newest = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert newest["learning_rate"] == pytest.approx(learned[-1])


@pytest.mark.fault("D3")
def test_a_few_bad_gradients_are_only_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    spoil_gradients(monkeypatch, range(4, 7))
    assert train(tmp_path).result["stopped_by"] == "steps"
    said = messages(capfd)
    assert "Updates are skipped because the gradient is NaN or infinite" in said
    assert "Going back" not in said
    record = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert record["skipped_updates"] == 3


@pytest.mark.fault("D3")
def test_a_bad_loss_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ppo, "policy_loss", lambda logp, *_: logp.mean() * float("nan"))
    assert train(tmp_path).result["stopped_by"] == "diverged"
    assert "Updates are skipped because the loss is NaN or infinite" in messages(capfd)


@pytest.mark.fault("D5")
@pytest.mark.parametrize("algo", ALGOS)
def test_weights_that_turn_bad_are_named_and_never_saved(
    algo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    original, calls = module.Session.iterate, itertools.count()

    def poisoning(self: Any, count: int, *rest: Any) -> None:
        original(self, count, *rest)
        if next(calls) == 3:
            self.learner.optimizer.flat[0] = float("nan")

    monkeypatch.setattr(module.Session, "iterate", poisoning)
    steps = {"steps": 32 * 8 * 24, "log_seconds": 0.1, "checkpoint_minutes": 1e-9}  # a checkpoint at every log point
    assert train(tmp_path, algo, **steps).result["stopped_by"] == "steps"
    said = messages(capfd)
    assert "' is NaN or infinite (rollback 1 of 3)" in said
    assert "was not written" not in said
    for folder in (tmp_path / "checkpoints").glob("ckpt-*"):
        assert all(bool(x.isfinite().all()) for x in load_file(folder / "model.safetensors").values())


@pytest.mark.fault("D5")
def test_with_actors_return_statistics_stay_finite(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Actors go on with bad weights for a while: what they played arrives after the rollback."""
    faults.arm("nan@weights:10")
    try:
        options = {"num_envs": 4, "batch_size": 32, "steps": 4 * 8 * 60, "log_seconds": 0.05}
        result = redline.train(
            "gym:CartPole-v1",
            run_dir=str(tmp_path),
            algo="ppo",
            algo_options=ALGOS["ppo"],
            actors=2,
            **OPTIONS | options,
        ).result
    finally:
        faults.arm("")
    assert result["stopped_by"] == "steps"
    said = messages(capfd)
    assert "(rollback 1 of 3)" in said
    assert "(rollback 2 of 3)" not in said
    weights = newest_weights(tmp_path)
    assert all(bool(x.isfinite().all()) for x in weights.values())
    assert weights["updates"] > 20
    assert weights["variance"] != 1


@pytest.mark.fault("D5")
def test_without_good_weights_nothing_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, steps=32 * 8 * 4)
    saved = sorted((tmp_path / "checkpoints").glob("ckpt-*"))
    original = trainer.Trainer.__init__

    def poisoned(self: Any, *arguments: Any) -> None:
        original(self, *arguments)
        self.session.learner.optimizer.flat[0] = float("nan")
        self.guard._good.clear()

    monkeypatch.setattr(trainer.Trainer, "__init__", poisoned)
    assert train(tmp_path).result["stopped_by"] == "diverged"
    assert "There are no good weights to save: the last good checkpoint is kept" in messages(capfd)
    assert sorted((tmp_path / "checkpoints").glob("ckpt-*")) == saved


@pytest.mark.fault("D4")
@pytest.mark.parametrize("overflow", [True, False])
def test_float16_overflow_halves_the_scale_and_leaves_the_target_network(overflow: bool) -> None:
    """On the CPU, with the loss scaled far enough to overflow float16."""
    config = dqn.Config(batch_size=8, replay_capacity=400, learning_starts=0, hidden=(8,), net="mlp", tau=0.5)
    rules = make_rules("snake")
    envs = batch.reset(rules, batch.env_keys(0, torch.arange(4)))
    learner = dqn.Learner(rules, config, envs.game, 4, 0, Runtime(torch.device("cpu"), torch.float16))
    for _ in range(8):
        envs, step = batch.step(rules, envs, torch.zeros(4, dtype=torch.int64))
        learner.ingest(redline.core.records.Transition(envs.game, torch.zeros(4, dtype=torch.int64), step))
    assert learner.optimizer.scaled
    scale = 2.0**60 if overflow else 1.0
    learner.optimizer.scale.fill_(scale)
    learner.optimizer.flat.add_(0.01)  # the target network has somewhere to go
    online, target = learner.optimizer.flat.clone(), learner.target_weights.clone()
    learner.gradient_step()
    assert int(learner.optimizer.skipped) == overflow
    assert float(learner.optimizer.scale) == (scale / 2 if overflow else scale)
    assert torch.equal(learner.optimizer.flat, online) == overflow
    assert torch.equal(learner.target_weights, target) == overflow


def test_float16_finds_its_scale_and_learns(tmp_path: Path) -> None:
    result = train(tmp_path, precision="fp16", steps=32 * 8 * 3).result
    assert result["stopped_by"] == "steps"


@pytest.mark.fault("E5")
def test_repeated_runs_in_one_process_leak_no_memory(tmp_path: Path) -> None:
    sizes = []
    for number in range(6):
        train(tmp_path / str(number), steps=32 * 8 * 4)
        gc.collect()
        sizes.append(psutil.Process().memory_info().rss)
    growth = (sizes[-1] - sizes[1]) / 4  # bytes per run, after the first two have loaded libraries and filled caches
    assert growth < 4 * 2**20
