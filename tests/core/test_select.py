"""Choosing by rank, against the plain way."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from redline.core.select import nth_set, pack, popcount

WIDTHS = [1, 2, 29, 30, 31, 59, 60, 61, 100, 127, 256, 1000, 1023, 1024]


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1))
def test_popcount(values: list[int]) -> None:
    assert popcount(torch.tensor(values, dtype=torch.int32)).tolist() == [value.bit_count() for value in values]


@given(st.lists(st.booleans(), min_size=1, max_size=150))
def test_pack_keeps_every_bit(row: list[bool]) -> None:
    assert popcount(pack(torch.tensor([row]))).sum().item() == sum(row)


@given(st.lists(st.booleans(), min_size=1, max_size=150).filter(any), st.data())
def test_nth_set_of_any_row(row: list[bool], data: st.DataObject) -> None:
    places = [place for place, value in enumerate(row) if value]
    rank = data.draw(st.integers(0, len(places) - 1))
    assert nth_set(torch.tensor([row]), torch.tensor([rank], dtype=torch.int32)).tolist() == [places[rank]]


@pytest.mark.parametrize("width", WIDTHS)
def test_nth_set_of_every_rank(width: int) -> None:
    """A full row and a random one: all ranks of each, one row a rank, in one batch."""
    generator = torch.Generator().manual_seed(width)
    random_row = torch.rand(width, generator=generator) < 0.3
    random_row[-1] = True
    for row in (torch.ones(width, dtype=torch.bool), random_row):
        places = row.nonzero().squeeze(1)
        ranks = torch.arange(len(places), dtype=torch.int32)
        found = nth_set(row.expand(len(places), -1), ranks)
        assert found.dtype == torch.int32
        assert torch.equal(found.long(), places)


@pytest.mark.parametrize("width", WIDTHS)
def test_nth_set_of_rows_with_one(width: int) -> None:
    found = nth_set(torch.eye(width, dtype=torch.bool), torch.zeros(width, dtype=torch.int32))
    assert torch.equal(found.long(), torch.arange(width))
