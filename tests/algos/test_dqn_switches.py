"""DQN's switches: targets against plain loops, noise, small games, compiled against eager, runs that are continued."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_distribution import projected, quantile_loss
from test_dqn import (
    ENDED,
    ENDLESS,
    TINY,
    Memory,
    Outcome,
    State,
    batch_of,
    choose_then_earn,
    learner_of,
    masks_of,
    obs_of,
    paid_by_action,
    probe,
    stand_still,
    train,
)
from test_dqn_prioritized import differences, ranks, record, saved, session_of, slots_of
from test_dqn_prioritized import learner_of as ranking_learner
from torch import Tensor, nn
from torch.nn import functional as F

from redline.algos import dqn, networks
from redline.algos.dense import Head
from redline.algos.distribution import Categorical, Kind, Quantile
from redline.algos.dqn import PRESETS, Config, Learner
from redline.algos.network_config import ILLEGAL
from redline.algos.noisy import NoisyLinear, draw_noise, gaussian
from redline.algos.td_targets import distributional_losses, td_targets
from redline.core import random
from redline.core.errors import UserError
from redline.core.records import Batch, Spec
from redline.engine import fast
from redline.replay import windows
from redline.replay.priority import UNIT

CATEGORICAL = {"distribution": "categorical", "atoms": 21, "v_min": -2.5, "v_max": 2.5}
QUANTILE = {"distribution": "quantile", "atoms": 8}
MUNCHAUSEN = {"munchausen": True, "double": False}
SWITCHES: dict[str, dict[str, Any]] = {
    "categorical": CATEGORICAL,
    "quantile": QUANTILE,
    "munchausen": MUNCHAUSEN,
    "layer_norm": {"layer_norm": True},
    "noisy": {"noisy": True},
    "rainbow": PRESETS["rainbow"] | CATEGORICAL,
    "modern": PRESETS["modern"] | QUANTILE,
    "all but double": CATEGORICAL | MUNCHAUSEN | {"dueling": True, "noisy": True, "layer_norm": True},
}
each_switch = pytest.mark.parametrize("options", SWITCHES.values(), ids=SWITCHES)


def targets_of(config: Config, batch: Batch, online: Any, target: Any) -> Tensor:
    return td_targets(batch, online, target, config.double, config.munchausen_options)


def losses_of(config: Config, batch: Batch, online: Any, target: Any) -> tuple[Tensor, Tensor]:
    return distributional_losses(batch, online, target, config.double, config.munchausen_options)


def net_of(learner: Learner) -> nn.Module:
    """As evaluation makes it."""
    return dqn.policy_network(learner.spec, learner.config, learner.state_dict()["model"])


def drawn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- Munchausen targets


class Values:
    """A network that gives one table for observations of zeros, another for all others."""

    def __init__(self, here: Tensor, there: Tensor) -> None:
        self.here, self.there = here, there

    def __call__(self, obs: Tensor, legal: Tensor | None = None) -> Tensor:
        return networks.masked(self.there if obs.any() else self.here, legal)


def soft_policy(values: list[float], tau: float, legal: list[bool] | None = None) -> list[float]:
    best = max(values)
    weights = [
        math.exp((v - best) / tau) if ok else 0.0 for v, ok in zip(values, legal or [True] * len(values), strict=True)
    ]
    return [w / sum(weights) for w in weights]


def earned(values: list[float], action: int, alpha: float, tau: float, clip_range: float) -> float:
    """What the action taken earns besides its reward."""
    return alpha * max(tau * math.log(max(soft_policy(values, tau)[action], 1e-300)), clip_range)


def entropy(policy: list[float]) -> float:
    return -sum(p * math.log(p) for p in policy if p)


@pytest.mark.parametrize("tau", [0.03, 0.3, 2.0])
@pytest.mark.parametrize("alpha", [0.0, 0.9])
def test_munchausen_targets_equal_a_loop(alpha: float, tau: float) -> None:
    config = Config(munchausen=True, double=False, munchausen_alpha=alpha, munchausen_tau=tau, munchausen_clip=-0.8)
    here, there = drawn(7, 3), drawn(7, 3, seed=1)
    sample = batch_of([0, 1, 2, 0, 1, 2, 0], [0.5, -1.0, 0.0, 2.0, 0.1, 0.2, 0.3], [0.9, 0.0, 0.73, 0.5, 0.9, 0.9, 0.9])
    legal = masks_of(7)
    for mask in (None, legal):
        found = targets_of(config, sample._replace(next_legal=mask), None, Values(here, there))
        for row, target in enumerate(found.tolist()):
            action, reward, discount = (x[row].item() for x in (sample.action, sample.reward, sample.discount))
            values, follows = here[row].tolist(), there[row].tolist()
            policy = soft_policy(follows, tau, None if mask is None else mask[row].tolist())
            soft = sum(p * v for p, v in zip(policy, follows, strict=True)) + tau * entropy(policy)
            expected = reward + earned(values, action, alpha, tau, -0.8) + discount * soft
            assert target == pytest.approx(expected, rel=1e-4, abs=1e-4), f"sample {row}"


def test_munchausen_by_hand() -> None:
    """Two actions of equal value: each has probability a half. A far worse one earns the least there is."""
    config = Config(munchausen=True, double=False, munchausen_alpha=0.5, munchausen_tau=0.2)
    half = 0.2 * math.log(0.5)
    net = Values(torch.tensor([[1.0, 1.0], [9.0, 0.0]]), torch.tensor([[3.0, 3.0], [3.0, 3.0]]))
    found = targets_of(config, batch_of([0, 1], [0.25, 0.25], [0.5, 0.0]), None, net)
    assert found.tolist() == pytest.approx([0.25 + 0.5 * half + 0.5 * (3.0 - half), 0.25 + 0.5 * -1.0])


def test_munchausen_without_reward_and_temperature_is_the_maximum() -> None:
    config = Config(munchausen=True, double=False, munchausen_alpha=0.0, munchausen_tau=1e-4)
    sample = batch_of([0, 1, 2], [1.0, -1.0, 2.0], [0.5, 0.25, 0.0])
    net = Values(drawn(3, 3), drawn(3, 3, seed=1))
    plain = sample.reward + sample.discount * net.there.amax(1)
    torch.testing.assert_close(targets_of(config, sample, None, net), plain, rtol=1e-3, atol=1e-3)


@pytest.mark.fault("D6")
def test_a_state_without_a_legal_action_is_worth_nothing() -> None:
    legal = torch.tensor([[False] * 3, [True] * 3])
    sample = batch_of([0, 1], [1.0, 1.0], [0.9, 0.9])._replace(next_legal=legal)
    config = Config(munchausen=True, double=False, munchausen_alpha=0.0)
    found = targets_of(config, sample, None, Values(drawn(2, 3), drawn(2, 3, seed=1)))
    assert found[0].item() == 1.0
    assert found[1].item() != 1.0
    kind = Quantile(4)
    net = Outputs(kind, drawn(2, 3, 4), drawn(2, 3, 4, seed=1))
    losses = losses_of(Config(double=False), sample, net, net)[1]
    expected = quantile_loss(net.here[0, 0].tolist(), [1.0] * 4, 1.0)
    assert losses[0].item() == pytest.approx(expected, rel=1e-4)


# ---- Targets of distributions


class Outputs(Values):
    """As Values, of distributions."""

    def __init__(self, kind: Kind, here: Tensor, there: Tensor) -> None:
        super().__init__(here, there)
        self.kind = kind

    def outputs(self, obs: Tensor) -> Tensor:
        return self.there if obs.any() else self.here

    def __call__(self, obs: Tensor, legal: Tensor | None = None) -> Tensor:
        return networks.masked(self.kind.expected(self.outputs(obs)), legal)


@pytest.mark.parametrize("kind", [Categorical(7, -2.0, 3.0), Quantile(5, 0.7)], ids=["categorical", "quantile"])
@pytest.mark.parametrize("judge", ["double", "target", "munchausen"])
@pytest.mark.parametrize("masked", [False, True])
def test_losses_of_distributions_equal_a_loop(kind: Kind, judge: str, masked: bool) -> None:
    soft = judge == "munchausen"
    config = Config(double=judge == "double", munchausen=soft, munchausen_tau=0.3, munchausen_alpha=0.7)
    online, target = (
        Outputs(kind, *(drawn(7, 3, kind.atoms, seed=seed + k, scale=1.5) for k in (0, 1))) for seed in (3, 5)
    )
    sample = batch_of([0, 1, 2, 0, 1, 2, 0], [0.5, -1.0, 0.0, 2.0, 0.1, 9.0, 0.3], [0.9, 0.0, 0.73, 0.5, 0.9, 0.9, 0.9])
    sample = sample._replace(next_legal=masks_of(7) if masked else None)
    values, losses = losses_of(config, sample, online, target)
    for row in range(7):
        action, reward, discount = (x[row].item() for x in (sample.action, sample.reward, sample.discount))
        legal = masks_of(7)[row].tolist() if masked else [True] * 3
        follows, judged = kind.expected(target.there[row]).tolist(), kind.expected(online.there[row]).tolist()
        if soft:
            policy = soft_policy(follows, 0.3, legal)
            reward += earned(kind.expected(target.here[row]).tolist(), int(action), 0.7, 0.3, -1.0)
            reward += discount * 0.3 * entropy(policy)
        else:
            chooser = judged if config.double else follows
            best = max((a for a in range(3) if legal[a]), key=lambda a: chooser[a])
            policy = [float(a == best) for a in range(3)]
        taken = online.here[row, int(action)]
        if isinstance(kind, Categorical):
            mixture = [
                sum(policy[a] * target.there[row, a].softmax(0)[k].item() for a in range(3)) for k in range(kind.atoms)
            ]
            goal = projected(mixture, reward, discount, kind.low, kind.high)
            expected = -sum(g * x for g, x in zip(goal, taken.log_softmax(0).tolist(), strict=True))
        else:
            mixture = [sum(policy[a] * target.there[row, a, k].item() for a in range(3)) for k in range(kind.atoms)]
            expected = quantile_loss(taken.tolist(), [reward + discount * x for x in mixture], 0.7)
        assert losses[row].item() == pytest.approx(expected, rel=1e-3), f"sample {row}"
        assert values[row].item() == pytest.approx(kind.expected(taken).item(), rel=1e-5)


@pytest.mark.parametrize("options", [CATEGORICAL, QUANTILE], ids=["categorical", "quantile"])
def test_a_gradient_step_ranks_distributions_by_their_loss(options: dict[str, Any]) -> None:
    learner = ranking_learner(accumulate=2, **options)
    calls = record(learner)
    learner._apply = lambda _: None
    learner.gradient_step()
    found = ranks(learner).levels[0]
    last = calls[-1]
    losses = losses_of(learner.config, last.batch, learner.online, learner.target)[1].tolist()
    for slot, loss, weight in zip(slots_of(learner, last), losses, last.batch.weight.tolist(), strict=True):
        expected = max((loss if weight else 0.0) ** 0.6 * UNIT, 1.0)
        assert found[slot].item() == pytest.approx(expected, rel=1e-4, abs=1.0)
    assert len({round(loss, 3) for loss in losses}) > 5
    total = sum(
        float((losses_of(learner.config, x.batch, learner.online, learner.target)[1] * x.batch.weight).mean().detach())
        for x in calls
    )
    assert learner.metric_sums["loss"].item() == pytest.approx(total / 2, rel=1e-4)  # of two batches, the mean


@each_switch
def test_only_the_action_taken_gets_a_gradient_and_the_target_network_none(options: dict[str, Any]) -> None:
    config = dataclasses.replace(TINY, **options | {"dueling": False})
    sample = batch_of([1] * 4, [1.0] * 4, [0.5] * 4)._replace(obs=obs_of(4))
    learner = learner_of(config, Memory(sample))
    gradients = learner.optimizer.gradient(learner.loss(torch.tensor(0))[0])
    named = dict(zip((name for name, _ in learner.online.named_parameters()), gradients, strict=True))
    bias = next(x for name, x in named.items() if name.endswith("head.out.bias"))
    atoms = 1 if config.kind is None else config.atoms
    rows = bias[: 3 * atoms].view(3, atoms)
    assert (rows[1] != 0).all()
    assert not rows[[0, 2]].any()
    assert not any(parameter.requires_grad for parameter in learner.target.parameters())


@pytest.mark.parametrize("options", [CATEGORICAL, QUANTILE, {"noisy": True}], ids=["categorical", "quantile", "noisy"])
def test_reduced_precision_learns_nearly_the_same(options: dict[str, Any]) -> None:
    sample = batch_of([0, 1, 2, 0], [1.0, 0.5, -1.0, 0.2], [0.9] * 4)._replace(obs=obs_of(4), next_obs=obs_of(4) * 2)
    config = dataclasses.replace(TINY, **options)
    plain, rounded = learner_of(config, Memory(sample)), learner_of(config, Memory(sample), amp=torch.bfloat16)
    for learner in (plain, rounded):
        for _ in range(50):
            learner.update()
    assert rounded.metric_sums["loss"].item() == pytest.approx(plain.metric_sums["loss"].item(), rel=0.05)
    assert rounded.metric_sums["loss"] != plain.metric_sums["loss"], "nothing ran in bfloat16"


@pytest.mark.fault("D3")
@pytest.mark.parametrize("options", [CATEGORICAL, QUANTILE], ids=["categorical", "quantile"])
def test_a_sample_that_is_not_finite_is_skipped(options: dict[str, Any]) -> None:
    good, bad = (batch_of([0] * 4, [reward] * 4, [0.0] * 4) for reward in (1.0, float("nan")))
    learner = learner_of(dataclasses.replace(TINY, **options), Memory(good, bad, good))
    for skipped in (0, 1, 1):
        learner.update()
        assert learner.optimizer.skipped == skipped
    assert torch.isfinite(learner.optimizer.flat).all()


# ---- The network


@pytest.mark.parametrize("kind", [Categorical(5, -1.0, 1.0), Quantile(5)], ids=["categorical", "quantile"])
@pytest.mark.parametrize("net", ["mlp", "cnn", "resnet"])
def test_values_of_distributions_are_their_means(kind: Kind, net: Any) -> None:
    spec = Spec((2, 5, 6), torch.float32, (1.0,) * 2, 1, 3, "points")
    config = networks.NetworkConfig(net=net, hidden=(16,), channels=(4,), layer_norm=True)
    for dueling in (False, True):
        built = networks.build(spec, config, 1, dueling=dueling, kind=kind)
        assert isinstance(built, networks.Distributional)
        obs, legal = drawn(7, 2, 5, 6), masks_of(7)
        outputs = built.outputs(obs)
        assert outputs.shape == (7, 3, 5)
        means = outputs.mean(2) if isinstance(kind, Quantile) else outputs.softmax(2) @ torch.linspace(-1, 1, 5)
        torch.testing.assert_close(built(obs), means, rtol=1e-4, atol=1e-6)
        assert torch.equal(built(obs, legal), torch.where(legal, built(obs), ILLEGAL))
        action = torch.tensor([0, 1, 2, 0, 1, 2, 0])
        assert torch.equal(built.chosen(obs, action), built(obs)[torch.arange(7), action])
        if dueling:  # value and advantages atom by atom: (value, three advantages) of five each
            raw = built.body(obs).view(7, 4, 5)
            torch.testing.assert_close(outputs.mean(1), raw[:, 0], rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(outputs - outputs[:, :1], raw[:, 1:] - raw[:, 1:2], rtol=1e-4, atol=1e-6)


# ---- Noise


def noise_of(net: nn.Module) -> Tensor:
    return torch.cat([module.noise for module in net.modules() if isinstance(module, NoisyLinear)])


def test_gaussian_numbers_look_so() -> None:
    found = gaussian(random.bits(random.seed_key(3), torch.arange(100_000))).double()
    assert abs(found.mean()) < 0.02
    assert found.std() == pytest.approx(1.0, abs=0.02)
    for bound, progress in ((-1.0, 0.1587), (0.0, 0.5), (1.6449, 0.95)):
        assert (found < bound).double().mean() == pytest.approx(progress, abs=0.006)
    ends = gaussian(torch.tensor([0, 2**32 - 1]))
    assert torch.isfinite(ends).all()
    assert ends[0] == -ends[1]


def test_a_noisy_layer_without_deviation_or_noise_is_the_plain_layer() -> None:
    torch.manual_seed(0)
    plain, x, key = nn.Linear(6, 4), drawn(5, 6), random.seed_key(1)
    still, shaken = NoisyLinear(plain, 0.0), NoisyLinear(plain, 0.5)
    assert torch.equal(shaken(x), plain(x)), "a new layer has no noise"
    for layer in (still, shaken):
        draw_noise(layer, key)
    assert torch.equal(still(x), plain(x))
    assert not torch.equal(shaken(x), plain(x))
    deviation = 0.5 / math.sqrt(6)
    inputs, outputs = shaken.noise[:6], shaken.noise[6:]
    weight = plain.weight + deviation * torch.outer(outputs, inputs)
    expected = F.linear(x, weight, plain.bias + deviation * outputs)
    torch.testing.assert_close(shaken(x), expected)
    draw_noise(shaken, None)
    assert torch.equal(shaken(x), plain(x))


def test_noise_depends_on_key_and_layer_alone() -> None:
    spec = Spec((3,), torch.float32, (1.0,) * 3, 1, 3, "points")
    net, other = (networks.build(spec, networks.NetworkConfig(hidden=(8, 8)), seed, sigma=0.5) for seed in (1, 2))
    for part in (net, other):
        draw_noise(part, random.seed_key(1))
    first = noise_of(net).clone()
    assert torch.equal(first, noise_of(other))
    assert len(first.unique()) == len(first), "two numbers of the noise are the same"
    assert 0.2 < (first > 0).double().mean() < 0.8
    draw_noise(net, random.seed_key(2))
    assert not torch.isclose(noise_of(net), first).any()
    draw_noise(net, random.seed_key(1))
    assert torch.equal(noise_of(net), first)


@pytest.mark.parametrize("options", [{}, CATEGORICAL, {"layer_norm": True}], ids=["plain", "categorical", "layer_norm"])
def test_a_noisy_network_begins_with_the_weights_of_a_plain_one(options: dict[str, Any]) -> None:
    plain, noisy = (learner_of(dataclasses.replace(TINY, noisy=on, **options)) for on in (False, True))
    assert torch.equal(plain.online(obs_of(6)), noisy.online(obs_of(6)))
    assert noisy.optimizer.flat.numel() > plain.optimizer.flat.numel()
    assert not any("noise" in name for name in noisy.state_dict()["model"])


@pytest.mark.parametrize("net", ["mlp", "cnn", "resnet"])
def test_fully_connected_layers_are_noisy_and_convolutions_are_not(net: Any) -> None:
    spec = Spec((2, 5, 6), torch.float32, (1.0,) * 2, 1, 3, "points")
    built = networks.build(spec, networks.NetworkConfig(net=net, hidden=(16, 8), channels=(4,)), 1, sigma=0.5)
    found = {name for name, module in built.named_modules() if isinstance(module, NoisyLinear)}
    hidden = {"dense.layers.0", "dense.layers.1"} if net == "mlp" else {"dense.layers.0"}
    assert found == hidden | {"dense.head.out"}


def noisy_learner(seed: int = 0, num_envs: int = 400, accumulate: int = 1, **options: Any) -> Learner:
    still = {"epsilon_start": 0.0, "epsilon_high": 0.0, "epsilon_low": 0.0}
    sample = batch_of([0, 1, 2, 0], [1.0, 0.5, -1.0, 0.2], [0.9] * 4)._replace(obs=obs_of(4))
    config = dataclasses.replace(TINY, noisy=True, **still | options)
    return learner_of(config, Memory(sample), num_envs, accumulate, seed=seed)


def test_play_is_noisy_and_evaluation_is_not() -> None:
    learner, obs = noisy_learner(), obs_of(400)
    best = net_of(learner)(obs).argmax(1)
    for _ in range(20):
        learner.act(obs)
        assert torch.equal(learner.policy(obs), best)
    calls = torch.stack([learner.act(obs) for _ in range(60)])
    counts = torch.nn.functional.one_hot(calls, 3).sum(0)  # of each environment: at first the noise decides alone
    assert counts.min() > 5, "there are actions the noise does not reach"


def test_noise_repeats_by_seed() -> None:
    ours, again, other = noisy_learner(1), noisy_learner(1), noisy_learner(2)
    for learner in (ours, again, other):
        learner.act(obs_of(400))
    played = [noise_of(learner.online).clone() for learner in (ours, again, other)]
    for learner in (ours, again, other):
        learner.update()
    assert torch.equal(played[0], played[1])
    assert not torch.isclose(played[0], played[2]).any()
    assert torch.equal(ours.optimizer.flat, again.optimizer.flat)
    assert torch.equal(noise_of(ours.target), noise_of(again.target))


def test_noise_is_new_in_every_step_batch_and_network() -> None:
    learner = noisy_learner(accumulate=2)
    found = []
    loss = learner.loss

    def watched(part: Tensor) -> Any:
        result = loss(part)
        found.extend([noise_of(learner.online).clone(), noise_of(learner.target).clone()])
        return result

    learner._loss = watched
    for _ in range(3):
        learner.act(obs_of(400))
        found.append(noise_of(learner.online).clone())
        learner.update()
    assert len(found) == 3 * 5
    for a, b in itertools.combinations(found, 2):
        assert not torch.isclose(a, b).any()


def test_deviations_are_learned() -> None:
    """Noise that costs is unlearned: a single state whose value is known."""
    sample = batch_of([0] * 4, [1.0] * 4, [0.0] * 4)._replace(obs=torch.ones(4, 3))
    learner = learner_of(dataclasses.replace(TINY, noisy=True, learning_rate=1e-2), Memory(sample))

    def spread() -> float:
        values = []
        for number in range(50):
            draw_noise(learner.online, random.fold(random.seed_key(9), number))
            values.append(learner.online(torch.ones(1, 3))[0, 0].item())
        return float(torch.tensor(values).std())

    before = spread()
    for _ in range(200):
        learner.update()
    assert spread() < 0.6 * before
    assert net_of(learner)(torch.ones(1, 3))[0, 0].item() == pytest.approx(1.0, abs=0.1)


# ---- Small games


def values(learner: Learner, place: int) -> list[float]:
    with torch.no_grad():
        return net_of(learner)(F.one_hot(torch.tensor([place]), 5)).squeeze(0).tolist()


MEANS = {name: SWITCHES[name] for name in ("categorical", "quantile", "layer_norm", "noisy", "rainbow")}


@pytest.mark.parametrize("options", MEANS.values(), ids=MEANS)
def test_probe_reward_comes_a_step_later(options: dict[str, Any]) -> None:
    """The same values as without the switch. (Munchausen has others, see below.)"""
    options = options | {"n_step": 1, "prioritized": False, "atoms": 11, "noisy_sigma": 0.1}
    learner = train(probe(choose_then_earn), updates=250, **options)
    assert values(learner, 0) == pytest.approx([0.0, 0.5], abs=0.08)
    assert values(learner, 1) == pytest.approx([0.0, 0.0], abs=0.08)
    assert values(learner, 2) == pytest.approx([1.0, 1.0], abs=0.08)


@pytest.mark.parametrize(("options", "n_step"), [(CATEGORICAL, 1), (QUANTILE, 3)], ids=["categorical", "quantile"])
def test_values_pass_through_a_truncation(
    options: dict[str, Any], n_step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with a memory that writes a death where the time limit struck, they do not: the negative control."""
    learner = train(probe(stand_still, time_limit=4), n_step=n_step, **options)
    assert values(learner, 0) == pytest.approx([ENDLESS] * 2, abs=0.1)
    monkeypatch.setattr(windows, "TRUNCATED", windows.TERMINATED)
    learner = train(probe(stand_still, time_limit=4), n_step=n_step, **options)
    assert values(learner, 0) == pytest.approx([ENDED[n_step]] * 2, abs=0.1)


