"""DQN: numbers worked out by hand, small games whose values are known, and the negative control of bootstrapping."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from redline.algos import dqn, networks
from redline.algos.dqn import Config, Learner
from redline.algos.td_targets import td_targets
from redline.collect.device_collector import DeviceCollector
from redline.core import random
from redline.core.errors import UserError
from redline.core.records import Batch, Events, Spec
from redline.engine.runtime import Runtime
from redline.envs import batch
from redline.envs.batch import Rules, env_keys
from redline.replay import windows
from redline.replay.contract import ReplayRequest
from redline.replay.device import DeviceReplay
from redline.run.resolve import resolve
from redline.run.session import Session
from redline.run.settings import Settings

CPU = torch.device("cpu")
TINY = Config(batch_size=4, hidden=(8,), replay_capacity=1000, n_step=1)


# ---- A learner whose values are set by hand


def fixed_values(learner: Learner, online: list[float], target: list[float] | None = None) -> None:
    """Let the networks give these values whatever they see, without replacing a tensor."""
    for net, values in ((learner.online, online), (learner.target, online if target is None else target)):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.zero_()
            net.dense.head.out.bias[: len(values)] = torch.tensor(values)


def batch_of(action: list[int], reward: list[float], discount: list[float], weight: list[float] | None = None) -> Batch:
    size = len(action)
    return Batch(
        obs=torch.zeros(size, 3),
        action=torch.tensor(action),
        reward=torch.tensor(reward),
        next_obs=torch.ones(size, 3),
        discount=torch.tensor(discount),
        weight=torch.tensor([1.0] * size if weight is None else weight),
    )


class Memory:
    """Gives batches in turn, and notes which were asked for."""

    def __init__(self, *batches: Batch) -> None:
        self.batches, self.keys = batches, []

    def sample(self, key: Tensor, size: int, *_: object) -> Batch:
        self.keys.append(key.item())
        found = self.batches[(len(self.keys) - 1) % len(self.batches)]
        assert found.action.shape == (size,)
        return found

    def tensors(self) -> dict[str, Tensor]:
        return {}


class Seen(NamedTuple):
    """The State of a game that is never played."""

    view: Tensor  # (N, 3) float32


def learner_of(config: Config, memory: Any = None, num_envs: int = 6, accumulate: int = 1, **options: Any) -> Learner:
    spec = options.get("spec", Spec((3,), torch.float32, (1.0,) * 3, 1, 3, "points"))
    seed, amp = options.get("seed", 0), options.get("amp")
    game = SimpleNamespace(State=Seen, HIDDEN=(), spec=lambda _: spec, observe=lambda _, state: state.view)
    config = dataclasses.replace(config, replay_capacity=max(config.replay_capacity, 3 * num_envs))
    runtime, state = Runtime(CPU, amp), Seen(torch.zeros(num_envs, 3))
    learner = Learner(Rules(game, None, 0), config, state, num_envs, seed, runtime, accumulate)  # type: ignore[arg-type]
    learner.memory = memory or Memory()
    return learner


class Table:
    """A network that gives these values for a batch, whatever is in it."""

    def __init__(self, values: list[list[float]]) -> None:
        self.values = torch.tensor(values)

    def __call__(self, obs: Tensor, legal: Tensor | None = None) -> Tensor:
        del obs
        return networks.masked(self.values, legal)

    def chosen(self, obs: Tensor, action: Tensor) -> Tensor:
        del obs
        return networks.gather(self.values, action)


def obs_of(count: int) -> Tensor:
    return random.uniform(random.bits(random.seed_key(8), torch.arange(3 * count))).view(count, 3)


# ---- Targets and loss


@pytest.mark.parametrize(
    ("double", "expected"),
    [
        # Double: the online network chooses action 1, 0, 2, the target network says what it is worth.
        (True, [1 + 0.5 * 20, -1 + 0.25 * 7, 2.0]),
        # Else: the target network's own best, 30, 9, 5.
        (False, [1 + 0.5 * 30, -1 + 0.25 * 9, 2.0]),
    ],
)
def test_td_targets_by_hand(double: bool, expected: list[float]) -> None:
    online = Table([[1.0, 5.0, 2.0], [3.0, 2.0, 1.0], [0.0, 1.0, 2.0]])
    target = Table([[10.0, 20.0, 30.0], [7.0, 8.0, 9.0], [5.0, 4.0, 3.0]])
    sample = batch_of(action=[0, 0, 0], reward=[1.0, -1.0, 2.0], discount=[0.5, 0.25, 0.0])
    assert td_targets(sample, online, target, double).tolist() == expected


@pytest.mark.parametrize(
    ("double", "expected"),
    [
        # Double: without action 1 the online network chooses 2, without 0 it chooses 1; the third has nothing left.
        (True, [1 + 0.5 * 30, -1 + 0.25 * 8, 2.0]),
        # Else: the target network's best of what is left.
        (False, [1 + 0.5 * 35, -1 + 0.25 * 8, 2.0]),
    ],
)
def test_td_targets_take_legal_actions_only(double: bool, expected: list[float]) -> None:
    online = Table([[1.0, 5.0, 2.0], [3.0, 2.0, 1.0], [0.0, 1.0, 2.0]])
    target = Table([[35.0, 40.0, 30.0], [9.5, 8.0, 9.0], [5.0, 4.0, 3.0]])
    sample = batch_of(action=[0, 0, 0], reward=[1.0, -1.0, 2.0], discount=[0.5, 0.25, 0.0])
    legal = torch.tensor([[1, 0, 1], [0, 1, 0], [0, 0, 0]], dtype=torch.bool)
    sample = sample._replace(next_legal=legal)
    targets = td_targets(sample, online, target, double)
    assert targets.tolist() == expected  # and the state without a legal action, a terminal one, gave no NaN


@pytest.mark.parametrize(("double", "best"), [(True, 20.0), (False, 40.0)])
def test_loss_by_hand(double: bool, best: float) -> None:
    """Online values 1, 3, 2, target values 10, 20, 40. A sample of weight 0 is as if it were not there."""
    sample = batch_of([0, 1, 2, 2], [0.5, 0.0, 2.25, 1e6], [0.0, 0.5, 0.0, 0.5], [1.0, 1.0, 1.0, 0.0])
    learner = learner_of(dataclasses.replace(TINY, double=double), Memory(sample))
    fixed_values(learner, [1.0, 3.0, 2.0], [10.0, 20.0, 40.0])
    loss, metrics, *_ = learner.loss(torch.tensor(0))
    # Errors 0.5, a large one, 0.25: half the square, the linear part, half the square; four samples.
    large = best / 2 - 3.0
    assert loss.item() == pytest.approx((0.125 + (large - 0.5) + 0.03125) / 4)
    assert metrics.tolist() == pytest.approx([loss.item(), (1 + 3 + 2 + 2) / 4, (0.5 + large + 0.25) / 4])


@pytest.mark.parametrize("delta", [0.5, 1.0, 3.0])
def test_loss_is_hubers(delta: float) -> None:
    rewards = [-4.0, -0.7, 0.0, 0.3, 0.5, 1.0, 2.9, 8.0]
    learner = learner_of(
        dataclasses.replace(TINY, huber=delta, batch_size=8), Memory(batch_of([0] * 8, rewards, [0.0] * 8))
    )
    fixed_values(learner, [0.25, 0.0, 0.0])
    errors = [abs(reward - 0.25) for reward in rewards]
    expected = sum(e * e / 2 if e <= delta else delta * (e - delta / 2) for e in errors) / 8
    assert learner.loss(torch.tensor(0))[0].item() == pytest.approx(expected)


def test_only_the_action_taken_gets_a_gradient_and_the_target_network_none() -> None:
    learner = learner_of(TINY, Memory(batch_of([1] * 4, [1.0] * 4, [0.5] * 4)))
    fixed_values(learner, [0.0, 0.0, 0.0])
    learner.optimizer.gradient(learner.loss(torch.tensor(0))[0])
    bias = learner.optimizer.gradient(learner.loss(torch.tensor(0))[0])[-1]
    assert bias[1] < 0
    assert bias[[0, 2, 3, 4, 5, 6, 7]].tolist() == [0.0] * 7
    assert not any(parameter.requires_grad for parameter in learner.target.parameters())


def test_accumulated_batches_equal_one_of_their_mean() -> None:
    """Three batches of four added up: the gradient of the twelve, with other samples each time."""
    parts = [
        batch_of([0, 1, 2, part], [0.3 * part, 0.1, -0.2, 0.4], [0.9, 0.0, 0.5, 0.1 * part])._replace(
            obs=obs_of(12)[4 * part : 4 * part + 4], next_obs=1 - obs_of(12)[4 * part : 4 * part + 4]
        )
        for part in range(3)
    ]
    memory = Memory(*parts)
    learner = learner_of(TINY, memory, accumulate=3)
    whole = Batch(*(torch.cat(fields) for fields in zip(*(part[:6] for part in parts), strict=True)))
    values = learner.online(whole.obs).gather(1, whole.action[:, None]).squeeze(1)
    best = learner.target(whole.next_obs).gather(1, learner.online(whole.next_obs).argmax(1, keepdim=True)).squeeze(1)
    loss = F.huber_loss(values, (whole.reward + whole.discount * best).detach(), delta=1.0)
    expected = torch.autograd.grad(loss, list(learner.online.parameters()))

    handed_over = []
    learner._apply = lambda gradients: handed_over.append(gradients)
    learner.update()
    for ours, theirs in zip(handed_over[0], expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    assert max(g.abs().max().item() for g in expected) > 1e-3
    assert learner.metric_sums["loss"].item() == pytest.approx(loss.item(), rel=1e-5)
    assert learner.metric_sums["q_mean"].item() == pytest.approx(values.mean().item(), rel=1e-4)
    assert learner.samples_per_update == 12


def test_every_update_draws_other_samples() -> None:
    memory = Memory(batch_of([0] * 4, [0.0] * 4, [0.0] * 4))
    learner = learner_of(TINY, memory, accumulate=3)
    for _ in range(20):
        learner.update()
    assert len(set(memory.keys)) == 60


# ---- Exploration


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (0, [1.0, 1.0, 1.0]),
        (250, [0.775, 0.7525, 0.75025]),  # a quarter of the way to 0.1, 0.01, 0.001
        (500, [0.55, 0.505, 0.5005]),
        (1000, [0.1, 0.01, 0.001]),
        (10**12, [0.1, 0.01, 0.001]),  # and it stays there
    ],
)
def test_epsilon_at_start_middle_end_and_beyond(steps: int, expected: list[float]) -> None:
    config = Config(epsilon_start=1.0, epsilon_high=0.1, epsilon_low=0.001, epsilon_steps=1000)
    found = dqn.epsilon(config, torch.tensor(steps), torch.arange(3), 3)
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx(expected, abs=1e-7)


def test_epsilon_ends_are_a_geometric_ladder() -> None:
    config = Config(epsilon_high=0.4, epsilon_low=0.4 / 2**7, epsilon_steps=10)
    found = dqn.epsilon(config, torch.tensor(10), torch.arange(8), 8)
    assert found.tolist() == pytest.approx([0.4 / 2**env_index for env_index in range(8)], abs=1e-7)


@pytest.mark.parametrize(
    ("options", "num_envs", "expected"),
    [
        ({"epsilon_high": 0.3, "epsilon_low": 0.01}, 1, [0.3]),  # one environment is the boldest
        ({"epsilon_high": 0.2, "epsilon_low": 0.2}, 3, [0.2] * 3),
        ({"epsilon_high": 0.0, "epsilon_low": 0.0}, 2, [0.0] * 2),
        ({"epsilon_high": 0.1, "epsilon_low": 0.0}, 2, [0.1, 0.0]),
    ],
)
def test_epsilon_of_few_environments_and_of_none(options: Any, num_envs: int, expected: list[float]) -> None:
    found = dqn.epsilon(Config(epsilon_steps=5, **options), torch.tensor(99), torch.arange(num_envs), num_envs)
    assert found.tolist() == pytest.approx(expected, abs=1e-7)


def acting(epsilon: float, num_envs: int, seed: int = 0) -> Learner:
    """A learner that always explores at this rate, and whose best action is 2."""
    config = dataclasses.replace(TINY, epsilon_start=epsilon, epsilon_high=epsilon, epsilon_low=epsilon)
    learner = learner_of(config, num_envs=num_envs, seed=seed)
    fixed_values(learner, [0.0, 0.5, 1.0])
    return learner


def test_epsilon_one_is_uniform_and_never_the_same_twice(looks_uniform: Callable[[Tensor], bool]) -> None:
    learner = acting(1.0, 500)
    calls = torch.stack([learner.act(torch.zeros(500, 3)) for _ in range(60)])
    assert looks_uniform(torch.bincount(calls.flatten(), minlength=3))
    pairs = calls[:-1] * 3 + calls[1:]  # one call tells nothing of the next …
    assert looks_uniform(torch.bincount(pairs.flatten(), minlength=9))
    neighbours = calls[:, :-1] * 3 + calls[:, 1:]  # … nor one environment of another
    assert looks_uniform(torch.bincount(neighbours.flatten(), minlength=9))
    assert len({tuple(call.tolist()) for call in calls}) == 60
    shares = torch.nn.functional.one_hot(calls, 3).double().mean(0)  # of each environment over the calls
    entropy = -(shares * shares.clamp(min=1e-9).log()).sum(1)
    assert entropy.min() > 0.8 * torch.tensor(3.0).log()


def test_epsilon_zero_is_greedy_and_a_third_is_a_third() -> None:
    assert (acting(0.0, 400).act(torch.zeros(400, 3)) == 2).all()
    learner = acting(0.3, 400)
    explored = torch.stack([learner.act(torch.zeros(400, 3)) for _ in range(50)]) != 2
    # 0.3 of the moves are random, two thirds of those are not the best action: 0.2, within five standard deviations.
    assert abs(explored.double().mean() - 0.2) < 5 * (0.2 * 0.8 / 20_000) ** 0.5


def test_each_env_explores_at_its_own_rate_by_its_own_clock() -> None:
    config = dataclasses.replace(TINY, epsilon_start=1.0, epsilon_high=0.9, epsilon_low=0.1, epsilon_steps=300)
    learner = learner_of(config, num_envs=3)
    fixed_values(learner, [0.0, 0.5, 1.0])
    calls = torch.stack([learner.act(torch.zeros(3, 3)) for _ in range(1100)]) != 2
    # 100 calls are 300 environment steps: from then on the environments are at 0.9, 0.3 and 0.1.
    shares = calls[100:].double().mean(0) * 1.5
    assert shares.tolist() == pytest.approx([0.9, 0.3, 0.1], rel=0.25)
    assert calls[:20].double().mean() * 1.5 > 0.7, "at first all of them are bold"


def test_acting_repeats_by_seed_and_differs_by_seed() -> None:
    first, again, other = (acting(1.0, 200, seed) for seed in (1, 1, 2))
    for _ in range(3):
        a, b, c = (learner.act(torch.zeros(200, 3)) for learner in (first, again, other))
        assert torch.equal(a, b)
        assert 0.5 < (a != c).double().mean() < 0.85
    assert first.acted == 3


def test_acting_sees_new_weights_at_once() -> None:
    """Zero the weights and name an action: every actor must take it, whichever way the weights were changed."""
    learner = acting(0.0, 50)
    obs = obs_of(50)
    for action in (1, 0, 2, 1):
        values = [float(a == action) for a in range(3)]
        fixed_values(learner, values)
        assert (learner.policy(obs) == action).all()
        assert (learner.act(obs) == action).all()
    learner.optimizer.flat.zero_()  # the vector the optimizer steps is the network
    learner.online.dense.head.out.bias.data[2] = 1.0
    assert (learner.act(obs) == 2).all()
    gradients = [torch.zeros_like(p) for p in learner.online.parameters()]
    gradients[-1][0] = -1.0  # Adam's first steps are as long as the learning rate
    for _ in range(2 * round(1 / TINY.learning_rate)):
        learner.apply(tuple(gradients))
    assert (learner.act(obs) == 0).all()


# ---- Masks


def masks_of(count: int) -> Tensor:
    """Every non-empty set of three actions in turn."""
    return torch.stack([((torch.arange(count) % 7 + 1) >> a) & 1 for a in range(3)], 1).bool()


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 1.0])
def test_only_legal_actions_are_taken(epsilon: float, looks_uniform: Callable[[Tensor], bool]) -> None:
    learner, legal = acting(epsilon, 700), masks_of(700)
    calls = torch.stack([learner.act(torch.zeros(700, 3), legal) for _ in range(40)])
    assert legal.expand(40, -1, -1).gather(2, calls.unsqueeze(2)).all()
    if epsilon == 0.0:  # the best is 2, then 1, then 0
        assert torch.equal(calls[0], torch.where(legal[:, 2], 2, torch.where(legal[:, 1], 1, 0)))
        assert torch.equal(calls[0], learner.policy(torch.zeros(700, 3), legal))
    if epsilon == 1.0:
        everything = calls[:, legal.all(1)]
        assert looks_uniform(torch.bincount(everything.flatten(), minlength=3))
        two = calls[:, (legal == torch.tensor([True, False, True])).all(1)]
        assert looks_uniform(torch.bincount(two.flatten(), minlength=3)[[0, 2]])


@pytest.mark.fault("D6")
def test_a_state_without_legal_actions_gives_an_action_all_the_same() -> None:
    for epsilon in (0.0, 1.0):
        found = acting(epsilon, 50).act(torch.zeros(50, 3), torch.zeros(50, 3, dtype=torch.bool))
        assert ((found >= 0) & (found < 3)).all()


def test_the_policy_of_a_checkpoint_scores_illegal_actions_lowest() -> None:
    learner, legal = learner_of(TINY), masks_of(14)
    net = dqn.policy_network(learner.spec, TINY, learner.state_dict()["model"])
    plain, scores = net(obs_of(14)), net(obs_of(14), legal)
    assert torch.equal(scores[legal], plain[legal])
    assert (scores[~legal] == -1e9).all()


# ---- The target network


def random_gradients(learner: Learner, seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(p.shape, generator=generator) for p in learner.online.parameters())


def test_hard_copy_every_period() -> None:
    learner = learner_of(dataclasses.replace(TINY, tau=1.0, target_period=3))
    start = learner.target_weights.clone()
    assert torch.equal(start, learner.optimizer.flat)
    for update in range(1, 10):
        learner.apply(random_gradients(learner, update))
        if update % 3 == 0:
            start = learner.optimizer.flat.clone()
        assert torch.equal(learner.target_weights, start), f"after {update} updates"
        assert torch.equal(learner.target.dense.head.out.bias, learner.target_weights[-8:]), (
            "the network is not the vector"
        )
        assert torch.equal(learner.target_weights, learner.optimizer.flat) == (update % 3 == 0)


def test_soft_update_is_exact() -> None:
    learner = learner_of(dataclasses.replace(TINY, tau=0.25, target_period=2, learning_rate=0.1))
    expected = learner.target_weights.clone()
    for update in range(1, 7):
        learner.apply(random_gradients(learner, update))
        if update % 2 == 0:
            expected = expected + 0.25 * (learner.optimizer.flat - expected)
        assert torch.equal(learner.target_weights, expected), f"after {update} updates"


@pytest.mark.fault("D3")
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_skipped_update_moves_neither_network(poison: float) -> None:
    learner = learner_of(dataclasses.replace(TINY, tau=0.5, learning_rate=0.1))
    learner.apply(random_gradients(learner, 1))
    watched = (learner.optimizer.flat, learner.optimizer.mean, learner.optimizer.square, learner.target_weights)
    before = [x.clone() for x in watched]
    bad = random_gradients(learner, 2)
    bad[1][0] = poison
    learner.apply(bad)
    assert all(torch.equal(x, y) for x, y in zip(watched, before, strict=True))
    assert (learner.optimizer.skipped, learner.optimizer.steps, learner.updated) == (1, 1, 2)
    learner.apply(random_gradients(learner, 3))
    assert not any(torch.equal(x, y) for x, y in zip(watched, before, strict=True))


@pytest.mark.fault("D3")
def test_a_sample_that_is_not_finite_is_skipped_and_counted() -> None:
    good, bad = (batch_of([0] * 4, [reward] * 4, [0.0] * 4) for reward in (1.0, float("nan")))
    learner = learner_of(TINY, Memory(good, bad, good))
    learner.update()
    weights = learner.optimizer.flat.clone()
    learner.update()
    assert torch.equal(learner.optimizer.flat, weights)
    learner.update()
    assert not torch.equal(learner.optimizer.flat, weights)
    assert torch.isfinite(learner.optimizer.flat).all()
    assert learner.optimizer.skipped == 1


def test_reduced_precision_learns_nearly_the_same() -> None:
    sample = batch_of([0, 1, 2, 0], [1.0, 0.5, -1.0, 0.2], [0.9] * 4)._replace(obs=obs_of(4), next_obs=obs_of(4) * 2)
    plain, rounded = learner_of(TINY, Memory(sample)), learner_of(TINY, Memory(sample), amp=torch.bfloat16)
    for learner in (plain, rounded):
        for _ in range(100):
            learner.update()
    assert rounded.optimizer.flat.dtype == torch.float32
    assert rounded.metric_sums["loss"].item() == pytest.approx(plain.metric_sums["loss"].item(), rel=0.05)
    assert rounded.metric_sums["loss"] != plain.metric_sums["loss"], "nothing ran in bfloat16"


# ---- State


def test_state_dict_holds_everything_that_changes() -> None:
    """Two learners with different seeds; after the state of one is copied into the other they stay alike."""
    sample = batch_of([0, 1, 2, 0], [1.0, 0.5, -1.0, 0.2], [0.9] * 4)._replace(obs=obs_of(4))
    ours, theirs = (learner_of(TINY, Memory(sample), seed=seed) for seed in (1, 2))
    for _ in range(5):
        ours.act(obs_of(6))
        ours.update()
    for group, tensors in theirs.state_dict().items():
        for name, tensor in tensors.items():
            tensor.copy_(ours.state_dict()[group][name])
    for _ in range(3):
        assert torch.equal(ours.act(obs_of(6)), theirs.act(obs_of(6)))
        for learner in (ours, theirs):
            learner.update()
    assert torch.equal(ours.optimizer.flat, theirs.optimizer.flat)
    assert torch.equal(ours.target_weights, theirs.target_weights)
    net = dqn.policy_network(ours.spec, TINY, ours.state_dict()["model"])
    assert torch.equal(net(obs_of(6)), ours.online(obs_of(6)))
    assert not torch.equal(net(obs_of(6)), ours.target(obs_of(6)))


# ---- Configuration


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[(name, 0) for name in ("batch_size", "updates", "n_step", "target_period", "replay_capacity")],
        *[(name, -0.1) for name in ("gamma", "tau", "epsilon_start", "epsilon_high", "epsilon_low")],
        *[(name, 1.1) for name in ("gamma", "tau", "epsilon_start", "epsilon_high", "epsilon_low")],
        ("gamma", float("nan")),
        ("learning_rate", 0.0),
        ("learning_rate", float("nan")),
        ("huber", 0.0),
        ("huber", -1.0),
        ("max_grad_norm", 0.0),
        ("hidden", (64, 0)),
    ],
)
def test_impossible_settings_are_errors_that_name_them(field: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"^dqn\.{field} is .*; expected .*\.$"):
        Config(**{field: value})


def test_possible_settings_are_taken() -> None:
    Config(gamma=0.0, tau=1.0, epsilon_start=0.0, epsilon_high=1.0, n_step=1, updates=1, hidden=(1,), learning_starts=0)


# ---- Small games whose values are known


class State(NamedTuple):
    place: Tensor  # (N,) int32: 0 to 4
    clock: Tensor  # (N,) int32: steps of the episode
    key: Tensor  # (N,) int32


Outcome = tuple[Tensor, Tensor, Tensor]  # next place, reward, terminated
Step = Callable[[State, Tensor], Outcome]


def probe(step: Step, start: Callable[[Tensor], Tensor] = torch.zeros_like, time_limit: int = 0) -> Rules:
    """A game of five places, of which the player sees one alight."""

    def init(config: Any, key: Tensor) -> State:
        del config
        return State(start(key).to(torch.int32), torch.zeros_like(key), key)

    def play(config: Any, state: State, action: Tensor) -> tuple[State, Tensor, Tensor, Events]:
        del config
        place, reward, terminated = step(state, action)
        never = torch.zeros_like(terminated)
        after = State(place.to(torch.int32), state.clock + 1, state.key)
        return after, reward.to(torch.float32), terminated, Events(torch.zeros_like(state.clock), never, never)

    def observe(config: Any, state: State) -> Tensor:
        del config
        return F.one_hot(state.place.to(torch.int64), 5).to(torch.uint8)

    def spec(config: Any) -> Spec:
        del config
        return Spec((5,), torch.uint8, (1.0,) * 5, 1, 2, "points")

    game = SimpleNamespace(State=State, HIDDEN=("clock", "key"), init=init, step=play, observe=observe, spec=spec)
    return Rules(game, None, time_limit)  # type: ignore[arg-type]


def train(rules: Rules, updates: int = 150, **options: Any) -> Learner:
    """Play 16 environments at random into the memory, and learn from it: exploration is no part of these tests."""
    n_step = options.get("n_step", 1)
    config = Config(
        **{
            "batch_size": 256,
            "hidden": (16,),
            "learning_rate": 1e-2,
            "gamma": 0.5,
            "n_step": 1,
            "tau": 0.2,
            "epsilon_high": 1.0,
            "epsilon_low": 1.0,
            "replay_capacity": 16 * (32 + n_step),  # 32 rows can be drawn: as many of each phase of a period of four
        }
        | options
    )
    num_envs = batch.reset(rules, env_keys(3, torch.arange(16)))
    learner = Learner(rules, config, num_envs.game, 16, seed=1, runtime=Runtime(CPU))
    request = ReplayRequest(rules, num_envs.game, config.replay_capacity, config.n_step, config.gamma)
    learner.memory = DeviceReplay(request, final_states=40)
    collector = DeviceCollector(rules, learner, num_envs)
    for _ in range(40):
        collector.step()
    for update in range(updates):
        if update == updates * 2 // 3:  # the last third with smaller steps: the values settle
            learner.optimizer.learning_rate = config.learning_rate / 10
        learner.update()
    return learner


def values_at(learner: Learner, place: int) -> list[float]:
    with torch.no_grad():
        return learner.online(F.one_hot(torch.tensor([place]), 5)).squeeze(0).tolist()


def stand_still(state: State, action: Tensor) -> Outcome:
    """A reward of 1 for whatever is done, for ever."""
    del action
    return state.place, torch.ones_like(state.place), torch.zeros_like(state.place, dtype=torch.bool)


def end_every_fourth(state: State, action: Tensor) -> Outcome:
    return *stand_still(state, action)[:2], state.clock == 3


# A reward of 1 a step, gamma 1/2. For ever it is worth 2. Ended every fourth step, which the player cannot see coming, one
# step ahead is worth Q = 1 + 3/4 * Q/2, so 1.6; three steps ahead, from the four phases of the episode,
# Q = (1.75 + Q/8 + 1.75 + 1.5 + 1) / 4, so 1.5484.
ENDLESS, ENDED = 2.0, {1: 1.6, 3: 6 / 3.875}


@pytest.mark.parametrize("n_step", [1, 3])
def test_values_pass_through_a_truncation(n_step: int) -> None:
    learner = train(probe(stand_still, time_limit=4), n_step=n_step)
    assert values_at(learner, 0) == pytest.approx([ENDLESS] * 2, abs=0.06)


@pytest.mark.parametrize("n_step", [1, 3])
def test_values_stop_at_a_termination(n_step: int) -> None:
    learner = train(probe(end_every_fourth), n_step=n_step)
    assert values_at(learner, 0) == pytest.approx([ENDED[n_step]] * 2, abs=0.06)


@pytest.mark.parametrize("n_step", [1, 3])
def test_negative_control_truncation_taken_for_termination(n_step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A memory that writes a death where the time limit struck gets the wrong value: the test above can fail."""
    monkeypatch.setattr(windows, "TRUNCATED", windows.TERMINATED)
    learner = train(probe(stand_still, time_limit=4), n_step=n_step)
    assert values_at(learner, 0) == pytest.approx([ENDED[n_step]] * 2, abs=0.06)


