"""Frame stacks built when they are sampled, against lists that walk back through each environment's episodes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from list_replay import ListReplay, assert_same, batch_of, play, states
from torch import Tensor

from redline.core import random
from redline.core.errors import UserError
from redline.core.records import Spec, Step
from redline.envs.batch import Rules
from redline.replay.contract import ReplayRequest
from redline.replay.device import DeviceReplay

RUNNING, TERMINATED, TRUNCATED = 0, 1, 2
GAMMA = 0.5


class Film(NamedTuple):
    """A frame of which observations show the last few, a number they show once, and one they never read."""

    frame: Tensor  # (N, 2) int32: the stamp and its negative; stacked (N, frames, 2)
    stamp: Tensor  # (N,) int32
    secret: Tensor  # (N,) int64


def film(stamp: Tensor) -> Film:
    return Film(torch.stack([stamp, -stamp], 1), stamp, torch.full_like(stamp, 77, dtype=torch.int64))


def rules_of(frames: int, masked: bool = False) -> Rules:
    """A game whose observation is its frames, oldest first, then stamp and secret."""
    spec = Spec((2 * frames + 2,), torch.int64, (1.0,), 1 << 14, 5, "points", masked=masked, frames=frames)

    def observe(config: Any, state: Film) -> Tensor:
        del config
        assert state.frame.shape == (*state.stamp.shape, frames, 2)
        columns = (state.frame.flatten(1), state.stamp.unsqueeze(1), state.secret.unsqueeze(1))
        return torch.cat([x.to(torch.int64) for x in columns], 1)

    def legal(config: Any, state: Film) -> Tensor:
        """Bit b of the newest frame says whether action b is legal."""
        del config
        return (state.frame[:, -1, :1] >> torch.arange(5)) & 1 == 1

    game = SimpleNamespace(
        State=Film, HIDDEN=("secret",), STACKED=("frame",), observe=observe, spec=lambda _: spec, legal=legal
    )
    return Rules(game, None, 0)


class FilmRing(DeviceReplay):
    """Written with the States of `list_replay`, of which it stores films."""

    def write(self, state: Any, action: Tensor, step: Step) -> None:
        super().write(film(state.stamp), action, step._replace(final_state=film(step.final_state.stamp)))


class FilmReplay(ListReplay):
    """The reference, with stacks."""

    def __init__(self, num_envs: int, rows: int, n_step: int, finals: int, frames: int) -> None:
        super().__init__(num_envs, rows, n_step, GAMMA, finals)
        self.frames = frames

    def places(self) -> list[tuple[int, int]]:
        """Return the starts whose frames are all in memory; the oldest rows only serve as earlier frames."""
        first = max(0, len(self.played[0]) - self.rows + self.frames - 1)
        return [(row, env_index) for row, env_index in super().places() if row >= first]

    def stack(self, row: int, env_index: int) -> list[int]:
        """Return the stamps up to this row, oldest first; the episode's first frame is repeated before it."""
        history = self.played[env_index]
        found = [history[row].stamp]
        while len(found) < self.frames:
            if row > 0 and history[row - 1].ended == RUNNING:
                row -= 1
            found.insert(0, history[row].stamp)
        return found

    def window(self, row: int, env_index: int) -> dict[str, Any]:
        history, last = self.played[env_index], row
        while last < row + self.n_step - 1 and history[last].ended == RUNNING:
            last += 1
        after = [*self.stack(last, env_index), history[last].final][
            1:
        ]  # what the player saw after the window's last action
        expected = super().window(row, env_index)
        return expected | {"obs": shown(self.stack(row, env_index)), "next_obs": shown(after)}


def shown(stamps: list[int]) -> list[int]:
    """Return the observation of a stack; hidden fields read as 0."""
    return [number for stamp in stamps for number in (stamp, -stamp)] + [stamps[-1], 0]


def make(
    num_envs: int, rows: int, n_step: int, frames: int, finals: int = 3, alpha: float | None = None
) -> tuple[FilmRing, FilmReplay]:
    example = film(states([0] * num_envs).stamp)
    ring = FilmRing(ReplayRequest(rules_of(frames), example, rows * num_envs, n_step, GAMMA, alpha), finals)
    return ring, FilmReplay(num_envs, rows, n_step, finals, frames)


