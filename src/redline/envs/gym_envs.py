"""GymEnvs: N Gymnasium environments of one kind, stepped one after another in this process.

Observations, rewards and endings are written into arrays that stay in place, from which a collector copies them to the
device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import torch

from redline.core import random
from redline.core.errors import UserError
from redline.core.faults import reach, spoil
from redline.envs.gym_game import frame_shape
from redline.envs.gym_make import failure

BACKPLAY_LENGTH = 4  # an episode of backplay lasts this many times `backplay_steps`
Array = np.ndarray[Any, Any]


class GymEnvs:
    """N environments of one kind. After `reset` and every `step` the arrays hold the results.

    An environment whose episode ended has started the next one by then: `obs` is the first observation of the new
    episode, `final_obs` the last one of the old.
    """

    def __init__(
        self, game: Any, config: Any, count: int, time_limit: int = 0, backplay: float = 0.0, backplay_steps: int = 32
    ) -> None:
        """Make `count` environments.

        backplay: fraction of episodes that start about `backplay_steps` before the last loss, where the game can restore
            snapshots. They are truncated after a while, and `episode_over` stays False: only whole games are counted.
        """
        self.game, self.config, self.time_limit = game, config, time_limit
        self.backplay, self.backplay_steps = backplay, backplay_steps
        spec = game.spec(config)
        reach("env.make")
        self.envs = [game.make(config) for _ in range(count)]
        self.obs = np.zeros((count, *frame_shape(spec)), torch.empty(0, dtype=spec.obs_dtype).numpy().dtype)
        self.final_obs = np.zeros_like(self.obs)
        self.reward = np.zeros(count, np.float32)
        self.terminated, self.truncated = np.zeros(count, bool), np.zeros(count, bool)  # for the learner
        self.ended = np.zeros(count, bool)  # the episode ended, backplay included
        self.episode_over = np.zeros(count, bool)  # a whole game ended
        self.lost = np.zeros(count, bool)  # the game terminated, was not truncated
        self.won = np.zeros(count, bool)  # the game was won, where the environment reports it
        self.current_env: Any = np.zeros(
            1, np.int64
        )  # index of the one being stepped, for whoever watches from outside
        self.first = 0  # index of the first among the environments of all processes
        self.lives = np.zeros(count, np.int64)
        self.left = np.zeros(count, np.int64)  # remaining steps of backplay; 0: a whole game
        self.failed = np.zeros(count, bool)  # the last whole game was lost
        # Statistics of the current game, this step included; its result where it is over.
        self.length, self.score, self.episode_return = np.zeros(count, np.int64), np.zeros(count), np.zeros(count)
        self.started = False

    def reset(self, seed: int, number: int = 0, first: int = 0) -> None:
        """Start new episodes everywhere. Environment i, counted from `first`, is seeded with `seed`, `number` and i."""
        if not self.envs:
            raise RuntimeError(f"reset of {self.game.name} was called after close; make it anew.")
        self.first = first
        seeds = env_seeds(seed, number, first, len(self.envs))
        for env_index, (env, env_seed) in enumerate(zip(self.envs, seeds, strict=True)):
            self.current_env[0] = first + env_index
            options = self._snapshots() if self.backplay else None
            try:
                reach("env.reset")
                self.obs[env_index], info = env.reset(seed=env_seed, options=options)
            except Exception as error:
                raise self._failure("reset", error) from error
            self.lives[env_index] = _lives(info)
        self.rng = np.random.default_rng([seed, number, first])
        for array in (self.length, self.score, self.episode_return, self.terminated, self.truncated):
            array[:] = 0
        for array in (self.ended, self.episode_over, self.won, self.left, self.failed):
            array[:] = 0
        self._check("observation", self.obs)
        self.started = True

    def step(self, actions: Array, busy: Array | None = None) -> None:
        """Step every environment with actions (N,), or only those that are `busy` (N,) bool."""
        if not self.started:
            when = "before reset; call reset first" if self.envs else "after close; make it anew"
            raise RuntimeError(f"step of {self.game.name} was called {when}.")
        for array in (self.length, self.score, self.episode_return):
            array[self.ended] = 0
        try:
            reach("env.step")
            for env_index, (env, action) in enumerate(zip(self.envs, actions.tolist(), strict=True)):
                if busy is None or busy[env_index]:
                    self._step_one(env_index, env, action)
        except Exception as error:
            raise self._failure("step", error) from error
        if reach("env.reward"):
            spoil(self.reward)
        if reach("env.obs"):
            spoil(self.final_obs)
        self._check("reward", self.reward)
        self._check("observation", self.final_obs)
        if self.ended.any():
            self._check("observation", self.obs)

    def _step_one(self, i: int, env: gymnasium.Env[Any, Any], action: int) -> None:
        self.current_env[0] = self.first + i
        obs, reward, terminated, truncated, info = env.step(action)
        self._count(i, float(reward), info)
        if self.time_limit and self.length[i] >= self.time_limit:
            truncated = True
        is_backplay = self.left[i] > 0
        if is_backplay:
            self.left[i] -= 1
            truncated = truncated or not self.left[i]
        lives = _lives(info)
        life_lost = self.config.life_loss and lives < self.lives[i]
        ended = terminated or truncated
        self.final_obs[i] = obs
        self.ended[i], self.episode_over[i] = ended, ended and not is_backplay
        self.lost[i], self.won[i] = terminated, terminated and bool(info.get(self.game.WON))
        if self.episode_over[i]:
            self.failed[i] = terminated and not self.won[i]
        self.terminated[i] = terminated or life_lost
        self.truncated[i] = truncated and not self.terminated[i]
        if ended:
            obs, info = self._next_episode(env, i)
            lives = _lives(info)
        self.obs[i], self.lives[i] = obs, lives

    def _count(self, i: int, reward: float, info: Mapping[str, Any]) -> None:
        """Add a step to the statistics of environment i, and write its reward for the learner."""
        self.length[i] += 1
        self.score[i] = float(info[self.game.SCORE]) if self.game.SCORE else self.score[i] + reward
        learned = float(np.sign(reward)) if self.config.reward_clip else reward
        self.episode_return[i] += learned
        self.reward[i] = learned

    def _next_episode(self, env: gymnasium.Env[Any, Any], i: int) -> tuple[Any, dict[str, Any]]:
        """Start a whole game or, with probability `backplay` after a loss, an episode of backplay."""
        if not self.backplay:
            return env.reset()
        backplay = bool(self.failed[i] and self.rng.random() < self.backplay)
        obs, info = env.reset(options=self._snapshots() | {"backplay": backplay})
        self.left[i] = BACKPLAY_LENGTH * self.backplay_steps if info.get("backplay") else 0
        return obs, info

    def _snapshots(self) -> dict[str, Any]:
        return {"snapshots": 2 * self.backplay_steps * self.config.frame_skip}  # on average half of that before a loss

    def _failure(self, method: str, error: Exception) -> UserError:
        where = f"{method} (environment {int(self.current_env[0])})"
        return failure(self.game.name, where, error)

    def _check(self, kind: str, values: Array) -> None:
        """Raise UserError for a NaN in values (N, …): it would soon be in every weight of the network."""
        if values.dtype.kind == "f" and math.isnan(values.max()):  # the maximum of an array with a NaN is NaN
            env_index = int(np.isnan(values.reshape(len(values), -1)).any(1).argmax())
            raise UserError(
                f"{self.game.name} gave the {kind} {values[env_index].tolist()} in step {self.length[env_index]} of an "
                "episode, where numbers were expected; correct the environment, or wrap it."
            )

    def close(self) -> None:
        """Close the environments; calling it again does nothing."""
        for env in self.envs:
            env.close()
        self.envs, self.started = [], False


def env_seeds(seed: int, number: int, first: int, count: int) -> list[int]:
    """Return the seeds of `count` environments, counted from index `first`."""
    key = random.fold(random.seed_key(seed), torch.tensor(number))
    seeds: list[int] = (random.fold(key, torch.arange(first, first + count)) & 0x7FFFFFFF).tolist()
    return seeds


def _lives(info: Mapping[str, Any]) -> int:
    """Return the lives left, where the environment reports them, else 0."""
    return int(info.get("lives", info.get("life", 0)))