def toss(state: State, action: Tensor) -> Outcome:
    """A coin falls, and the game is over: 1 or -1 for action 0, half of that for action 1."""
    coin = random.below(random.bits(state.key, 7), 2) * 2.0 - 1.0
    return state.place, coin / (1 + action), torch.ones_like(action, dtype=torch.bool)


def test_chance_is_learned_as_a_distribution() -> None:
    """Both actions are worth nothing on average; how far it may go is told apart."""
    seen = F.one_hot(torch.tensor([0]), 5)
    quantiles = train(probe(toss), updates=300, distribution="quantile", atoms=6, huber=0.1).online.outputs(seen)[0]
    for action, size in ((0, 1.0), (1, 0.5)):
        found = quantiles[action].tolist()
        assert found[:2] == pytest.approx([-size] * 2, abs=0.15)
        assert found[-2:] == pytest.approx([size] * 2, abs=0.15)
    kind = {"distribution": "categorical", "atoms": 9, "v_min": -2.0, "v_max": 2.0}  # every half
    shares = train(probe(toss), updates=300, **kind).online.outputs(seen)[0].softmax(1)
    assert shares[0, [2, 6]].tolist() == pytest.approx([0.5] * 2, abs=0.1)
    assert shares[1, [3, 5]].tolist() == pytest.approx([0.5] * 2, abs=0.1)


