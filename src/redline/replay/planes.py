"""Observations of planes made from stored fields in one kernel: no States between replay and observations.

If a game declares that its observation shows a board and two marked cells (`plane_fields`), a Triton kernel reads them at
the drawn places and writes the observations. Otherwise States are gathered first, written to memory and read again, and the
compiler's kernels compute an address for every word. Without Triton or a GPU, replay does that for all games.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from redline.engine.triton_use import attempt
from redline.envs.batch import Rules

# The fastest of twenty settings on an H200, for boards of 25 words and 131,072 observations:
_LARGEST_TILE = 256  # words of each plane that a program writes, unless a single plane has more
_LAUNCH = {"num_warps": 4}

_WHAT = "observations from replay"
_notify: Callable[[str], None] = print


class StoredPlanes:
    """Builds observations from the stored tables of the fields that they show as planes."""

    def __init__(self, rules: Rules, tables: Mapping[str, Tensor]) -> None:
        """tables: stored fields of State for which `suits` has returned True."""
        spec = rules.game.spec(rules.config)
        board, first, second = (tables[name] for name in plane_fields(rules))
        self.shape, self.dtype = list(spec.obs_shape), spec.obs_dtype
        self.tables = board.flatten(1).view(torch.int32), first, second

    def observe(self, index: Tensor) -> Tensor:
        """Return the observations (M, 3, H, W) of the States at `index` (M,) int64."""
        planes: Tensor = _observe(*self.tables, index, self.shape, self.dtype)
        return planes


def plane_fields(rules: Rules) -> tuple[str, ...]:
    """Return the names of the fields that observations show as planes; empty if they show anything else."""
    fields = getattr(rules.game, "plane_fields", None)
    return () if fields is None else tuple(fields(rules.config))


def suits(rules: Rules, tables: Mapping[str, Tensor], notify: Callable[[str], None]) -> bool:
    """Return whether the kernel can build observations from these stored fields; `notify` if only Triton is missing."""
    global _notify
    spec, names = rules.game.spec(rules.config), plane_fields(rules)
    if (
        not names
        or spec.masked
        or spec.obs_dtype.is_floating_point
        or next(iter(tables.values())).device.type != "cuda"
    ):
        return False
    _notify = notify
    _, height, width = spec.obs_shape
    size = height * width * spec.obs_dtype.itemsize
    board = tables[names[0]][:1]
    if board.nbytes != size or size % 4:  # the dtype differs from the observation's, or words do not fit
        return False
    if importlib.util.find_spec("triton") is None:
        notify("Making observations from replay by way of States: Triton, which compiles the kernel, is not installed.")
        return False
    return True


@torch.library.custom_op("redline::observe_planes", mutates_args=())
def _observe(
    board: Tensor, first: Tensor, second: Tensor, index: Tensor, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Return planes (M, *shape): board (entries, W) int32 at index (M,), and ones at cells `first` and `second` (entries,)."""
    planes = _empty(board, first, second, index, shape, dtype)
    if attempt(_WHAT, lambda: _launch(board, first, second, index, planes), _notify):
        return planes  # type: ignore[no-any-return]
    return _plain(board, first, second, index, shape, dtype)


@_observe.register_fake
def _empty(
    board: Tensor, first: Tensor, second: Tensor, index: Tensor, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    del board, first, second
    return index.new_empty(index.shape[0], *shape, dtype=dtype)


def _launch(board: Tensor, first: Tensor, second: Tensor, index: Tensor, planes: Tensor) -> None:
    from redline.replay import plane_kernels

    size, words = len(index), board.shape[1]
    block = 1 << (words - 1).bit_length()
    tile = max(1, _LARGEST_TILE // block)
    plane_kernels.planes_kernel[(-(-size // tile),)](
        board, first, second, index.contiguous(), planes.flatten().view(torch.int32), size,
        words, block, tile, 4 // planes.element_size(), **_LAUNCH,
    )  # fmt: skip


def _plain(
    board: Tensor, first: Tensor, second: Tensor, index: Tensor, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Return the same planes as `_observe`, computed by torch."""
    shown = board[index].view(dtype)
    number = torch.arange(shown.shape[1], device=board.device)
    marks = ((cell[index].unsqueeze(1) == number).to(dtype) for cell in (first, second))
    return torch.stack([shown, *marks], 1).view(-1, *shape)
