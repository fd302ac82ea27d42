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
    seconds: float = 1.0  # time measured for each figure, all repeats together
    repeats: int = 3  # parts of that time, whose median and spread are kept
    quick: bool = False  # measure little, without compilation: all tables in half a minute
    device: str = "auto"  # auto, cpu, cuda, cuda:N, mps
    precision: str = "auto"  # auto, fp32, tf32, bf16, fp16
    compile: bool | None = None  # --no-compile leaves out the compiled column
    out: str | None = None  # write the figures as JSON to this file
    compare: str | None = None  # JSON file of an earlier --out: print what changed, exit 1 if a figure became slower
    tolerance: float = 5.0  # percent that a median may lose besides its spread (with --compare)
    capacity: int = 1_000_000  # transitions in the memory (replay)
    batch: tuple[int, ...] = (2048,)  # samples per batch, a column each (replay)
    replay: str | None = None  # the only replay kind to measure (replay); all by default
    actors: int | None = None  # actor processes (collect); every core but one by default
    num_envs: int | None = None  # environments (switches); default: as in training
    only: tuple[str, ...] = ()  # names of the switches to measure, such as precision,threads (switches)
    folder: str | None = None  # where temporary files are written (replay); the system's by default


# Defaults of each table when all are measured (about two minutes on an idle CPU with two cores), and with --quick.
ALL_TABLES: dict[str, dict[str, Any]] = {
    "env": {"games": (4096,), "seconds": 0.5},
    "train": {"games": (1024,), "seconds": 0.5},
    "replay": {"capacity": 100_000, "seconds": 0.5, "compile": False},
    "collect": {"seconds": 0.5, "compile": False},
}
QUICK: dict[str, dict[str, Any]] = {
    "env": {"games": (256,), "seconds": 0.3, "compile": False},
    "train": {"games": (256,), "seconds": 0.3, "compile": False},
    "replay": {"capacity": 20_000, "seconds": 0.15, "compile": False},
    "collect": {"seconds": 0.3, "compile": False},
}


@dataclass(frozen=True)
class BenchRequest(BenchOptions):
    """Bench options, and those of the environment and the algorithm, as words or values, like in `redline train`."""

    env_options: Mapping[str, Any] = field(default_factory=dict)
    algo_options: Mapping[str, Any] = field(default_factory=dict)