ALPHA, TAU, CLIP = 0.5, 0.4, -0.5


def soft_values(n_step: int, alpha: float = ALPHA) -> dict[int, list[float]]:
    """Of choose_then_earn with gamma 1/2, by repeating the definition: place 0 leads to 1 or 2, both end, 2 pays 1."""
    found = {place: [0.0, 0.0] for place in range(3)}
    for _ in range(500):
        soft = {}
        for place, at in found.items():
            policy = soft_policy(at, TAU)
            soft[place] = sum(p * v for p, v in zip(policy, at, strict=True)) + TAU * entropy(policy)
        bonus = {place: [earned(at, a, alpha, TAU, CLIP) for a in range(2)] for place, at in found.items()}
        ahead = [0.5 * (soft[1 + a] if n_step == 1 else float(a)) for a in range(2)]  # two steps: the end is in sight
        found = {
            0: [bonus[0][a] + ahead[a] for a in range(2)],
            1: list(bonus[1]),
            2: [1.0 + bonus[2][a] for a in range(2)],
        }
    return found


@pytest.mark.parametrize(
    ("options", "n_step"),
    [({}, 1), ({}, 2), (CATEGORICAL, 1), (QUANTILE | {"layer_norm": True}, 2)],
    ids=["one step", "two steps", "categorical", "quantile"],
)
def test_munchausen_learns_its_own_values(options: dict[str, Any], n_step: int) -> None:
    """Over two steps the first action alone earns its log-probability."""
    chosen = {"munchausen_alpha": ALPHA, "munchausen_tau": TAU, "munchausen_clip": CLIP, "n_step": n_step}
    learner = train(probe(choose_then_earn), updates=250, **MUNCHAUSEN | chosen | options)
    expected = soft_values(n_step)
    for place in range(3):
        assert values(learner, place) == pytest.approx(expected[place], abs=0.08), f"place {place}"
    without = soft_values(n_step, alpha=0.0)  # the negative control: other values without what Munchausen adds
    assert abs(without[0][0] - expected[0][0]) > 0.2


