"""Micro-batches: the same samples, in the same order, with the same random draws, give the same gradient in less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from redline import algos
from redline.algos.learner import Learner
from redline.collect.device_collector import DeviceCollector
from redline.core import faults
from redline.engine.runtime import Runtime
from redline.envs import Rules, batch, make_rules

CPU = torch.device("cpu")
ENVS = 8
SMALL: dict[str, Any] = {"hidden": (16,), "channels": (4,)}
REPLAY: dict[str, Any] = {"batch_size": 24, "replay_capacity": 800, "learning_starts": 0}
CASES = {
    "ppo": ("snake", "ppo", {"rollout_steps": 6, "batch_size": 24}),
    "ppo-cnn": ("snake", "ppo", {"rollout_steps": 6, "batch_size": 24, "net": "cnn"}),
    "ppo-kl": ("snake", "ppo", {"rollout_steps": 6, "batch_size": 24, "target_kl": 1e-3, "separate": True}),
    "ppo-tetris": ("tetris", "ppo", {"rollout_steps": 6, "batch_size": 24}),
    "pqn": ("snake", "pqn", {"rollout_steps": 6, "batch_size": 24}),
    "dqn": ("snake", "dqn", REPLAY),
    "dqn-uneven": ("snake", "dqn", REPLAY | {"batch_size": 23}),
    "dqn-rainbow": (
        "snake",
        "dqn",
        REPLAY | {"distribution": "categorical", "dueling": True, "prioritized": True, "noisy": True},
    ),
    "dqn-quantile": (
        "snake",
        "dqn",
        REPLAY | {"distribution": "quantile", "munchausen": True, "double": False, "layer_norm": True},
    ),
    "dqn-pinned": ("snake", "dqn", REPLAY | {"replay": "pinned", "prioritized": True}),
    "dqn-tetris": ("tetris", "dqn", REPLAY),
}


class Recorded:
    """A learner that plays Snake or Tetris and keeps the gradients of its steps."""

    def __init__(self, game: str, algo: str, options: dict[str, Any], accumulate: int = 1) -> None:
        rules: Rules = make_rules(game)
        algorithm = algos.load(algo)
        config = algorithm.Config(**{k: v for k, v in SMALL.items() if k in algorithm.options} | options)
        envs = batch.reset(rules, batch.env_keys(0, torch.arange(ENVS)))
        self.learner: Learner = algorithm.Learner(rules, config, envs.game, ENVS, 0, Runtime(CPU), accumulate)
        self.collector = DeviceCollector(rules, self.learner, envs)
        self.gradients: list[Tensor] = []
        apply = self.learner._apply  # type: ignore[attr-defined]

        def recording(gradients: tuple[Tensor, ...]) -> None:
            self.gradients.append(torch.cat([g.flatten() for g in gradients]))
            apply(gradients)

        self.learner._apply = recording  # type: ignore[attr-defined]

    def iterate(self, count: int) -> None:
        for number in range(count):
            self.learner.before_iteration()
            for _ in range(self.learner.rollout_steps):
                self.collector.step()
            if self.learner.ready(number):
                self.learner.update()
            self.learner.after_iteration()


def relative_difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.fixture(autouse=True)
def no_faults() -> Any:
    yield
    faults.arm("")


@pytest.mark.parametrize("name", CASES)
def test_gradient_is_that_of_the_whole_batch(name: str) -> None:
    iterations = 12 if "dqn" in name else 1
    whole, split = Recorded(*CASES[name]), Recorded(*CASES[name])
    split.learner.micro_batches = 4
    whole.iterate(iterations)
    split.iterate(iterations)
    assert len(whole.gradients) == len(split.gradients) > 0
    assert relative_difference(split.gradients[0], whole.gradients[0]) <= 1e-6
    for mine, other in zip(split.gradients, whole.gradients, strict=True):
        assert relative_difference(mine, other) <= 1e-3  # rounding grows as the weights move apart
    metrics, expected = split.learner.read_metrics(1), whole.learner.read_metrics(1)
    assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("name", ["ppo", "dqn-rainbow", "dqn-pinned"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_out_of_memory_in_mid_training_repeats_the_gradient_with_smaller_parts(name: str, accumulate: int) -> None:
    """The third gradient runs out of memory twice in a row: the run goes on as if nothing had happened."""
    iterations = 12 if "dqn" in name else 2
    straight, broken = Recorded(*CASES[name], accumulate), Recorded(*CASES[name], accumulate)
    straight.iterate(iterations)
    faults.arm("oom@gradient:3,oom@gradient:4")
    broken.iterate(iterations)
    assert broken.learner.micro_batches == 4
    assert int(broken.learner.acted) == int(straight.learner.acted)
    assert len(broken.gradients) == len(straight.gradients)
    for mine, other in zip(broken.gradients[:3], straight.gradients[:3], strict=True):
        assert relative_difference(mine, other) <= 1e-6
    states = broken.learner.state_dict(), straight.learner.state_dict()
    for name, mine in states[0]["rng"].items():
        assert torch.equal(mine, states[1]["rng"][name])


def test_whole_batches_are_computed_as_before() -> None:
    """With one micro-batch, no function for parts of batches is called."""
    run = Recorded(*CASES["dqn"])
    run.learner._sample = None  # type: ignore[attr-defined]
    run.iterate(6)
    assert run.gradients


def test_out_of_memory_is_raised_once_batches_cannot_be_split_further() -> None:
    run = Recorded("snake", "ppo", {"rollout_steps": 6, "batch_size": 24})
    run.learner.max_micro_batches = 2
    faults.arm("oom@gradient")
    with pytest.raises(torch.OutOfMemoryError):
        run.iterate(1)
    assert run.learner.micro_batches == 2
    assert not run.gradients


def test_other_errors_are_raised_at_once() -> None:
    run = Recorded(*CASES["ppo"])
    faults.arm("raise@gradient:1")
    with pytest.raises(faults.InjectedFault):
        run.iterate(1)
    assert run.learner.micro_batches == 1


def test_largest_number_of_micro_batches_leaves_one_sample_each() -> None:
    assert Recorded("snake", "ppo", {"rollout_steps": 6, "batch_size": 24}).learner.max_micro_batches == 24
