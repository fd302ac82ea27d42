"""PPO: numbers worked out by hand, plain references, small games whose best play is known, and runs that repeat."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from probes import (
    State,
    anywhere,
    choose_then_earn,
    end_every_fourth,
    paid_by_action,
    paid_by_place,
    probe,
    seen_at,
    stand_still,
)
from torch import Tensor
from torch.nn import functional as F

from redline.algos import networks, ppo, returns
from redline.algos.ppo import Config, Learner
from redline.collect.device_collector import DeviceCollector
from redline.core import random
from redline.core.errors import UserError
from redline.core.records import Spec
from redline.engine.runtime import Runtime
from redline.envs import batch, make_rules
from redline.envs.batch import Rules, env_keys
from redline.run.resolve import resolve
from redline.run.session import Session
from redline.run.settings import Settings

CPU = torch.device("cpu")
NUM_ENVS = 16
TINY = Config(rollout_steps=4, epochs=1, batch_size=16, hidden=(8,), learning_rate=1e-2, gamma=0.5)


# ---- Advantages


def test_gae_by_hand() -> None:
    """gamma 1/2, lambda 1/2, values 1, 2, 3 and then 4; rewards 1, 1, 1.

    Lane 0 goes on: deltas 1 + 1 - 1, 1 + 3/2 - 2, 1 + 2 - 3, so 1, 1/2, 0; each adds a quarter of the next.
    Lane 1 terminates in row 1: its delta is 1 - 2, and nothing comes from row 2.
    Lane 2 is cut there instead, at a place worth 6: the reward of row 1 is 1 + 6/2, so its delta is 4 - 2.
    """
    reward = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 4.0], [1.0, 1.0, 1.0]])
    value = torch.tensor([[1.0] * 3, [2.0] * 3, [3.0] * 3])
    ended = torch.tensor([[False] * 3, [False, True, True], [False] * 3])
    found = returns.gae(reward, value, torch.full((3,), 4.0), ended, gamma=0.5, gae_lambda=0.5)
    assert found.T.tolist() == [[1 + (1 / 2) / 4, 1 / 2, 0.0], [1 - 1 / 4, -1.0, 0.0], [1 + 2 / 4, 2.0, 0.0]]


@pytest.mark.parametrize("lam", [0.0, 0.9, 1.0])
def test_gae_against_the_sum_over_every_later_step(lam: float) -> None:
    """The definition, one (step, environment) at a time: sum of (gamma lambda)^k delta_k up to the end of the episode."""
    generator = torch.Generator().manual_seed(3)
    steps, num_envs, gamma = 13, 6, 0.8
    reward, value = (torch.randn(steps, num_envs, generator=generator) for _ in range(2))
    last, ended = torch.randn(num_envs, generator=generator), torch.rand(steps, num_envs, generator=generator) < 0.2
    found = returns.gae(reward, value, last, ended, gamma, lam)
    following = torch.cat([value[1:], last.unsqueeze(0)])
    for t in range(steps):
        for env_index in range(num_envs):
            total, weight = 0.0, 1.0
            for k in range(t, steps):
                over = bool(ended[k, env_index])
                delta = reward[k, env_index] + (0 if over else gamma * following[k, env_index]) - value[k, env_index]
                total += weight * float(delta)
                weight *= gamma * lam
                if over:
                    break
            assert found[t, env_index].item() == pytest.approx(total, abs=1e-5)
    assert ended.any()


# ---- The loss


def test_loss_against_a_plain_reference() -> None:
    rules = probe(paid_by_action, anywhere)
    learner = learner_of(TINY, rules)
    play(learner, rules, 4)
    learner.compute_targets()
    with torch.no_grad():  # as after some steps: the policy is no longer the one that played
        learner.net.body.dense.head.out.weight.normal_(std=0.15, generator=torch.Generator().manual_seed(1))
    learner.progress.fill_(0.5)
    index = torch.arange(0, 64, 3)
    loss, measured = learner.loss(index)

    scores = learner.net.body(learner.rollout.obs[index]).double()
    probability = scores[:, :2].exp() / scores[:, :2].exp().sum(1, keepdim=True)
    value = learner.net.mean + learner.net.variance.sqrt() * scores[:, 2]
    advantages = learner.advantages[index].double()
    advantages = (advantages - advantages.mean()) / advantages.std(correction=0)
    policy = value_loss = entropy = clipped = kl = 0.0
    for i, sample in enumerate(index.tolist()):
        ratio = (
            probability[i, learner.rollout.action[sample]] / learner.rollout.outputs["logp"][sample].double().exp()
        ).item()
        a = advantages[i].item()
        policy += -min(ratio * a, min(max(ratio, 0.8), 1.2) * a)
        value_loss += 0.5 * (value[i] - learner.targets[sample]).item() ** 2 / learner.net.variance.item()
        entropy += -sum(p * math.log(p) for p in probability[i].tolist())
        clipped += float(abs(ratio - 1) > 0.2)
        kl += ratio - 1 - math.log(ratio)
    expected = [x / len(index) for x in (policy, value_loss, entropy, clipped, kl)]
    total = expected[0] + 0.5 * expected[1] - 0.0055 * expected[2]  # half-way from 0.01 to 0.001
    assert measured.tolist() == pytest.approx([total, *expected], rel=1e-3, abs=1e-5)
    assert loss.item() == pytest.approx(total, rel=1e-3)
    assert 0.1 < expected[3] < 0.9


@pytest.mark.parametrize(
    ("ratio", "advantage", "moves"),
    [(1.0, 1.0, True), (1.3, 1.0, False), (1.3, -1.0, True), (0.7, 1.0, True), (0.7, -1.0, False)],
)
def test_a_clipped_ratio_has_no_gradient(ratio: float, advantage: float, moves: bool) -> None:
    logp = torch.tensor([math.log(ratio)], requires_grad=True)
    loss = ppo.policy_loss(logp, torch.zeros(1), torch.tensor([advantage]), 0.2)
    (gradient,) = torch.autograd.grad(loss, logp)
    assert gradient.item() == pytest.approx(-advantage * ratio if moves else 0.0)


@pytest.mark.fault("D10")
@pytest.mark.parametrize("level", [0.0, 1.0, -7.3, 1e4, 1e-3])
def test_equal_advantages_are_none(level: float) -> None:
    rounded = level * (1 + 1.2e-7 * (torch.arange(999) % 2))  # equal but for the last digit
    assert ppo.normalize(rounded).abs().max() < 0.02
    assert ppo.normalize(torch.full((999,), level)).abs().max() < 0.02
    assert ppo.normalize(torch.tensor([level])).tolist() == [0.0]  # a batch of one
    spread = ppo.normalize(level + torch.tensor([1.0, -1.0, 3.0, -3.0]) * max(abs(level), 1.0))
    assert spread.tolist() == pytest.approx([x / 5**0.5 for x in (1, -1, 3, -3)], rel=1e-3)


def test_accumulated_batches_are_one_gradient_step() -> None:
    """Two batches of 16 added up: the mean of their gradients, in half as many steps."""
    rules = probe(paid_by_action, anywhere)
    learner = learner_of(TINY, rules, accumulate=2)
    play(learner, rules, 4)
    learner.compute_targets()
    handed_over = []
    learner._apply, learner._compute_targets = handed_over.append, lambda: None
    learner.update()
    assert (len(handed_over), learner.updates_per_iteration, learner.samples_per_update) == (2, 2, 32)
    parts = [
        learner.optimizer.gradient(learner.loss(learner.order[k : k + 16], learner.order[:32])[0] * 2) for k in (0, 16)
    ]
    for total, first, second in zip(handed_over[0], *parts, strict=True):
        torch.testing.assert_close(total, (first + second) / 2)
    assert sorted(learner.order.tolist()) == list(range(64))


# ---- Schedules and statistics


@pytest.mark.parametrize(
    ("progress", "rate", "bonus"),
    [(0.0, 1e-2, 0.1), (0.25, 7.75e-3, 0.08), (0.5, 5.5e-3, 0.06), (1.0, 1e-3, 0.02), (1.5, 1e-3, 0.02)],
)
def test_schedules_at_start_middle_end_and_beyond(progress: float, rate: float, bonus: float) -> None:
    config = dataclasses.replace(TINY, learning_rate_end=1e-3, entropy_coef=0.1, entropy_end=0.02, value_coef=0.0)
    rules = probe(paid_by_action, anywhere)
    learner = learner_of(config, rules)
    play(learner, rules, 4)
    learner.progress.fill_(progress)
    learner.compute_targets()
    assert learner.learning_rate.item() == pytest.approx(rate)
    loss, policy, _, entropy, *_ = learner.loss(torch.arange(16))[1].tolist()
    assert policy - loss == pytest.approx(bonus * entropy, rel=1e-4, abs=1e-6)
    before = learner.optimizer.flat.clone()
    learner.apply(tuple(torch.ones_like(p) for p in learner.net.parameters()))
    moved = (before - learner.optimizer.flat).abs()
    assert moved.max().item() == pytest.approx(rate, rel=0.02), "the optimizer does not see the rate"


def test_the_session_tells_how_far_training_is() -> None:
    session = session_of(steps=8 * 4 * 10)
    shares = []
    for _ in range(12):
        session.iterate(1)
        shares.append(round(session.learner.progress.item(), 6))
    assert shares == [*(k / 10 for k in range(10)), 1.0, 1.0]
    session = session_of(steps=None)
    session.progress = 0.375
    session.iterate(2)
    assert session.learner.progress == 0.375


def test_return_statistics_follow_what_is_seen() -> None:
    net = networks.build_actor_critic(probe(paid_by_place).game.spec(None), networks.NetworkConfig("mlp", (8,)), 0, 0.5)
    generator = torch.Generator().manual_seed(0)
    seen = [torch.randn(50, generator=generator) * scale + scale for scale in (1.0, 3.0, 10.0)]
    for values in seen:
        net.update_return_stats(values)
    together = torch.cat(seen)
    assert net.mean.item() == pytest.approx(together.mean().item(), rel=1e-4)
    assert net.variance.item() == pytest.approx(together.var(correction=0).item(), rel=1e-4)
    for _ in range(1000):
        net.update_return_stats(torch.tensor([5.0, 9.0]))
    assert (net.mean.item(), net.variance.item()) == pytest.approx((7.0, 4.0), rel=1e-2)
    for _ in range(2000):
        net.update_return_stats(torch.full((9,), 7.0))  # no variance at all
    assert torch.isfinite(net(torch.zeros(1, 5))[1]).all()
    assert net.deviation >= 1e-4
    before = net.mean.item(), net.variance.item(), net.updates.item()
    for bad in (float("nan"), float("inf")):
        net.update_return_stats(torch.tensor([1.0, bad]))
    assert (net.mean.item(), net.variance.item(), net.updates.item()) == before


# ---- Acting


def test_actions_are_drawn_from_the_policy(looks_uniform: Callable[[Tensor], bool]) -> None:
    noise = random.gumbel(random.bits(random.seed_key(1), torch.arange(4 * 40_000))).view(-1, 4)
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    counts = torch.bincount((logits + noise).argmax(1), minlength=4)
    assert counts.div(40_000).tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=0.01)
    assert looks_uniform(torch.bincount(noise.argmax(1), minlength=4))


def test_the_ends_of_the_noise_are_finite() -> None:
    ends = random.gumbel(torch.tensor([0, 255, 256, 0xFFFFFF00, 0xFFFFFFFF]))
    assert torch.isfinite(ends).all()
    assert (ends.abs() < 20).all()


def test_illegal_actions_are_never_taken() -> None:
    """In place p of five only actions p % 2 and 2 are legal; everything drawn and everything greedy obeys."""
    rules = probe(paid_by_place, anywhere, masked=True)
    learner = learner_of(TINY, rules, num_envs=200)
    taken = set()
    for _ in range(20):
        play(learner, rules, 4)
        assert learner.rollout.legal is not None
        assert learner.rollout.legal.gather(1, learner.rollout.action.unsqueeze(1)).all()
        places = learner.rollout.obs.argmax(1)
        taken |= set(zip((places % 2).tolist(), learner.rollout.action.tolist(), strict=True))
        learner.update()
    assert taken == {(0, 0), (0, 2), (1, 1), (1, 2)}, "every legal action is taken some time"
    obs = F.one_hot(torch.arange(5), 5).to(torch.uint8)
    legal = rules.game.legal(None, State(torch.arange(5), torch.zeros(5), torch.zeros(5)))
    assert legal.gather(1, learner.policy(obs, legal).unsqueeze(1)).all()
    net = ppo.policy_network(learner.spec, TINY, learner.state_dict()["model"])
    assert torch.equal(net(obs, legal) == -1e9, ~legal)
    torch.testing.assert_close(net(obs, legal)[legal], learner.net(obs)[0][legal])


def test_entropy_counts_legal_actions_only() -> None:
    rules = probe(paid_by_place, anywhere, masked=True)
    learner = learner_of(TINY, rules)
    with torch.no_grad():
        learner.optimizer.flat.zero_()
    play(learner, rules, 4)
    learner.compute_targets()
    measured = dict(zip(learner.metrics, learner.loss(torch.arange(16))[1].tolist(), strict=True))
    assert measured["entropy"] == pytest.approx(math.log(2))  # two of three
    assert learner.rollout.outputs["logp"].tolist() == pytest.approx([math.log(0.5)] * 64)


@pytest.mark.fault("D6")
def test_a_state_without_legal_actions_gives_numbers() -> None:
    for spec in (Spec((5,), torch.uint8, (1.0,) * 5, 1, 3, "points", masked=True), AFTER):
        net = networks.build_actor_critic(spec, networks.NetworkConfig("auto", (8,)), 0, 0.9)
        logits, value = net(torch.ones(2, *spec.obs_shape), torch.zeros(2, spec.num_actions, dtype=torch.bool))
        assert torch.isfinite(logits.log_softmax(1)).all()
        assert torch.isfinite(value).all()


# ---- Afterstates: a row of features for every action, of which feature 0 is its reward

AFTER = Spec((4, 5), torch.float32, (0.5, 1.0, 2.0, 0.1, 1.0), 9.0, 4, "points", -9.0, masked=True, afterstates=True)


def rows_of(count: int) -> Tensor:
    return torch.randn(count, 4, 5, generator=torch.Generator().manual_seed(count))


def test_an_afterstate_is_worth_its_reward_and_what_follows() -> None:
    net, obs = (
        networks.build(AFTER, networks.NetworkConfig("auto", (16,)), seed=1, gamma=0.9, dueling=False),
        rows_of(6),
    )
    values = net(obs)
    for b in range(6):
        for a in range(4):
            x = torch.cat([obs[b, a] * torch.tensor(AFTER.obs_scale), torch.zeros(3)])
            x = (net.row.dense.layers[0].weight @ x + net.row.dense.layers[0].bias).clamp(min=0)
            following = net.row.dense.head.out.weight[0] @ x + net.row.dense.head.out.bias[0]
            assert values[b, a].item() == pytest.approx((obs[b, a, 0] + 0.9 * following).item(), abs=1e-5)


@pytest.mark.parametrize("hidden", [(), (16,), (16, 8)])
@pytest.mark.parametrize(
    "spec", [AFTER, Spec((3, 6, 5), torch.uint8, (1.0,) * 3, 1, 4, "points")], ids=["after", "planes"]
)
def test_chosen_is_what_all_values_hold(spec: Spec, hidden: tuple[int, ...]) -> None:
    for kind in ("mlp",) if spec.afterstates else ("mlp", "cnn"):
        net = networks.build(spec, networks.NetworkConfig(kind, hidden), seed=1, gamma=0.9, dueling=False)
        obs = torch.rand(9, *spec.obs_shape, generator=torch.Generator().manual_seed(2))
        action = torch.arange(9) % 4
        torch.testing.assert_close(net.chosen(obs, action), net(obs).gather(1, action.unsqueeze(1)).squeeze(1))


def test_rows_may_come_in_any_order() -> None:
    """Values and logits move with their rows; the value of the state stays."""
    obs, order = rows_of(7), torch.tensor([2, 0, 3, 1])
    legal = torch.rand(7, 4, generator=torch.Generator().manual_seed(4)) < 0.6
    net = networks.build(AFTER, networks.NetworkConfig("auto", (16,)), seed=1, gamma=0.9, dueling=False)
    torch.testing.assert_close(net(obs[:, order], legal[:, order]), net(obs, legal)[:, order])
    both = networks.build_actor_critic(AFTER, networks.NetworkConfig("auto", (16,)), 1, 0.9)
    (logits, value), (moved, same) = both(obs, legal), both(obs[:, order], legal[:, order])
    torch.testing.assert_close(moved, logits[:, order])
    torch.testing.assert_close(same, value)


def test_the_value_of_a_state_is_that_of_its_policy() -> None:
    net, obs = networks.build_actor_critic(AFTER, networks.NetworkConfig("auto", (16,)), 1, 0.9), rows_of(5)
    net.update_return_stats(torch.tensor([2.0, 6.0]))  # mean 4, deviation 2
    legal = torch.tensor([[True, True, False, True]] * 5)
    logits, value = net(obs, legal)
    out = net.body.rows(obs).detach()
    for b in range(5):
        chance = [math.exp(out[b, a, 0]) * bool(legal[b, a]) for a in range(4)]
        worth = [obs[b, a, 0].item() + 0.9 * (4 + 2 * out[b, a, 1].item()) for a in range(4)]
        expected = sum(p * w for p, w in zip(chance, worth, strict=True)) / sum(chance)
        assert value[b].item() == pytest.approx(expected, rel=1e-4)
    gradients = torch.autograd.grad(value.sum(), net.body.row.dense.head.out.bias)[0]
    assert gradients[0] == 0, "the value must not teach the policy"
    assert gradients[1] > 0
    assert torch.equal(logits == -1e9, ~legal)


def test_learning_values_of_the_actions_taken_runs_one_row_each() -> None:
    net, seen = networks.build(AFTER, networks.NetworkConfig("auto", (16,)), seed=1, gamma=0.9, dueling=False), []
    net.row.register_forward_hook(lambda _, inputs, __: seen.append(tuple(inputs[0].shape)))
    net.chosen(rows_of(6), torch.zeros(6, dtype=torch.int64))
    assert seen == [(6, 5)]
    with pytest.raises(UserError, match="dueling is on"):
        networks.build(AFTER, networks.NetworkConfig("auto", (16,)), seed=1, gamma=0.9, dueling=True)


# ---- Small games whose best play is known


def learner_of(config: Config, rules: Rules, num_envs: int = NUM_ENVS, seed: int = 1, accumulate: int = 1) -> Learner:
    state = batch.reset(rules, env_keys(3, torch.arange(num_envs))).game
    return Learner(rules, config, state, num_envs, seed, Runtime(CPU), accumulate)


def play(learner: Learner, rules: Rules, steps: int, seed: int = 3) -> DeviceCollector:
    collector = DeviceCollector(rules, learner, batch.reset(rules, env_keys(seed, torch.arange(learner.num_envs))))
    for _ in range(steps):
        collector.step()
    return collector


def train(rules: Rules, iterations: int = 120, **options: Any) -> Learner:
    """16 environments, learning after every 8 steps of each."""
    config = dataclasses.replace(
        TINY, **{"rollout_steps": 8, "batch_size": 64, "epochs": 2, "learning_rate_end": 1e-3} | options
    )
    learner = learner_of(config, rules)
    collector = DeviceCollector(rules, learner, batch.reset(rules, env_keys(3, torch.arange(NUM_ENVS))))
    for iteration in range(iterations):
        learner.progress.fill_(iteration / iterations)
        for _ in range(learner.rollout_steps):
            collector.step()
        learner.update()
    return learner


@torch.no_grad()
def chances_and_value(learner: Learner, rules: Rules, place: int) -> tuple[list[float], float]:
    logits, value = learner.net(*seen_at(rules, place))
    return logits.softmax(1).squeeze(0).tolist(), value.item()


@pytest.mark.parametrize("afterstates", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_probe_reward_depends_on_observation_and_action(masked: bool, afterstates: bool) -> None:
    rules = probe(paid_by_action, anywhere, masked=masked, afterstates=afterstates)
    learner = train(rules, iterations=60)
    for place in range(5):
        chances, value = chances_and_value(learner, rules, place)
        assert chances[place % 2] > 0.95, f"place {place}"
        assert value == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize("afterstates", [False, True])
def test_probe_reward_comes_a_step_later(afterstates: bool) -> None:
    rules = probe(choose_then_earn, afterstates=afterstates)
    learner = train(rules, iterations=100)
    chances, value = chances_and_value(learner, rules, 0)
    assert chances[1] > 0.95
    assert value == pytest.approx(0.5, abs=0.08)
    assert chances_and_value(learner, rules, 2)[1] == pytest.approx(1.0, abs=0.08)


@pytest.mark.parametrize("cut_at", [0, 99], ids=["endless", "may-be-cut"])
def test_the_last_row_is_followed_by_the_value_of_the_state_it_led_to(cut_at: int) -> None:
    """Episodes of two steps, a rollout of three: the last row is the first step of an episode, and leads to place 1 or 2."""
    rules = probe(choose_then_earn, cut_at=cut_at)
    learner = learner_of(dataclasses.replace(TINY, rollout_steps=3), rules)
    with torch.no_grad():
        learner.net.body.dense.head.out.weight.normal_(generator=torch.Generator().manual_seed(1))
    play(learner, rules, 3)
    learner.compute_targets()
    last = slice(2 * NUM_ENVS, 3 * NUM_ENVS)
    assert not learner.rollout.done[last].any()
    with torch.no_grad():
        places = F.one_hot(1 + learner.rollout.action[last], 5)
        learner.net.mean.zero_()
        learner.net.variance.fill_(1.0)  # as they were when the values were made
        expected = 0.5 * learner.net(places)[1] - learner.rollout.outputs["value"][last]
    torch.testing.assert_close(learner.advantages[last], expected)
    assert learner.advantages[last].std() > 0.01


# A reward of 1 a step, gamma 1/2: for ever it is worth 2. Ended every fourth step, which the player cannot see coming, the
# four phases are worth 1.875, 1.75, 1.5 and 1 with lambda 1, on average 1.53.
@pytest.mark.parametrize("rules", [probe(stand_still, time_limit=4), probe(stand_still, cut_at=4), probe(stand_still)])
def test_values_pass_through_a_truncation(rules: Rules) -> None:
    learner = train(rules, iterations=100, gae_lambda=1.0)
    assert chances_and_value(learner, rules, 0)[1] == pytest.approx(2.0, abs=0.06)


def test_values_stop_at_a_termination() -> None:
    rules = probe(end_every_fourth)
    learner = train(rules, iterations=100, gae_lambda=1.0)
    assert chances_and_value(learner, rules, 0)[1] == pytest.approx(6.125 / 4, abs=0.08)


def test_negative_control_truncation_without_its_value() -> None:
    """A learner that does not know that episodes are cut short gets the wrong value: the test above can fail."""
    rules = probe(stand_still, cut_at=4)
    spec = dataclasses.replace(rules.game.spec(None), truncates=False)
    rules.game.spec = lambda _: spec  # type: ignore[method-assign,assignment]
    learner = train(rules, iterations=100, gae_lambda=1.0)
    assert chances_and_value(learner, rules, 0)[1] < 1.8


# ---- Sessions


def session_of(steps: int | None = 10**6, seed: int = 1, env: str = "snake", **options: Any) -> Session:
    game = {"width": 5, "height": 5} if env == "snake" else options.pop("env_options")
    settings = Settings(
        env=env,
        algo="ppo",
        num_envs=8,
        steps=steps,
        seed=seed,
        device="cpu",
        compile=False,
        curriculum=False,
        backplay=0.0,
        time_limit=9,
        env_options=game,
        algo_options={"rollout_steps": 4, "batch_size": 16, "epochs": 2, "hidden": (16, 16)} | options,
    )
    return Session(resolve(settings), pytest.fail)


def state_of(session: Session) -> dict[str, Tensor]:
    return {f"{group}.{name}": x.clone() for group, tensors in session.tensors().items() for name, x in tensors.items()}


def test_one_seed_repeats_bit_for_bit_and_two_differ() -> None:
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(len(found))
        session = session_of(seed=seed)
        session.iterate(6)
        found.append(state_of(session))
    first, again, other = found
    assert all(torch.equal(first[name], again[name]) for name in first)
    for name in ("model.body.dense.layers.0.weight", "rng.key", "envs.game.food"):
        assert not torch.equal(first[name], other[name]), f"{name} does not depend on the seed"


def test_counts_of_a_session() -> None:
    session = session_of()
    session.iterate(5)
    assert (session.env_steps, session.updates, session.samples_trained) == (5 * 4 * 8, 5 * 2 * 2, 5 * 2 * 32)
    assert session.learner.optimizer.steps == session.updates
    metrics = session.read_metrics(session.updates)
    optimizer = {"grad_norm", "learning_rate", "skipped_updates"}
    assert set(metrics) == {*Learner.metrics, "explained_variance", *optimizer}
    assert metrics["entropy"] == pytest.approx(math.log(session.learner.spec.num_actions), rel=0.1)
    assert session.read_metrics(1)["entropy"] == 0, "sums start again"
    assert "replay" not in session.tensors()


def test_a_continued_run_is_the_run_that_was_not_interrupted() -> None:
    straight, before, after = session_of(steps=500), session_of(steps=500), session_of(steps=500, seed=1)
    straight.iterate(12)
    before.iterate(5)
    saved, counters = {g: {k: v.clone() for k, v in t.items()} for g, t in before.tensors().items()}, before.counters()
    after.iterate(3)  # of its own, to be forgotten
    after.load(saved, counters)
    after.iterate(7)
    expected, found = state_of(straight), state_of(after)
    assert expected.keys() == found.keys()
    for name, x in expected.items():
        assert torch.equal(found[name], x), name
    assert after.counters() == straight.counters()
    assert after.progress == straight.progress > 0.5


def test_what_was_played_is_learned_from_every_epoch_in_another_order() -> None:
    learner = session_of().learner
    orders = []
    for _ in range(4):
        learner.shuffle()
        orders.append(learner.order.tolist())
    assert all(sorted(order) == list(range(32)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert max(sum(a == b for a, b in zip(order, range(32), strict=True)) for order in orders) < 8


def test_rows_hold_what_was_played() -> None:
    """Beside the learner the same games are stepped again with its actions: observations, rewards and ends fit."""
    session = session_of()
    rules = session.plan.rules
    num_envs = batch.reset(rules, env_keys(1, torch.arange(8)))
    for _ in range(5):
        session.iterate(1)
        learner = session.learner
        assert learner.rollout.row == 0
        for t in range(4):
            row = slice(8 * t, 8 * t + 8)
            assert torch.equal(learner.rollout.obs[row], rules.game.observe(rules.config, num_envs.game))
            num_envs, step = batch.step(rules, num_envs, learner.rollout.action[row])
            assert torch.equal(learner.rollout.done[row], step.terminated | step.truncated)
            plain = ~step.truncated
            assert torch.equal(learner.rollout.reward[row][plain], step.reward[plain])


def test_a_policy_as_it_will_be_loaded() -> None:
    session = session_of()
    session.iterate(3)
    rules, learner = session.plan.rules, session.learner
    obs = rules.game.observe(rules.config, session.collector.envs.game)
    net = ppo.policy_network(learner.spec, learner.config, session.tensors()["model"])
    assert torch.equal(net(obs).argmax(1), learner.policy(obs))


# ---- Configuration


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[(name, 0) for name in ("rollout_steps", "epochs", "learning_rate", "clip_range", "max_grad_norm")],
        ("batch_size", -1),
        *[(name, bad) for name in ("gamma", "gae_lambda") for bad in (-0.1, 1.1, float("nan"))],
        *[(name, -0.1) for name in ("learning_rate_end", "value_coef", "entropy_coef", "entropy_end")],
        ("hidden", (64, 0)),
    ],
)
def test_impossible_settings_are_errors_that_name_them(field: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"^ppo\.{field} is .*; expected .*\.$"):
        Config(**{field: value})


@pytest.mark.fault("G8")
@pytest.mark.parametrize(
    ("size", "accumulate", "nearest"), [(24, 1, 32), (14, 1, 16), (65, 1, 64), (24, 2, 32), (128, 1, 64), (31, 4, 16)]
)
def test_a_batch_that_does_not_divide_the_rollout_is_an_error(size: int, accumulate: int, nearest: int) -> None:
    config, rules = dataclasses.replace(TINY, batch_size=size), probe(paid_by_place)
    with pytest.raises(
        UserError, match=r"ppo.batch_size is .*expected a divisor of the 64 steps .* such as \d+\.$"
    ) as told:
        learner_of(config, rules, accumulate=accumulate)
    assert int(str(told.value).removesuffix(".").split()[-1]) == nearest
    learner_of(dataclasses.replace(config, batch_size=nearest), rules, accumulate=accumulate)


def test_an_accumulation_that_does_not_divide_the_rollout_is_an_error() -> None:
    with pytest.raises(UserError, match=r"^accumulate is 3; expected a divisor of the 64 steps"):
        learner_of(TINY, probe(paid_by_place), accumulate=3)


@pytest.mark.parametrize("num_envs", [1, 3, 512, 4096])
@pytest.mark.parametrize("rollout_steps", [32, 2, 7])
def test_the_batch_size_follows_from_the_rollout(num_envs: int, rollout_steps: int) -> None:
    config, why = ppo.fill_defaults(Config(rollout_steps=rollout_steps), num_envs, ())
    size = num_envs * rollout_steps
    assert size % config.batch_size == 0
    assert config.batch_size == size // 8 or size % 8
    assert why
    odd = dataclasses.replace(config, batch_size=5)
    assert ppo.fill_defaults(odd, num_envs, {"batch_size"}) == (odd, {})  # requested: kept, though it does not divide
    assert ppo.fill_defaults(odd, num_envs, ())[0].batch_size == (5 if size % 5 == 0 else config.batch_size)


# ---- Switches


def played_and_updated(**options: Any) -> Learner:
    rules = probe(paid_by_action, start=anywhere)
    learner = learner_of(dataclasses.replace(TINY, **options), rules)
    play(learner, rules, learner.rollout_steps)
    learner.update()
    return learner


def test_an_update_that_moved_far_enough_learns_no_more() -> None:
    """With a tiny target the first minibatch, whose policy has not moved yet, is all that is learned from."""
    options = {"rollout_steps": 8, "batch_size": 16, "epochs": 3, "learning_rate": 0.05}
    free, held = played_and_updated(**options), played_and_updated(**options, target_kl=1e-9)
    assert free.optimizer.steps.item() == 3 * 8
    assert held.optimizer.steps.item() == 1
    assert held.optimizer.skipped.item() == 0
    loose = played_and_updated(**options, target_kl=1e9)
    assert torch.equal(loose.optimizer.flat, free.optimizer.flat)


def test_a_new_rollout_may_move_again() -> None:
    rules = probe(paid_by_action, start=anywhere)
    learner = learner_of(dataclasses.replace(TINY, target_kl=1e-9), rules)
    for number in range(3):
        play(learner, rules, learner.rollout_steps)
        learner.update()
        assert learner.optimizer.steps.item() == number + 1


def test_averaged_weights_play_greedily_and_are_what_is_loaded() -> None:
    options = {"rollout_steps": 8, "batch_size": 64, "learning_rate": 0.05}
    plain, averaged = played_and_updated(**options), played_and_updated(**options, ema_decay=0.9)
    assert torch.equal(plain.optimizer.flat, averaged.optimizer.flat), "averaging must not change learning"
    first = learner_of(dataclasses.replace(TINY, **options), probe(paid_by_action)).optimizer.flat
    steps = int(averaged.optimizer.steps.item())
    assert averaged.ema_weights is not None
    assert steps == 2
    rules = probe(paid_by_action, start=anywhere)
    one = learner_of(dataclasses.replace(TINY, **options, ema_decay=0.9), rules)
    play(one, rules, one.rollout_steps)
    one._compute_targets()
    one._shuffle()
    expected = first.clone()
    for start in (0, 64):
        loss, _ = one._loss(one.order[start : start + 64])
        one._apply(one.optimizer.gradient(loss))
        expected = 0.9 * expected + 0.1 * one.optimizer.flat
    torch.testing.assert_close(one.ema_weights, expected)
    obs = torch.eye(5, dtype=torch.uint8)
    assert averaged.ema_network is not None
    loaded = ppo.policy_network(averaged.spec, averaged.config, averaged.state_dict()["model"])
    torch.testing.assert_close(loaded(obs), averaged.ema_network(obs)[0])
    assert not torch.allclose(loaded(obs), averaged.net(obs)[0])
    averaged.ema_weights.zero_()
    assert not averaged.ema_network(obs)[0].any()
    assert averaged.net(obs)[0].any()


def test_settings_that_afterstates_have_no_use_for_are_refused() -> None:
    rules = probe(paid_by_action, afterstates=True)
    for options, sentence in (
        ({"separate": True}, "separate is on"),
        ({"net": "cnn"}, "net is cnn"),
        ({"net": "columns"}, "net is columns, but afterstates are rows of features"),
    ):
        with pytest.raises(UserError, match=sentence):
            learner_of(dataclasses.replace(TINY, **options), rules)
    with pytest.raises(UserError, match="net is cnn, but boards of afterstates are read by columns"):
        learner_of(dataclasses.replace(TINY, net="cnn"), make_rules("tetris", {"view": "boards"}))
    with pytest.raises(UserError, match=r"ppo\.ema_decay is 1.0; expected a number from 0 to below 1"):
        Config(ema_decay=1.0)


@pytest.mark.parametrize("hidden", [(16, 16), ()])
def test_separate_networks_share_nothing(hidden: tuple[int, ...]) -> None:
    """Side by side in one product, or two networks where there is nothing to put side by side."""
    rules = probe(paid_by_action, start=anywhere)
    learner = train(rules, separate=True, hidden=hidden)
    assert (learner.net.critic is None) == bool(hidden)
    for place in range(5):
        assert chances_and_value(learner, rules, place)[0][place % 2] > 0.9
    obs = torch.eye(5, dtype=torch.uint8)
    logits, value = learner.net(obs)
    weights = list(learner.net.parameters())
    grads = [torch.autograd.grad(out.sum(), weights, allow_unused=True, retain_graph=True) for out in (logits, value)]
    for one, other in zip(*grads, strict=True):
        assert one is None or other is None or not (one * other).any(), "a weight that both depend on"
    loaded = ppo.policy_network(learner.spec, learner.config, learner.state_dict()["model"])
    torch.testing.assert_close(loaded(obs), logits)


def test_in_low_precision_a_copy_plays_what_was_learned() -> None:
    """Rounded weights, the statistics of returns themselves, and whatever was learned or loaded by the next iteration."""
    rules = probe(paid_by_action, start=anywhere)
    state = batch.reset(rules, env_keys(3, torch.arange(NUM_ENVS))).game
    learner = Learner(
        rules, dataclasses.replace(TINY, layer_norm=True), state, NUM_ENVS, 1, Runtime(CPU, torch.bfloat16)
    )
    assert learner.behaviour_network is not learner.net
    assert learner.behaviour_network.body.dense.layers[0].weight.dtype == torch.bfloat16
    obs = torch.eye(5, dtype=torch.uint8)

    def both() -> tuple[Tensor, Tensor]:
        with torch.no_grad(), learner.runtime.autocast():
            return torch.cat(learner.behaviour_network(obs)[:1]), torch.cat(learner.net(obs)[:1])

    assert torch.equal(*both())
    play(learner, rules, learner.rollout_steps)
    learner.update()
    assert learner.behaviour_network.mean.data_ptr() == learner.net.mean.data_ptr()
    assert not torch.equal(*both())
    learner.before_iteration()
    assert torch.equal(*both())
    assert not any(p.requires_grad for p in learner.behaviour_network.parameters())
    learner.optimizer.flat.zero_()
    learner.before_iteration()
    assert not both()[0].any()


@pytest.mark.parametrize(("progress", "ahead"), [(0.0, 10.0), (0.5, 55.0), (1.0, 100.0), (1.5, 100.0)])
def test_the_discount_grows_evenly_in_how_far_it_looks(progress: float, ahead: float) -> None:
    learner = learner_of(dataclasses.replace(TINY, gamma=0.9, gamma_end=0.99), probe(paid_by_action))
    learner.progress.fill_(progress)
    assert float(learner.discount()) == pytest.approx(1 - 1 / ahead, abs=1e-6)
    constant = learner_of(dataclasses.replace(TINY, gamma=0.9), probe(paid_by_action))
    assert constant.discount() == 0.9


def test_the_discount_in_force_is_the_one_learned_with() -> None:
    rules = probe(paid_by_action, start=anywhere)
    targets = []
    for progress in (0.0, 1.0):
        learner = learner_of(dataclasses.replace(TINY, gamma=0.5, gamma_end=0.9), rules)
        learner.progress.fill_(progress)
        learner.rollout.reward.fill_(1.0)
        learner.compute_targets()
        targets.append(learner.targets.clone())
    assert (targets[1] > targets[0]).float().mean() > 0.5
    for options in ({"gamma_end": 1.0}, {"gamma": 1.0, "gamma_end": 0.9}):
        with pytest.raises(UserError, match="gamma"):
            dataclasses.replace(TINY, **options)
    with pytest.raises(UserError, match="gamma_end is set, but with afterstates"):
        learner_of(dataclasses.replace(TINY, gamma_end=0.9), probe(paid_by_action, afterstates=True))
