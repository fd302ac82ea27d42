"""Metrics of learners: sums on the device, read once per log point."""

from __future__ import annotations

import torch
from torch import Tensor


def read_means(sums: dict[str, Tensor], updates: int) -> dict[str, float]:
    """Return each sum divided by `updates` and reset the sums. Waits for the device once."""
    values = torch.stack(list(sums.values())).tolist()
    for total in sums.values():
        total.zero_()
    return {name: value / updates for name, value in zip(sums, values, strict=True)}
