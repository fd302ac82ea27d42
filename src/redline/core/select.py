"""Sets of cells as bits, and selection of a cell by rank without a scan.

A set of C cells is K = ceil(C / 30) int32 words of S = ceil(C / K) bits: cell c is bit c % S of word c // S. int32
vectorises on every CPU; 30 bits leave its sign bit unused.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from redline.core import random

_MOST = 30


def layout(cells: int) -> tuple[int, int]:
    """Return (K, S), the number of words and bits per word, for a number of cells."""
    words = -(-cells // _MOST)
    return words, -(-cells // words)


def full_set(cells: int) -> list[int]:
    """Return the K words of the set of all cells."""
    words, size = layout(cells)
    return [(1 << min(size, cells - size * k)) - 1 for k in range(words)]


def one_cell(cell: Tensor, cells: int) -> list[Tensor]:
    """Return one-cell sets as K words (N,) int32, from cells (N,) int32; a negative cell gives the empty set."""
    words, size = layout(cells)
    word = torch.div(cell, size, rounding_mode="floor")
    bit = torch.ones_like(cell) << torch.where(cell < 0, 0, cell - word * size)
    return [torch.where(word == k, bit, 0) for k in range(words)]


def pack(mask: Tensor) -> Tensor:
    """Return rows of cells (N, C) bool as sets (N, K) int32."""
    words, size = layout(mask.shape[1])
    padded = F.pad(mask, (0, words * size - mask.shape[1])).view(-1, words, size)
    bit = 1 << torch.arange(size, dtype=torch.int32, device=mask.device)
    return torch.where(padded, bit, 0).sum(2, dtype=torch.int32)


def draw(mask: Tensor, random_bits: Tensor) -> Tensor:
    """Return a random member (N,) int64 of each row of `mask` (N, C) bool, all equally likely. random_bits (N,) int64.

    A row without members gives an arbitrary cell.
    """
    cells, members = mask.shape[1], pack(mask).unbind(1)
    count = sum(_partial_counts(word)[-1] for word in members)
    rank = random.below(random_bits, count).to(torch.int32)
    return nth_cell(members, rank, cells).clamp(max=cells - 1).to(torch.int64)


def nth_cell(members: Sequence[Tensor], rank: Tensor, cells: int) -> Tensor:
    """Return the member (N,) int32 with `rank` (N,) int32 others before it. members: K words (N,) int32 of the sets.

    If the rank is too high, the result is meaningless. A cumulative sum over the cells would be the slowest part of a game's
    step; this takes a few dozen integer operations per row, all in registers: find the word by its count, then the bit by
    partial counts of 16, 8, 4, 2 and 1 bits.
    """
    words, size = layout(cells)
    counts = [_partial_counts(word)[-1] for word in members]
    before = torch.zeros_like(rank)  # members in earlier words
    index = torch.zeros_like(rank)  # first cell of the word
    word = members[0]
    start = torch.zeros_like(rank)  # members before word k
    for k in range(1, words):
        start = start + counts[k - 1]
        reached = start <= rank
        before = torch.where(reached, start, before)
        word = torch.where(reached, members[k], word)
        index = torch.where(reached, index + size, index)  # not between two plain numbers, which would give int64
    rest = rank - before

    pairs, nibbles, octets, halves, _ = _partial_counts(word)
    place = torch.zeros_like(rank)
    for partial, width in ((halves, 16), (octets, 8), (nibbles, 4), (pairs, 2), (word, 1)):
        count = (partial >> place) & ((1 << width) - 1)  # members in the lower half of the remaining bits
        upper = rest >= count
        rest = torch.where(upper, rest - count, rest)
        place = torch.where(upper, place + width, place)
    return index + place


def _partial_counts(x: Tensor) -> tuple[Tensor, ...]:
    """Return the number of set bits in each group of 2, 4, 8, 16 and 32 bits of a non-negative int32, in place of the group."""
    pairs = x - ((x >> 1) & 0x55555555)
    nibbles = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    octets = (nibbles + (nibbles >> 4)) & 0x0F0F0F0F
    halves = (octets + (octets >> 8)) & 0x00FF00FF
    return pairs, nibbles, octets, halves, (halves + (halves >> 16)) & 0xFFFF
