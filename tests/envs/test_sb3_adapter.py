"""Redline's games for Stable-Baselines3."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.error import InvalidAction

from redline.core.errors import UserError
from redline.envs import make

sb3 = pytest.importorskip("stable_baselines3")

from stable_baselines3.common.env_checker import check_env  # noqa: E402
from stable_baselines3.common.evaluation import evaluate_policy  # noqa: E402
from stable_baselines3.common.vec_env import DummyVecEnv  # noqa: E402

from redline.envs.sb3 import SB3VecEnv  # noqa: E402

DQN, PPO = sb3.DQN, sb3.PPO


def test_steps_are_the_envs(variant: Any) -> None:
    """Every array and every info against the Env's own step."""
    adapter = SB3VecEnv(make(variant.game, 4, seed=2, time_limit=15, **variant.options))
    ours = make(variant.game, 4, seed=2, time_limit=15, **variant.options)
    np.testing.assert_array_equal(adapter.reset(), ours.reset().numpy())
    adapter.action_space.seed(0)
    endings = 0
    for _ in range(40):
        masks = adapter.env_method("action_masks")
        np.testing.assert_array_equal(np.stack(masks), ours.legal().numpy())
        actions = np.array([adapter.action_space.sample(mask.astype(np.int8)) for mask in masks])
        obs, rewards, dones, infos = adapter.step(actions)
        step = ours.step(torch.from_numpy(actions))
        np.testing.assert_array_equal(obs, step.obs.numpy())
        np.testing.assert_array_equal(rewards, step.reward.numpy())
        np.testing.assert_array_equal(dones, (step.terminated | step.truncated).numpy())
        for env_index, info in enumerate(infos):
            assert info["TimeLimit.truncated"] == step.truncated[env_index].item()
            assert ("terminal_observation" in info) == ("episode" in info) == dones[env_index]
            if dones[env_index]:
                np.testing.assert_array_equal(info["terminal_observation"], step.final_obs[env_index].numpy())
                assert info["episode"] == {
                    "r": step.episode.episode_return[env_index].item(),
                    "l": step.episode.length[env_index].item(),
                    "score": step.episode.score[env_index].item(),
                }
                assert info["is_success"] == step.won[env_index].item()
                endings += 1
    assert endings >= 8


def test_illegal_actions_are_refused(variant: Any) -> None:
    adapter = SB3VecEnv(make(variant.game, 16, **variant.options), on_illegal="raise")
    adapter.reset()
    masks = adapter.action_masks()
    if not adapter.env.spec.masked:
        assert masks.all()
        return
    actions = masks.argmax(1)
    env_index = masks.sum(1).argmin()
    actions[env_index] = masks[env_index].argmin()
    refusal = rf"Action {actions[env_index]} is illegal in environment {env_index}: {masks[env_index].sum()} of the"
    with pytest.raises(InvalidAction, match=refusal):
        adapter.step(actions)
    defined = SB3VecEnv(make(variant.game, 16, **variant.options))
    ours = make(variant.game, 16, **variant.options)
    defined.reset()
    ours.reset()
    np.testing.assert_array_equal(defined.step(actions)[1], ours.step(torch.from_numpy(actions)).reward.numpy())


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_sb3_finds_no_fault_in_any_id(game_name: str) -> None:
    """With random actions, illegal ones among them; and masks are found through Gymnasium's wrappers."""
    env = gymnasium.make(f"redline/{game_name.title().replace('_', '')}-v0")
    check_env(env)
    env.reset(seed=0)
    (mask,) = DummyVecEnv([lambda: env]).env_method("action_masks")
    assert (mask.shape, mask.dtype) == ((env.action_space.n,), np.bool_)  # type: ignore[attr-defined]
    PPO("MlpPolicy", env, n_steps=16, batch_size=16, n_epochs=1, seed=1).learn(16)


def test_reset_goes_on_and_a_seed_starts_over() -> None:
    adapter = SB3VecEnv(make("snake", 2, seed=2))
    first, second = adapter.reset(), adapter.reset()
    assert not np.array_equal(first, second)
    adapter.seed(2)
    np.testing.assert_array_equal(adapter.reset(), first)
    np.testing.assert_array_equal(adapter.reset(), second)  # a seed is used once
    adapter.seed(3)
    np.testing.assert_array_equal(adapter.reset(), make("snake", 2).reset(seed=3).numpy())


def test_attributes_and_methods() -> None:
    adapter = SB3VecEnv(make("snake", 3), render_mode="rgb_array")
    adapter.reset()
    assert adapter.get_attr("render_mode") == ["rgb_array"] * 3
    assert adapter.get_attr("num_envs", indices=[0, 2]) == [3, 3]
    assert adapter.has_attr("action_masks")
    assert not adapter.has_attr("wheels")
    assert [mask.tolist() for mask in adapter.env_method("action_masks", indices=1)] == [[True] * 4]
    with pytest.raises(AttributeError, match="no method 'fly'"):
        adapter.env_method("fly")
    with pytest.raises(UserError, match="one batch"):
        adapter.set_attr("width", 3)
    image = adapter.render()
    assert image is not None
    assert image.shape[2] == 3
    for wrong in (np.zeros(2, np.int64), np.zeros(3), np.full(3, 4)):
        with pytest.raises(InvalidAction, match="step expects"):
            adapter.step(wrong)
    adapter.close()


@pytest.mark.filterwarnings("error::UserWarning")
def test_dqn_and_ppo_learn_on_it() -> None:
    """SB3's own loops, seeded: they find the episodes without a Monitor, and have nothing to warn of."""
    dqn = DQN("MlpPolicy", SB3VecEnv(make("snake", 4, time_limit=20)), learning_starts=64, buffer_size=512, seed=1)
    dqn.learn(256)
    ppo = PPO("MlpPolicy", SB3VecEnv(make("snake", 8, time_limit=20)), n_steps=32, batch_size=64, n_epochs=1, seed=1)
    ppo.learn(256)
    for model in (dqn, ppo):
        assert model.num_timesteps >= 256
        assert len(model.ep_info_buffer or []) > 4
        assert all(0 < info["l"] <= 20 for info in model.ep_info_buffer or [])
    mean, _ = evaluate_policy(ppo, SB3VecEnv(make("snake", 2, time_limit=10)), n_eval_episodes=4)
    assert np.isfinite(mean)


def test_without_sb3_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "redline.envs.sb3")
    monkeypatch.setitem(sys.modules, "stable_baselines3.common.vec_env", None)
    with pytest.raises(UserError, match=r"pip install redline\[sb3\]"):
        importlib.import_module("redline.envs.sb3")
