"""Priorities against a plain list: every sum, every place drawn, and the units of every TD error."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from redline.core import random
from redline.replay.priority import CHILDREN, TOP, UNIT, Priorities

CPU = torch.device("cpu")
SIZES = [1, 15, 16, 17, 256, 257, 5000]
MOST = 2**31 - 1  # the most units a leaf holds
NOTED = 2**31 - 128  # the most units an error is worth


def integers(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def filled(units: Sequence[int], top: int = CHILDREN) -> Priorities:
    found = Priorities(len(units), CPU, top)
    found.set(torch.arange(len(units)), integers(units))
    return found


def assert_sums(priorities: Priorities, units: Sequence[int]) -> None:
    """Check that the leaves are `units`, that each node is the sum of its children, and that the padding is 0."""
    assert priorities.levels[0].dtype == torch.int32
    expected = list(units)
    for number, level in enumerate(priorities.levels):
        padded = expected + [0] * (level.numel() - len(expected))
        assert level.tolist() == padded, f"level {number}"
        expected = [sum(padded[start : start + CHILDREN]) for start in range(0, len(padded), CHILDREN)]
    assert priorities.total.dtype == torch.int64
    assert priorities.total.item() == sum(units)


def targets_of(total: int, key: Tensor, count: int) -> list[int]:
    """Return where each draw falls in the total: anywhere in each of `count` parts, equal to within a unit."""
    progress, left = divmod(total, count)
    found = []
    for number in range(count):
        start = progress * number + min(number, left)
        extent = progress + (number < left)
        upper, lower = (int(random.bits(key, 2 * number + half)) for half in (0, 1))
        found.append(start + (upper << 31 | lower >> 1) % extent)
    return found


def place_of(target: int, units: Sequence[int]) -> int:
    """Walk along the list until the units passed exceed the target."""
    for place, own in enumerate(units):
        if target < own:
            return place
        target -= own
    raise AssertionError("the target is beyond the total")


# ---- Sums


@pytest.mark.parametrize(
    ("size", "levels"), [(1, 1), (15, 1), (16, 1), (17, 2), (256, 2), (257, 3), (4096, 3), (5000, 4)]
)
def test_shape_of_the_tree(size: int, levels: int) -> None:
    priorities = Priorities(size, CPU, top=CHILDREN)
    assert [x.dtype for x in priorities.levels] == [torch.int32] + [torch.int64] * (levels - 1)
    assert priorities.levels[0].numel() >= size
    assert priorities.levels[-1].numel() == CHILDREN
    assert len(Priorities(size, CPU).levels) == 1  # a few thousand are searched without a tree
    assert_sums(priorities, [0] * size)
    assert set(priorities.tensors()) == {"highest"} | {f"level{k}" for k in range(levels)}
    assert priorities.highest.item() == UNIT


@given(units=st.lists(st.integers(0, MOST), min_size=1, max_size=600), seed=st.integers(0, 1000))
def test_where_the_tree_ends_changes_no_draw(units: list[int], seed: int) -> None:
    key = random.seed_key(seed)
    expected = filled(units).draw(key, 50)
    for top in (CHILDREN**2, TOP):
        found = filled(units, top).draw(key, 50)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("size", SIZES)
@given(data=st.data())
def test_sums_stay_those_of_a_list(size: int, data: st.DataObject) -> None:
    """Mix single places, spans and clearing; compare after each."""
    priorities, model = Priorities(size, CPU, top=CHILDREN), [0] * size
    some_units = st.one_of(st.just(0), st.integers(0, 100), st.sampled_from([MOST - 1, MOST]), st.integers(0, MOST))
    for _ in range(data.draw(st.integers(1, 8), label="operations")):
        operation = data.draw(st.sampled_from(["set", "set", "span", "span", "clear"]), label="operation")
        if operation == "set":
            changes = data.draw(st.dictionaries(st.integers(0, size - 1), some_units, min_size=1, max_size=40))
            for place, units in changes.items():
                model[place] = units
            # Some come twice, with equal units, in any order.
            twice = data.draw(st.lists(st.sampled_from(sorted(changes)), max_size=10))
            places = data.draw(st.permutations([*changes, *twice]))
            priorities.set(torch.tensor(places), integers([changes[place] for place in places]))
        elif operation == "span":
            count = data.draw(st.one_of(st.integers(1, size), st.integers(1, min(size, 40))), label="count")
            first = data.draw(st.integers(0, size - count), label="first")
            units = data.draw(some_units, label="units")
            priorities.set_span(torch.tensor(first), count, torch.tensor(units, dtype=torch.int32))
            model[first : first + count] = [units] * count
        else:
            priorities.clear()
            model = [0] * size
        assert_sums(priorities, model)


@pytest.mark.parametrize("first", [0, 1, 15, 16, 17, 31, 240, 255, 256])
@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 31, 32, 33, 257])
def test_a_span_changes_its_own_places_only(first: int, count: int) -> None:
    units = [3 + place % 7 for place in range(600)]
    priorities = filled(units)
    priorities.set_span(torch.tensor(first), count, torch.tensor(1_000_000, dtype=torch.int32))
    units[first : first + count] = [1_000_000] * count
    assert_sums(priorities, units)


def test_a_million_updates_leave_no_drift() -> None:
    """Large and small units in turn: sums of float32 would be off by millions."""
    size, each = 5000, 2000
    priorities = Priorities(size, CPU, top=CHILDREN)
    generator = torch.Generator().manual_seed(0)
    for number in range(1_000_000 // each):
        place = torch.randperm(size, generator=generator)[:each]
        units = torch.randint(1, MOST if number % 2 else 100, (each,), generator=generator, dtype=torch.int32)
        priorities.set(place, units)
    leaves = priorities.levels[0].tolist()
    assert max(leaves) > 2**30
    assert_sums(priorities, leaves[:size])


def test_bytes_needed_are_about_those_held() -> None:
    for size in (5000, 123_457):
        held = sum(x.numel() * x.element_size() for x in Priorities(size, CPU, top=CHILDREN).tensors().values())
        assert Priorities.bytes_needed(size) == pytest.approx(held, rel=0.1)


# ---- Draws


@given(data=st.data())
def test_draws_are_those_of_a_walk_along_the_list(data: st.DataObject) -> None:
    """The same targets, found place by place: the same places exactly."""
    size = data.draw(st.sampled_from(SIZES[:-1]), label="size")
    leaf = st.one_of(st.just(0), st.integers(0, 5), st.just(MOST), st.integers(0, MOST))
    units = data.draw(st.lists(leaf, min_size=size, max_size=size), label="units")
    count = data.draw(st.integers(1, 50), label="count")
    if sum(units) < count:  # fewer units than draws: looked at below
        units[data.draw(st.integers(0, size - 1))] = count
    key = random.seed_key(data.draw(st.integers(0, 2**40), label="seed"))
    place, found = filled(units).draw(key, count)
    assert place.dtype == found.dtype == torch.int64
    expected = [place_of(target, units) for target in targets_of(sum(units), key, count)]
    assert place.tolist() == expected
    assert found.tolist() == [units[p] for p in expected]
    assert 0 not in found.tolist()


def test_draws_from_a_large_tree_are_those_of_a_walk() -> None:
    units = torch.randint(0, MOST, (5000,), generator=torch.Generator().manual_seed(1)).tolist()
    units = [0 if place % 3 == 0 else own >> place % 31 for place, own in enumerate(units)]
    ends = list(itertools.accumulate(units))
    for seed in range(5):
        place, found = filled(units).draw(random.seed_key(seed), 700)
        targets = targets_of(ends[-1], random.seed_key(seed), 700)
        assert place.tolist() == [bisect.bisect_right(ends, target) for target in targets]
        assert found.tolist() == [units[p] for p in place.tolist()]


def chi_square(counts: Tensor, expected: Tensor) -> tuple[float, float]:
    """Return how far counts are from the expected ones, in standard deviations of the statistic, and the statistic."""
    statistic = ((counts.double() - expected) ** 2 / expected).sum().item()
    free = counts.numel() - 1
    return (statistic - free) / math.sqrt(2 * free), statistic


def test_single_draws_come_in_proportion() -> None:
    """One draw a key, so that draws are independent: shares are those of the units, within five standard deviations."""
    units = [1000, 0, 2500, 400, 40_000, 7, 0, 3000, *[9000] * 10, 60_000, 0, 500]
    priorities, draws = filled(units), 3000
    found = torch.cat([priorities.draw(random.seed_key(seed), 1)[0] for seed in range(draws)])
    counts = torch.bincount(found, minlength=len(units))
    progress = torch.tensor(units, dtype=torch.float64) / sum(units)
    common = progress * draws >= 5
    away, _ = chi_square(counts[common], (progress * draws)[common])
    assert abs(away) < 5
    assert counts[torch.tensor(units) == 0].sum() == 0
    assert counts[5] <= 5  # seven units of some 200,000
    flat, _ = chi_square(counts[common], torch.full((int(common.sum()),), draws / int(common.sum())))
    assert flat > 100, "the test could not tell proportional from uniform"


@pytest.mark.parametrize("count", [64, 1000, 4096])
def test_draws_of_a_batch_come_in_proportion(count: int) -> None:
    """Stratified: a place gets at least the parts that lie wholly in it, and at most those that touch it."""
    units = [(place * 7919) % 1000 * (place % 4) for place in range(300)]
    priorities, total = filled(units), sum(units)
    for seed in range(5):
        counts = torch.bincount(priorities.draw(random.seed_key(seed), count)[0], minlength=len(units)).tolist()
        for place, (own, drawn) in enumerate(zip(units, counts, strict=True)):
            assert abs(drawn - own * count / total) < 2, place


def test_places_of_one_part_are_equally_likely(looks_uniform: Any) -> None:
    """Within a part every unit has its chance: 64 places of one unit in two parts, many keys."""
    priorities = filled([1] * 64)
    draws = torch.stack([priorities.draw(random.seed_key(seed), 2)[0] for seed in range(2500)])
    assert looks_uniform(torch.bincount(draws[:, 0], minlength=32))
    assert looks_uniform(torch.bincount(draws[:, 1] - 32, minlength=32))
    assert looks_uniform(torch.bincount(draws[:, 0] // 4 * 8 + (draws[:, 1] - 32) // 4, minlength=64)), "dependent"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("units", [1, 3, UNIT, MOST])
def test_with_equal_priorities_each_place_is_drawn_once(size: int, units: int) -> None:
    place, found = filled([units] * size).draw(random.seed_key(4), size)
    assert place.tolist() == list(range(size))
    assert (found == units).all()


@pytest.mark.parametrize("size", [5, 16, 17, 300])
@pytest.mark.parametrize("high", [1, 100, MOST])
def test_a_leaf_of_no_units_is_never_drawn(size: int, high: int) -> None:
    """Each second place is 0, the first and the last among them where the size is odd."""
    units = [high if place % 2 else 0 for place in range(size)]
    priorities = filled(units)
    drawable = [place for place in range(size) if place % 2]
    seen = set()
    for seed in range(40):
        place, found = priorities.draw(random.seed_key(seed), len(drawable))
        assert (place % 2 == 1).all()
        assert (found == high).all()
        seen |= set(place.tolist())
    assert seen == set(drawable)


@pytest.mark.parametrize("size", [1, 16, 17, 257, 5000])
@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_the_only_place_is_always_drawn(size: int, where: str) -> None:
    only = {"first": 0, "middle": size // 2, "last": size - 1}[where]
    for units in (1, MOST):
        priorities = Priorities(size, CPU, top=CHILDREN)
        priorities.set(torch.tensor([only]), integers([units]))
        place, found = priorities.draw(random.seed_key(6), 50)
        assert (place == only).all()
        assert (found == units).all()


def test_totals_beyond_what_a_double_holds() -> None:
    """Four million places of 2**31 - 1 units, each thousandth of none: the total has 54 bits, and every draw is exact."""
    size = 4_300_000
    priorities = Priorities(size, CPU, top=CHILDREN)
    priorities.set_span(torch.tensor(0), size, torch.tensor(MOST, dtype=torch.int32))
    empty = torch.arange(0, size, 1000)
    priorities.set(empty, torch.zeros_like(empty, dtype=torch.int32))
    total = (size - empty.numel()) * MOST
    assert total > 2**53
    assert priorities.total.item() == total
    for seed in range(2):
        place, found = priorities.draw(random.seed_key(seed), 2000)
        number = [target // MOST for target in targets_of(total, random.seed_key(seed), 2000)]
        assert place.tolist() == [n // 999 * 1000 + 1 + n % 999 for n in number]
        assert (found == MOST).all()
    # One unit beside the giants is told apart.
    priorities.set(torch.tensor([0]), integers([1]))
    assert priorities.total.item() == total + 1


@pytest.mark.fault("F6")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [1, 7, 512])
def test_nothing_to_draw_is_harmless(size: int, count: int) -> None:
    priorities = Priorities(size, CPU, top=CHILDREN)
    for _ in range(2):  # never filled, and cleared
        place, units = priorities.draw(random.seed_key(1), count)
        assert ((place >= 0) & (place < size)).all()
        assert units.tolist() == [0] * count
        priorities.set_span(torch.tensor(0), size, torch.tensor(5, dtype=torch.int32))
        priorities.clear()
        assert_sums(priorities, [0] * size)


@pytest.mark.parametrize("units", [[1], [0, 1, 0, 2, 0, 0, 1, 0], [1] * 64, [0, 3] * 50, [1] * 511], ids=len)
@pytest.mark.parametrize("seed", [0, 1])
def test_fewer_units_than_draws_are_drawn_in_proportion(units: list[int], seed: int) -> None:
    """512 draws: a place gets its share of them, neither the first nor the last gets what is left over."""
    place, found = filled(units).draw(random.seed_key(seed), 512)
    assert found.tolist() == [units[p] for p in place.tolist()]
    counts = torch.bincount(place, minlength=len(units)).tolist()
    for own, drawn in zip(units, counts, strict=True):
        assert abs(drawn - 512 * own / sum(units)) < 2
        assert (drawn > 0) == (own > 0)


def test_draws_repeat_by_key_and_differ_by_key() -> None:
    priorities = filled([1 + place % 5 for place in range(1000)])
    first, again, other = (priorities.draw(random.seed_key(seed), 20)[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert (first != other).float().mean() > 0.7


def test_drawing_changes_nothing() -> None:
    units = [place % 9 for place in range(100)]
    priorities = filled(units)
    priorities.draw(random.seed_key(2), 64)
    assert_sums(priorities, units)
    assert priorities.highest.item() == UNIT


# ---- Errors


def noted(errors: Sequence[float], alpha: float) -> tuple[list[int], int]:
    """Return the units of the errors, and `highest` afterwards."""
    priorities = Priorities(4, CPU, top=CHILDREN)
    units = priorities.units(torch.tensor(errors, dtype=torch.float32), alpha)
    assert units.dtype == torch.int32
    assert priorities.highest.dtype == torch.int32
    return units.tolist(), int(priorities.highest.item())


@pytest.mark.parametrize(
    ("error", "units"),
    [
        (0.0, 1),
        (-0.0, 1),
        (1e-45, 1),
        (1e-6, 1),
        (-1e-6, 1),
        (2.0**-16, 1),
        (3 * 2.0**-16, 3),
        (0.5, UNIT // 2),
        (-0.5, UNIT // 2),
        (1.0, UNIT),
        (-2.25, UNIT * 9 // 4),
        (1000.0, 1000 * UNIT),
        (32767.0, 32767 * UNIT),
        (32768.0, NOTED),
        (1e30, NOTED),
        (-3.4e38, NOTED),
        (math.inf, NOTED),
        (-math.inf, NOTED),
        (math.nan, 1),
    ],
)
def test_units_of_an_error(error: float, units: int) -> None:
    """With alpha 1. Only finite errors raise `highest`, and nothing lowers it."""
    found, highest = noted([error], 1.0)
    assert found == [units]
    assert highest == (max(UNIT, units) if math.isfinite(error) else UNIT)


@pytest.mark.fault("F7")
def test_one_bad_error_does_not_spoil_the_others() -> None:
    units, highest = noted([0.25, math.nan, 2.0, math.inf, 0.0, -math.inf], 1.0)
    assert units == [UNIT // 4, 1, 2 * UNIT, NOTED, 1, NOTED]
    assert highest == 2 * UNIT


def test_the_highest_only_rises() -> None:
    priorities, seen = Priorities(4, CPU, top=CHILDREN), []
    for error in (0.5, 3.0, 2.0, math.inf, math.nan, -7.0, 0.0):
        priorities.units(torch.tensor([error, 0.1]), 1.0)
        seen.append(priorities.highest.item() / UNIT)
    assert seen == [1.0, 3.0, 3.0, 3.0, 3.0, 7.0, 7.0]


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 0.6, 1.0])
def test_alpha_is_the_power_applied_once(alpha: float) -> None:
    errors = [0.001, 0.3, 1.0, 4.0, -9.0, 123.0]
    units, highest = noted(errors, alpha)
    for error, found in zip(errors, units, strict=True):
        assert found == pytest.approx(abs(error) ** alpha * UNIT, rel=1e-5, abs=1.0)
    assert highest == max(units)


def test_alpha_one_half_is_the_root() -> None:
    assert noted([0.25, 4.0, -6.25], 0.5)[0] == [UNIT // 2, 2 * UNIT, UNIT * 5 // 2]


def test_alpha_zero_makes_finite_errors_equal() -> None:
    units, highest = noted([0.0, 1e-9, -0.5, 1.0, 1e30], 0.0)
    assert units == [UNIT] * 5
    assert highest == UNIT


@pytest.mark.fault("F7")
@given(
    st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=1, max_size=30),
    st.sampled_from([0.0, 0.4, 0.5, 1.0]),
)
def test_any_error_gives_units_that_can_be_drawn(errors: list[float], alpha: float) -> None:
    units, highest = noted(errors, alpha)
    assert all(1 <= found <= NOTED for found in units)
    finite = [found for found, error in zip(units, errors, strict=True) if math.isfinite(error)]
    assert highest == max([UNIT, *finite])
    order = sorted((abs(error), found) for error, found in zip(errors, units, strict=True) if not math.isnan(error))
    assert [found for _, found in order] == sorted(found for _, found in order), "a larger error has fewer units"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_errors_of_any_precision(dtype: torch.dtype) -> None:
    units = Priorities(4, CPU, top=CHILDREN).units(torch.tensor([0.5, -2.0, 0.0, math.nan], dtype=dtype), 1.0)
    assert units.tolist() == [UNIT // 2, 2 * UNIT, 1, 1]
