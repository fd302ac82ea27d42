"""The training loop of one's own learns, and the one of Stable-Baselines3 runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_own_training_loop_learns(capsys: pytest.CaptureFixture[str]) -> None:
    first, last = load("own_training_loop").train(num_envs=128, steps=600, device="cpu")
    assert last > 3 * first
    assert capsys.readouterr().out.count("foods per game") == 10


def test_sb3_runs() -> None:
    pytest.importorskip("stable_baselines3")
    model = load("sb3_masked").train(steps=256, num_envs=4, n_steps=64)
    assert model.num_timesteps >= 256
