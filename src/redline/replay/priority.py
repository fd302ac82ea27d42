"""Priorities as whole numbers in a tree of sums: what is drawn more often is decided without a rounding error.

A priority is a number of units, 1 to 2**31 - 1, in an int32 leaf; 0 is a leaf that cannot be drawn. A node above is the sum
of its 16 children, int64, computed anew from them whenever one changes. Sums of integers are exact in any order, so they
never drift, equal each other on every device, and a draw below the total always ends at a leaf that can be drawn. The tree
ends where few enough nodes are left: a search in their running sum is faster than more levels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from redline.core import random

CHILDREN = 16
UNIT = 1 << 16  # units of a priority of 1: priorities from 1/65536 to 32767 are told apart
TOP = 1 << 16  # nodes of the uppermost level, at most
_MOST = 2.0**31 - 128  # the largest float32 an int32 can hold


class Priorities:
    """Priorities of `size` places."""

    def __init__(self, size: int, device: torch.device, top: int = TOP) -> None:
        self.size, self.device = size, device
        self.levels: list[Tensor] = []  # leaves first; each as long as a multiple of CHILDREN
        length, dtype = size, torch.int32
        while True:
            whole = -(-length // CHILDREN)
            self.levels.append(torch.zeros(whole * CHILDREN, dtype=dtype, device=device))
            if length <= top:
                break
            length, dtype = whole, torch.int64
        self.highest = torch.full((), UNIT, dtype=torch.int32, device=device)  # what a new place gets

    @staticmethod
    def bytes_needed(size: int) -> int:
        """About what the tree takes."""
        return 4 * size + 8 * size // (CHILDREN - 1)

    def tensors(self) -> dict[str, Tensor]:
        """Everything, by name: for checkpoints."""
        return {"highest": self.highest} | {f"level{k}": x for k, x in enumerate(self.levels)}

    def clear(self) -> None:
        """As new: nothing can be drawn."""
        for level in self.levels:
            level.zero_()
        self.highest.fill_(UNIT)

    @property
    def total(self) -> Tensor:
        """Sum of all leaves, () int64."""
        return self.levels[-1].sum(dtype=torch.int64)

    def draw(self, key: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Places drawn in proportion to their priority, and their units, each (count,) int64. key () int32.

        Stratified: the total is cut into `count` equal parts and one place is drawn from each. With a total of 0 nothing
        can be drawn; the places are then meaningless and their units 0.
        """
        reached = self.levels[-1].cumsum(0, dtype=torch.int64)
        total, number = reached[-1], torch.arange(count, device=self.device)
        stratum = torch.div(total, count, rounding_mode="floor")
        left = total - stratum * count
        start = stratum * number + torch.minimum(number, left)
        start = torch.where(
            total < count, torch.div(number * total.clamp(max=count), count, rounding_mode="floor"), start
        )
        extent = (stratum + (number < left).to(torch.int64)).clamp(min=1)
        bits = (random.bits(key, 2 * number) << 31) | (random.bits(key, 2 * number + 1) >> 1)  # 63 of them
        rest = torch.minimum(start + bits % extent, (total - 1).clamp(min=0))
        node = torch.searchsorted(reached, rest, right=True).clamp(max=len(reached) - 1)
        rest = rest - torch.where(node > 0, reached[node - 1], 0)
        for level in reversed(self.levels[:-1]):
            node = node.clamp(max=len(level) // CHILDREN - 1)  # (beyond it only where there is nothing to draw)
            sums = level.view(-1, CHILDREN)[node].to(torch.int64)  # (count, CHILDREN)
            passed = sums.cumsum(1) <= rest.unsqueeze(1)
            rest = rest - torch.where(passed, sums, 0).sum(1)
            node = node * CHILDREN + passed.sum(1).clamp(max=CHILDREN - 1)
        place = node.clamp(max=self.size - 1)
        return place, self.levels[0][place].to(torch.int64)

    def set(self, place: Tensor, units: Tensor) -> None:
        """Give places (M,) int64 their units (M,) int32. Of a place that comes twice, the units must be the same."""
        self.levels[0].index_copy_(0, place, units)
        self._add_up(torch.div(place, CHILDREN, rounding_mode="floor"))

    def set_span(self, first: Tensor, count: int, units: Tensor) -> None:
        """Give `count` places from `first` () int64 on the units () int32."""
        place = first + torch.arange(count, device=self.device)
        self.levels[0].index_copy_(0, place, units.to(torch.int32).expand(count))
        parent = torch.div(first, CHILDREN, rounding_mode="floor")
        last = torch.div(first + count - 1, CHILDREN, rounding_mode="floor")
        touched = torch.arange(count // CHILDREN + 2, device=self.device)
        self._add_up(torch.minimum(parent + touched, last))

    def _add_up(self, node: Tensor) -> None:
        """Compute the given nodes (M,) of the level above the leaves anew, and all above them."""
        for child, parent in zip(self.levels, self.levels[1:], strict=False):
            parent.index_copy_(0, node, child.view(-1, CHILDREN)[node].sum(1, dtype=torch.int64))
            node = torch.div(node, CHILDREN, rounding_mode="floor")

    def note(self, errors: Tensor, alpha: float) -> Tensor:
        """Units (M,) int32 of errors (M,): |error| ** alpha. The largest so far is what new places get from now on.

        An error of 0 or one too small to tell is 1 unit, infinity is the most there is; what is not a number gives no
        reason to be looked at again: 1 unit. Neither changes what new places get. (With alpha 0 all are equal.)
        """
        powers = torch.nan_to_num(errors.to(torch.float32).abs().pow(alpha) * UNIT, nan=1.0)
        units = powers.clamp(1.0, _MOST).to(torch.int32)
        self.highest.copy_(torch.maximum(self.highest, torch.where(torch.isfinite(errors), units, 1).amax()))
        return units
