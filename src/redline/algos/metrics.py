"""Metrics of learners: sums on the device, read once per log point."""

from __future__ import annotations

import torch
from torch import Tensor

_ROW = 256  # samples whose mean is taken first, on a GPU


def explained_variance(predictions: Tensor, targets: Tensor) -> Tensor:
    """Return the fraction () of the variance of targets (B,) that predictions (B,) explain: 1 is perfect, 0 a constant.

    0 where all targets are equal.
    """
    variance = targets.var(correction=0)
    return torch.where(variance > 0, 1 - (targets - predictions).var(correction=0) / variance, 0.0)


def batch_mean(x: Tensor) -> Tensor:
    """Return the mean () of a batch (B,).

    The compiler reduces a single vector with few GPU blocks, eight for 65,536 samples, however much must be gathered and
    computed per sample. In two steps, over rows and then over their means, it uses the whole GPU.
    """
    if not x.is_cuda or x.shape[0] % _ROW:
        return x.mean()
    return x.view(-1, _ROW).mean(1).mean()


def read_means(sums: dict[str, Tensor], updates: int) -> dict[str, float]:
    """Return each sum divided by `updates` and reset the sums. Waits for the device once."""
    values = torch.stack(list(sums.values())).tolist()
    for total in sums.values():
        total.zero_()
    return {name: value / updates for name, value in zip(sums, values, strict=True)}
