"""Choosing by rank, without a scan.

int32 throughout: the width that vectorises on every CPU and costs a GPU nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_WORD = 30  # bits in a word at most: 2 << 29 is the last power of two an int32 holds


def popcount(x: Tensor) -> Tensor:
    """Number of set bits of non-negative int32 values."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    return (x + (x >> 16)) & 0x3F


def pack(mask: Tensor) -> Tensor:
    """Rows of bits as words: mask (N, C) bool -> (N, K) int32, C cells spread evenly over K = ceil(C / 30) words."""
    words = -(-mask.shape[1] // _WORD)
    size = -(-mask.shape[1] // words)
    bit = torch.arange(size, device=mask.device, dtype=torch.int32)
    padded = F.pad(mask, (0, words * size - mask.shape[1])).view(-1, words, size)
    return (padded.to(torch.int32) << bit).sum(2, dtype=torch.int32)


def nth_set(mask: Tensor, rank: Tensor) -> Tensor:
    """Index of the True with `rank` others before it, in each row.

    mask (N, C) bool, rank (N,) int32 below the row's count -> (N,) int32. A rank too high gives a meaningless number. A
    cumulative sum over the cells would be the slowest part of a game's step; this packs the row into words (a reduction that
    fuses with what made the mask), picks a word by its count, and a bit by the count of the bits up to it.
    """
    words = pack(mask)
    size = -(-mask.shape[1] // words.shape[1])
    rank = rank.unsqueeze(1)
    place = torch.arange(words.shape[1], device=mask.device)
    before = torch.where(place < place.unsqueeze(1), popcount(words).unsqueeze(1), 0).sum(2, dtype=torch.int32)
    chosen = (before <= rank).sum(1, keepdim=True) - 1  # the last word that starts at or before the rank
    rest, word = rank - before.gather(1, chosen), words.gather(1, chosen)
    up_to_bit = (2 << torch.arange(size, device=mask.device, dtype=torch.int32)) - 1
    inside = (popcount(word & up_to_bit) <= rest).sum(1, dtype=torch.int32)
    return chosen.squeeze(1).to(torch.int32) * size + inside