def walk_on(state: State, action: Tensor) -> Outcome:
    """From place 0 or 1 one step to 2 or 3; only those two pay. A time limit of one step cuts every episode there."""
    del action
    return state.place.clamp(max=1) + 2, (state.place >= 2).float(), torch.zeros_like(state.place, dtype=torch.bool)


def test_a_truncated_episode_bootstraps_from_where_it_was_cut() -> None:
    """Lanes start anywhere. Places 2 and 3 pay 1 for ever: worth 2, and the step before them half of that.

    A memory that took the reset's State for the next one would mix in the value of places that do not pay.
    """
    learner = train(probe(walk_on, start=lambda key: random.below(random.bits(key, 0), 4), time_limit=1))
    for place, expected in enumerate([1.0, 1.0, 2.0, 2.0]):
        assert values_at(learner, place) == pytest.approx([expected] * 2, abs=0.06), f"place {place}"


def paid_by_place(state: State, action: Tensor) -> Outcome:
    del action
    return state.place, state.place * 0.25, torch.ones_like(state.place, dtype=torch.bool)


def paid_by_action(state: State, action: Tensor) -> Outcome:
    return state.place, torch.where(action == state.place % 2, 1.0, -1.0), torch.ones_like(action, dtype=torch.bool)


def choose_then_earn(state: State, action: Tensor) -> Outcome:
    """Place 0: nothing yet, action 1 leads to place 2, action 0 to 1. Then place 2 pays 1 and the game is over."""
    choosing = state.place == 0
    return torch.where(choosing, 1 + action, state.place), (state.place == 2).float(), ~choosing


