"""Gradients that are NaN or infinite: skipped and counted; a run that has only such ones stops and says why."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import redline
from redline.algos import dqn, ppo
from redline.engine.runtime import Runtime
from redline.envs import batch, make_rules
from redline.run import train as module
from redline.run.train import EXIT_CODES

OPTIONS: dict[str, Any] = {
    "algo": "ppo",
    "num_envs": 32,
    "device": "cpu",
    "compile": False,
    "eval_episodes": 0,
    "batch_size": 64,
    "steps": 32 * 8 * 20,
    "algo_options": {"rollout_steps": 8, "hidden": (16,), "net": "mlp"},
}


def train(folder: Path, **others: Any) -> redline.Run:
    return redline.train("snake", run_dir=str(folder), **OPTIONS | others)


@pytest.mark.fault("D3")
def test_a_run_without_finite_gradients_stops_with_a_diagnosis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The weights before the first NaN are kept: skipped updates change nothing, and the run can be continued."""
    good = train(tmp_path, steps=32 * 8 * 4).result
    with monkeypatch.context() as patch:
        patch.setattr(ppo, "policy_loss", lambda logp, *_: logp.mean() * float("nan"))
        bad = train(tmp_path).result
    assert bad["stopped_by"] == "diverged"
    assert EXIT_CODES["diverged"] == 70
    said = " ".join(capfd.readouterr().err.split())
    assert "Training has diverged: the last" in said
    assert "The weights are finite." in said
    assert bad["env_steps"] > good["env_steps"]
    folders = sorted((tmp_path / "checkpoints").glob("ckpt-*"))
    first, last = ((folder / "model.safetensors").read_bytes() for folder in (folders[0], folders[-1]))
    # Running statistics of returns go on; every trained weight is as before.
    from safetensors.torch import load

    before, after = load(first), load(last)
    statistics = {"mean", "variance", "updates"}
    assert all(torch.equal(before[name], after[name]) for name in before if name not in statistics)
    assert train(tmp_path).result["stopped_by"] == "steps"


@pytest.mark.fault("D5")
def test_weights_that_are_not_finite_are_named_and_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, steps=32 * 8 * 4)
    saved = sorted((tmp_path / "checkpoints").glob("ckpt-*"))
    original = module.Trainer.__init__

    def poisoned(self: Any, *arguments: Any) -> None:
        original(self, *arguments)
        self.session.learner.optimizer.flat[0] = float("nan")

    monkeypatch.setattr(module.Trainer, "__init__", poisoned)
    assert train(tmp_path).result["stopped_by"] == "diverged"
    assert "is not finite: the last good checkpoint is kept" in " ".join(capfd.readouterr().err.split())
    assert sorted((tmp_path / "checkpoints").glob("ckpt-*")) == saved


def test_a_row_of_skipped_updates_ends_with_one_that_was_taken() -> None:
    trainer = object.__new__(module.Trainer)
    trainer._skipped, trainer._skipped_in_row = None, 0
    rows = []
    for updates, skipped in ((10, 10), (10, 20), (0, 20), (10, 29), (10, 39), (10, 39)):
        trainer._count_skipped(updates, skipped)
        rows.append(trainer._skipped_in_row)
    assert rows == [10, 20, 20, 0, 10, 0]


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
