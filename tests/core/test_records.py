"""Records are taken apart and put together without mixing fields or environments."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from redline.core.records import assign, from_leaves, leaves, map_record, where


class Inner(NamedTuple):
    small: Tensor
    board: Tensor


class Outer(NamedTuple):
    inner: Inner
    count: Tensor


def record(start: int) -> Outer:
    """Every number in it is another one."""
    numbers = torch.arange(start, start + 3 * 6).view(3, 6)
    return Outer(Inner(numbers[:, 0], numbers[:, 1:5].reshape(3, 2, 2)), numbers[:, 5])


def equal(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(leaves(a).values(), leaves(b).values(), strict=True))


def test_leaves_names_and_order() -> None:
    assert list(leaves(record(0))) == ["inner.small", "inner.board", "count"]


def test_from_leaves_inverts_leaves() -> None:
    again = from_leaves(record(100), leaves(record(0)))
    assert isinstance(again, Outer)
    assert isinstance(again.inner, Inner)
    assert equal(again, record(0))


def test_map_record_goes_field_by_field() -> None:
    assert equal(
        map_record(lambda a, b: b - a, record(0), record(50)), map_record(lambda x: torch.full_like(x, 50), record(0))
    )


def test_where_chooses_env_by_env() -> None:
    chosen = where(torch.tensor([True, False, True]), record(0), record(100))
    for name, x in leaves(chosen).items():
        yes, no = leaves(record(0))[name], leaves(record(100))[name]
        assert torch.equal(x, torch.stack([yes[0], no[1], yes[2]]))


def test_assign_writes_into_the_same_memory() -> None:
    target = map_record(torch.clone, record(0))
    places = {name: x.data_ptr() for name, x in leaves(target).items()}
    assign(target, record(7))
    assert equal(target, record(7))
    assert {name: x.data_ptr() for name, x in leaves(target).items()} == places
