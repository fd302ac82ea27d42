"""The contract of algorithms, checked for every registered one and for A2C, which lies outside the package."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from probes import anywhere, paid_by_action, probe
from torch import Tensor

from redline import algos
from redline.algos.algorithm import Algorithm
from redline.algos.learner import Learner
from redline.collect.actor_policy import ActorPolicy, flat_weights
from redline.collect.device_collector import DeviceCollector
from redline.core.records import PolicyInput
from redline.engine.runtime import Runtime
from redline.envs import batch

CPU = torch.device("cpu")
NUM_ENVS = 16
OUTSIDE = Path(__file__).parents[2] / "examples" / "a2c"
# Options of any algorithm that make it small and quick to start; those an algorithm does not have are left out.
SMALL = {"hidden": (8,), "rollout_steps": 4, "replay_capacity": 512, "learning_starts": 16, "batch_size": 16}
RULES = probe(paid_by_action, anywhere)


@pytest.fixture(params=[*algos.names(), "a2c"])
def algo(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Algorithm]:
    monkeypatch.chdir(OUTSIDE)
    yield algos.load(request.param)
    algos.registry.refresh()
    sys.modules.pop("a2c", None)


class Run:
    """A learner that plays a small game in this process."""

    def __init__(self, algo: Algorithm, seed: int = 1) -> None:
        requested = {k: v for k, v in SMALL.items() if k in algo.options}
        self.config, _ = algo.fill_defaults(algo.Config(**requested), NUM_ENVS, ())
        envs = batch.reset(RULES, batch.env_keys(seed, torch.arange(NUM_ENVS)))
        self.learner: Learner = algo.Learner(RULES, self.config, envs.game, NUM_ENVS, seed, Runtime(CPU))
        self.collector = DeviceCollector(RULES, self.learner, envs)
        self.iterations = self.updates = 0

    def iterate(self, count: int) -> None:
        for _ in range(count):
            self.learner.before_iteration()
            for _ in range(self.learner.rollout_steps):
                self.collector.step()
            if self.learner.ready(self.iterations):
                self.learner.update()
                self.updates += self.learner.updates_per_iteration
            self.learner.after_iteration()
            self.iterations += 1

    def tensors(self) -> dict[str, Tensor]:
        groups = {**self.learner.state_dict(), "envs": self.collector.tensors()}
        return {f"{group}.{name}": x for group, tensors in groups.items() for name, x in tensors.items()}

    def snapshot(self) -> dict[str, Tensor]:
        return {name: x.clone() for name, x in self.tensors().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(x, b[name]) for name, x in a.items())


def test_it_plays_and_learns(algo: Algorithm) -> None:
    run = Run(algo)
    before = {k: v.clone() for k, v in run.learner.state_dict()["model"].items()}
    run.iterate(20)
    assert run.updates > 0
    assert run.learner.samples_per_update > 0
    assert not same(before, run.learner.state_dict()["model"])
    assert run.learner.acted.item() == 20 * run.learner.rollout_steps
    metrics = run.learner.read_metrics(run.updates)
    assert set(run.learner.metrics) <= set(metrics)
    assert all(isinstance(value, int | float) and value == value for value in metrics.values())
    assert metrics.get("skipped_updates", 0) == 0
    assert all(run.learner.read_metrics(1)[name] == 0 for name in run.learner.metrics)  # reading resets them


@pytest.mark.fault("G9")
def test_one_seed_repeats_bit_for_bit_and_two_differ(algo: Algorithm) -> None:
    first, again, other = Run(algo), Run(algo), Run(algo, seed=2)
    assert not same(first.learner.state_dict()["model"], other.learner.state_dict()["model"])
    for run in (first, again, other):
        run.iterate(12)
    assert same(first.tensors(), again.tensors())
    assert not same(first.tensors(), other.tensors())


def test_a_checkpoint_brings_back_everything(algo: Algorithm) -> None:
    whole = Run(algo)
    whole.iterate(10)
    saved, iterations = whole.snapshot(), whole.iterations
    whole.iterate(10)
    resumed = Run(algo, seed=7)
    own = resumed.tensors()
    assert own.keys() == saved.keys()
    for name, x in own.items():
        x.copy_(saved[name])
    assert resumed.learner.loaded()
    resumed.iterations = iterations
    resumed.iterate(10)
    assert same(whole.tensors(), resumed.tensors())


def policy_input(learner: Learner, draw: int) -> PolicyInput:
    env_index, number = torch.arange(NUM_ENVS), torch.tensor(draw)
    obs = torch.zeros(NUM_ENVS, *learner.spec.obs_shape, dtype=learner.spec.obs_dtype)
    return PolicyInput(obs, None, learner.key, env_index, NUM_ENVS, number, number, torch.tensor(0.0))


def test_actions_and_outputs_have_their_shapes(algo: Algorithm) -> None:
    run = Run(algo)
    action, outputs = run.learner.select_actions(policy_input(run.learner, 0))
    assert (action.shape, action.dtype) == ((NUM_ENVS,), torch.int64)
    assert len(outputs) == len(algo.POLICY_OUTPUTS)
    assert all((x.shape, x.dtype) == ((NUM_ENVS,), torch.float32) for x in outputs)
    assert (action >= 0).all()
    assert (action < run.learner.spec.num_actions).all()


def test_exploration_is_new_in_every_step(algo: Algorithm) -> None:
    """Untrained policies act nearly uniformly, and no two steps draw the same actions."""
    run = Run(algo)
    actions = torch.stack([run.learner.select_actions(policy_input(run.learner, draw))[0] for draw in range(64)])
    share = actions.to(torch.float32).mean()
    assert 0.4 < share < 0.6  # of the second of two actions
    assert len({tuple(row.tolist()) for row in actions}) > 60
    assert (actions.to(torch.float32).mean(0) > 0.2).all()


def test_zeroed_weights_reach_every_acting_network(algo: Algorithm) -> None:
    run = Run(algo)
    run.iterate(10)
    with torch.no_grad():
        for weights in run.learner.acting_network.parameters():
            weights.zero_()
    run.learner.before_iteration()
    spec, obs = run.learner.spec, policy_input(run.learner, 0).obs
    actor = ActorPolicy(RULES, algo, run.config, NUM_ENVS, int(run.learner.key))
    assert any(weights.any() for weights in actor.network.parameters())
    actor.load(flat_weights(run.learner.acting_network), 1)
    assert not any(weights.any() for weights in actor.network.parameters())
    greedy = algo.policy_network(spec, run.config, run.learner.state_dict()["model"])
    with torch.no_grad():
        assert greedy(obs).shape == (NUM_ENVS, spec.num_actions)
        assert (greedy(obs) == greedy(obs)[:, :1]).all()  # nothing is preferred
    assert (run.learner.policy(obs) == 0).all()


def test_actors_choose_as_the_learner_does(algo: Algorithm) -> None:
    run = Run(algo)
    run.iterate(10)
    run.learner.before_iteration()
    given = policy_input(run.learner, 5)
    network = algo.acting_network(run.learner.spec, run.config)
    network.load_state_dict(run.learner.acting_network.state_dict())
    action, outputs = algo.select_actions(run.config, network, given)
    expected, expected_outputs = run.learner.select_actions(given)
    assert torch.equal(action, expected)
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected_outputs, strict=True))


def test_memory_is_estimated_by_option(algo: Algorithm) -> None:
    run = Run(algo)
    needs: dict[str, Any] = algo.memory_bytes(run.config, run.learner.spec, 12, NUM_ENVS)
    assert set(needs) <= algo.options
    assert all(number >= 0 for number in needs.values())
    assert algo.samples_per_step(run.config, NUM_ENVS, 1) > 0
