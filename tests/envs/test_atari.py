"""Atari: the field's preprocessing, once; how episodes start; scores as the game counts them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from gymnasium import Env

from redline import recipes
from redline.core.errors import UserError
from redline.core.records import Hardware
from redline.envs import load_game, make_rules
from redline.envs.gym_envs import GymEnvs
from redline.envs.gym_game import GymConfig
from redline.run.resolve import resolve
from redline.run.settings import Settings

pytest.importorskip("ale_py")
NOOP, FIRE = 0, 1


def make(name: str, **options: Any) -> Env[Any, Any]:
    game: Any = load_game(f"gym:ALE/{name}-v5")
    made: Env[Any, Any] = game.make(GymConfig(**options))
    return made


def ball(env: Env[Any, Any]) -> int:
    """The height of the ball of Breakout; 0: there is none."""
    return int(env.unwrapped.ale.getRAM()[101])  # type: ignore[attr-defined]


def test_the_preprocessing_is_that_of_the_field() -> None:
    plan = resolve(Settings("gym:ALE/Pong-v5", device="cpu"))
    config = plan.rules.config
    assert (config.frame_skip, config.frame_max, config.grey, config.size, config.stack) == (4, True, True, 84, 4)
    assert (config.noops, config.fire, config.reward_clip, config.life_loss) == (30, True, True, False)
    assert config.sticky == 0, "the emulator's own actions stick"
    spec = plan.rules.game.spec(config)
    assert (spec.obs_shape, spec.num_actions, str(plan.run_dir)) == ((4, 84, 84), 6, "runs/gym-ALE-Pong-v5-ppo")
    envs = GymEnvs(plan.rules.game, config, 2)
    made = envs.envs[0].unwrapped.spec
    assert made
    assert (made.kwargs["frameskip"], made.kwargs["repeat_action_probability"]) == (1, 0.25)
    envs.reset(0)
    envs.step(np.array([2, 2]))
    assert envs.obs.any()
    envs.close()
    own = resolve(Settings("gym:ALE/Pong-v5", device="cpu", env_options={"frame_skip": "2", "life_loss": True}))
    assert (own.rules.config.frame_skip, own.rules.config.life_loss) == (2, True)
    assert resolve(Settings("gym:ALE/Pong-v5", "dqn", device="cpu")).rules.config == config, "whatever learns"


H200 = Hardware("cuda:0", "test", cores=16, memory_gb=80.0, bf16=True, compiler="g++", capability=(9, 0))


@pytest.mark.parametrize(("algo", "sizes"), [("ppo", (120, 960)), ("dqn", (120, 1024))])
def test_sixteen_cores_play_many_games(algo: str, sizes: tuple[int, int]) -> None:
    chosen = recipes.collect(recipes.Request(load_game("gym:ALE/Pong-v5"), H200, algo))
    assert (chosen["num_envs"].value, chosen["batch_size"].value) == sizes


@pytest.mark.parametrize(("device", "algo"), [("cuda:0", "dqn"), ("cpu", "ppo")])
def test_replay_is_chosen_on_gpus(device: str, algo: str) -> None:
    machine = dataclasses.replace(H200, device=device)
    assert recipes.choose_algo(recipes.Request(load_game("gym:ALE/Pong-v5"), machine)).value == algo
    assert recipes.choose_algo(recipes.Request(load_game("gym:CartPole-v1"), machine)).value == "ppo"


@pytest.mark.parametrize(
    ("options", "frames"),
    [({}, 4), ({"frame_skip": 4}, 4), ({"frame_skip": 2}, 2), ({"frame_skip": 2, "kwargs": {"frameskip": 3}}, 6)],
)
def test_frames_are_skipped_once(options: dict[str, Any], frames: int) -> None:
    env = make("Pong", **options)
    env.reset(seed=0)
    assert env.step(NOOP)[4]["episode_frame_number"] == frames
    env.close()


def test_the_score_is_that_of_the_game() -> None:
    rules = make_rules("gym:ALE/Riverraid-v5", {"frame_skip": 4, "reward_clip": True, "grey": True, "size": 84})
    envs = GymEnvs(rules.game, rules.config, 1)
    envs.reset(0)
    emulator: Any = envs.envs[0].unwrapped
    paid, act = [], emulator.step

    def step(action: int) -> Any:
        result = act(action)
        paid.append(result[1])
        return result

    emulator.step = step
    learned = []
    while not envs.episode_over[0] and len(learned) < 400:
        envs.step(np.array([FIRE]))
        learned.append(float(envs.reward[0]))
    assert set(learned) == {0.0, 1.0}
    assert envs.score[0] == sum(paid) > sum(learned), "points, not their signs"
    envs.close()


def test_fire_starts_the_game_and_every_life() -> None:
    waiting = make("Breakout", frame_skip=4)
    waiting.reset(seed=0)
    for _ in range(20):
        waiting.step(NOOP)
    assert not ball(waiting)
    waiting.close()
    env = make("Breakout", frame_skip=4, fire=True)
    _, info = env.reset(seed=0)
    assert ball(env)
    lives = info["lives"]
    while info["lives"] == lives:
        *_, info = env.step(NOOP)
    env.step(NOOP)
    assert ball(env)
    env.close()
    with pytest.raises(UserError, match=r"env\.fire is set, but gym:CartPole-v1 has no action FIRE"):
        make_rules("gym:CartPole-v1", {"fire": True}).game.spec(GymConfig(fire=True))
    with pytest.raises(UserError, match=r"env\.fire is set, but a level has no action FIRE"):
        make_rules("mario", {"fire": True})


def test_games_start_with_a_random_number_of_idle_frames() -> None:
    env = make("Pong", noops=30, frame_skip=4)
    starts = [env.reset(seed=seed)[1]["episode_frame_number"] for seed in (1, 2, 3, 1)]
    starts += [env.reset()[1]["episode_frame_number"]]
    assert starts[0] == starts[3], "by the seed"
    assert len(set(starts)) > 2
    assert all(1 <= start <= 30 for start in starts)
    env.close()
