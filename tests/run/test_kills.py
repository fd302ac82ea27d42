"""Runs killed at random moments, also inside saves, and continued: their final files equal those of uninterrupted runs.

The same script with 20 runs of each case gave the figures in docs/benchmarks.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import redline
from redline.run.checkpoint import Checkpoints

ROOT = Path(__file__).resolve().parents[2]
RUNS = int(os.environ.get("REDLINE_KILLED_RUNS", "1"))  # of each case
CASES = ["dqn-pinned", "ppo"] if RUNS == 1 else ["dqn", "dqn-pinned", "pqn", "ppo"]
FEW = {"hidden": (8,), "net": "mlp"}
DQN = FEW | {"learning_starts": 64, "replay_capacity": 640}


@pytest.mark.fault("A1", "B4")
def test_killed_runs_end_like_uninterrupted_ones(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "bench" / "kills.py"), "--out", str(tmp_path / "kills.json")]
    done = subprocess.run(
        [*command, "--runs", str(RUNS), "--steps", "1500", "--cases", ",".join(CASES)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=400 + 400 * RUNS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "kills.json").read_text())["rows"]
    assert [row["case"] for row in rows] == CASES
    assert all(row["equal"] == RUNS <= row["kills"] for row in rows)


@pytest.mark.fault("B4")
@pytest.mark.parametrize(
    ("env", "algo", "options", "level"),
    [
        ("snake", "ppo", FEW | {"rollout_steps": 4}, "L3"),
        ("snake", "pqn", FEW | {"rollout_steps": 4}, "L3"),
        ("snake", "dqn", DQN | {"replay": "device"}, "L3"),
        ("snake", "dqn", DQN | {"replay": "pinned"}, "L3"),
        ("snake", "dqn", DQN | {"replay": "memmap"}, "L2"),
        ("gym:CartPole-v1", "ppo", FEW | {"rollout_steps": 4}, "L2"),
        ("gym:CartPole-v1", "dqn", DQN | {"replay": "device"}, "L2"),
        ("gym:CartPole-v1", "dqn", DQN | {"replay": "pinned"}, "L1"),
        ("gym:CartPole-v1", "dqn", DQN | {"replay": "memmap"}, "L1"),
    ],
)
def test_a_checkpoint_says_what_it_restores(
    env: str, algo: str, options: dict[str, Any], level: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    more: dict[str, Any] = {"compile": False, "eval_episodes": 0, "batch_size": 8, "actors": 0 if ":" in env else None}
    for steps in (8 * 20, 8 * 30):
        redline.train(
            env, algo=algo, algo_options=options, num_envs=8, device="cpu", run_dir=str(tmp_path), steps=steps, **more
        )
        checkpoint = Checkpoints(tmp_path).load()
        assert checkpoint
        assert checkpoint.manifest["resume_level"] == level
    assert ("replay memory of this run is lost" in " ".join(capfd.readouterr().err.split())) == (level == "L1")


@pytest.mark.fault("F3")
def test_a_killed_run_with_a_replay_file_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its checkpoint promises L2: rows written since have overwritten some of those it counts on."""
    more: dict[str, Any] = {"compile": False, "eval_episodes": 0, "batch_size": 8, "run_dir": str(tmp_path)}
    more |= {"algo": "dqn", "algo_options": DQN | {"replay": "memmap"}, "num_envs": 8, "device": "cpu"}
    redline.train("snake", steps=8 * 100, **more)
    with monkeypatch.context() as patch:

        def killed(*_: Any, **__: Any) -> None:
            raise ZeroDivisionError

        patch.setattr("redline.run.trainer.Trainer._save", killed)
        with pytest.raises(redline.UserError, match="Training failed after 1,000 steps"):
            redline.train("snake", steps=8 * 125, **more)
    capfd.readouterr()
    redline.train("snake", steps=8 * 140, **more)
    said = " ".join(capfd.readouterr().err.split())
    assert "transitions are missing from the replay file: they are not sampled." in said
    checkpoint = Checkpoints(tmp_path).load()
    assert checkpoint
    assert all(bool(torch.isfinite(x).all()) for x in checkpoint.tensors["model"].values())
