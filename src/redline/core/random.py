"""Counter-based random numbers: a number is a hash of (key, counter), so nothing has to be carried but two integers.

All arithmetic is int64 on values below 2**32 with multipliers below 2**31. No product overflows, so the result is defined
by the language everywhere and bit-identical on CPU and GPU, eager and compiled. Keys are 32-bit; they are stored as int32.
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
    """Hash 32-bit values by a bijection: each input bit flips each output bit about half the time. Any shape, int64."""
    x = ((x ^ (x >> 16)) * _MULTIPLY_1) & MASK
    x = ((x ^ (x >> 15)) * _MULTIPLY_2) & MASK
    x = ((x ^ (x >> 15)) * _MULTIPLY_1) & MASK
    return x ^ (x >> 16)


def fold(key: Tensor, data: Tensor | int) -> Tensor:
    """Derive a key from `key` (…) int32 and `data` (broadcastable, integer); different `data` give independent streams."""
    return bits(key, data).to(torch.int32)


def bits(key: Tensor, counter: Tensor | int) -> Tensor:
    """Return 32 random bits, int64 in [0, 2**32), from `key` (…) int32 and `counter` (…) integer, broadcast together."""
    if isinstance(counter, Tensor):
        counter = counter.to(torch.int64)
    return mix((key.to(torch.int64) + (counter & MASK) * WEYL) & MASK)


def below(random_bits: Tensor, bound: Tensor | int) -> Tensor:
    """Return integers in [0, bound) from `random_bits` (…) int64; `bound` (…) up to 2**31. Uniform to bound / 2**32."""
    if isinstance(bound, Tensor):
        bound = bound.to(torch.int64)
    return (random_bits * bound) >> 32


def uniform(random_bits: Tensor) -> Tensor:
    """Return float32 in [0, 1) from the upper 24 of `random_bits` (…) int64."""
    return (random_bits >> 8).to(torch.float32) * (1.0 / (1 << 24))


def gumbel(random_bits: Tensor) -> Tensor:
    """Return Gumbel noise (…) float32, -2.8 to 18.4: the largest of logits plus noise is a draw from their softmax."""
    exponential = -torch.log1p(-uniform(random_bits))  # of [0, 1): never infinite, may be 0
    return -exponential.clamp(min=1e-8).log()


def seed_key(seed: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the root key of `seed`, a () int32 tensor; all 64 bits of the seed count."""
    key = mix(mix(seed & MASK) ^ ((seed >> 32) & MASK))
    return torch.tensor(key, dtype=torch.int64, device=device).to(torch.int32)