def anywhere(key: Tensor) -> Tensor:
    return random.below(random.bits(key, 0), 5)


def test_probe_reward_depends_on_the_observation() -> None:
    learner = train(probe(paid_by_place, anywhere))
    for place in range(5):
        assert values_at(learner, place) == pytest.approx([place * 0.25] * 2, abs=0.05)


@pytest.mark.parametrize("dueling", [False, True])
def test_probe_reward_depends_on_observation_and_action(dueling: bool) -> None:
    learner = train(probe(paid_by_action, anywhere), dueling=dueling)
    for place in range(5):
        assert values_at(learner, place) == pytest.approx([1.0, -1.0] if place % 2 == 0 else [-1.0, 1.0], abs=0.1)


@pytest.mark.parametrize("options", [{}, {"n_step": 2}, {"double": False}, {"tau": 1.0, "target_period": 10}], ids=str)
def test_probe_reward_comes_a_step_later(options: dict[str, Any]) -> None:
    """The first action earns nothing, but leads to what is worth 1 a step later: half of it now."""
    learner = train(probe(choose_then_earn), **options)
    assert values_at(learner, 0) == pytest.approx([0.0, 0.5], abs=0.05)
    assert values_at(learner, 1) == pytest.approx([0.0, 0.0], abs=0.05)
    assert values_at(learner, 2) == pytest.approx([1.0, 1.0], abs=0.05)


