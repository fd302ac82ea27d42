"""Compressed weights: int8 with a scale for each row, or large matrices as the product of two smaller ones.

A weight `w` may be stored as other tensors, named by the encoding:

    w#int8 (R, …) int8, w#scale (R,) float32     w = int8 * scale, row by row
    w#left (M, K), w#right (K, N)                w = left @ right; both may themselves be stored as int8

Training checkpoints never contain such names. Reading a checkpoint restores the weights in float32.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

INT8, SCALE, LEFT, RIGHT = "#int8", "#scale", "#left", "#right"
_LARGEST = 127
_MOST = 1 << 26  # weights of a product: in an untrusted run folder, small factors could produce a huge matrix


def to_int8(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Return the tensors that store a weight (R, …) as int8 with a scale for each row."""
    rows = weight.float().reshape(len(weight), -1)
    scale = rows.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / _LARGEST
    codes = (rows / scale.unsqueeze(1)).round().clamp(-_LARGEST, _LARGEST).to(torch.int8)
    return {name + INT8: codes.reshape(weight.shape), name + SCALE: scale}


def unpack(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights by name from a checkpoint's tensors, packed or not; raise ValueError for parts that do not match."""
    weights = dict(stored)
    for name in [name for name in weights if name.endswith(INT8)]:
        codes, scale = weights.pop(name), _other(weights, name, INT8, SCALE)
        if not codes.dim() or scale.shape != codes.shape[:1]:
            raise ValueError(f"{name} has no scale for each of its rows")
        rows = scale.float().reshape(-1, *[1] * (codes.dim() - 1))
        _add(weights, name.removesuffix(INT8), codes.float() * rows)
    for name in [name for name in weights if name.endswith(LEFT)]:
        left, right = weights.pop(name), _other(weights, name, LEFT, RIGHT)
        if left.dim() != 2 or right.dim() != 2 or left.shape[1] != right.shape[0]:
            raise ValueError(f"{name} does not fit its other factor")
        if left.shape[0] * right.shape[1] > _MOST:
            raise ValueError(f"{name} belongs to a matrix larger than any network's")
        _add(weights, name.removesuffix(LEFT), left.float() @ right.float())
    return weights


def _add(weights: dict[str, Tensor], name: str, weight: Tensor) -> None:
    if name in weights:
        raise ValueError(f"'{name}' is stored twice")
    weights[name] = weight


def _other(weights: dict[str, Tensor], name: str, suffix: str, other: str) -> Tensor:
    """Remove the second tensor of a pair from `weights` and return it."""
    part = name.removesuffix(suffix) + other
    if part not in weights:
        raise ValueError(f"{name} comes without {part}")
    return weights.pop(part)