def test_munchausen_punishes_what_it_would_not_do() -> None:
    """One step, 1 for the right action and -1 for the wrong: the gap of 2 is clipped, and 0.9 of that is added to it."""
    learner = train(probe(paid_by_action), updates=250, **MUNCHAUSEN)
    assert values(learner, 0) == pytest.approx([1.0, -1.9], abs=0.1)


# ---- Compiled, and weights that reach every copy


class Still:
    """A memory of one batch."""

    def __init__(self, found: Batch) -> None:
        self.found = found

    def sample(self, *_: object) -> Batch:
        return self.found


def assert_compiled_equals_eager(options: dict[str, Any], compiler: Callable[..., Any]) -> None:
    """Play, losses and gradients are those of eager, time after time; then the weights change and must be seen."""
    sample = batch_of([0, 1, 2, 0], [1.0, 0.5, -1.0, 0.2], [0.9] * 4)
    sample = sample._replace(obs=obs_of(4), next_obs=1 - obs_of(4), next_legal=masks_of(4))
    sample = sample if not options.get("munchausen") else sample._replace(next_legal=None)
    config = dataclasses.replace(TINY, **options | {"epsilon_steps": 10, "epsilon_high": 0.0, "epsilon_low": 0.0})
    ours, theirs = (learner_of(config, Still(sample)) for _ in range(2))
    torch.compiler.reset()
    act, ours._loss = compiler(ours.act), compiler(ours.loss)
    for _ in range(4):
        assert torch.equal(act(obs_of(6)), theirs.act(obs_of(6)))
        for learner in (ours, theirs):
            learner.update()
    torch.testing.assert_close(ours.optimizer.flat, theirs.optimizer.flat, rtol=1e-3, atol=1e-5)
    assert ours.metric_sums["loss"].item() == pytest.approx(theirs.metric_sums["loss"].item(), rel=1e-4)
    for action in (1, 2, 0):
        name_action(ours, action)
        assert (act(obs_of(6)) == action).all(), "acting does not see the new weights"


