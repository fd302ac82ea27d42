"""The ring with identifiable numbers: every number in a sample says which environment, step and field it came from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from redline.core import random
from redline.core.errors import UserError
from redline.core.records import Batch, Episode, Spec, Step, leaves
from redline.envs import batch, make_rules
from redline.envs.batch import Rules, env_keys
from redline.replay.ring import ReplayRing

RUNNING, TERMINATED, TRUNCATED = 0, 1, 2


class State(NamedTuple):
    """A number that no other State has, in two shapes, and a field observations never read."""

    stamp: Tensor  # (N,) int32
    board: Tensor  # (N, 2, 3) int16: the stamp in every cell
    secret: Tensor  # (N,) int64


def observe(config: Any, state: State) -> Tensor:
    """(N, 8): stamp, six cells, secret."""
    del config
    columns = (state.stamp.unsqueeze(1), state.board.flatten(1), state.secret.unsqueeze(1))
    return torch.cat([x.to(torch.int64) for x in columns], 1)


def rules_of(masked: bool) -> Rules:
    """With masks, bit b of a State's stamp says whether action b is legal in it."""
    spec = Spec((8,), torch.int64, (1.0,) * 8, 1 << 14, 5, "points", masked=masked)

    def legal(config: Any, state: State) -> Tensor:
        del config
        assert masked, "nobody asked for masks"
        return (state.stamp.unsqueeze(1) >> torch.arange(5)) & 1 == 1

    game = SimpleNamespace(State=State, HIDDEN=("secret",), observe=observe, spec=lambda _: spec, legal=legal)
    return Rules(game, None, 0)  # type: ignore[arg-type]


RULES = rules_of(masked=False)


def states(stamps: list[int]) -> State:
    stamp = torch.tensor(stamps, dtype=torch.int32)
    board = stamp.to(torch.int16).view(-1, 1, 1).expand(-1, 2, 3).clone()
    return State(stamp, board, torch.full((len(stamps),), 77))


def seen(stamp: int) -> list[int]:
    """The observation of a State that was stored: what is hidden reads as 0."""
    return [stamp] * 7 + [0]


class Transition(NamedTuple):
    stamp: int
    action: int
    reward: float
    ended: int
    final: int  # stamp of the State after the action, before any reset


class ListReplay:
    """What the ring should remember: all that ever happened in a list for each environment, looked at with plain loops."""

    def __init__(self, num_envs: int, rows: int, n_step: int, gamma: float, finals: int) -> None:
        self.rows, self.n_step, self.gamma, self.finals = rows, n_step, gamma, finals
        self.played: list[list[Transition]] = [[] for _ in range(num_envs)]

    def places(self) -> list[tuple[int, int]]:
        """(row, environment) of each start whose whole window, and the State after it, is in memory."""
        written = len(self.played[0])
        oldest = max(0, written - self.rows)
        return [
            (row, env_index) for row in range(oldest, written - self.n_step) for env_index in range(len(self.played))
        ]

    def window(self, row: int, env_index: int) -> dict[str, Any]:
        history = self.played[env_index]
        reward, discount, last = 0.0, 1.0, row
        for last in range(row, row + self.n_step):
            reward += discount * history[last].reward
            discount *= self.gamma
            if history[last].ended != RUNNING:
                break
        # A later cut takes a place in the side ring, and frees the oldest once the next step is written.
        later = sum(t.ended == TRUNCATED for t in history[last + 1 : -1])
        ended = history[last].ended
        return {
            "obs": seen(history[row].stamp),
            "action": history[row].action,
            "reward": reward,
            "discount": 0.0 if ended == TERMINATED else discount,
            "next_obs": seen(history[last].final),
            "weight": 0.0 if ended == TRUNCATED and later >= self.finals else 1.0,
        }


def play(ring: ReplayRing, naive: ListReplay, endings: list[list[int]]) -> None:
    """Write a row for each of `endings` (one ending a environment) into both."""
    num_envs = len(naive.played)
    fresh = iter(range(1, 1 << 14))
    now = [next(fresh) for _ in range(num_envs)]
    for row, ended in enumerate(endings):
        action = [(row * num_envs + env_index) % 251 for env_index in range(num_envs)]
        reward = [float(next(fresh)) for _ in range(num_envs)]
        final = [next(fresh) for _ in range(num_envs)]
        step = Step(
            reward=torch.tensor(reward),
            terminated=torch.tensor([e == TERMINATED for e in ended]),
            truncated=torch.tensor([e == TRUNCATED for e in ended]),
            won=torch.zeros(num_envs, dtype=torch.bool),
            final_state=states(final),
            episode=Episode(*(torch.zeros(num_envs) for _ in range(3))),
        )
        ring.write(states(now), torch.tensor(action), step)
        for env_index in range(num_envs):
            naive.played[env_index].append(
                Transition(now[env_index], action[env_index], reward[env_index], ended[env_index], final[env_index])
            )
        now = [final[env_index] if ended[env_index] == RUNNING else next(fresh) for env_index in range(num_envs)]


