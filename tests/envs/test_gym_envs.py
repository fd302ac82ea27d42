"""Environments of Gymnasium: what is seen of them, episodes, seeds, borders."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import toys
from gymnasium import spaces

from redline.core.errors import UserError
from redline.envs import load_game, make, make_rules
from redline.envs.gym_envs import GymEnvs
from redline.envs.gym_game import GymConfig, GymGame


def envs_of(name: str, count: int = 3, time_limit: int = 0, **options: Any) -> GymEnvs:
    return GymEnvs(GymGame(f"gym:{name}"), GymConfig(**options), count, time_limit)


def play(envs: GymEnvs, action: int = 1) -> None:
    envs.step(np.full(len(envs.envs), action))


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "scale"),
    [
        ("CartPole-v1", (4,), torch.float32, None),
        ("ToyImage-v0", (3, 6, 5), torch.uint8, (1 / 255,) * 3),
        ("ToyPlanes-v0", (4, 6, 5), torch.uint8, (1 / 255,) * 4),
        ("ToyBounded-v0", (2,), torch.float32, (0.5, 1.0)),
        ("ToyBoth-v0", (5,), torch.float32, (1.0,) * 5),
        ("ToyBits-v0", (4,), torch.float32, None),
        ("ToyMatch-v0", (3,), torch.float32, None),
        ("ToyCount-v0", (3,), torch.float32, (1.0,) * 3),
    ],
)
def test_what_is_seen_is_one_array(name: str, shape: tuple[int, ...], dtype: torch.dtype, scale: Any) -> None:
    rules = make_rules(f"gym:{name}")
    spec = rules.game.spec(rules.config)
    assert spec.obs_shape == shape
    assert len(spec.obs_scale) == shape[0]
    if scale is not None:
        assert spec.obs_scale == pytest.approx(scale)
    assert spec.obs_dtype == dtype
    envs = envs_of(name)
    envs.reset(1)
    play(envs)
    assert envs.obs.shape == (3, *shape)
    assert torch.from_numpy(envs.obs).dtype == spec.obs_dtype
    assert envs.obs.any()
    envs.close()


def test_planes_come_first() -> None:
    env = GymGame("gym:ToyImage-v0").make(GymConfig())
    raw = toys.Seen(toys.SPACES["Image"])
    assert np.array_equal(env.reset(seed=4)[0], np.moveaxis(raw.reset(seed=4)[0], 2, 0))
    assert isinstance(env.observation_space, spaces.Box)


def test_an_episode_that_ends_is_followed_by_the_next_in_the_same_step() -> None:
    envs = envs_of("ToyCount-v0", count=2)
    envs.reset(seed=5)
    first = envs.obs.copy()
    assert (first[:, :2] == 0).all()
    for step in range(1, 7):
        play(envs)
        ended = step % 3 == 0
        assert (envs.final_obs[:, 1] == (step - 1) % 3 + 1).all(), "the old episode's last sight"
        assert (envs.obs[:, 1] == step % 3).all()
        assert (envs.obs[:, 0] == step // 3).all()
        assert (envs.terminated == (step == 3)).all()
        assert (envs.truncated == (step == 6)).all(), "every second episode is cut short"
        assert (envs.length == (step - 1) % 3 + 1).all()
        assert (envs.score == sum(range(1, (step - 1) % 3 + 2))).all()
        if not ended:
            assert np.array_equal(envs.final_obs, envs.obs)
    play(envs, action=0)
    assert (envs.reward == 10).all(), "actions count from 0, whatever they are called there"


def test_rewards_are_clipped_for_learning_and_not_for_the_score() -> None:
    envs = envs_of("ToyCount-v0", count=1, reward_clip=True)
    envs.reset(0)
    play(envs, action=0)
    play(envs, action=0)
    assert (envs.reward, envs.episode_return, envs.score) == (1.0, 2.0, 30.0)
    with pytest.raises(UserError, match=r"env\.reward_clip is 'yes'"):
        make_rules("gym:ToyCount-v0", {"reward_clip": "yes"})


@pytest.mark.parametrize(("name", "limit", "length"), [("ToyLimited-v0", 0, 5), ("ToyLimited-v0", 4, 4)])
def test_time_limits_truncate(name: str, limit: int, length: int) -> None:
    envs = envs_of(name, time_limit=limit)
    envs.reset(0)
    for _ in range(length):
        assert not envs.truncated.any()
        play(envs)
    assert envs.truncated.all()
    assert not envs.terminated.any()


def test_a_time_limit_gives_way_to_the_end() -> None:
    envs = envs_of("ToyCount-v0", time_limit=3)
    envs.reset(0)
    for _ in range(3):
        play(envs)
    assert envs.terminated.all()
    assert not envs.truncated.any()


@pytest.mark.fault("G9")
def test_seeds_make_episodes() -> None:
    """Same seed, same episodes; another seed, environment or number: others. The batch size makes no difference."""

    def luck(count: int, seed: int, number: int = 0) -> list[list[float]]:
        envs = envs_of("ToyCount-v0", count)
        envs.reset(seed, number)
        found = [envs.obs[:, 2].tolist()]
        for _ in range(6):
            play(envs)
            found.append(envs.obs[:, 2].tolist())
        return [list(env_index) for env_index in zip(*found, strict=True)]

    base = luck(3, 7)
    assert base == luck(3, 7)
    assert base[:2] == luck(2, 7)
    assert len({tuple(env_index) for env_index in base + luck(3, 8) + luck(3, 7, 1)}) == 9


def test_those_that_are_not_busy_stay_as_they_are() -> None:
    envs = envs_of("ToyCount-v0", 3)
    envs.reset(0)
    play(envs)
    before = envs.obs.copy(), envs.score.copy(), envs.length.copy()
    envs.step(np.ones(3, np.int64), np.array([True, False, True]))
    for was, now in zip(before, (envs.obs, envs.score, envs.length), strict=True):
        assert np.array_equal(was[1], now[1])
        assert not np.array_equal(was[0], now[0])


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("gym:CartPol-v1", "gym:CartPol-v1 cannot be made: .*CartPole"),
        ("gym:", "names no environment"),
        ("gym:a:b:c", "gym:a:b:c cannot be made"),
        ("gym:no_such_module:Thing-v0", "no_such_module"),
        ("gym:ToyContinuous-v0", "gym:ToyContinuous-v0 takes actions of Box.*discrete actions"),
        ("gym:ToyAny-v0", "has no fixed size"),
    ],
)
def test_what_cannot_be_learned_is_refused_with_a_reason(name: str, sentence: str) -> None:
    rules = make_rules(name)
    with pytest.raises(UserError, match=sentence):
        rules.game.spec(rules.config)


def test_names_tell_which_is_which() -> None:
    assert load_game("gym:CartPole-v1").ON_CPU
    assert load_game("gym:toys:ToyCount-v0").ON_CPU
    assert not load_game("snake").ON_CPU
    assert make_rules("gym:toys:ToyCount-v0").game.spec(GymConfig()).num_actions == 2
    with pytest.raises(UserError, match="no option 'skip'"):
        make_rules("gym:CartPole-v1", {"skip": 3})
    with pytest.raises(UserError, match="gym:CartPole-v1 is a CPU environment, not a tensor game"):
        make("gym:CartPole-v1")
    with pytest.raises(UserError, match="did you mean 'gym:CartPole-v1'"):
        load_game("CartPole-v1")