@pytest.mark.parametrize("name", [name for name in SWITCHES if name not in PRESETS])
def test_each_switch_is_one_graph(name: str) -> None:
    """Traced without a break, so that a GPU can capture it. The generated code is tested below."""
    assert_compiled_equals_eager(SWITCHES[name], functools.partial(torch.compile, backend="eager", fullgraph=True))


@pytest.mark.parametrize("name", ["rainbow", "modern"])
def test_compiled_equals_eager(name: str) -> None:
    assert_compiled_equals_eager(SWITCHES[name], fast.Compiler(True, pytest.fail))


def name_action(learner: Learner, action: int) -> None:
    """Zero the vector the optimizer steps, and let one action be the best whatever is seen."""
    learner.optimizer.flat.zero_()
    config = learner.config
    head = next(module for module in learner.online.modules() if isinstance(module, Head))
    atoms = 1 if config.kind is None else config.atoms
    rows = head.out.bias.detach()[: (learner.spec.num_actions + config.dueling) * atoms].view(-1, atoms)
    rows[action + config.dueling] = 3.0 * torch.arange(1, atoms + 1)


@each_switch
def test_zeroed_weights_reach_every_copy_of_the_policy(options: dict[str, Any]) -> None:
    still = {"epsilon_start": 0.0, "epsilon_high": 0.0, "epsilon_low": 0.0, "tau": 1.0}
    learner, obs = learner_of(dataclasses.replace(TINY, **options | still), num_envs=50), obs_of(50)
    for action in (1, 0, 2):
        name_action(learner, action)
        assert (learner.act(obs) == action).all()
        assert (learner.policy(obs) == action).all()
        assert (net_of(learner)(obs).argmax(1) == action).all()
        assert torch.equal(net_of(learner)(obs), learner.online(obs))
        learner.apply(tuple(torch.zeros_like(p) for p in learner.online.parameters()))
        assert torch.equal(learner.target(obs), learner.online(obs))
        assert (learner.target(obs).argmax(1) == action).all()


