"""PQN: returns worked out by hand and by a plain loop, small games whose best play is known, and runs that repeat."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from probes import anywhere, choose_then_earn, end_every_fourth, paid_by_action, probe, seen_at, stand_still
from torch import Tensor

from redline.algos import pqn
from redline.algos.pqn import Config, Learner, epsilon
from redline.algos.returns import q_lambda_returns
from redline.collect.device_collector import DeviceCollector
from redline.core.errors import UserError
from redline.engine.runtime import Runtime
from redline.envs import batch
from redline.envs.batch import Rules, env_keys
from redline.run.resolve import resolve
from redline.run.session import Session
from redline.run.settings import Settings

CPU = torch.device("cpu")
NUM_ENVS = 16
TINY = Config(
    rollout_steps=8,
    epochs=2,
    batch_size=32,
    hidden=(16,),
    learning_rate=3e-2,
    learning_rate_end=1e-3,
    gamma=0.5,
    epsilon_high=0.5,
    epsilon_low=0.5,
)


# ---- Returns


def test_returns_by_hand() -> None:
    """Three steps, gamma 1/2, lambda 1/2; the second environment ends after its second step."""
    reward = torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    value = torch.tensor([[9.0, 9.0], [4.0, 4.0], [8.0, 8.0]])
    ended = torch.tensor([[False, False], [False, True], [False, False]])
    found = q_lambda_returns(reward, value, torch.tensor([16.0, 16.0]), ended, 0.5, 0.5)
    last = 3 + 0.5 * 16
    middle = 2 + 0.5 * (0.5 * last + 0.5 * 8)
    assert found[:, 0].tolist() == [1 + 0.5 * (0.5 * middle + 0.5 * 4), middle, last]
    assert found[:, 1].tolist() == [1 + 0.5 * (0.5 * 2 + 0.5 * 4), 2, last]


@given(data=st.data(), lam=st.sampled_from([0.0, 0.3, 0.65, 1.0]), length=st.integers(1, 7))
def test_returns_against_a_mixture_of_n_step_returns(data: st.DataObject, lam: float, length: int) -> None:
    """Q(lambda) is the n-step returns, each bootstrapping with the best value, weighed by (1 - lambda) lambda^(n-1)."""
    numbers = st.floats(-3, 3, width=32)
    reward = [data.draw(numbers) for _ in range(length)]
    value = [data.draw(numbers) for _ in range(length + 1)]
    ended = [data.draw(st.booleans()) for _ in range(length)]
    gamma = 0.9

    def from_step(t: int) -> float:
        total, discount, progress, found = 0.0, 1.0, 1.0, 0.0
        for later in range(t, length):
            total += discount * reward[later]
            if ended[later]:
                return found + progress * total
            discount *= gamma
            bootstrapped = total + discount * value[later + 1]
            if later == length - 1:
                return found + progress * bootstrapped
            found += progress * (1 - lam) * bootstrapped
            progress *= lam
        raise AssertionError

    columns = (torch.tensor(x).view(-1, 1) for x in (reward, value[:-1], ended))
    rewards, values, ends = columns
    found = q_lambda_returns(rewards, values, torch.tensor(value[-1:]), ends, gamma, lam)
    expected = torch.tensor([from_step(t) for t in range(length)]).view(-1, 1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# ---- Exploring


@pytest.mark.parametrize(
    ("progress", "first", "last"),
    [(0.0, 1.0, 1.0), (0.05, 0.55, 0.5005), (0.1, 0.1, 0.001), (0.7, 0.1, 0.001), (2.0, 0.1, 0.001)],
)
def test_exploration_at_start_middle_end_and_beyond(progress: float, first: float, last: float) -> None:
    found = epsilon(Config(), torch.tensor(progress), torch.arange(9), 9)
    assert found[0].item() == pytest.approx(first)
    assert found[-1].item() == pytest.approx(last, rel=1e-4)
    assert (found.diff() <= 0).all()


def test_exploration_of_one_env_and_without_any() -> None:
    nothing = Config(epsilon_start=0.0, epsilon_high=0.0, epsilon_low=0.0, exploration=0.0)
    assert epsilon(nothing, torch.tensor(0.0), torch.arange(1), 1).item() <= 1e-8


def learner_of(config: Config, rules: Rules, seed: int = 1, accumulate: int = 1) -> Learner:
    state = batch.reset(rules, env_keys(3, torch.arange(NUM_ENVS))).game
    return Learner(rules, config, state, NUM_ENVS, seed, Runtime(CPU), accumulate)


def train(rules: Rules, iterations: int = 40, **options: Any) -> Learner:
    learner = learner_of(dataclasses.replace(TINY, **options), rules)
    collector = DeviceCollector(rules, learner, batch.reset(rules, env_keys(3, torch.arange(NUM_ENVS))))
    for iteration in range(iterations):
        learner.progress.fill_(iteration / iterations)
        for _ in range(learner.rollout_steps):
            collector.step()
        learner.update()
    return learner


@torch.no_grad()
def values_at(learner: Learner, rules: Rules, place: int) -> list[float]:
    found: list[float] = learner.net(*seen_at(rules, place)).squeeze(0).tolist()
    return found


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_what_is_played_is_greedy_or_random(rate: float) -> None:
    rules = probe(paid_by_action, start=anywhere)
    config = dataclasses.replace(TINY, epsilon_start=rate, epsilon_high=rate, epsilon_low=rate)
    learner = learner_of(config, rules)
    obs = torch.eye(5, dtype=torch.uint8)[torch.arange(NUM_ENVS) % 5]
    actions = torch.stack([learner.act(obs) for _ in range(40)])
    greedy = learner.policy(obs)
    agree = (actions == greedy).float().mean().item()
    assert agree == 1.0 if rate == 0.0 else 0.35 < agree < 0.65


def test_illegal_actions_are_never_taken() -> None:
    rules = probe(paid_by_action, start=anywhere, masked=True)
    learner = learner_of(TINY, rules)
    collector = DeviceCollector(rules, learner, batch.reset(rules, env_keys(3, torch.arange(NUM_ENVS))))
    for _ in range(TINY.rollout_steps):
        collector.step()
    assert learner.rollout.legal is not None
    assert learner.rollout.legal.gather(1, learner.rollout.action.unsqueeze(1)).all()


# ---- Small games


@pytest.mark.parametrize(("masked", "afterstates"), [(False, False), (True, False), (False, True)])
def test_probe_reward_depends_on_observation_and_action(masked: bool, afterstates: bool) -> None:
    rules = probe(paid_by_action, start=anywhere, masked=masked, afterstates=afterstates)
    learner = train(rules, layer_norm=not afterstates)
    for place in range(5):
        found = values_at(learner, rules, place)
        assert found[place % 2] == pytest.approx(1.0, abs=0.15)
        assert learner.policy(*seen_at(rules, place)).item() == place % 2


def test_probe_reward_comes_a_step_later() -> None:
    rules = probe(choose_then_earn)
    learner = train(rules)
    assert values_at(learner, rules, 0) == pytest.approx([0.0, 0.5], abs=0.1)
    assert max(values_at(learner, rules, 2)) == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("rules", [probe(stand_still, time_limit=4), probe(stand_still, cut_at=4), probe(stand_still)])
def test_values_pass_through_a_truncation(rules: Rules) -> None:
    """A reward of 1 a step with gamma 1/2 is worth 2 for ever, however often the game is cut short."""
    assert max(values_at(train(rules), rules, 0)) == pytest.approx(2.0, abs=0.1)


def test_values_stop_at_a_termination() -> None:
    rules = probe(end_every_fourth)
    assert max(values_at(train(rules, q_lambda=1.0), rules, 0)) < 1.75


# ---- What the learners from fresh play share


def test_a_env_truncated_more_often_than_is_kept_learns_nothing_from_those_steps() -> None:
    """Cut every second step, by the rules themselves, in a rollout of eight: one of four cuts is kept."""
    rules = probe(stand_still, cut_at=2)
    learner = learner_of(dataclasses.replace(TINY, q_lambda=0.0), rules)
    assert learner.rollout.max_truncations == 1
    collector = DeviceCollector(rules, learner, batch.reset(rules, env_keys(3, torch.arange(NUM_ENVS))))
    for _ in range(learner.rollout_steps):
        collector.step()
    reward, value, _, ended = learner.rollout_returns()
    assert ended[1::2].all()
    bootstrap_value = learner.state_values(collector.envs.game)
    torch.testing.assert_close(reward[1], 1.0 + 0.5 * bootstrap_value)  # all states look alike
    taken = learner.net.chosen(learner.rollout.obs, learner.rollout.action).view_as(value)
    torch.testing.assert_close(reward[3::2], taken[3::2])
    assert not torch.equal(taken[3::2], value[3::2]), "some moves were random ones"
    assert (reward[::2] == 1.0).all()
    assert (learner.rollout.truncations == 0).all()


def test_known_limits_keep_every_cut() -> None:
    assert learner_of(TINY, probe(stand_still, time_limit=3)).rollout.max_truncations == 3
    assert learner_of(TINY, probe(stand_still)).rollout.max_truncations == 0
    assert (
        learner_of(
            dataclasses.replace(TINY, rollout_steps=64), probe(stand_still, time_limit=1000, cut_at=40)
        ).rollout.max_truncations
        == 2
    )


def test_accumulated_batches_are_one_gradient_step() -> None:
    rules = probe(paid_by_action, start=anywhere)
    weights = []
    for size, accumulate in ((64, 1), (32, 2)):
        learner = learner_of(dataclasses.replace(TINY, batch_size=size), rules, accumulate=accumulate)
        collector = DeviceCollector(rules, learner, batch.reset(rules, env_keys(3, torch.arange(NUM_ENVS))))
        for _ in range(learner.rollout_steps):
            collector.step()
        learner.update()
        weights.append(learner.optimizer.flat.clone())
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)


# ---- Sessions


def session_of(seed: int = 1, **options: Any) -> Session:
    settings = Settings(
        env="snake",
        algo="pqn",
        num_envs=8,
        steps=10**6,
        seed=seed,
        device="cpu",
        compile=False,
        curriculum=False,
        env_options={"width": 5, "height": 4},
        algo_options={"rollout_steps": 4, "batch_size": 16, "hidden": (16,)} | options,
    )
    return Session(resolve(settings), pytest.fail)


def state_of(session: Session) -> dict[str, Tensor]:
    return {f"{g}.{k}": x.clone() for g, tensors in session.tensors().items() for k, x in tensors.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(x, b[name]) for name, x in a.items())


def test_one_seed_repeats_bit_for_bit_and_two_differ() -> None:
    first, second, third = session_of(), session_of(), session_of(seed=2)
    for session in (first, second, third):
        session.iterate(5)
    assert same(state_of(first), state_of(second))
    assert not torch.equal(
        state_of(first)["model.dense.layers.0.weight"], state_of(third)["model.dense.layers.0.weight"]
    )


def test_a_continued_run_is_the_run_that_was_not_interrupted() -> None:
    first, second = session_of(), session_of(seed=1)
    first.iterate(6)
    second.iterate(3)
    third = session_of()
    third.load({g: {k: x.clone() for k, x in t.items()} for g, t in second.tensors().items()}, second.counters())
    third.iterate(3)
    assert same(state_of(first), state_of(third))


def test_a_policy_as_it_will_be_loaded_and_zeroed_weights_reach_it() -> None:
    session = session_of(dueling=True)
    session.iterate(4)
    learner = session.learner
    net = pqn.policy_network(learner.spec, learner.config, learner.state_dict()["model"])
    obs = session.collector.rules.game.observe(session.collector.rules.config, session.collector.envs.game)
    torch.testing.assert_close(net(obs), learner.net(obs))
    with torch.no_grad():
        learner.optimizer.flat.zero_()
    assert not learner.net(obs).any()
    assert not learner.behaviour_network(obs).any()
    assert not pqn.policy_network(learner.spec, learner.config, learner.state_dict()["model"])(obs).any()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("q_lambda", 1.5),
        ("epsilon_low", -0.1),
        ("exploration", 2.0),
        ("rollout_steps", 0),
        ("learning_rate", 0.0),
        ("stride", 0),
    ],
)
def test_impossible_settings_are_errors_that_name_them(field: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"pqn.{field} is"):
        Config(**{field: value})


@pytest.mark.fault("G8")
def test_a_batch_that_does_not_divide_the_rollout_is_an_error() -> None:
    with pytest.raises(UserError, match=r"pqn\.batch_size is 48"):
        learner_of(dataclasses.replace(TINY, batch_size=48), probe(stand_still))