def make(
    num_envs: int, rows: int, n_step: int, gamma: float = 0.5, finals: int | None = None
) -> tuple[ReplayRing, ListReplay]:
    ring = ReplayRing(RULES, states([0] * num_envs), rows * num_envs, n_step, gamma, finals)
    kept = max(1, rows // 16) if finals is None else finals
    return ring, ListReplay(num_envs, rows, n_step, gamma, kept)


def batch_of(ring: ReplayRing, places: list[tuple[int, int]]) -> Batch:
    row, env_index = torch.tensor(places).unbind(1)
    return ring.batch(row, env_index)


def assert_same(found: Batch, places: list[tuple[int, int]], naive: ListReplay) -> dict[str, int]:
    """Sample by sample; returns how many samples there were of each kind, to know that something was tested."""
    kinds = {"terminated": 0, "lost": 0, "whole": 0}
    for number, (row, env_index) in enumerate(places):
        expected, where = naive.window(row, env_index), f"row {row}, environment {env_index}"
        assert found.obs[number].tolist() == expected["obs"], where
        assert found.action[number].item() == expected["action"], where
        assert found.reward[number].item() == expected["reward"], where
        assert found.discount[number].item() == expected["discount"], where
        assert found.weight[number].item() == expected["weight"], where
        kinds["terminated"] += expected["discount"] == 0.0
        kinds["lost"] += expected["weight"] == 0.0
        if expected["discount"] and expected["weight"]:  # else nobody looks there
            kinds["whole"] += 1
            assert found.next_obs[number].tolist() == expected["next_obs"], where
    return kinds


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, int, int, int | None, list[list[int]]]:
    """Lanes, rows, n, finals kept, and the endings of each row written: fewer rows than fit, or several times as many."""
    num_envs, n_step = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    rows = draw(st.integers(n_step + 2, n_step + 8))
    ending = st.sampled_from([RUNNING] * 4 + [TERMINATED, TRUNCATED, TRUNCATED])
    endings = draw(
        st.lists(st.lists(ending, min_size=num_envs, max_size=num_envs), min_size=n_step + 1, max_size=3 * rows)
    )
    return num_envs, rows, n_step, draw(st.sampled_from([None, 1, 2, 3])), endings


@settings(max_examples=150)
@given(histories())
def test_every_window_equals_a_list_replay(history: tuple[int, int, int, int | None, list[list[int]]]) -> None:
    num_envs, rows, n_step, finals, endings = history
    ring, naive = make(num_envs, rows, n_step, finals=finals)
    play(ring, naive, endings)
    places = naive.places()
    assert_same(batch_of(ring, places), places, naive)


@pytest.mark.parametrize("n_step", [1, 2, 3, 4])
def test_every_kind_of_window_was_met(n_step: int) -> None:
    """The same on a long fixed history, in which each kind of window is known to occur."""
    ring, naive = make(num_envs=2, rows=20, n_step=n_step, finals=1)
    endings = [[(0, 0, 0, 1, 0, 2)[row % 6], (0, 2, 0, 0, 0, 0, 0)[row % 7]] for row in range(55)]
    play(ring, naive, endings)
    places = naive.places()
    assert min(row for row, _ in places) == 55 - 20
    kinds = assert_same(batch_of(ring, places), places, naive)
    assert min(kinds.values()) >= 2, kinds


def test_hand_computed_windows() -> None:
    """One environment, three steps a window, gamma 1/2, rewards 2, 4, 6 …: each number worked out on paper."""
    ring, naive = make(num_envs=1, rows=10, n_step=3, finals=4)
    play(ring, naive, [[e] for e in (0, 0, 0, 1, 0, 2, 0, 0, 0)])
    rewards = [t[0].reward for t in zip(*naive.played, strict=True)]
    assert rewards == [2, 4, 6, 8, 11, 13, 16, 18, 20]  # a reset takes a stamp too
    found = batch_of(ring, [(row, 0) for row in range(6)])
    #                                2+4/2+6/4  4+6/2+8/4  6+8/2  8  11+13/2  13
    assert found.reward.tolist() == [5.5, 9.0, 10.0, 8.0, 17.5, 13.0]
    assert found.discount.tolist() == [0.125, 0.0, 0.0, 0.0, 0.25, 0.5]
    assert found.obs[:, 0].tolist() == [1, 3, 5, 7, 10, 12]
    # Row 0 bootstraps from the State of row 3; rows 4 and 5 from the one cut off (14), not from the new game (15).
    assert found.next_obs[[0, 4, 5], 0].tolist() == [7, 14, 14]
    assert found.weight.tolist() == [1.0] * 6