# ---- Runs


def switched_session(options: dict[str, Any], seed: int = 1) -> Any:
    small = {"hidden": (16,), "learning_starts": 64, "epsilon_steps": 200, "priority_beta": 0.2}
    return session_of(seed=seed, prioritized=options.get("prioritized", False), algo_options=small | options)


@each_switch
def test_a_continued_session_goes_on_as_if_it_had_not_stopped(options: dict[str, Any]) -> None:
    whole = switched_session(options)
    whole.iterate(15)
    groups, counters = saved(whole), whole.counters()
    whole.iterate(12)
    part = switched_session(options, seed=2)
    part.iterate(11)  # what is loaded into has a past, and noise, of its own
    part.load(groups, counters)
    part.iterate(12)
    assert not differences(saved(part), saved(whole))
    assert part.updates == whole.updates > 12
    assert torch.isfinite(whole.learner.optimizer.flat).all()
    assert whole.learner.optimizer.skipped == 0
    net = net_of(whole.learner)
    whole.learner.policy(batch_obs(whole))  # without noise
    assert torch.equal(net(batch_obs(whole)), whole.learner.online(batch_obs(whole)))


def batch_obs(session: Any) -> Tensor:
    rules = session.collector.rules
    found: Tensor = rules.game.observe(rules.config, session.collector.envs.game)
    return found


