"""Launch: this process's rank, from the environment variables that torchrun sets. Does not import torch."""

from __future__ import annotations

import os
from typing import NamedTuple

_REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Launch(NamedTuple):
    """A process's rank, counted from 0, in a run and on its machine."""

    rank: int  # among all ranks
    size: int  # number of ranks
    local_rank: int = 0  # among the ranks on this machine
    local_size: int = 1  # number of ranks on this machine


def launched() -> Launch | None:
    """Return the Launch of this process; None if torchrun did not start it, or started only one rank."""
    if any(name not in os.environ for name in _REQUIRED):
        return None
    numbers = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    defaults = ("", "", "0", "1")
    rank, size, local_rank, local_size = (int(number or other) for number, other in zip(numbers, defaults, strict=True))
    return Launch(rank, size, local_rank, local_size) if size > 1 else None


def follows() -> bool:
    """Return whether this process is a rank above 0, which neither writes nor prints anything."""
    launch = launched()
    return launch is not None and launch.rank > 0
