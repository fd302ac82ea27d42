"""Options of `redline tune`. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TuneOptions:
    """Options of `redline tune`."""

    algo: str = "auto"  # algorithm; auto: the one the recipe recommends
    seconds: float = 100.0  # time for the whole search
    device: str = "auto"  # auto, cpu, cuda, cuda:N, mps
    compile: bool | None = None  # --no-compile leaves out compiled candidates
    out: str | None = None  # TOML file to write, for redline train --config; default tuned-ENV.toml
