"""Bit counts of int32 and int64 tensors that hold sets of up to 32 bits, without a loop over the bits."""

from __future__ import annotations

import torch
from torch import Tensor


def heights(columns: Tensor) -> Tensor:
    """Return the position of the highest bit plus one, 0 for none, int32: the exponent of the number as a float."""
    if columns.dtype == torch.int32:  # up to 24 bits are exact in a float32
        return ((columns.to(torch.float32).view(torch.int32) >> 23) - 126).clamp(min=0)
    return ((columns.to(torch.float64).view(torch.int64) >> 52) - 1022).clamp(min=0).to(torch.int32)


def count_octets(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each octet of the lower 32 bits, the count of set bits and the sum of their places 0 to 7, in place.

    Built up together, from 2 to 4 to 8 bits: the upper half of a group lies 1, 2 or 4 places higher.
    """
    place = (x >> 1) & 0x55555555
    count = x - place
    for width, mask in ((2, 0x33333333), (4, 0x0F0F0F0F)):
        upper = (count >> width) & mask
        place = (place & mask) + ((place >> width) & mask) + width * upper
        count = (count & mask) + upper
    return count, place


def fold_octets(octets: Tensor) -> Tensor:
    """Return the sum of four octets, int32."""
    halves = (octets & 0x00FF00FF) + ((octets >> 8) & 0x00FF00FF)
    return ((halves + (halves >> 16)) & 0x3FF).to(torch.int32)


def weigh_octets(octets: Tensor) -> Tensor:
    """Return the sum of four octets, times 0, 1, 2 and 3, int32."""
    upper = (octets >> 8) & 0x00FF00FF
    halves = (octets & 0x00FF00FF) + upper
    return ((upper & 0xFFFF) + (upper >> 16) + 2 * (halves >> 16)).to(torch.int32)


def count_bits(x: Tensor) -> Tensor:
    """Return the number of set bits, int32."""
    return fold_octets(count_octets(x)[0])


def count_bits_along(x: Tensor) -> Tensor:
    """Return the number of set bits along the first axis, at most 31 long, int32."""
    return fold_octets(count_octets(x)[0].sum(0, dtype=x.dtype))