def test_the_policy_of_a_checkpoint_scores_illegal_actions_lowest() -> None:
    for options in (CATEGORICAL, QUANTILE, {"noisy": True}):
        learner, legal = learner_of(dataclasses.replace(TINY, **options)), masks_of(14)
        learner.act(obs_of(6))
        net = net_of(learner)
        plain, scores = net(obs_of(14)), net(obs_of(14), legal)
        assert torch.equal(scores[legal], plain[legal])
        assert (scores[~legal] == ILLEGAL).all()


# ---- Configuration


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("distribution", "normal"),
        ("atoms", 1),
        ("v_min", 10.0),
        ("v_min", float("nan")),
        ("munchausen_alpha", 1.1),
        ("munchausen_tau", 0.0),
        ("munchausen_clip", 0.1),
        ("noisy_sigma", -0.1),
        ("noisy_sigma", float("inf")),
        ("munchausen", True),  # with double, which is on unless it is switched off
    ],
)
def test_impossible_settings_are_errors_that_name_them(field: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"^dqn\.{field} is .*; expected .*\.$"):
        Config(**{field: value})


@pytest.mark.parametrize("options", [CATEGORICAL, QUANTILE], ids=["categorical", "quantile"])
def test_what_games_cannot_have_is_refused(options: dict[str, Any]) -> None:
    plain = Spec((3,), torch.float32, (1.0,) * 3, 1, 3, "points")
    after = dataclasses.replace(plain, obs_shape=(3, 3), afterstates=True)
    with pytest.raises(UserError, match=r"^distribution is on, but with afterstates .*\.$"):
        learner_of(dataclasses.replace(TINY, **options), spec=after)
    with pytest.raises(UserError, match=r"^dqn\.munchausen is on; expected a game in which every action is legal"):
        learner_of(dataclasses.replace(TINY, **options | MUNCHAUSEN), spec=dataclasses.replace(plain, masked=True))