class History(NamedTuple):
    num_envs: int
    rows: int
    n_step: int
    frames: int
    finals: int
    endings: list[list[int]]  # of each row, by environment


@st.composite
def histories(draw: st.DrawFn) -> History:
    """Episodes from one step to several stacks long; fewer rows than fit, or several times as many."""
    num_envs, n_step, frames = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(2, 4))
    rows = draw(st.integers(n_step + frames + 1, n_step + frames + 8))
    ending = st.sampled_from([RUNNING] * draw(st.integers(1, 8)) + [TERMINATED, TRUNCATED, TRUNCATED])
    length = draw(st.integers(n_step + 1, 3 * rows))
    endings = draw(st.lists(st.lists(ending, min_size=num_envs, max_size=num_envs), min_size=length, max_size=length))
    return History(num_envs, rows, n_step, frames, draw(st.integers(1, 4)), endings)


@pytest.mark.fault("F8")
@settings(max_examples=80)
@given(histories())
def test_every_stack_equals_a_list_replay(history: History) -> None:
    ring, naive = make(history.num_envs, history.rows, history.n_step, history.frames, history.finals)
    play(ring, naive, history.endings)
    places = naive.places()
    assert_same(batch_of(ring, places), places, naive)


@pytest.mark.fault("F8")
@settings(max_examples=80)
@given(histories(), st.integers(0, 10**6))
def test_samples_are_windows_that_can_be_drawn(history: History, seed: int) -> None:
    ring, naive = make(history.num_envs, history.rows, history.n_step, history.frames, history.finals)
    play(ring, naive, history.endings)
    row, env_index, _ = ring.ring.draw(random.seed_key(seed), 64)
    places = list(zip(row.tolist(), env_index.tolist(), strict=True))
    assert set(places) <= set(naive.places())
    assert_same(ring.sample(random.seed_key(seed), 64), places, naive)


@settings(max_examples=80)
@given(histories())
def test_by_priority_the_same_can_be_drawn(history: History) -> None:
    """The leaves above 0 are the places of the list; with equal priorities and as many draws, each is drawn once."""
    ring, naive = make(history.num_envs, history.rows, history.n_step, history.frames, history.finals, alpha=0.5)
    play(ring, naive, history.endings)
    assert ring.priorities is not None
    slots = [row % ring.rows * ring.num_envs + env_index for row, env_index in naive.places()]
    assert ring.priorities.levels[0].nonzero().flatten().tolist() == sorted(slots)
    found = ring.sample(random.seed_key(1), len(slots), beta=0.0)
    assert found.place is not None
    places = [divmod(place, ring.num_envs) for place in found.place.tolist()]
    assert sorted(places) == naive.places()
    assert_same(found, places, naive)


@pytest.mark.parametrize("frames", [2, 3, 4])
@pytest.mark.parametrize("n_step", [1, 2, 3])
def test_every_kind_of_stack_was_met(n_step: int, frames: int) -> None:
    """Compare a long fixed history in which both complete stacks and stacks at the start of an episode occur."""
    ring, naive = make(num_envs=2, rows=25, n_step=n_step, frames=frames, finals=6)
    # The first environment is truncated, terminates two steps later, and continues; the second is truncated repeatedly.
    play(ring, naive, [[2 * (row % 9 == 5) + (row % 9 == 7), 2 * (row % 11 in (0, 2, 5, 10))] for row in range(70)])
    places = naive.places()
    assert min(row for row, _ in places) == 70 - 25 + frames - 1
    kinds = assert_same(batch_of(ring, places), places, naive)
    assert min(kinds.values()) >= 2, kinds
    windows = [naive.window(*place) for place in places]
    counted = [w for w in windows if w["discount"] and w["weight"]]
    for name, some in (("obs", windows), ("next_obs", counted)):
        lengths = {len(set(w[name][: 2 * frames : 2])) for w in some}
        assert lengths >= set(range(2 if name == "next_obs" else 1, frames + 1)), name