def test_gamma_is_applied_a_step_at_a_time() -> None:
    ring, naive = make(num_envs=1, rows=8, n_step=4, gamma=0.9)
    play(ring, naive, [[0]] * 6)
    found = batch_of(ring, [(1, 0)])
    assert found.reward.item() == pytest.approx(4 + 0.9 * 6 + 0.81 * 8 + 0.729 * 10, rel=1e-6)
    assert found.discount.item() == pytest.approx(0.6561, rel=1e-6)


def test_only_the_last_finals_are_kept() -> None:
    """Cuts in rows 1, 3, 5, 7: with room for two, those of rows 5 and 7 can still be learned from."""
    ring, naive = make(num_envs=1, rows=12, n_step=1, finals=2)
    play(ring, naive, [[TRUNCATED if row % 2 else RUNNING] for row in range(9)])
    found = batch_of(ring, [(row, 0) for row in (1, 3, 5, 7)])
    assert found.weight.tolist() == [0.0, 0.0, 1.0, 1.0]
    assert found.next_obs[2:, 0].tolist() == [naive.played[0][row].final for row in (5, 7)]


def test_a_lane_that_is_cut_often_costs_no_other_lane_its_finals() -> None:
    ring, naive = make(num_envs=2, rows=12, n_step=1, finals=1)
    play(ring, naive, [[TRUNCATED, TRUNCATED if row == 0 else RUNNING] for row in range(9)])
    assert batch_of(ring, [(0, 0), (0, 1)]).weight.tolist() == [0.0, 1.0]


@pytest.mark.parametrize(("written", "oldest"), [(7, 0), (10, 0), (11, 1), (37, 27)])
def test_draw_is_uniform_over_the_valid_places(looks_uniform: Any, written: int, oldest: int) -> None:
    """Ten rows, three environments, two steps a window; before the ring is full, just full, and after it has come round."""
    ring, naive = make(num_envs=3, rows=10, n_step=2)
    play(ring, naive, [[0, 0, 0]] * written)
    row, env_index = ring.draw(random.seed_key(5), 30_000)
    assert (row.min(), row.max()) == (oldest, written - 3)
    counts = torch.bincount((row - oldest) * 3 + env_index)
    assert counts.numel() == len(naive.places())
    assert looks_uniform(counts)


def test_draws_differ_by_key_and_repeat_by_key() -> None:
    ring, naive = make(num_envs=3, rows=10, n_step=1)
    play(ring, naive, [[0, 0, 0]] * 10)
    first, again, other = (torch.stack(ring.draw(random.seed_key(k), 256)) for k in (1, 1, 2))
    assert torch.equal(first, again)
    assert (first != other).any(0).float().mean() > 0.8  # 26 of 27 places differ


def test_sample_is_a_batch_of_drawn_places() -> None:
    ring, naive = make(num_envs=2, rows=9, n_step=3)
    play(ring, naive, [[(0, 1, 0, 2)[row % 4], 0] for row in range(21)])
    row, env_index = ring.draw(random.seed_key(3), 64)
    places = list(zip(row.tolist(), env_index.tolist(), strict=True))
    assert_same(ring.sample(random.seed_key(3), 64), places, naive)


def test_shapes_and_types_of_a_sample() -> None:
    ring, naive = make(num_envs=2, rows=6, n_step=1)
    play(ring, naive, [[0, 0]] * 6)
    found = ring.sample(random.seed_key(0), 5)
    assert found.obs.shape == found.next_obs.shape == (5, 8)
    assert all(x.shape == (5,) for x in (found.action, found.reward, found.discount, found.weight))
    assert found.action.dtype == torch.int64
    assert {found.reward.dtype, found.discount.dtype, found.weight.dtype} == {torch.float32}


def test_the_mask_is_that_of_the_state_to_bootstrap_from() -> None:
    """Of the next row, or of where the episode was cut; of a game that ended it does not matter."""
    plain, naive = make(num_envs=3, rows=12, n_step=2, finals=12)
    ring = ReplayRing(rules_of(masked=True), states([0] * 3), 36, 2, 0.5, 12)
    endings = [[(0, 2, 0, 1)[row % 4], 0, (0, 0, 2)[row % 3]] for row in range(19)]
    play(plain, naive, endings)
    play(ring, ListReplay(3, 12, 2, 0.5, 12), endings)
    places = naive.places()
    found = batch_of(ring, places)
    assert batch_of(plain, places).next_legal is None
    assert found.next_legal is not None
    assert (found.next_legal.shape, found.next_legal.dtype) == ((len(places), 5), torch.bool)
    going_on = found.discount > 0
    stamps = found.next_obs[:, 0]
    expected = torch.tensor([[stamp >> bit & 1 for bit in range(5)] for stamp in stamps.tolist()]).bool()
    assert torch.equal(found.next_legal[going_on], expected[going_on])
    assert going_on.sum() > 10
    assert len({tuple(row) for row in found.next_legal.tolist()}) > 8


