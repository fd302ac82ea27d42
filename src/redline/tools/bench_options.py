"""What `redline bench` is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class BenchOptions:
    """Options of `redline bench`."""

    env: str = "snake"  # the game
    algo: str = "dqn"  # the algorithm (train)
    games: tuple[int, ...] = (1, 16, 64, 256, 4096, 65536)  # how many at once, a row each
    seconds: float = 1.0  # measured for each figure
    device: str = "auto"
    precision: str = "auto"
    compile: bool | None = None  # leave out the compiled column with --no-compile
    out: str | None = None  # write the figures as JSON to this file
    capacity: int = 1_000_000  # transitions of a memory (replay)
    batch: tuple[int, ...] = (2048,)  # samples at once, a column each (replay)
    actors: int | None = None  # processes that play (collect); each core but one unless named
    folder: str | None = None  # where files are made and removed again (replay); the system's unless named


@dataclass(frozen=True)
class Wanted(BenchOptions):
    """With those of the game and the algorithm, words or values, as of `redline train`."""

    env_options: Mapping[str, Any] = field(default_factory=dict)
    algo_options: Mapping[str, Any] = field(default_factory=dict)