def test_stacks_worked_out_by_hand() -> None:
    """One environment, three frames, one step: episodes truncated, of one step, terminated and unfinished."""
    ring, naive = make(num_envs=1, rows=20, n_step=1, frames=3)
    play(ring, naive, [[ended] for ended in (0, 2, 2, 0, 1, 0, 0, 0)])
    stamps, finals = ([getattr(t, name) for t in naive.played[0]] for name in ("stamp", "final"))
    assert stamps == [1, 3, 6, 9, 11, 14, 16, 18]  # a reward takes a number too, and so does a reset
    assert finals == [3, 5, 8, 11, 13, 16, 18, 20]
    found = batch_of(ring, [(row, 0) for row in range(7)])
    assert found.obs[:, 0:6:2].tolist() == [
        [1, 1, 1],
        [1, 1, 3],
        [6, 6, 6],
        [9, 9, 9],
        [9, 9, 11],
        [14, 14, 14],
        [14, 14, 16],
    ]
    rows = [0, 1, 2, 3, 5, 6]  # row 4 terminated
    assert found.next_obs[rows, 0:6:2].tolist() == [
        [1, 1, 3],
        [1, 3, 5],  # truncated: the last frame is in no row, the ones before are
        [6, 6, 8],
        [9, 9, 11],
        [14, 14, 16],
        [14, 16, 18],
    ]
    assert torch.equal(found.obs[:, 1:6:2], -found.obs[:, 0:6:2]), "the frame's other number is of another frame"
    assert found.obs[:, 6].tolist() == [1, 3, 6, 9, 11, 14, 16], "what is not stacked is the newest"
    assert found.next_obs[rows, 6].tolist() == [3, 5, 8, 11, 16, 18]
    assert found.discount.tolist() == [0.5, 0.5, 0.5, 0.5, 0.0, 0.5, 0.5]


def test_a_truncated_window_has_the_frames_before_the_truncation() -> None:
    """3-step windows of four frames, truncated in their second step: frames of the next episode are not shown."""
    ring, naive = make(num_envs=1, rows=20, n_step=3, frames=4)
    play(ring, naive, [[2 * (row == 5)] for row in range(9)])
    stamps = [t.stamp for t in naive.played[0]]
    found = batch_of(ring, [(3, 0), (4, 0), (5, 0)])
    final = naive.played[0][5].final
    assert found.next_obs[:, 0:8:2].tolist() == [[stamps[3], stamps[4], stamps[5], final]] * 3
    assert found.discount.tolist() == [0.125, 0.25, 0.5]


@pytest.mark.parametrize("alpha", [None, 1.0])
@pytest.mark.parametrize("frames", [1, 2, 3, 4])
@pytest.mark.parametrize("n_step", [1, 3])
def test_what_can_be_drawn_as_the_ring_fills_and_comes_round(n_step: int, frames: int, alpha: float | None) -> None:
    """After every row: exactly the rows whose frames and window are all stored can be drawn."""
    rows = n_step + frames + 2
    ring, _ = make(2, rows, n_step, frames, alpha=alpha)
    for written in range(n_step + 1, 2 * rows + 3):
        ring.clear()
        play(ring, FilmReplay(2, rows, n_step, 3, frames), [[0, 0]] * written)
        row = ring.ring.draw(random.seed_key(written), 200).row
        assert set(row.tolist()) == set(range(max(0, written - rows + frames - 1), written - n_step)), written


@pytest.mark.parametrize("n_step", [1, 2, 3])
@pytest.mark.parametrize("frames", [2, 3, 4])
@pytest.mark.parametrize("alpha", [None, 1.0])
def test_the_smallest_ring_works_and_a_smaller_one_is_an_error(n_step: int, frames: int, alpha: float | None) -> None:
    least = n_step + frames + 1
    with pytest.raises(UserError, match=rf"replay_capacity is {2 * least - 1}; .* need at least {2 * least} "):
        DeviceReplay(ReplayRequest(rules_of(frames), film(states([0, 0]).stamp), 2 * least - 1, n_step, GAMMA))
    ring, naive = make(2, least, n_step, frames, alpha=alpha)
    play(ring, naive, [[2 * (row % 5 == 3), row % 4 == 1] for row in range(29)])
    places = naive.places()
    assert len(places) == 2 * 2
    assert_same(batch_of(ring, places), places, naive)
    found = ring.sample(random.seed_key(0), 64, 0.0)
    assert len({tuple(obs) for obs in found.obs.tolist()}) == 4


