"""Runtime: the device, precision and compiler that learners use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from redline.engine.distributed import SINGLE, Ranks


@dataclass(frozen=True)
class Runtime:
    """How a learner runs its functions."""

    device: torch.device
    amp_dtype: torch.dtype | None = None  # matrix products in bfloat16 or float16; None: float32
    compile: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function
    folder: Path = Path(".")  # where a learner may store files
    notify: Callable[[str], None] = print  # shows a message to the user
    fused_optimizer: bool = True  # update all weights as one vector; else layer by layer
    pin_memory: bool = True  # page-lock host memory that is copied to and from a GPU
    ranks: Ranks = SINGLE  # the processes that train together

    def autocast(self) -> torch.autocast:
        """Return a context in which matrix products run in `amp_dtype`."""
        return torch.autocast(self.device.type, dtype=self.amp_dtype, enabled=self.amp_dtype is not None)
