"""Rows copied by the loop that prefetches, against plain indexing."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.engine import gather
from redline.engine.hardware import find_compiler

DTYPES = [torch.uint8, torch.int16, torch.int32, torch.int64, torch.float32]


@pytest.fixture(autouse=True)
def _built() -> None:
    if not find_compiler():
        pytest.skip("there is no C++ compiler")
    assert gather._build(), "a compiler is there: a loop that it refuses is a fault"


@settings(deadline=None)
@given(
    entries=st.integers(1, 60),
    width=st.integers(1, 70),
    count=st.integers(0, 3000),
    dtype=st.sampled_from(DTYPES),
    threads=st.sampled_from([1, 2]),
)
def test_rows_are_those_of_plain_indexing(
    entries: int, width: int, count: int, dtype: torch.dtype, threads: int
) -> None:
    table = torch.randint(0, 100, (entries, width)).to(dtype)
    index = torch.randint(0, entries, (count,))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(gather.gather_rows(table, index), table[index])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("wrong", [-1, 5])
def test_an_index_that_is_none_of_the_table_is_an_error(wrong: int) -> None:
    with pytest.raises(IndexError, match=f"index {wrong} at 2 .* 5 rows"):
        gather.gather_rows(torch.zeros(5, 3), torch.tensor([0, 4, wrong]))


def test_compiled_code_calls_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gather._copy is not None
    calls: list[int] = []
    copy = gather._copy
    monkeypatch.setattr(gather, "_copy", lambda *arguments: calls.append(1) or copy(*arguments))
    table, index = torch.arange(24.0).view(8, 3), torch.tensor([7, 0, 7])
    found = torch.compile(lambda x: gather.gather_rows(x, index) + 1, fullgraph=True)(table)
    assert torch.equal(found, table[index] + 1)
    assert calls


def test_torch_copies_the_rows_where_the_loop_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> ctypes.CDLL:
        raise RuntimeError("No compiler found\nSee the documentation.")

    messages: list[str] = []
    monkeypatch.setattr("torch._inductor.codecache.CppCodeCache.load", fail)
    monkeypatch.setattr(gather, "_copy", None)
    monkeypatch.setattr(gather, "_broken", False)
    monkeypatch.setattr(gather, "_notify", print)
    gather.prepare(messages.append)
    table, index = torch.arange(24).view(8, 3), torch.tensor([7, 0, 7])
    for _ in range(2):
        assert torch.equal(gather.gather_rows(table, index), table[index])
    assert messages == [
        "Copying rows from replay without prefetching: the loop could not be built (RuntimeError: No compiler found)."
    ]