def test_too_little_capacity_is_an_error() -> None:
    with pytest.raises(
        UserError, match=r"replay_capacity is 49.* 10 environments with 3-step returns .* 50 transitions"
    ):
        ReplayRing(RULES, states([0] * 10), 49, 3, 0.9)
    ring = ReplayRing(RULES, states([0] * 10), 50, 3, 0.9)
    assert ring.rows == 5


def test_the_smallest_ring_works() -> None:
    ring, naive = make(num_envs=1, rows=5, n_step=3)
    play(ring, naive, [[0]] * 23)
    places = naive.places()
    assert places == [(18, 0), (19, 0)]
    assert_same(batch_of(ring, places), places, naive)


def test_hidden_fields_are_not_stored() -> None:
    ring, naive = make(num_envs=1, rows=6, n_step=1)
    play(ring, naive, [[0]] * 6)
    assert set(ring.states) == set(ring.finals) == {"stamp", "board"}
    assert not any("secret" in name for name in ring.tensors())
    assert (ring.sample(random.seed_key(0), 8).obs[:, -1] == 0).all()


def test_a_transition_on_the_common_board_is_small() -> None:
    """With the memory's own sizes on a CPU: a million transitions of 1,024 games."""
    rules = make_rules("snake")
    num_envs = batch.reset(rules, env_keys(0, torch.arange(64)))
    ring = ReplayRing(rules, num_envs.game, 64 * 976, 3, 0.99)
    counted = sum(x.numel() * x.element_size() for x in ring.tensors().values()) / (64 * 976)
    assert ring.bytes_per_transition == pytest.approx(counted)
    assert 105 < ring.bytes_per_transition <= 125
    unnamed = {id(x) for x in vars(ring).values() if isinstance(x, Tensor)} - {id(x) for x in ring.tensors().values()}
    assert not unnamed, "a tensor of the ring that no checkpoint would hold"


def test_tensors_carry_the_whole_memory() -> None:
    """Saved, loaded into a fresh ring, and written on: the same samples as the ring that went straight through."""
    endings = [[(0, 0, 2)[row % 3], (0, 1, 0, 2)[row % 4]] for row in range(40)]
    ring, naive = make(num_envs=2, rows=11, n_step=2, finals=2)
    play(ring, naive, endings[:17])
    copy, _ = make(num_envs=2, rows=11, n_step=2, finals=2)
    for name, tensor in copy.tensors().items():
        tensor.copy_(ring.tensors()[name])
    for more in ([], endings[17:]):
        for one in (ring, copy):
            play(one, ListReplay(2, 11, 2, 0.5, 2), more)
        ours, theirs = (one.sample(random.seed_key(9), 64) for one in (ring, copy))
        assert all(torch.equal(a, b) for a, b in zip(leaves(ours).values(), leaves(theirs).values(), strict=True))
    assert copy.written == 40


def test_with_a_game_the_observations_are_those_that_were_played() -> None:
    """A real game beside its ring: what a sample shows is what the player saw, before and after; one-step windows."""
    rules = make_rules("snake", {"width": 5, "height": 4, "starvation": 4, "start": "random"}, time_limit=11)
    num_envs = batch.reset(rules, env_keys(1, torch.arange(6)))
    ring, choices = (
        ReplayRing(rules, num_envs.game, 6 * 64, 1, 0.9, finals=64),
        rules.game.spec(rules.config).num_actions,
    )
    shown, after, steps, actions = [], [], [], []
    for t in range(41):
        action = random.below(random.bits(random.seed_key(t), torch.arange(6)), choices)
        shown.append(rules.game.observe(rules.config, num_envs.game))
        following, step = batch.step(rules, num_envs, action)
        ring.write(num_envs.game, action, step)
        after.append(rules.game.observe(rules.config, step.final_state))
        steps.append(step)
        actions.append(action)
        num_envs = following
    places = [(row, env_index) for row in range(40) for env_index in range(6)]
    found = batch_of(ring, places)
    assert torch.equal(found.obs, torch.cat(shown[:40]))
    assert torch.equal(found.action, torch.cat(actions[:40]))
    assert torch.equal(found.reward, torch.cat([step.reward for step in steps[:40]]))
    terminated = torch.cat([step.terminated for step in steps[:40]])
    truncated = torch.cat([step.truncated for step in steps[:40]])
    assert terminated.sum() > 5
    assert truncated.sum() > 5
    assert torch.equal(found.discount == 0, terminated)
    assert torch.equal(found.next_obs[~terminated], torch.cat(after[:40])[~terminated])
    assert (found.weight == 1).all()
