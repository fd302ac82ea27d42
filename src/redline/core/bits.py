"""Bit counts of int32 and int64 tensors that hold sets of up to 32 bits, without a loop over the bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def heights(columns: Tensor) -> Tensor:
    """Return the position of the highest set bit plus one, int32, 0 for none: the exponent of the number as a float."""
    if columns.dtype == torch.int32:  # up to 24 bits are exact in a float32
        return ((columns.to(torch.float32).view(torch.int32) >> 23) - 126).clamp(min=0)
    return ((columns.to(torch.float64).view(torch.int64) >> 52) - 1022).clamp(min=0).to(torch.int32)


def count_octets(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of set bits in each octet of the lower 32 bits, and the sum of their places 0 to 7, as octets.

    Both are built up from 2 to 4 to 8 bits: the upper half of a group lies 1, 2 or 4 places higher.
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
    return fold_halves(pair_octets(octets))


def pair_octets(octets: Tensor) -> Tensor:
    """Return the sums of the lower and of the upper two octets as halves of 16 bits."""
    return (octets & 0x00FF00FF) + ((octets >> 8) & 0x00FF00FF)


def fold_halves(halves: Tensor) -> Tensor:
    """Return the sum of two halves of 16 bits, which must be below 2**15, int32."""
    return ((halves + (halves >> 16)) & 0x7FFF).to(torch.int32)


def weigh_octets(octets: Tensor) -> Tensor:
    """Return the weighted sum of four octets, with weights 0, 1, 2 and 3 from the lowest, int32."""
    upper = (octets >> 8) & 0x00FF00FF
    halves = (octets & 0x00FF00FF) + upper
    return ((upper & 0xFFFF) + (upper >> 16) + 2 * (halves >> 16)).to(torch.int32)


def count_bits(x: Tensor) -> Tensor:
    """Return the number of set bits, int32."""
    return fold_octets(count_octets(x)[0])


def count_all_bits(words: Sequence[Tensor]) -> Tensor:
    """Return the total number of set bits in `words`, at most 31 tensors of equal shape, int32.

    Three words are added bitwise to a sum and a carry until one word of each weight is left (Harley and Seal): eleven words
    take four counts instead of eleven.
    """
    weight, octets = 1, torch.zeros_like(words[0])
    while words:
        sums, carries = list(words), []
        while len(sums) > 2:
            a, b, c = sums[:3]
            sums = [*sums[3:], a ^ b ^ c]
            carries.append((a & b) | ((a ^ b) & c))
        if len(sums) == 2:
            carries.append(sums[0] & sums[1])
            sums = [sums[0] ^ sums[1]]
        octets = octets + weight * count_octets(sums[0])[0]
        weight, words = 2 * weight, carries
    return fold_octets(octets)
