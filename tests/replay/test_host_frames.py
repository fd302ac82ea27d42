"""Frame stacks rebuilt from records on the host, against lists of all transitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from list_replay import assert_same, play, states
from test_frames import GAMMA, FilmReplay, History, film, histories, rules_of
from test_host_replay import Iterations
from torch import Tensor

from redline.core import random
from redline.core.records import Step
from redline.replay.contract import ReplayRequest
from redline.replay.host_replay import HostReplay
from redline.replay.pinned import PinnedRecords
from redline.replay.transfer import AHEAD


class FilmHostReplay(HostReplay):
    """Written with the States of `list_replay`, of which it stores films."""

    def write(self, state: Any, action: Tensor, step: Step) -> None:
        super().write(film(state.stamp), action, step._replace(final_state=film(step.final_state.stamp)))


@pytest.mark.parametrize("alpha", [None, 0.6], ids=["uniform", "prioritized"])
@settings(max_examples=25)
@given(history=histories())
def test_every_stack_delivered_equals_a_list_replay(alpha: float | None, history: History) -> None:
    num_envs, rows = history.num_envs, history.rows + AHEAD + 1
    request = ReplayRequest(
        rules=rules_of(history.frames),
        state=film(states([0] * num_envs).stamp),
        capacity=rows * num_envs,
        n_step=history.n_step,
        gamma=GAMMA,
        alpha=alpha,
        key=random.seed_key(3),
        batch_size=16,
        batches_per_iteration=2,
        notify=pytest.fail,
    )
    memory = FilmHostReplay(request, lambda entries, layout: PinnedRecords(request, entries, layout), 200)
    naive, player = FilmReplay(num_envs, rows, history.n_step, 200, history.frames), Iterations(memory)
    play(player, naive, history.endings)
    for _, sample, places in player.samples:
        assert all(row >= 0 for row, _ in places)
        assert_same(sample._replace(weight=(sample.weight > 0).to(torch.float32)), places, naive)
