"""The kernel for planes against plain operations, for tests on a GPU and by Triton's interpreter."""

from __future__ import annotations

import torch

from redline.engine import triton_use
from redline.replay import planes


def check(
    entries: int, count: int, board: tuple[int, int], dtype: torch.dtype, cells: torch.dtype, device: str
) -> None:
    """Compare both for `count` of `entries` boards of numbers of `dtype`, with cells of another dtype."""
    generator = torch.Generator().manual_seed(entries * 1000 + count)
    height, width = board

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    boards = draw(0, 128, entries, height * width).to(dtype).view(torch.int32).to(device)
    first, second = (draw(-1, height * width, entries).to(cells).to(device) for _ in range(2))
    index = draw(0, entries, count).to(device)
    arguments = boards, first, second, index, [3, height, width], dtype
    found = planes._observe(*arguments)
    assert not triton_use._broken
    assert (found.shape, found.dtype) == ((count, 3, height, width), dtype)
    assert torch.equal(found, planes._plain(*arguments))
