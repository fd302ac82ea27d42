"""Priorities as integers in a sum tree, so that drawing in proportion to them is exact.

A priority is a number of units, 1 to 2**31 - 1, in an int32 leaf; a leaf of 0 is never drawn. A node is the int64 sum of
its 16 children and is recomputed from them whenever one changes. Integer sums do not depend on the order of addition, so
they never drift, are equal on every device, and a draw below the total always ends at a leaf above 0. The top level has
some ten thousand nodes: summing them for every batch is faster than keeping more levels up to date.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from redline.core import random

CHILDREN = 16
UNIT = 1 << 16  # units of a priority of 1: priorities from 1/65536 to 32767 can be represented
TOP = 1 << 16  # largest number of nodes in the top level
_MAX_UNITS = 2.0**31 - 128  # the largest float32 that an int32 can hold
_ROW = 256


def in_rows(x: Tensor) -> Tensor:
    """Return a batch (B,) as rows of 256, or as one row if B is no multiple of that, to be reduced in two steps.

    The compiler reduces a single vector with few blocks of a GPU, eight for 65,536 samples, however much has to be gathered
    and computed for each sample. In two steps, over rows and then over their results, it uses the whole GPU.
    """
    return x.view(-1, _ROW if x.shape[0] % _ROW == 0 else x.shape[0])


class Priorities:
    """Sum tree with the priorities of places 0 to `size` - 1."""

    def __init__(self, size: int, device: torch.device, top: int = TOP) -> None:
        self.size, self.device = size, device
        self.levels: list[Tensor] = []  # leaves first; the length of each is a multiple of CHILDREN
        length, dtype = size, torch.int32
        while True:
            parents = -(-length // CHILDREN)
            self.levels.append(torch.zeros(parents * CHILDREN, dtype=dtype, device=device))
            if length <= top:
                break
            length, dtype = parents, torch.int64
        self.highest = torch.full((), UNIT, dtype=torch.int32, device=device)  # given to new places

    @staticmethod
    def bytes_needed(size: int) -> int:
        """Return the approximate size of the tree in bytes."""
        return 4 * size + 8 * size // (CHILDREN - 1)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors for checkpoints, by name."""
        return {"highest": self.highest} | {f"level{k}": x for k, x in enumerate(self.levels)}

    def clear(self) -> None:
        """Set all priorities to 0."""
        for level in self.levels:
            level.zero_()
        self.highest.fill_(UNIT)

    @property
    def total(self) -> Tensor:
        """Sum of all priorities in units, () int64."""
        return self.levels[-1].sum(dtype=torch.int64)

    def draw(self, key: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return places drawn in proportion to their priorities, and their units, each (count,) int64. key () int32.

        Sampling is stratified: the total is split into `count` equal parts and one place is drawn from each. If the total
        is 0, the places are meaningless and their units are 0.
        """
        tree = [*self.levels, *self._levels_above()]
        cumulative = tree[-1].cumsum(0, dtype=torch.int64)
        total, number = cumulative[-1], torch.arange(count, device=self.device)
        stratum = torch.div(total, count, rounding_mode="floor")
        remainder = total - stratum * count
        start = stratum * number + torch.minimum(number, remainder)
        start = torch.where(
            total < count, torch.div(number * total.clamp(max=count), count, rounding_mode="floor"), start
        )
        extent = (stratum + (number < remainder).to(torch.int64)).clamp(min=1)
        bits = (random.bits(key, 2 * number) << 31) | (random.bits(key, 2 * number + 1) >> 1)  # 63 random bits
        target = torch.minimum(start + bits % extent, (total - 1).clamp(min=0))
        node = torch.searchsorted(cumulative, target, right=True).clamp(max=len(cumulative) - 1)
        target = target - torch.where(node > 0, cumulative[node - 1], 0)
        for level in reversed(tree[:-1]):
            node = node.clamp(max=len(level) // CHILDREN - 1)  # only exceeded if the total is 0
            sums = level.view(-1, CHILDREN)[node].to(torch.int64)  # (count, CHILDREN)
            passed = sums.cumsum(1) <= target.unsqueeze(1)
            target = target - torch.where(passed, sums, 0).sum(1)
            node = node * CHILDREN + passed.sum(1).clamp(max=CHILDREN - 1)
        place = node.clamp(max=self.size - 1)
        return place, self.levels[0][place].to(torch.int64)

    def _levels_above(self) -> list[Tensor]:
        """Return two more levels if the top one has many nodes: a GPU computes a long cumulative sum in a single block."""
        top, group = self.levels[-1], CHILDREN * CHILDREN
        if len(top) <= group:
            return []
        nodes = F.pad(top, (0, -len(top) % group))
        return [nodes.view(-1, count).sum(1, dtype=torch.int64) for count in (CHILDREN, group)]

    def set(self, place: Tensor, units: Tensor) -> None:
        """Set the units (M,) int32 of places (M,) int64. Duplicate places must have equal units."""
        self.levels[0].index_copy_(0, place, units)
        self._update_sums(torch.div(place, CHILDREN, rounding_mode="floor"))

    def set_span(self, first: Tensor, count: int, units: Tensor) -> None:
        """Set `count` places from `first` () int64 on to the same units () int32."""
        place = first + torch.arange(count, device=self.device)
        self.levels[0].index_copy_(0, place, units.to(torch.int32).expand(count))
        first_parent = torch.div(first, CHILDREN, rounding_mode="floor")
        last_parent = torch.div(first + count - 1, CHILDREN, rounding_mode="floor")
        offset = torch.arange(count // CHILDREN + 2, device=self.device)
        self._update_sums(torch.minimum(first_parent + offset, last_parent))

    def _update_sums(self, node: Tensor) -> None:
        """Recompute the given nodes (M,) of the level above the leaves, and all their ancestors."""
        for child, parent in zip(self.levels, self.levels[1:], strict=False):
            parent.index_copy_(0, node, child.view(-1, CHILDREN)[node].sum(1, dtype=torch.int64))
            node = torch.div(node, CHILDREN, rounding_mode="floor")

    def units(self, td_errors: Tensor, alpha: float) -> Tensor:
        """Return the units (M,) int32 of TD errors (M,), |error| ** alpha, and raise `highest` to the largest of them.

        Errors that are 0, NaN or too small to represent give 1 unit; infinite errors give the maximum. Non-finite errors
        do not change `highest`. With alpha 0, all finite errors give the same units.
        """
        powers = torch.nan_to_num(td_errors.to(torch.float32).abs().pow(alpha) * UNIT, nan=1.0)
        units = powers.clamp(1.0, _MAX_UNITS).to(torch.int32)
        finite = torch.where(torch.isfinite(td_errors), units, 1)
        self.highest.copy_(torch.maximum(self.highest, in_rows(finite).amax(1).amax()))
        return units