def test_probe_learned_by_its_own_play() -> None:
    """The whole loop: act, step, remember, learn, with exploration going down; then greedy play is right every time."""
    rules = probe(choose_then_earn)
    num_envs = batch.reset(rules, env_keys(3, torch.arange(8)))
    options = {"learning_rate": 1e-2, "gamma": 0.5, "n_step": 1, "epsilon_steps": 800, "tau": 0.1}
    config = Config(batch_size=32, hidden=(16,), replay_capacity=800, **options)
    learner = Learner(rules, config, num_envs.game, 8, 1, Runtime(CPU))
    collector = DeviceCollector(rules, learner, num_envs)
    for iteration in range(200):
        collector.step()
        if iteration > 10:
            learner.update()
    collector.episode_stats.read()
    for _ in range(50):
        collector.step()
    found = collector.episode_stats.read()
    assert found["length"] == 2.0
    assert found["reward"] > 0.9  # the boldest environment still makes a random move in ten
    assert learner.policy(F.one_hot(torch.zeros(1, dtype=torch.int64), 5)).item() == 1


# ---- Seeds


def trained(seed: int) -> dict[str, Tensor]:
    options = {"hidden": (16, 16), "learning_starts": 64, "epsilon_steps": 500}
    settings = Settings(
        env="snake",
        num_envs=8,
        batch_size=16,
        n_step=1,
        replay_capacity=2000,
        seed=seed,
        device="cpu",
        compile=False,
        env_options={"width": 5, "height": 5},
        algo_options=options,
    )
    session = Session(resolve(settings), pytest.fail)
    session.iterate(60)
    assert session.updates == 60 - 8
    return {f"{group}.{name}": x.clone() for group, tensors in session.tensors().items() for name, x in tensors.items()}