def test_one_frame_is_a_stack_of_one() -> None:
    ring, naive = make(num_envs=2, rows=9, n_step=2, frames=1)
    play(ring, naive, [[(0, 0, 2)[row % 3], (0, 1, 0, 0)[row % 4]] for row in range(31)])
    places = naive.places()
    assert len(places) == 2 * 7
    assert_same(batch_of(ring, places), places, naive)


def test_an_episode_that_ends_changes_no_other_environment() -> None:
    """Compare an environment beside one whose episode never ends and beside one that ends at every step."""
    found = []
    for other in (RUNNING, TERMINATED, TRUNCATED):
        ring, _ = make(num_envs=2, rows=12, n_step=2, frames=4)
        for row in range(30):
            ended = [2 * (row % 7 == 4), other]
            stamp = torch.tensor([1 + row, 1000 + row], dtype=torch.int32)
            step = Step(
                reward=torch.zeros(2),
                terminated=torch.tensor([e == TERMINATED for e in ended]),
                truncated=torch.tensor([e == TRUNCATED for e in ended]),
                won=torch.zeros(2, dtype=torch.bool),
                final_state=states([500 + row, 2000 + row]),
                episode=None,  # type: ignore[arg-type]
            )
            ring.write(states(stamp.tolist()), torch.zeros(2, dtype=torch.int64), step)
        found.append(batch_of(ring, [(row, 0) for row in range(21, 28)]))
    for one in found[1:]:
        assert torch.equal(one.obs, found[0].obs)
        assert torch.equal(one.next_obs, found[0].next_obs)


def test_masks_are_made_from_the_stack_to_bootstrap_from() -> None:
    ring, naive = make(num_envs=2, rows=14, n_step=2, frames=3, finals=14)
    masked = FilmRing(ReplayRequest(rules_of(3, masked=True), film(states([0, 0]).stamp), 28, 2, GAMMA), 14)
    endings = [[(0, 0, 0, 2)[row % 4], (0, 0, 1)[row % 3]] for row in range(33)]
    play(ring, naive, endings)
    play(masked, FilmReplay(2, 14, 2, 14, 3), endings)
    places = naive.places()
    found = batch_of(masked, places)
    assert found.next_legal is not None
    going_on = found.discount > 0
    newest = found.next_obs[:, 4]
    expected = (newest.unsqueeze(1) >> torch.arange(5)) & 1 == 1
    assert torch.equal(found.next_legal[going_on], expected[going_on])
    assert torch.equal(found.next_obs, batch_of(ring, places).next_obs)
    assert going_on.sum() >= 8


def test_frames_are_stored_once() -> None:
    """A stack costs no memory: the tables of one frame and of four are the same."""
    one, four = (make(num_envs=2, rows=20, n_step=1, frames=frames)[0] for frames in (1, 4))
    assert four.states["frame"].shape == (40, 2)
    assert four.bytes_per_transition == one.bytes_per_transition


@pytest.mark.parametrize("alpha", [None, 0.5])
def test_tensors_carry_the_frames(alpha: float | None) -> None:
    """Load a checkpoint into a memory with other contents: the samples are those of the first."""
    endings = [[(0, 0, 0, 2)[row % 4], (0, 0, 0, 0, 1)[row % 5]] for row in range(40)]
    ring, naive = make(2, 13, 2, 3, alpha=alpha)
    play(ring, naive, endings[:31])
    copy, _ = make(2, 13, 2, 3, alpha=alpha)
    play(copy, FilmReplay(2, 13, 2, 3, 3), endings[5:15])
    for name, tensor in copy.tensors().items():
        tensor.copy_(ring.tensors()[name])
    places = naive.places()
    assert_same(batch_of(copy, places), places, naive)
    ours, theirs = (one.sample(random.seed_key(3), 50) for one in (ring, copy))
    assert torch.equal(ours.obs, theirs.obs)
    assert torch.equal(ours.next_obs, theirs.next_obs)
