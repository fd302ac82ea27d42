"""Prioritized replay against a list that follows every row and every TD error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from list_replay import RULES, ListReplay, assert_same, play, states
from torch import Tensor

from redline.core import random
from redline.core.records import Batch, Step, leaves
from redline.replay.contract import ReplayRequest
from redline.replay.device import DeviceReplay
from redline.replay.priority import UNIT, Priorities

GAMMA = 0.5
NOTED = 2**31 - 128  # most units of an error


class Watched(DeviceReplay):
    """A memory that calls a function before each row is written."""

    at_write: Callable[[], None] = staticmethod(lambda: None)

    def write(self, state: Any, action: Tensor, step: Step) -> None:
        self.at_write()
        super().write(state, action, step)


def make(
    num_envs: int, rows: int, n_step: int, alpha: float | None = 1.0, finals: int | None = None
) -> tuple[Watched, ListReplay]:
    ring = Watched(ReplayRequest(RULES, states([0] * num_envs), rows * num_envs, n_step, GAMMA, alpha), finals)
    kept = max(1, rows // 16) if finals is None else finals
    return ring, ListReplay(num_envs, rows, n_step, GAMMA, kept)


def tree(ring: DeviceReplay) -> Priorities:
    assert ring.priorities is not None
    return ring.priorities


def drawable(ring: DeviceReplay) -> dict[tuple[int, int], int]:
    """Return the units of the transitions that can be drawn, by row and environment."""
    written, found = int(ring.written.item()), {}
    leaf = tree(ring).levels[0].tolist()
    assert not any(leaf[ring.rows * ring.num_envs :])
    for row in range(max(0, written - ring.rows), written):
        for env_index in range(ring.num_envs):
            if units := leaf[row % ring.rows * ring.num_envs + env_index]:
                found[row, env_index] = units
    assert len(found) == sum(units > 0 for units in leaf), "a place that was never written can be drawn"
    return found


def placed(found: Batch) -> Tensor:
    assert found.place is not None
    return found.place


def where(ring: DeviceReplay, place: Tensor | None) -> list[tuple[int, int]]:
    """Rows and environments of the places of a sample."""
    assert place is not None
    return [divmod(number, ring.num_envs) for number in place.tolist()]


def error_of(place: Tensor, salt: int) -> Tensor:
    """Errors whose powers are exact for alpha 0, 1/2 and 1: signed squares of 1/16, 2/16, … 97/16."""
    root = ((place * 37 + salt * 11) % 97 + 1).to(torch.float32) / 16
    return torch.where(place % 2 == 0, root**2, -(root**2))


def units_of(place: int, salt: int, alpha: float) -> int:
    """Return the units of `error_of`, computed in plain Python."""
    root = ((place * 37 + salt * 11) % 97 + 1) / 16
    return int(root ** (2 * alpha) * UNIT)


class RankedList:
    """The reference: a row gets the highest priority when it can first be drawn, later that of its TD error."""

    def __init__(self, naive: ListReplay, alpha: float) -> None:
        self.naive, self.alpha, self.highest = naive, alpha, UNIT
        self.units: dict[tuple[int, int], int] = {}

    def catch_up(self) -> None:
        """Follow a row that was written."""
        now = self.naive.places()
        self.units = {place: self.units.get(place, self.highest) for place in now}

    def update_priorities(self, places: list[tuple[int, int]], salt: int) -> None:
        num_envs = len(self.naive.played)
        for row, env_index in places:
            if (row, env_index) in self.units:
                self.units[row, env_index] = units_of(row * num_envs + env_index, salt, self.alpha)
                self.highest = max(self.highest, self.units[row, env_index])


class History(NamedTuple):
    num_envs: int
    rows: int
    n_step: int
    finals: int | None
    alpha: float
    endings: list[list[int]]  # of each row, by environment
    delays: list[int | None]  # before each row: learn from a sample, so many rows late


@st.composite
def histories(draw: st.DrawFn) -> History:
    num_envs, n_step = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    rows = draw(st.integers(n_step + 2, n_step + 8))
    ending = st.sampled_from([0] * 4 + [1, 2, 2])
    length = draw(st.integers(1, 3 * rows))
    endings = draw(st.lists(st.lists(ending, min_size=num_envs, max_size=num_envs), min_size=length, max_size=length))
    late = st.sampled_from([None, 0, 0, 1, 2, n_step, rows - n_step, rows, rows + 1])
    delays = draw(st.lists(late, min_size=length, max_size=length))
    finals = draw(st.sampled_from([None, 1, 3]))
    return History(num_envs, rows, n_step, finals, draw(st.sampled_from([0.0, 0.5, 1.0])), endings, delays)


@pytest.mark.fault("F7")
@settings(max_examples=60)
@given(histories())
def test_priorities_are_those_of_a_list(history: History) -> None:
    """Update priorities at once or rows later, and compare every leaf before each row."""
    ring, naive = make(history.num_envs, history.rows, history.n_step, history.alpha, history.finals)
    model, row = RankedList(naive, history.alpha), 0
    waiting: list[tuple[int, int, Tensor]] = []  # until which row, from which, what

    def check() -> None:
        model.catch_up()
        assert drawable(ring) == model.units
        assert list(drawable(ring)) == naive.places()
        assert tree(ring).total.item() == sum(model.units.values())
        assert tree(ring).highest.item() == model.highest

    def before() -> None:
        nonlocal row
        check()
        delay = history.delays[row]
        if delay is not None and model.units:
            waiting.append((row + delay, row, placed(ring.sample(random.seed_key(row), 6))))
        for entry in [entry for entry in waiting if entry[0] == row]:
            _, salt, place = entry
            ring.update_priorities(place, error_of(place, salt))
            model.update_priorities(where(ring, place), salt)
            check()
        row += 1

    ring.at_write = before
    play(ring, naive, history.endings)
    check()


@pytest.mark.fault("F8")
@settings(max_examples=60)
@given(histories())
def test_every_sample_is_a_window_that_can_be_drawn(history: History) -> None:
    """With unequal priorities. With beta 0 the weights are those of uniform replay."""
    ring, naive = make(history.num_envs, history.rows, history.n_step, history.alpha, history.finals)
    endings = history.endings + [[0] * history.num_envs] * (history.n_step + 1)
    play(ring, naive, endings)
    every = torch.tensor([row * ring.num_envs + env_index for row, env_index in naive.places()])
    ring.update_priorities(every, error_of(every, 1))
    ranked = drawable(ring)
    row, env_index, units = ring.ring.draw_by_priority(random.seed_key(2), 40)
    places = list(zip(row.tolist(), env_index.tolist(), strict=True))
    assert set(places) <= set(naive.places())
    assert units.tolist() == [ranked[place] for place in places]
    found = ring.sample(random.seed_key(2), 40, beta=0.0)
    assert where(ring, found.place) == places
    assert_same(found, places, naive)


def test_every_kind_of_window_is_sampled() -> None:
    """Sample every place of a long fixed history once: equal priorities, as many draws as places."""
    ring, naive = make(num_envs=2, rows=20, n_step=3, finals=1)
    play(ring, naive, [[(0, 0, 0, 1, 0, 2)[row % 6], (0, 2, 0, 0, 0, 0, 0)[row % 7]] for row in range(55)])
    places = naive.places()
    found = ring.sample(random.seed_key(0), len(places), beta=0.0)
    assert sorted(where(ring, found.place)) == places
    kinds = assert_same(found, where(ring, found.place), naive)
    assert min(kinds.values()) >= 2, kinds


def test_samples_come_in_proportion_to_what_was_learned() -> None:
    """Errors of 1 and 3 in turn, alpha 1: three quarters of the draws are of the second kind; with alpha 0 a half."""
    for alpha, expected in ((1.0, 0.75), (0.0, 0.5)):
        ring, naive = make(num_envs=4, rows=20, n_step=2, alpha=alpha)
        play(ring, naive, [[0] * 4] * 50)
        every = torch.tensor([row * 4 + env_index for row, env_index in naive.places()])
        ring.update_priorities(every, torch.where(every % 2 == 1, 3.0, -1.0))
        place = torch.cat([placed(ring.sample(random.seed_key(seed), 500)) for seed in range(4)])
        assert (place % 2 == 1).double().mean().item() == pytest.approx(expected, abs=0.01)


def test_a_ring_without_priorities_has_no_places() -> None:
    ring, naive = make(num_envs=2, rows=8, n_step=1, alpha=None)
    play(ring, naive, [[0, 0]] * 8)
    assert ring.priorities is None
    assert ring.sample(random.seed_key(0), 16).place is None
    assert not any("priorities" in name for name in ring.tensors())


# ---- New rows


def test_new_rows_get_the_highest_there_was_when_they_could_first_be_drawn() -> None:
    ring, naive = make(num_envs=2, rows=10, n_step=2)
    row = 0

    def before() -> None:
        nonlocal row
        if row == 5:  # rows 0, 1 and 2 can be drawn
            ring.update_priorities(torch.tensor([2 * 1 + 0, 2 * 2 + 1]), torch.tensor([4.0, -0.5]))
        if row == 7:  # an error beyond all bounds is the most for its own place, and nothing for others
            ring.update_priorities(torch.tensor([2 * 3 + 1]), torch.tensor([float("inf")]))
        row += 1

    ring.at_write = before
    play(ring, naive, [[0, 0]] * 9)
    found = drawable(ring)
    assert {place: units for place, units in found.items() if place[0] < 3} == {
        (0, 0): UNIT,
        (0, 1): UNIT,
        (1, 0): 4 * UNIT,
        (1, 1): UNIT,
        (2, 0): UNIT,
        (2, 1): UNIT // 2,
    }
    assert found[3, 0] == 4 * UNIT, "it could be drawn after the error was seen"
    assert found[3, 1] == NOTED
    assert [found[row, env_index] for row in (4, 5, 6) for env_index in (0, 1)] == [4 * UNIT] * 6
    assert max(found) == (6, 1)


# ---- Weights


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_weights_by_hand(beta: float, as_tensor: bool) -> None:
    ring, naive = make(num_envs=3, rows=12, n_step=2)
    play(ring, naive, [[0, 0, 0]] * 30)
    every = torch.tensor([row * 3 + env_index for row, env_index in naive.places()])
    ring.update_priorities(every, error_of(every, 5))
    units = drawable(ring)
    found = ring.sample(random.seed_key(7), 16, torch.tensor(beta) if as_tensor else beta)
    drawn = [units[place] for place in where(ring, found.place)]
    assert len(set(drawn)) > 5
    assert found.weight.tolist() == pytest.approx([(min(drawn) / own) ** beta for own in drawn], rel=1e-6)
    assert found.weight.max().item() == 1.0


def with_losses() -> tuple[Watched, ListReplay]:
    """Room for one final State and many truncations: most final States are lost."""
    ring, naive = make(num_envs=2, rows=16, n_step=1, finals=1)
    play(ring, naive, [[2 * (row % 2), 0] for row in range(40)])
    return ring, naive


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_lost_samples_weigh_nothing_and_do_not_set_the_scale(beta: float) -> None:
    """The lost samples have the lowest priorities; the largest weight among the others is still 1."""
    ring, naive = with_losses()
    places = naive.places()
    lost = [naive.window(*place)["weight"] == 0.0 for place in places]
    assert 4 <= sum(lost) <= 8
    errors = [0.01 if gone else 1.0 + row % 3 for gone, (row, _) in zip(lost, places, strict=True)]
    ring.update_priorities(torch.tensor([row * 2 + env_index for row, env_index in places]), torch.tensor(errors))
    # Draws enough that even the rare are drawn.
    found = ring.sample(random.seed_key(3), 20_000, beta)
    gone = dict(zip(places, lost, strict=True))
    units = drawable(ring)
    drawn = where(ring, found.place)
    assert sum(gone[place] for place in drawn) > 5
    rarest = min(units[place] for place in drawn if not gone[place])
    assert rarest == UNIT
    for place, weight in set(zip(drawn, found.weight.tolist(), strict=True)):
        expected = 0.0 if gone[place] else (rarest / units[place]) ** beta
        assert weight == pytest.approx(expected, rel=1e-6), place
    assert found.weight.max().item() == 1.0


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_a_sample_of_lost_ones_only_weighs_nothing(beta: float) -> None:
    ring, naive = with_losses()
    lost = {place for place in naive.places() if naive.window(*place)["weight"] == 0.0}
    tree(ring).set_span(torch.tensor(0), 32, torch.tensor(0, dtype=torch.int32))
    slots = torch.tensor([row % 16 * 2 + env_index for row, env_index in lost])
    tree(ring).set(slots, torch.full((len(lost),), 1, dtype=torch.int32))
    found = ring.sample(random.seed_key(3), len(lost), beta)
    assert set(where(ring, found.place)) == lost
    assert found.weight.tolist() == [0.0] * len(lost)


def test_weights_undo_the_priorities_in_the_mean() -> None:
    """With beta 1 the weighted mean over many draws is the plain mean over all places."""
    ring, naive = make(num_envs=2, rows=20, n_step=1)
    play(ring, naive, [[0, 0]] * 45)
    places = naive.places()
    every = torch.tensor([row * 2 + env_index for row, env_index in places])
    ring.update_priorities(every, torch.where(every % 5 == 0, 8.0, 1.0))
    rewards = torch.tensor([naive.window(*place)["reward"] for place in places])
    rewards = torch.where(every % 5 == 0, 1000.0, rewards)
    value = dict(zip(places, rewards.tolist(), strict=True))
    found = ring.sample(random.seed_key(1), 50_000, beta=1.0)
    drawn = torch.tensor([value[place] for place in where(ring, found.place)])
    assert drawn.mean() > 1.5 * rewards.mean()
    weighted = (drawn * found.weight).sum() / found.weight.sum()
    assert weighted.item() == pytest.approx(rewards.mean().item(), rel=0.01)


# ---- Updated priorities


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.7, 1.0])
def test_learning_changes_the_sampled_places_only(alpha: float) -> None:
    ring, naive = make(num_envs=3, rows=9, n_step=1, alpha=alpha)
    play(ring, naive, [[0, 0, 0]] * 25)
    before = drawable(ring)
    place = ring.sample(random.seed_key(1), 8).place
    assert place is not None
    errors = error_of(place, 3)
    ring.update_priorities(place, errors)
    expected = before | {
        at: abs(error) ** alpha * UNIT for at, error in zip(where(ring, place), errors.tolist(), strict=True)
    }
    found = drawable(ring)
    assert found.keys() == before.keys()
    assert 1 <= len(set(where(ring, place))) < len(found)
    for at, units in found.items():
        assert units == pytest.approx(expected[at], rel=1e-5, abs=1.0), at
        if at not in set(where(ring, place)):
            assert units == before[at]


@pytest.mark.fault("F7")
@pytest.mark.parametrize(
    ("error", "units"),
    [(0.0, 1), (1e-12, 1), (float("nan"), 1), (float("inf"), NOTED), (-1e30, NOTED), (-0.5, UNIT / 2)],
)
def test_any_error_leaves_its_place_drawable(error: float, units: int) -> None:
    ring, naive = make(num_envs=1, rows=6, n_step=1)
    play(ring, naive, [[0]] * 10)
    ring.update_priorities(torch.tensor([6]), torch.tensor([error]))
    assert drawable(ring) == {(4, 0): UNIT, (5, 0): UNIT, (6, 0): units, (7, 0): UNIT, (8, 0): UNIT}


@pytest.mark.fault("F7")
@pytest.mark.parametrize("more", range(1, 25))
def test_what_was_overwritten_since_is_not_ranked(more: int) -> None:
    """Sample all places, then write rows: places still stored get their new priority, overwritten ones do not."""
    ring, naive = make(num_envs=2, rows=10, n_step=2)
    row, place = 0, torch.zeros(0, dtype=torch.int64)

    def before() -> None:
        nonlocal row, place
        if row == 23:
            place = torch.tensor([r * 2 + env_index for r, env_index in naive.places()])
            assert sorted(where(ring, ring.sample(random.seed_key(0), 16).place)) == naive.places()
        row += 1

    ring.at_write = before
    play(ring, naive, [[0, 0]] * (23 + more))
    old = set(where(ring, place))
    assert len(old) == 16
    ring.update_priorities(place, torch.full((16,), 5.0))
    still = old & set(naive.places())
    assert drawable(ring) == {at: 5 * UNIT if at in still else UNIT for at in naive.places()}
    assert tree(ring).highest.item() == (5 * UNIT if still else UNIT), "an error of what is gone counted"
    assert len(still) == max(0, 8 - more) * 2


def test_a_leaf_of_nothing_is_never_revived() -> None:
    """Rows that are overwritten next, whose window is incomplete, or that were never written keep priority 0."""
    ring, naive = make(num_envs=1, rows=10, n_step=3)
    play(ring, naive, [[0]] * 6)
    ring.update_priorities(torch.arange(10), torch.full((10,), 2.0))
    assert drawable(ring) == {(row, 0): 2 * UNIT for row in range(3)}
    assert tree(ring).highest.item() == 2 * UNIT
    empty, _ = make(num_envs=1, rows=10, n_step=3)
    empty.update_priorities(torch.arange(10), torch.full((10,), 2.0))
    assert drawable(empty) == {}
    assert tree(empty).total.item() == 0
    assert tree(empty).highest.item() == UNIT


def test_a_place_drawn_twice_is_ranked_once() -> None:
    ring, naive = make(num_envs=2, rows=6, n_step=1)
    play(ring, naive, [[0, 0]] * 9)
    place = torch.tensor([11, 8, 11, 11, 8])
    ring.update_priorities(place, error_of(place, 0))
    expected = dict.fromkeys(naive.places(), UNIT)
    expected |= {(4, 0): units_of(8, 0, 1.0), (5, 1): units_of(11, 0, 1.0)}
    assert drawable(ring) == expected
    assert tree(ring).total.item() == sum(expected.values())


# ---- Empty, cleared, saved


@pytest.mark.fault("F6")
@pytest.mark.parametrize("rows", [6, 12, 40, 300])
@pytest.mark.parametrize("written", [0, 1, 3])
def test_a_sample_of_nothing_is_harmless(rows: int, written: int) -> None:
    """Too few rows for a 3-step window: all weights are 0, and updating priorities changes nothing."""
    ring, naive = make(num_envs=2, rows=rows, n_step=3)
    play(ring, naive, [[0, 0]] * written)
    found = ring.sample(random.seed_key(0), 32)
    assert found.weight.tolist() == [0.0] * 32
    assert all(torch.isfinite(x.to(torch.float32)).all() for x in leaves(found).values())
    assert found.place is not None
    ring.update_priorities(found.place, torch.full((32,), 9.0))
    assert drawable(ring) == {}
    assert tree(ring).highest.item() == UNIT


def test_a_sample_of_nothing_weighs_nothing_whatever_beta() -> None:
    ring, _ = make(num_envs=2, rows=6, n_step=3)
    assert ring.sample(random.seed_key(0), 8, beta=0.0).weight.tolist() == [0.0] * 8


@settings(max_examples=40)
@given(histories())
def test_a_cleared_ring_is_as_good_as_new(history: History) -> None:
    ring, naive = make(history.num_envs, history.rows, history.n_step, history.alpha, history.finals)
    play(ring, naive, history.endings)
    ring.clear()
    assert drawable(ring) == {}
    assert tree(ring).total.item() == 0
    naive = ListReplay(history.num_envs, history.rows, history.n_step, GAMMA, naive.finals)
    play(ring, naive, history.endings[::-1])
    assert list(drawable(ring)) == naive.places()
    if naive.places():
        found = ring.sample(random.seed_key(0), 24, beta=0.0)
        assert_same(found, where(ring, found.place), naive)


def test_no_tensor_is_left_out_of_a_checkpoint() -> None:
    ring, _ = make(num_envs=2, rows=20, n_step=1)
    named = {id(x) for x in ring.tensors().values()}
    parts = (ring, ring.ring, ring.finals, tree(ring))
    held = [*(value for part in parts for value in vars(part).values()), *tree(ring).levels]
    assert all(id(x) in named for x in held if isinstance(x, Tensor))
    assert sum(isinstance(x, Tensor) for x in held) >= 5
