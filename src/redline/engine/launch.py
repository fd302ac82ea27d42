"""Launch: the place of this process among the ranks of a run, from the variables that torchrun sets. Imports no torch."""

from __future__ import annotations

import os
from typing import NamedTuple

_REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Launch(NamedTuple):
    """Numbers of a rank, each counted from 0."""

    rank: int  # among all ranks
    size: int  # ranks in all
    local_rank: int = 0  # among those on this machine
    local_size: int = 1  # ranks on this machine


def launched() -> Launch | None:
    """Return the place of this process; None if it was not started by torchrun, or as its only rank."""
    if any(name not in os.environ for name in _REQUIRED):
        return None
    numbers = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    defaults = ("", "", "0", "1")
    rank, size, local_rank, local_size = (int(number or other) for number, other in zip(numbers, defaults, strict=True))
    return Launch(rank, size, local_rank, local_size) if size > 1 else None


def follows() -> bool:
    """Return whether this process is a rank other than 0, which writes and prints nothing."""
    launch = launched()
    return launch is not None and launch.rank > 0
