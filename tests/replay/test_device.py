"""The replay memory on the device, sample by sample against lists of all transitions."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from list_replay import (
    RULES,
    RUNNING,
    TERMINATED,
    TRUNCATED,
    ListReplay,
    assert_same,
    batch_of,
    play,
    rules_of,
    states,
)

from redline.core import random, select
from redline.core.errors import UserError
from redline.envs import batch, make_rules
from redline.envs.batch import env_keys
from redline.replay.contract import ReplayRequest
from redline.replay.device import DeviceReplay, in_words, rows_at


def make(
    num_envs: int, rows: int, n_step: int, gamma: float = 0.5, finals: int | None = None
) -> tuple[DeviceReplay, ListReplay]:
    memory = DeviceReplay(ReplayRequest(RULES, states([0] * num_envs), rows * num_envs, n_step, gamma), finals)
    kept = max(1, rows // 16) if finals is None else finals
    return memory, ListReplay(num_envs, rows, n_step, gamma, kept)


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, int, int, int | None, list[list[int]]]:
    """Draw environments, rows, n, final States kept, and endings: of fewer rows than fit, or several times as many."""
    num_envs, n_step = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    rows = draw(st.integers(n_step + 2, n_step + 8))
    ending = st.sampled_from([RUNNING] * 4 + [TERMINATED, TRUNCATED, TRUNCATED])
    endings = draw(
        st.lists(st.lists(ending, min_size=num_envs, max_size=num_envs), min_size=n_step + 1, max_size=3 * rows)
    )
    return num_envs, rows, n_step, draw(st.sampled_from([None, 1, 2, 3])), endings


@pytest.mark.fault("F8")
@settings(max_examples=80)
@given(histories())
def test_every_window_equals_a_list_replay(history: tuple[int, int, int, int | None, list[list[int]]]) -> None:
    num_envs, rows, n_step, finals, endings = history
    memory, naive = make(num_envs, rows, n_step, finals=finals)
    play(memory, naive, endings)
    places = naive.places()
    assert_same(batch_of(memory, places), places, naive)


@pytest.mark.parametrize("n_step", [1, 2, 3, 4])
def test_every_kind_of_window_was_met(n_step: int) -> None:
    """Compare a long fixed history in which each kind of window is known to occur."""
    memory, naive = make(num_envs=2, rows=20, n_step=n_step, finals=1)
    endings = [[(0, 0, 0, 1, 0, 2)[row % 6], (0, 2, 0, 0, 0, 0, 0)[row % 7]] for row in range(55)]
    play(memory, naive, endings)
    places = naive.places()
    assert min(row for row, _ in places) == 55 - 20
    kinds = assert_same(batch_of(memory, places), places, naive)
    assert min(kinds.values()) >= 2, kinds


@pytest.mark.fault("F8")
def test_hand_computed_windows() -> None:
    """One environment, three steps a window, gamma 1/2, rewards 2, 4, 6 …: each number computed by hand."""
    memory, naive = make(num_envs=1, rows=10, n_step=3, finals=4)
    play(memory, naive, [[e] for e in (0, 0, 0, 1, 0, 2, 0, 0, 0)])
    rewards = [t[0].reward for t in zip(*naive.played, strict=True)]
    assert rewards == [2, 4, 6, 8, 11, 13, 16, 18, 20]  # a reset takes a stamp too
    found = batch_of(memory, [(row, 0) for row in range(6)])
    #                                2+4/2+6/4  4+6/2+8/4  6+8/2  8  11+13/2  13
    assert found.reward.tolist() == [5.5, 9.0, 10.0, 8.0, 17.5, 13.0]
    assert found.discount.tolist() == [0.125, 0.0, 0.0, 0.0, 0.25, 0.5]
    assert found.obs[:, 0].tolist() == [1, 3, 5, 7, 10, 12]
    # Row 0 bootstraps from the State of row 3; rows 4 and 5 from the final State (14), not from the next episode (15).
    assert found.next_obs[[0, 4, 5], 0].tolist() == [7, 14, 14]
    assert found.weight.tolist() == [1.0] * 6


def test_gamma_is_applied_a_step_at_a_time() -> None:
    memory, naive = make(num_envs=1, rows=8, n_step=4, gamma=0.9)
    play(memory, naive, [[0]] * 6)
    found = batch_of(memory, [(1, 0)])
    assert found.reward.item() == pytest.approx(4 + 0.9 * 6 + 0.81 * 8 + 0.729 * 10, rel=1e-6)
    assert found.discount.item() == pytest.approx(0.6561, rel=1e-6)


def test_only_the_last_finals_are_kept() -> None:
    """Truncations in rows 1, 3, 5, 7: with room for two, the final States of rows 5 and 7 are still stored."""
    memory, naive = make(num_envs=1, rows=12, n_step=1, finals=2)
    play(memory, naive, [[TRUNCATED if row % 2 else RUNNING] for row in range(9)])
    found = batch_of(memory, [(row, 0) for row in (1, 3, 5, 7)])
    assert found.weight.tolist() == [0.0, 0.0, 1.0, 1.0]
    assert found.next_obs[2:, 0].tolist() == [naive.played[0][row].final for row in (5, 7)]


def test_frequent_truncations_cost_no_other_environment_its_final_states() -> None:
    memory, naive = make(num_envs=2, rows=12, n_step=1, finals=1)
    play(memory, naive, [[TRUNCATED, TRUNCATED if row == 0 else RUNNING] for row in range(9)])
    assert batch_of(memory, [(0, 0), (0, 1)]).weight.tolist() == [0.0, 1.0]


@pytest.mark.parametrize(("written", "oldest"), [(7, 0), (10, 0), (11, 1), (37, 27)])
def test_draw_is_uniform_over_the_valid_places(looks_uniform: Any, written: int, oldest: int) -> None:
    """Ten rows, three environments, two steps a window; before the ring is full, just full, and wrapped."""
    memory, naive = make(num_envs=3, rows=10, n_step=2)
    play(memory, naive, [[0, 0, 0]] * written)
    row, env_index, _ = memory.ring.draw(random.seed_key(5), 30_000)
    assert (row.min(), row.max()) == (oldest, written - 3)
    counts = torch.bincount((row - oldest) * 3 + env_index)
    assert counts.numel() == len(naive.places())
    assert looks_uniform(counts)


def test_draws_differ_by_key_and_repeat_by_key() -> None:
    memory, naive = make(num_envs=3, rows=10, n_step=1)
    play(memory, naive, [[0, 0, 0]] * 10)
    first, again, other = (torch.stack(memory.ring.draw(random.seed_key(k), 256)[:2]) for k in (1, 1, 2))
    assert torch.equal(first, again)
    assert (first != other).any(0).float().mean() > 0.8  # 26 of 27 places differ


def test_sample_is_a_batch_of_drawn_places() -> None:
    memory, naive = make(num_envs=2, rows=9, n_step=3)
    play(memory, naive, [[(0, 1, 0, 2)[row % 4], 0] for row in range(21)])
    row, env_index, _ = memory.ring.draw(random.seed_key(3), 64)
    places = list(zip(row.tolist(), env_index.tolist(), strict=True))
    assert_same(memory.sample(random.seed_key(3), 64), places, naive)


def test_the_mask_is_that_of_the_state_to_bootstrap_from() -> None:
    """The mask is that of the next row, or of the final State; after a termination it does not matter."""
    plain, naive = make(num_envs=3, rows=12, n_step=2, finals=12)
    memory = DeviceReplay(ReplayRequest(rules_of(masked=True), states([0] * 3), 36, 2, 0.5), 12)
    endings = [[(0, 2, 0, 1)[row % 4], 0, (0, 0, 2)[row % 3]] for row in range(19)]
    play(plain, naive, endings)
    play(memory, ListReplay(3, 12, 2, 0.5, 12), endings)
    places = naive.places()
    found = batch_of(memory, places)
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
        DeviceReplay(ReplayRequest(RULES, states([0] * 10), 49, 3, 0.9))
    memory = DeviceReplay(ReplayRequest(RULES, states([0] * 10), 50, 3, 0.9))
    assert memory.rows == 5


def test_the_smallest_ring_works() -> None:
    memory, naive = make(num_envs=1, rows=5, n_step=3)
    play(memory, naive, [[0]] * 23)
    places = naive.places()
    assert places == [(18, 0), (19, 0)]
    assert_same(batch_of(memory, places), places, naive)


def test_a_transition_on_the_common_board_is_small() -> None:
    """With the default settings on a CPU, scaled down: 976 rows, as for a million transitions of 1,024 games."""
    rules = make_rules("snake")
    num_envs = batch.reset(rules, env_keys(0, torch.arange(64)))
    memory = DeviceReplay(ReplayRequest(rules, num_envs.game, 64 * 976, 3, 0.99))
    counted = sum(x.numel() * x.element_size() for x in memory.tensors().values()) / (64 * 976)
    assert memory.bytes_per_transition == pytest.approx(counted)
    assert 105 < memory.bytes_per_transition <= 125


def test_with_a_game_the_observations_are_those_that_were_played() -> None:
    """Play a real game: samples show the observations that the player saw before and after each step."""
    rules = make_rules("snake", {"width": 5, "height": 4, "starvation": 4, "start": "random"}, time_limit=11)
    num_envs = batch.reset(rules, env_keys(1, torch.arange(6)))
    memory, choices = (
        DeviceReplay(ReplayRequest(rules, num_envs.game, 6 * 64, 1, 0.9), final_states=64),
        rules.game.spec(rules.config).num_actions,
    )
    shown, after, steps, actions = [], [], [], []
    for t in range(41):
        action = random.below(random.bits(random.seed_key(t), torch.arange(6)), choices)
        shown.append(rules.game.observe(rules.config, num_envs.game))
        following, step = batch.step(rules, num_envs, action)
        memory.write(num_envs.game, action, step)
        after.append(rules.game.observe(rules.config, step.final_state))
        steps.append(step)
        actions.append(action)
        num_envs = following
    places = [(row, env_index) for row in range(40) for env_index in range(6)]
    found = batch_of(memory, places)
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


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shape", [(), (2,), (8,), (3, 8), (5, 5)])  # rows of one number, of one word and of several
def test_rows_are_those_of_plain_indexing(shape: tuple[int, ...], compiled: bool) -> None:
    table = torch.arange(40 * torch.Size(shape).numel()).to(torch.uint8).view(40, *shape)
    index = torch.tensor([[3, 39], [0, 7], [7, 7]])

    def rows(words: torch.Tensor) -> torch.Tensor:
        return rows_at(words, index).view(torch.uint8).view(*index.shape, *shape)

    found = (torch.compile(rows) if compiled else rows)(in_words(table))
    assert torch.equal(found, table[index])


def test_past_states_are_observed_by_the_afterstate_of_their_action() -> None:
    """Whoever samples from a game that observes single afterstates gets the row of the action, and the whole next_obs."""
    rules = make_rules("tetris", {"view": "afterstates", "width": 5, "height": 8})
    whole = rules._replace(game=dataclasses.replace(rules.game, observe_afterstate=None))
    memories = [DeviceReplay(ReplayRequest(each, states_of(rules, 6), 6 * 16, 2, 0.9)) for each in (rules, whole)]
    envs = batch.reset(rules, env_keys(0, torch.arange(6)))
    for number in range(12):
        legal = batch.legal(rules, envs.game)
        assert legal is not None
        action = select.draw(legal, random.bits(random.seed_key(number), torch.arange(6)))
        after, step = batch.step(rules, envs, action)
        for memory in memories:
            memory.write(envs.game, action, step)
        envs = after
    rows, all_rows = (memory.sample(random.seed_key(1), 64) for memory in memories)
    assert rows.obs.shape == (64, 1, rules.game.spec(rules.config).obs_shape[1])
    assert torch.equal(rows.obs[:, 0], all_rows.obs[torch.arange(64), rows.action])
    assert all(torch.equal(a, b) for a, b in zip(rows[1:7], all_rows[1:7], strict=True))


def states_of(rules: Any, num_envs: int) -> Any:
    return batch.reset(rules, env_keys(0, torch.arange(num_envs))).game
