"""Names in TensorBoard and W&B: those that Stable-Baselines3 logs."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from redline import algos
from redline.run.metric_names import NAMES, to_scalars

SB3 = (
    *("time/fps", "time/time_elapsed", "time/total_timesteps"),
    *("rollout/ep_rew_mean", "rollout/ep_len_mean", "rollout/success_rate", "rollout/exploration_rate"),
    *("train/n_updates", "train/learning_rate", "train/loss", "train/policy_gradient_loss", "train/value_loss"),
    *("train/entropy_loss", "train/approx_kl", "train/clip_fraction", "train/explained_variance"),
)
RECORD = dict.fromkeys(NAMES, 2.0) | dict.fromkeys(
    ("loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "explained_variance", "learning_rate"), 2.0
)


def test_names_are_those_of_sb3() -> None:
    scalars = to_scalars(RECORD)
    assert set(SB3) <= scalars.keys()
    assert len(scalars) == len(RECORD), "two metrics have one name"
    assert scalars["train/entropy_loss"] == -2.0  # SB3 logs the loss, the negative


def test_sb3_logs_these_names() -> None:
    spec = importlib.util.find_spec("stable_baselines3")
    if spec is None or spec.origin is None:
        pytest.skip("Stable-Baselines3 is not installed")
    sources = "".join(path.read_text() for path in Path(spec.origin).parent.rglob("*.py"))
    assert set(SB3) <= set(re.findall(r'logger\.record\(\s*"([^"]+)"', sources))


def test_other_names_are_a_learners_and_text_is_left_out() -> None:
    record = {"my_metric": 1, "memory/peak_bytes": 5, "queue_1": 0.5, "phase": "easy", "none": None}
    assert to_scalars(record) == {"train/my_metric": 1, "memory/peak_bytes": 5, "collect/queue_1": 0.5}


def test_the_reference_explains_every_metric() -> None:
    table = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    learners = {name for algo in algos.names() for name in algos.load(algo).Learner.metrics}
    assert {name for name in NAMES.keys() | learners if f"`{name}`" not in table} == set()
    assert {name for name in SB3 if f"`{name}` *" not in table} <= {f"train/{name}" for name in learners}
