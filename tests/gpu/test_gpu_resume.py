"""Continuing on a GPU: a run stopped half-way and continued equals the uninterrupted one, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import redline
from redline.run.checkpoint import Checkpoint, Checkpoints

pytestmark = pytest.mark.gpu

STEPS = 256 * 8 * 20
FEW: dict[str, Any] = {"hidden": (32,), "net": "mlp"}
DQN = FEW | {"learning_starts": 1024, "replay_capacity": 20_000}


def train(folder: Path, algo: str, options: dict[str, Any], compile: bool, **others: Any) -> Checkpoint:
    redline.train(
        "snake",
        algo=algo,
        algo_options=options,
        run_dir=str(folder),
        num_envs=256,
        batch_size=512,
        device="cuda",
        deterministic=True,
        compile=compile,
        eval_episodes=0,
        **others,
    )
    checkpoint = Checkpoints(folder).load()
    assert checkpoint
    return checkpoint


@pytest.mark.fault("B4")
@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("algo", "options"),
    [
        ("dqn", DQN | {"replay": "device"}),
        ("dqn", DQN | {"replay": "pinned"}),
        ("dqn", DQN | {"replay": "device", "prioritized": True, "priority_beta": 1.0}),
        ("pqn", FEW | {"rollout_steps": 8}),
        ("ppo", FEW | {"rollout_steps": 8}),
    ],
    ids=["dqn", "dqn-pinned", "dqn-prioritized", "pqn", "ppo"],
)
def test_a_stopped_run_continues_bit_for_bit(
    algo: str, options: dict[str, Any], compile: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both runs have the same budget of steps, so that schedules agree; the first start of one ends half-way."""
    straight = train(tmp_path / "straight", algo, options, compile, steps=STEPS)
    with monkeypatch.context() as patch:
        patch.setattr("redline.run.budget.Budget.reached", lambda _, steps, *__: "steps" if steps >= STEPS // 2 else "")
        patch.setattr("redline.run.budget.Budget.iterations", lambda *_: 1)
        half = train(tmp_path / "parts", algo, options, compile, steps=STEPS)
    assert half.step == STEPS // 2
    parts = train(tmp_path / "parts", algo, options, compile, steps=STEPS)
    assert parts.step == straight.step
    for group, tensors in straight.tensors.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, parts.tensors[group][name]), f"{group}.{name}"


@pytest.mark.fault("D3")
def test_a_learning_rate_that_diverges_is_noticed_in_captured_updates(tmp_path: Path) -> None:
    """Rollbacks copy into the tensors that the graph reads, and the lower learning rate reaches it."""
    result = redline.train(
        "snake",
        algo="dqn",
        algo_options=DQN | {"learning_rate": 1e30},
        run_dir=str(tmp_path),
        num_envs=256,
        batch_size=512,
        device="cuda",
        compile=False,
        eval_episodes=0,
        log_seconds=0.05,
        steps=256 * 20_000,
    ).result
    assert result["stopped_by"] == "diverged"
    checkpoint = Checkpoints(tmp_path).load()
    assert checkpoint
    assert all(bool((x.abs() < 1e3).all()) for x in checkpoint.tensors["model"].values())
