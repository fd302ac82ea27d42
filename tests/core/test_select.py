"""Sets of cells and choosing from them by rank, against Python's own sets."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from redline.core import random
from redline.core.select import draw, full_set, layout, nth_cell, one_cell, pack

WIDTHS = [1, 2, 29, 30, 31, 59, 60, 61, 100, 127, 256, 1000, 1023, 1024, 1600]
CPU = torch.device("cpu")


def packed(mask: Tensor) -> Tensor:
    """Rows of cells (N, C) bool as sets (N, K) int32, bit by bit as the module's first lines define them."""
    words, size = layout(mask.shape[1])
    sets = torch.zeros(mask.shape[0], words, dtype=torch.int64)
    for cell in range(mask.shape[1]):
        sets[:, cell // size] |= mask[:, cell].long() << cell % size
    return sets.to(torch.int32)


@pytest.mark.parametrize("cells", WIDTHS)
def test_layout_holds_every_cell(cells: int) -> None:
    words, size = layout(cells)
    assert size <= 30
    assert (words - 1) * size < cells <= words * size


@pytest.mark.parametrize("cells", WIDTHS)
def test_full_set_and_one_cell(cells: int) -> None:
    assert torch.equal(
        torch.tensor([full_set(cells)], dtype=torch.int32), packed(torch.ones(1, cells, dtype=torch.bool))
    )
    single = torch.stack(one_cell(torch.arange(cells, dtype=torch.int32), cells), 1)
    assert single.dtype == torch.int32
    assert torch.equal(single, packed(torch.eye(cells, dtype=torch.bool)))
    assert not any(one_cell(torch.tensor([-1], dtype=torch.int32), cells))


@given(st.lists(st.booleans(), min_size=1, max_size=150).filter(any), st.data())
def test_nth_cell_of_any_set(row: list[bool], data: st.DataObject) -> None:
    places = [place for place, value in enumerate(row) if value]
    rank = data.draw(st.integers(0, len(places) - 1))
    found = nth_cell(packed(torch.tensor([row])).unbind(1), torch.tensor([rank], dtype=torch.int32), len(row))
    assert found.tolist() == [places[rank]]


@pytest.mark.parametrize("cells", WIDTHS)
def test_nth_cell_of_every_rank(cells: int) -> None:
    """A full set and two random ones: all ranks of each, one row a rank, in one batch."""
    generator = torch.Generator().manual_seed(cells)
    dense, sparse = (torch.rand(cells, generator=generator) < progress for progress in (0.7, 0.05))
    dense[-1] = sparse[-1] = True
    for row in (torch.ones(cells, dtype=torch.bool), dense, sparse):
        places = row.nonzero().squeeze(1)
        ranks = torch.arange(len(places), dtype=torch.int32)
        found = nth_cell(packed(row.unsqueeze(0)).expand(len(places), -1).unbind(1), ranks, cells)
        assert found.dtype == torch.int32
        assert torch.equal(found.long(), places)


@pytest.mark.parametrize("cells", WIDTHS)
def test_nth_cell_of_sets_of_one(cells: int) -> None:
    found = nth_cell(packed(torch.eye(cells, dtype=torch.bool)).unbind(1), torch.zeros(cells, dtype=torch.int32), cells)
    assert torch.equal(found.long(), torch.arange(cells))


@pytest.mark.parametrize("cells", WIDTHS)
def test_pack_is_bit_by_bit(cells: int) -> None:
    mask = torch.rand(50, cells, generator=torch.Generator().manual_seed(cells)) < 0.5
    mask[0], mask[1] = True, False
    found = pack(mask)
    assert found.dtype == torch.int32
    assert torch.equal(found, packed(mask))


@pytest.mark.parametrize("cells", [1, 2, 7, 30, 31, 34, 58])
def test_draw_is_uniform_over_the_members(cells: int, looks_uniform: Callable[[Tensor], bool]) -> None:
    generator = torch.Generator().manual_seed(cells)
    for progress in (0.1, 0.5, 1.0):
        row = torch.rand(cells, generator=generator) < progress
        row[-1] = True
        found = draw(row.expand(40_000, -1), random.bits(random.seed_key(cells), torch.arange(40_000)))
        assert found.dtype == torch.int64
        counts = torch.bincount(found, minlength=cells)
        assert counts[~row].sum() == 0
        assert row.sum() == 1 or looks_uniform(counts[row])


@pytest.mark.parametrize("cells", [1, 4, 30, 31, 58])
def test_draw_of_an_empty_row_is_some_cell_and_disturbs_no_other(cells: int) -> None:
    mask = torch.zeros(64, cells, dtype=torch.bool)
    mask[::2, cells // 2] = True
    found = draw(mask, random.bits(random.seed_key(1), torch.arange(64)))
    assert ((found >= 0) & (found < cells)).all()
    assert (found[::2] == cells // 2).all()
