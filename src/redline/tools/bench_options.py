"""Options of `redline bench`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class BenchOptions:
    """Options of `redline bench`."""

    env: str = "snake"  # environment to measure
    algo: str = "dqn"  # algorithm to measure (train, collect)
    games: tuple[int, ...] = (1, 16, 64, 256, 4096, 65536)  # games played at once, a row each
    seconds: float = 1.0  # time measured for each figure
    device: str = "auto"  # auto, cpu, cuda, cuda:N, mps
    precision: str = "auto"  # auto, fp32, tf32, bf16, fp16
    compile: bool | None = None  # --no-compile leaves out the compiled column
    out: str | None = None  # write the figures as JSON to this file
    capacity: int = 1_000_000  # transitions in the memory (replay)
    batch: tuple[int, ...] = (2048,)  # samples per batch, a column each (replay)
    actors: int | None = None  # actor processes (collect); every core but one by default
    num_envs: int | None = None  # environments (switches); default: as in training
    only: tuple[str, ...] = ()  # names of the switches to measure, such as precision,threads (switches)
    folder: str | None = None  # where temporary files are written (replay); the system's by default


@dataclass(frozen=True)
class BenchRequest(BenchOptions):
    """Bench options together with those of the environment and the algorithm, words or values, as for `redline train`."""

    env_options: Mapping[str, Any] = field(default_factory=dict)
    algo_options: Mapping[str, Any] = field(default_factory=dict)