def test_one_seed_repeats_bit_for_bit_and_two_differ() -> None:
    torch.manual_seed(1)
    first = trained(1)
    torch.manual_seed(2)
    again, other = trained(1), trained(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    for name in (
        "model.online.dense.layers.0.weight",
        "rng.key",
        "replay.step",
        "replay.states.food",
        "envs.game.food",
    ):
        assert not torch.equal(first[name], other[name]), f"{name} does not depend on the seed"


def test_first_weights_depend_on_the_seed() -> None:
    first, again, other = (learner_of(TINY, seed=seed).optimizer.flat for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(("progress", "rate"), [(0.0, 0.1), (0.5, 0.06), (1.0, 0.02), (2.0, 0.02)])
def test_the_learning_rate_falls_on_a_straight_line(progress: float, rate: float) -> None:
    """Of a step whose gradients are 1 everywhere, Adam's first: every weight moves by the rate."""
    learner = learner_of(dataclasses.replace(TINY, learning_rate=0.1, learning_rate_end=0.02))
    assert learner.scheduled
    learner.progress.fill_(progress)
    before = learner.optimizer.flat.clone()
    learner.apply(tuple(torch.ones_like(p) for p in learner.online.parameters()))
    torch.testing.assert_close(before - learner.optimizer.flat, torch.full_like(before, rate), rtol=1e-3, atol=1e-5)
    steady = learner_of(dataclasses.replace(TINY, learning_rate=0.1))
    assert not steady.scheduled
    steady.progress.fill_(1.0)
    before = steady.optimizer.flat.clone()
    steady.apply(tuple(torch.ones_like(p) for p in steady.online.parameters()))
    torch.testing.assert_close(before - steady.optimizer.flat, torch.full_like(before, 0.1), rtol=1e-3, atol=1e-5)
    with pytest.raises(UserError, match=r"dqn\.learning_rate_end is -1"):
        Config(learning_rate_end=-1)


def test_current_metrics() -> None:
    config = dataclasses.replace(TINY, epsilon_start=1.0, epsilon_high=0.5, epsilon_low=0.5, epsilon_steps=600)
    memory = SimpleNamespace(rows=50, written=torch.tensor(0))
    learner = learner_of(config, memory, num_envs=6)
    assert learner.current_metrics() == pytest.approx({"epsilon": 1.0, "replay_fill": 0.0})
    learner.acted.fill_(50)  # 300 of 600 steps
    memory.written.fill_(10)
    assert learner.current_metrics() == pytest.approx({"epsilon": 0.75, "replay_fill": 0.2})
    memory.written.fill_(70)  # the oldest are overwritten
    assert learner.current_metrics()["replay_fill"] == 1.0
    memory.written = None  # a kind that does not count its rows
    assert learner.current_metrics().keys() == {"epsilon"}
