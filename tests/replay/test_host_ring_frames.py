"""Stacks of frames rebuilt from records of the host: those that lists of all that happened give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from test_frames import GAMMA, FilmReplay, History, film, histories, rules_of
from test_host_ring import CPU, Iterations
from test_ring import assert_same, play, states
from torch import Tensor

from redline.core import random
from redline.core.records import Step
from redline.replay.host_ring import HostReplayRing, Pinned
from redline.replay.transfer import AHEAD


class FilmHostRing(HostReplayRing):
    """Written with States of `test_ring`, of which it keeps films."""

    def write(self, state: Any, action: Tensor, step: Step) -> None:
        super().write(film(state.stamp), action, step._replace(final_state=film(step.final_state.stamp)))


@pytest.mark.parametrize("alpha", [None, 0.6], ids=["uniform", "priority"])
@settings(max_examples=60)
@given(history=histories())
def test_every_stack_delivered_equals_a_list_replay(alpha: float | None, history: History) -> None:
    num_envs, rows = history.num_envs, history.rows + AHEAD + 1
    ring = FilmHostRing(
        rules_of(history.frames),
        film(states([0] * num_envs).stamp),
        rows * num_envs,
        history.n_step,
        GAMMA,
        random.seed_key(3),
        16,
        2,
        lambda entries, layout: Pinned(entries, layout, num_envs, CPU, pytest.fail),
        alpha=alpha,
        finals=200,
        notify=pytest.fail,
    )
    naive, player = FilmReplay(num_envs, rows, history.n_step, 200, history.frames), Iterations(ring)
    play(player, naive, history.endings)  # type: ignore[arg-type]
    for _, found, places in player.samples:
        assert all(row >= 0 for row, _ in places)
        assert_same(found._replace(weight=(found.weight > 0).to(torch.float32)), places, naive)
