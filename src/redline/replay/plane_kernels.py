"""Triton kernel of `planes`: reads stored States at random places and writes their observations. Imported where Triton is."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def planes_kernel(
    board, first, second, index, planes, size,
    words: tl.constexpr, block: tl.constexpr, tile: tl.constexpr, each: tl.constexpr,
):  # fmt: skip
    """Write three planes of `words` int32 for each of `size` observations: the board, and a one at each of two cells.

    board (entries, words) int32; first, second (entries,): number of the cell, -1 for none; index (size,) int64. A word holds
    `each` cells. A program makes `tile` observations; `block` is the smallest power of two that is at least `words`.
    """
    sample = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    exists = sample < size
    place = tl.load(index + sample, mask=exists, other=0)
    word = tl.arange(0, block)[None, :]
    inside = exists[:, None] & (word < words)
    seen = tl.load(board + place[:, None] * words + word, mask=inside, other=0)
    cell_1 = tl.load(first + place, mask=exists, other=-1).to(tl.int32)[:, None]
    cell_2 = tl.load(second + place, mask=exists, other=-1).to(tl.int32)[:, None]
    to = planes + sample[:, None] * (3 * words) + word
    tl.store(to, seen, mask=inside)
    tl.store(to + words, _mark(cell_1, word, each), mask=inside)
    tl.store(to + 2 * words, _mark(cell_2, word, each), mask=inside)


@triton.jit
def _mark(cell, word, each: tl.constexpr):
    """Return words with a one at a cell; no word has one if the cell is -1, which lies in word -1."""
    bits: tl.constexpr = 32 // each
    shift: tl.constexpr = each // 2  # each is 1, 2 or 4: a power of two
    one = tl.full((1, 1), 1, tl.int32) << ((cell & (each - 1)) * bits)
    return tl.where(word == (cell >> shift), one, 0)
