"""Counter-based random numbers: each is a hash of (key, counter), so that two integers are the whole generator state.

All arithmetic is int64 on values below 2**32 with multipliers below 2**31. No product overflows, so results are
well-defined and bitwise identical on CPU and GPU, eager and compiled. Keys have 32 bits and are stored as int32.
"""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
WEYL = 0x5E3779B9
_MULTIPLY_1 = 0x21F0AAAD
_MULTIPLY_2 = 0x735A2D97


@overload
def mix(x: int) -> int: ...
@overload
def mix(x: Tensor) -> Tensor: ...
def mix(x: Tensor | int) -> Tensor | int:
    """Return a bijective hash of 32-bit values (…) int64: each input bit flips each output bit about half the time."""
    x = ((x ^ (x >> 16)) * _MULTIPLY_1) & MASK
    x = ((x ^ (x >> 15)) * _MULTIPLY_2) & MASK
    x = ((x ^ (x >> 15)) * _MULTIPLY_1) & MASK
    return x ^ (x >> 16)


def fold(key: Tensor, data: Tensor | int) -> Tensor:
    """Return a key (…) int32 derived from `key` (…) int32 and integer `data`, broadcast; each `data` gives its own stream."""
    return bits(key, data).to(torch.int32)


def bits(key: Tensor, counter: Tensor | int) -> Tensor:
    """Return 32 random bits (…) int64, in [0, 2**32), for `key` (…) int32 and `counter` (…) integer, broadcast together."""
    if isinstance(counter, Tensor):
        counter = counter.to(torch.int64)
    return mix((key.to(torch.int64) + (counter & MASK) * WEYL) & MASK)


def below(random_bits: Tensor, bound: Tensor | int) -> Tensor:
    """Return integers (…) int64 in [0, bound) from `random_bits` (…) int64; `bound` is at most 2**31.

    Probabilities deviate from uniform by a relative error of at most bound / 2**32.
    """
    if isinstance(bound, Tensor):
        bound = bound.to(torch.int64)
    return (random_bits * bound) >> 32


def uniform(random_bits: Tensor) -> Tensor:
    """Return uniform numbers (…) float32 in [0, 1) from the upper 24 bits of `random_bits` (…) int64."""
    return (random_bits >> 8).to(torch.float32) * (1.0 / (1 << 24))


def gumbel(random_bits: Tensor) -> Tensor:
    """Return Gumbel noise (…) float32, from -2.8 to 18.4: the argmax of logits plus noise is a sample from their softmax."""
    exponential = -torch.log1p(-uniform(random_bits))  # of numbers in [0, 1): never infinite, may be 0
    return -exponential.clamp(min=1e-8).log()


def seed_key(seed: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the root key () int32 of `seed`, which depends on all 64 bits of the seed."""
    key = mix(mix(seed & MASK) ^ ((seed >> 32) & MASK))
    return torch.tensor(key, dtype=torch.int64, device=device).to(torch.int32)
