"""What learners measure: sums on the device, read once a log point."""

from __future__ import annotations

import torch
from torch import Tensor


def read_means(sums: dict[str, Tensor], updates: int) -> dict[str, float]:
    """Each sum by the number of updates it was added up over; the sums start again. Waits for the device once."""
    values = torch.stack(list(sums.values())).tolist()
    for total in sums.values():
        total.zero_()
    return {name: value / updates for name, value in zip(sums, values, strict=True)}
