"""The contract of an environment step, sentence by sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from redline import oracles
from redline.core import random
from redline.core.errors import UserError
from redline.core.records import leaves
from redline.envs import Env, EnvStep, make

UP, RIGHT = 0, 1
NUM_ENVS = 32


def actions(env: Env, t: int) -> Tensor:
    return random.below(random.bits(random.seed_key(t), torch.arange(env.num_envs)), env.spec.num_actions)


def play(env: Env, steps: int) -> list[EnvStep]:
    env.reset()
    return [env.step(actions(env, t)) for t in range(steps)]


def made(variant: Any, seed: int = 0, time_limit: int = 25) -> Env:
    """With a time limit, so that episodes of any game end soon."""
    return make(variant.game, NUM_ENVS, seed=seed, time_limit=time_limit, **variant.options)


def test_every_step_has_the_same_structure_and_shapes(variant: Any) -> None:
    shapes = {
        tuple((name, tuple(x.shape), x.dtype) for name, x in leaves(step).items()) for step in play(made(variant), 30)
    }
    assert len(shapes) == 1
    named = {name: (shape, dtype) for name, shape, dtype in shapes.pop()}
    spec = made(variant).spec
    assert named["obs"] == named["final_obs"] == ((NUM_ENVS, *spec.obs_shape), spec.obs_dtype)
    assert named["reward"] == named["episode.episode_return"] == ((NUM_ENVS,), torch.float32)
    assert named["terminated"] == named["truncated"] == named["won"] == ((NUM_ENVS,), torch.bool)
    assert named["episode.length"] == named["episode.score"] == ((NUM_ENVS,), torch.int32)


def test_an_ended_env_starts_its_next_episode_in_the_same_step(variant: Any) -> None:
    """Lane i's k-th episode is the game of episode_key(seed, i, k); an environment that goes on shows its final_obs."""
    env = made(variant, seed=9)
    game, config = env.rules.game, env.rules.config
    played = [0] * NUM_ENVS

    def first_obs(env_indices: list[int]) -> Tensor:
        keys = [oracles.episode_key(9, env_index, played[env_index]) for env_index in env_indices]
        return game.observe(config, game.init(config, torch.tensor(keys).to(torch.int32)))

    assert torch.equal(env.reset(), first_obs(list(range(NUM_ENVS))))
    for t in range(60):
        step = env.step(actions(env, t))
        ended = step.terminated | step.truncated
        assert torch.equal(step.obs[~ended], step.final_obs[~ended])
        if env_indices := ended.nonzero().flatten().tolist():
            for env_index in env_indices:
                played[env_index] += 1
            assert torch.equal(step.obs[ended], first_obs(env_indices))
    assert min(played) >= 2


def test_final_obs_is_the_observation_before_the_reset(variant: Any) -> None:
    env = made(variant)
    env.reset()
    ended = 0
    for t in range(30):
        assert env.state is not None
        after, reward, terminated, _ = env.rules.game.step(env.rules.config, env.state.game, actions(env, t))
        step = env.step(actions(env, t))
        assert torch.equal(step.final_obs, env.rules.game.observe(env.rules.config, after))
        assert torch.equal(step.reward, reward)
        assert torch.equal(step.terminated, terminated)
        ended += int((step.terminated | step.truncated).sum())
    assert ended >= NUM_ENVS


def test_a_time_limit_truncates_and_never_terminates(variant: Any) -> None:
    """Same seed and actions with and without: a first episode ends at the limit, as a truncation, or as before."""
    limited, free = play(made(variant, time_limit=5), 5), play(made(variant, time_limit=0), 5)
    alive = torch.ones(NUM_ENVS, dtype=torch.bool)
    for t, (a, b) in enumerate(zip(limited, free, strict=True)):
        assert torch.equal(a.terminated[alive], b.terminated[alive])
        if t < 4:
            assert torch.equal(a.truncated[alive], b.truncated[alive])
        else:
            assert torch.equal(a.truncated[alive], ~b.terminated[alive])
        alive &= ~(a.terminated | a.truncated)
        assert not (a.terminated & a.truncated).any()
        assert a.episode.length.max() <= 5
    assert not alive.any()


@pytest.mark.parametrize(
    ("time_limit", "ending"), [(0, "terminated"), (4, "terminated"), (5, "terminated"), (3, "truncated")]
)
def test_termination_wins_over_the_time_limit(time_limit: int, ending: str) -> None:
    """A snake that goes straight from the centre of 10x10 dies in its fourth step."""
    env = make("snake", 2, time_limit=time_limit)
    env.reset()
    last = 3 if ending == "truncated" else 4
    for _ in range(last - 1):
        step = env.step(torch.tensor([RIGHT, RIGHT]))
        assert not (step.terminated | step.truncated).any()
    step = env.step(torch.tensor([RIGHT, RIGHT]))
    assert step.terminated.tolist() == [ending == "terminated"] * 2
    assert step.truncated.tolist() == [ending == "truncated"] * 2
    assert step.episode.length.tolist() == [last, last]


def test_rules_that_truncate_are_no_termination() -> None:
    env = make("snake", 1, starvation=2)
    env.reset(seed=1)
    env.step(torch.tensor([UP]))
    step = env.step(torch.tensor([UP]))
    assert (step.terminated.item(), step.truncated.item(), step.won.item()) == (False, True, False)
    assert env.state is not None
    assert env.state.played.item() == 1


def test_episode_statistics(any_variant: Any) -> None:
    """Counted here by hand: length, score and reward of the episode so far, this step included; then from zero."""
    env = made(any_variant)
    env.reset()
    length, score, reward = torch.zeros(NUM_ENVS), torch.zeros(NUM_ENVS), torch.zeros(NUM_ENVS)
    for t in range(60):
        assert env.state is not None
        before = env.state.game
        events = env.rules.game.step(env.rules.config, before, actions(env, t))[3]
        step = env.step(actions(env, t))
        length, score, reward = length + 1, score + events.score, reward + step.reward
        assert torch.equal(step.episode.length.float(), length)
        assert torch.equal(step.episode.score.float(), score)
        assert torch.equal(step.episode.episode_return, reward)
        going_on = ~(step.terminated | step.truncated)
        length, score, reward = length * going_on, score * going_on, reward * going_on
        assert torch.equal(env.state.episode.length.float(), length)
        assert torch.equal(env.state.episode.score.float(), score)
        assert torch.equal(env.state.episode.episode_return, reward)


def test_reset_starts_over_and_a_seed_starts_another(variant: Any) -> None:
    env = made(variant, seed=3)
    first, steps = env.reset(), [env.step(actions(env, t)) for t in range(8)]
    assert torch.equal(env.reset(), first)
    for t, step in enumerate(steps):
        again = env.step(actions(env, t))
        assert all(torch.equal(a, b) for a, b in zip(leaves(step).values(), leaves(again).values(), strict=True))
    other = env.reset(seed=4)
    assert not torch.equal(other, first)
    assert torch.equal(other, made(variant, seed=4).reset())


@pytest.mark.fault("G6")
def test_wrong_calls() -> None:
    env = make("snake", 3)
    for call in (lambda: env.step(torch.zeros(3)), env.observe, env.legal):
        with pytest.raises(UserError, match="before reset; call reset first"):
            call()
    env.reset()
    with pytest.raises(UserError, match=r"shape \(3,\), got \(4,\)"):
        env.step(torch.zeros(4))
