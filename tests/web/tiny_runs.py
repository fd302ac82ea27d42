"""Runs trained for a moment."""

from __future__ import annotations

from pathlib import Path

from redline.run.settings import from_words
from redline.run.train import train


def train_tiny(folder: Path, env: str = "snake", steps: str = "2048", **words: str) -> Path:
    """Train for a moment and return the run folder."""
    options = {"steps": steps, "num_envs": "16", "compile": "false", "eval_episodes": "0", "run_dir": str(folder)}
    options |= {"ppo.rollout_steps": "16", "ppo.batch_size": "64", "log_seconds": "0.05", "device": "cpu"}
    train(from_words(env, options | words))
    return folder
