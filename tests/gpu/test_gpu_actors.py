"""Actors with a learner on a GPU: page-locked staging, copies beside it, actions chosen there. Run with `make gpu-test`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.run.resolve import resolve
from redline.run.session import Session
from redline.run.settings import Settings

pytestmark = pytest.mark.gpu
sys.path.insert(0, str(Path(__file__).parents[1] / "collect"))  # for `faulty`, here and in actors


@pytest.fixture
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    inference, algo, graph = request.param
    options: dict[str, Any] = {
        "ppo": {"hidden": (32,), "rollout_steps": 16, "batch_size": 64},
        "dqn": {"learning_starts": 10**6, "n_step": 2, "gamma": 0.5, "hidden": (32,), "replay_capacity": 4000},
    }[algo]
    settings = Settings(
        "gym:faulty:Faulty-v0", algo, num_envs=4, actors=2, device="cuda", steps=10**6, inference=inference, graph=graph
    )
    made = Session(resolve(Settings(**(vars(settings) | {"algo_options": options}))), pytest.fail)
    yield made
    made.close()


@pytest.mark.parametrize(
    "session", [(i, "ppo", g) for i in ("actors", "central") for g in (False, True)], indirect=True
)
def test_a_rollout_is_in_order(session: Session) -> None:
    session.collector = session.collector.start(0.0)
    for _ in range(6):
        session._play()
        learner = session.learner
        obs, ended = learner.rollout.obs.view(16, 4, 3).cpu(), learner.rollout.done.view(16, 4).cpu()
        for row in range(15):
            for env_index in range(4):
                now, then, over = (
                    obs[row, env_index].tolist(),
                    obs[row + 1, env_index].tolist(),
                    bool(ended[row, env_index]),
                )
                assert over == (now[1] == 4)
                assert then[:2] == ([now[0] + 1, 0] if over else [now[0], now[1] + 1])
        assert learner.rollout.reward.tolist() == learner.rollout.action.tolist()
        assert (learner.rollout.outputs["logp"] < 0).all()
        session._update()


@pytest.mark.parametrize("session", [("actors", "dqn", True), ("central", "dqn", True)], indirect=True)
def test_a_memory_holds_what_was_played(session: Session) -> None:
    session.iterate(200)
    batch = session.learner.memory.sample(torch.tensor(3, dtype=torch.int32, device="cuda"), 500)
    for obs, then, discount, weight in zip(
        batch.obs.tolist(), batch.next_obs.tolist(), batch.discount.tolist(), batch.weight.tolist(), strict=True
    ):
        if weight and discount:
            assert then[0] == obs[0]
            assert then[2] == obs[2]
            assert discount == 0.5 ** (then[1] - obs[1])
