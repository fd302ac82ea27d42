"""DQN's discount by progress: numbers worked out by hand, resuming, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from test_dqn import CPU, TINY, anywhere, learner_of, probe, stand_still
from test_dqn_prioritized import differences, saved, session_of

from redline.algos.dqn import Config, Learner
from redline.collect.device_collector import DeviceCollector
from redline.core.errors import UserError
from redline.core.records import Spec
from redline.engine.runtime import Runtime
from redline.envs import batch
from redline.envs.batch import env_keys


@pytest.mark.parametrize(("progress", "gamma"), [(0.0, 0.5), (0.5, 1 - 1 / 6), (1.0, 0.9), (1.5, 0.9)])
def test_the_discount_of_samples_follows_progress(progress: float, gamma: float) -> None:
    """The horizon 1 / (1 - gamma) grows linearly, from 2 to 10. A reward of 1 a step: three of them, then the value."""
    rules = probe(stand_still, anywhere)
    envs = batch.reset(rules, env_keys(3, torch.arange(4)))
    config = Config(batch_size=8, hidden=(8,), replay_capacity=64, n_step=3, gamma=0.5, gamma_end=0.9)
    learner = Learner(rules, config, envs.game, 4, seed=1, runtime=Runtime(CPU))
    collector = DeviceCollector(rules, learner, envs)
    for _ in range(8):
        collector.step()
    learner.progress.fill_(progress)
    assert learner.scheduled
    sample = learner.sample(torch.zeros((), dtype=torch.int64))
    torch.testing.assert_close(sample.reward, torch.full((8,), 1 + gamma + gamma**2))
    torch.testing.assert_close(sample.discount, torch.full((8,), gamma**3))


def test_a_continued_session_has_the_discount_of_its_progress() -> None:
    options = {"hidden": (16,), "learning_starts": 64, "gamma": 0.9, "gamma_end": 0.99}
    whole, part = (session_of(seed=seed, prioritized=False, algo_options=options) for seed in (1, 2))
    whole.learner.progress.fill_(0.25)
    whole.iterate(15)
    groups, counters = saved(whole), whole.counters()
    for session in (whole, part):
        session.learner.progress.fill_(0.75)
    whole.iterate(12)
    part.load(groups, counters)
    part.iterate(12)
    assert not differences(saved(part), saved(whole))


def test_a_constant_discount_needs_no_schedule() -> None:
    learner = learner_of(TINY)
    assert not learner.scheduled


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("gamma_end", {"gamma_end": 1.0}),
        ("gamma_end", {"gamma_end": -0.1}),
        ("gamma", {"gamma": 1.0, "gamma_end": 0.9}),
    ],
)
def test_impossible_discounts_are_errors_that_name_them(field: str, options: dict[str, float]) -> None:
    with pytest.raises(UserError, match=rf"^dqn\.{field} is .*; expected .*\.$"):
        Config(**options)  # type: ignore[arg-type]


def test_afterstates_refuse_a_changing_discount() -> None:
    spec = Spec((3, 2), torch.float32, (1.0,) * 2, 1, 3, "points", afterstates=True)
    with pytest.raises(UserError, match=r"^dqn\.gamma_end is set, but with afterstates .*\.$"):
        learner_of(dataclasses.replace(TINY, gamma_end=0.99), spec=spec)
