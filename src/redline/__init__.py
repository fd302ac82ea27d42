"""Redline trains agents that play games, as fast as the hardware allows, in plain Python and PyTorch.

    import redline
    env = redline.make("snake", num_envs=4096, device="cuda", seed=0)
    run = redline.train("snake", algo="dqn", steps=20_000_000)
    redline.evaluate(run, episodes=1000)
    agent = redline.load(run); action = agent.act(obs)

Importing the package registers `redline/<Game>-v0` with Gymnasium. It does not import torch: names are imported on
first use.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from redline.core.errors import StorageError, UserError
from redline.envs.registration import register as _register

if TYPE_CHECKING:
    from pathlib import Path

    from redline.envs.env import Env, EnvStep, make
    from redline.run.agent import Agent
    from redline.run.train import Run
    from redline.tools.profiler import Profiler

__version__ = "0.1.0"
__all__ = ["Env", "EnvStep", "Profiler", "StorageError", "UserError", "evaluate", "load", "make", "train"]

_LAZY = dict.fromkeys(("Env", "EnvStep", "make"), "redline.envs.env") | {"Profiler": "redline.tools.profiler"}

# Torch allocates by mimalloc on ARM, which returns freed memory to the system after 10 ms: the buffers of one gradient step
# are gone before the next, and page faults take a fifteenth of the time. Read when torch is imported.
os.environ.setdefault("MIMALLOC_PURGE_DELAY", "1000")
_register()


def __getattr__(name: str) -> Any:
    if name == "testing":
        return importlib.import_module("redline.testing")
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def train(env: str, **options: Any) -> Run:
    """Train an agent and return its run.

    env: a game, `gym:ID`, `mario:W-S` or the import name of a module that defines a game.
    options: those of `redline train` with underscores (`steps=20_000_000`); `env_options` and `algo_options` are
        dictionaries.
    """
    from redline.run.options import build
    from redline.run.settings import Settings
    from redline.run.train import train as run

    return run(build(Settings, {"env": env, **options}, ""))


def load(run: Run | Path | str, device: str = "auto", trust: bool = False, checkpoint: str | int = "newest") -> Agent:
    """Return the agent of a run's newest good checkpoint, or of another one.

    trust: import modules that a run of somebody else names as its environment or algorithm; refused otherwise.
    checkpoint: newest, best (by the evaluations of `eval_every`) or the step of a checkpoint.
    """
    from redline.run.agent import load_agent

    return load_agent(_folder(run), device, trust, str(checkpoint))


def evaluate(
    run: Run | Path | str,
    episodes: int = 256,
    device: str = "auto",
    seed: int = 0,
    max_steps: int = 0,
    sample: bool = False,
    trust: bool = False,
    checkpoint: str | int = "newest",
) -> dict[str, Any]:
    """Play held-out seeds with a run's agent and return the fields of `redline eval --json`.

    The policy is greedy, or with `sample` draws its actions. `max_steps` ends the evaluation after so many steps.
    `trust` and `checkpoint` are those of `load`.
    """
    return load(run, device, trust, checkpoint).evaluate(episodes, seed, max_steps=max_steps, sample=sample)


def _folder(run: Run | Path | str) -> Path:
    from pathlib import Path

    return Path(run if isinstance(run, (str, Path)) else run.path)
