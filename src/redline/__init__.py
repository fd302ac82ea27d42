"""Redline trains agents that play games, as fast as the hardware allows, in plain Python and PyTorch.

import redline
env = redline.make("snake", num_envs=4096, device="cuda", seed=0)
run = redline.train("snake", algo="dqn", steps=20_000_000)
redline.evaluate(run, episodes=1000)
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from redline.core.errors import StorageError, UserError
from redline.envs import Env, EnvStep, make
from redline.envs.gymnasium_adapter import register as _register

if TYPE_CHECKING:
    from redline.run.train import Run

__version__ = "0.1.0"
__all__ = ["Env", "EnvStep", "StorageError", "UserError", "evaluate", "make", "train"]

_register()


def train(env: str, **options: Any) -> Run:
    """Train a game; options as of `redline train` with underscores, `env_options` and `algo_options` as dictionaries."""
    from redline.run.config import Settings
    from redline.run.options import build
    from redline.run.train import train as run

    return run(build(Settings, {"env": env, **options}, ""))


def evaluate(
    run: Run | Path | str,
    episodes: int = 256,
    device: str = "auto",
    seed: int = 0,
    max_steps: int = 0,
    sample: bool = False,
) -> dict[str, Any]:
    """Play of a run's newest agent on held-out seeds, greedy or `sample`d; fields as of `redline eval --json`."""
    from redline.run.agent import load_agent

    path = run if isinstance(run, (str, Path)) else run.path
    return load_agent(Path(path), device).evaluate(episodes, seed, max_steps=max_steps, sample=sample)