def test_munchausen_needs_all_afterstates() -> None:
    config = dataclasses.replace(TINY, **MUNCHAUSEN)
    spec = Spec((3, 2), torch.float32, (1.0,) * 2, 1, 3, "points", afterstates=True)
    learner = learner_of(config, spec=spec)
    learner.rules.game.observe_afterstate = lambda *_: None  # type: ignore[misc]
    with pytest.raises(UserError, match=r"^dqn\.munchausen is on; expected a game without observe_afterstate"):
        Learner(learner.rules, config, None, 1, 0, learner.runtime)


def test_noise_and_munchausen_with_afterstates() -> None:
    spec = Spec((3, 2), torch.float32, (1.0,) * 2, 1, 3, "points", afterstates=True)
    sample = batch_of([0, 1, 2, 0], [1.0, 0.5, -1.0, 0.2], [0.9] * 4)
    sample = sample._replace(obs=drawn(4, 3, 2), next_obs=drawn(4, 3, 2, seed=1))
    learner = learner_of(dataclasses.replace(TINY, noisy=True, **MUNCHAUSEN), Memory(sample), spec=spec)
    before = net_of(learner)(sample.obs)
    learner.update()
    assert not torch.equal(net_of(learner)(sample.obs), before)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_settings(name: str) -> None:
    config = Config(**PRESETS[name])
    assert config.noisy == (name == "rainbow")
    assert config.munchausen == (name == "modern")
    if name == "plain":
        assert config == Config()


def test_a_run_is_not_continued_with_another_network() -> None:
    assert {"distribution", "atoms", "v_min", "v_max", "noisy", "layer_norm", "dueling"} <= set(dqn.RESUME_FIXED)
