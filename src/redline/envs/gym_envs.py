"""GymEnvs: N Gymnasium environments of one kind, stepped one after another in this process.

Observations, rewards and endings are written in place into arrays, from which a collector copies them to the device.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np
import torch

from redline.core import random
from redline.core.errors import EnvsLost, InvalidStep, UserError
from redline.core.faults import reach, spoil
from redline.envs import env_activity
from redline.envs.array_wrapper import entry_name
from redline.envs.gym_game import frame_shape
from redline.envs.gym_make import failure
from redline.envs.level_choice import LevelChoice

BACKPLAY_LENGTH = 4  # an episode of backplay lasts this many times `backplay_steps`
Array = np.ndarray[Any, Any]


class GymEnvs:
    """N environments of one kind. `reset` and `step` write their results to the arrays.

    Auto-reset happens in the same step: where an episode ended, `obs` is the first observation of the new episode and
    `final_obs` the last of the old one.

    If an environment raises an exception, the step or reset raises UserError, unless an `on_failure` is set, which may
    `replace` the environment. Its failed step counts as a truncation with reward 0, and `discarded` lists its index.
    """

    def __init__(
        self,
        game: Any,
        config: Any,
        count: int,
        time_limit: int = 0,
        backplay: float = 0.0,
        backplay_steps: int = 32,
        first: int = 0,
        choose_levels: bool = False,
    ) -> None:
        """Make `count` environments.

        first: index of the first of these environments among those of all processes.
        choose_levels: if the game has several levels, choose one for each whole game by LevelChoice. Otherwise every
            environment plays the same level all the time.
        backplay: probability that an episode starts about `backplay_steps` before the last loss, if the last whole game
            was lost and the game can restore snapshots. It is truncated after BACKPLAY_LENGTH times as many steps, and
            `episode_over` stays False: only whole games are counted.
        """
        self.game, self.config, self.time_limit = game, config, time_limit
        self.backplay, self.backplay_steps, self.first = backplay, backplay_steps, first
        spec = game.spec(config)
        self.playing = np.zeros(count, np.int16)  # index of each environment's level; 0 if there is only one
        self.level_choice = LevelChoice(len(game.levels)) if choose_levels and game.levels else None
        self.envs = [self._make(env_index) for env_index in range(count)]
        self.level = self.playing.copy()  # the level in which the last step was played
        self.obs = np.zeros((count, *frame_shape(spec)), torch.empty(0, dtype=spec.obs_dtype).numpy().dtype)
        self.final_obs = np.zeros_like(self.obs)
        self.reward = np.zeros(count, np.float32)
        self.terminated, self.truncated = np.zeros(count, bool), np.zeros(count, bool)  # for the learner
        self.ended = np.zeros(count, bool)  # the episode ended, backplay included
        self.episode_over = np.zeros(count, bool)  # a whole game ended
        self.lost = np.zeros(count, bool)  # the game terminated, was not truncated
        self.won = np.zeros(count, bool)  # the game was won, where the environment reports it
        self.activity: Any = env_activity.numbers()  # index being called and call counter, read by watchdogs
        self.seeds: list[int] = []  # of each environment's last seeded reset
        # Called with an environment's index and its failure: replaces the environment, or raises.
        self.on_failure: Callable[[int, UserError], None] | None = None
        self.discarded: list[int] = []  # environments replaced in the last step; cleared by the reader
        self.masked = 0  # rewards and observations that were not finite or too large, with `nonfinite` mask
        self.notify: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)
        self._bound, self._bound_squared = config.bound, config.bound**2
        self.lives = np.zeros(count, np.int64)
        self.left = np.zeros(count, np.int64)  # remaining steps of backplay; 0: a whole game
        self.failed = np.zeros(count, bool)  # the last whole game was lost
        # Statistics of the current game, including this step; final where the game is over.
        self.length, self.score, self.episode_return = np.zeros(count, np.int64), np.zeros(count), np.zeros(count)
        self.started = False

    def reset(self, seed: int, number: int = 0) -> None:
        """Start new episodes in all environments, each seeded with `seed`, `number` and its index among all processes."""
        if not self.envs:
            raise RuntimeError(f"reset of {self.game.name} was called after close; make it anew.")
        self.seeds = env_seeds(seed, number, self.first, len(self.envs))
        for env_index in range(len(self.envs)):
            with self._calling(env_index):
                try:
                    self._reset_one(env_index)
                except (Exception, SystemExit) as error:
                    self._recover(env_index, "reset", error)
        self.rng = np.random.default_rng([seed, number, self.first])
        for array in (self.length, self.score, self.episode_return, self.terminated, self.truncated):
            array[:] = 0
        for array in (self.ended, self.episode_over, self.won, self.left, self.failed):
            array[:] = 0
        self._check(self.obs)
        self.discarded.clear()
        self.started = True

    def _make(self, i: int) -> gymnasium.Env[Any, Any]:
        with env_activity.calling(env_activity.MAKING):
            reach("env.make")
            env: gymnasium.Env[Any, Any] = self.game.make(self.config, env_index=self.first + i)
            self.playing[i] = self.game.level_index(self.first + i)
            return env

    def _reset_one(self, i: int) -> None:
        """Start an episode in environment i with its seed."""
        options = self._snapshots() if self.backplay else None
        reach("env.reset")
        self.obs[i], info = self.envs[i].reset(seed=self.seeds[i], options=options)
        self.lives[i] = _lives(info)

    def replace(self, i: int, seed: int) -> None:
        """Replace environment i by a new one and start an episode with `seed`; raise UserError if that fails."""
        with contextlib.suppress(Exception, SystemExit):
            self.envs[i].close()
        self.seeds[i], self.left[i], self.failed[i] = seed, 0, False
        try:
            self.envs[i] = self._make(i)
            self._reset_one(i)
        except (Exception, SystemExit) as error:
            raise self._failure(i, "reset", error) from error

    @contextlib.contextmanager
    def _calling(self, i: int) -> Iterator[None]:
        self.activity[0] = self.first + i
        self.activity[1] += 1
        try:
            yield
        finally:
            self.activity[1] += 1

    def step(self, actions: Array, busy: Array | None = None) -> None:
        """Step the environments with actions (N,): all of them, or those where `busy` (N,) bool is True."""
        if not self.started:
            when = "before reset; call reset first" if self.envs else "after close; make it anew"
            raise RuntimeError(f"step of {self.game.name} was called {when}.")
        for array in (self.length, self.score, self.episode_return):
            array[self.ended] = 0
        self.level[:] = self.playing
        activity, first = self.activity, self.first
        activity[1] += 1
        try:
            for env_index, (env, action) in enumerate(zip(self.envs, actions.tolist(), strict=True)):
                if busy is None or busy[env_index]:
                    activity[0] = first + env_index
                    try:
                        if env_index == 0:
                            reach("env.step")
                        self._step_one(env_index, env, action)
                    except (Exception, SystemExit) as error:
                        self._discard(env_index, error)
        finally:
            activity[1] += 1
        if reach("env.obs"):
            spoil(self.final_obs)
        if self._check(self.final_obs) or self.ended.any():
            self._check(self.obs)

    def _step_one(self, i: int, env: gymnasium.Env[Any, Any], action: int) -> None:
        obs, reward, terminated, truncated, info = env.step(action)
        if i == 0 and reach("env.reward"):
            reward = math.nan
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
            if self.level_choice:
                self.level_choice.record(self.level[i], self.won[i], self.length[i])
        self.terminated[i] = terminated or life_lost
        self.truncated[i] = truncated and not self.terminated[i]
        if ended:
            try:
                obs, info = self._next_episode(env, i)
            except (Exception, SystemExit) as error:  # the step itself is complete
                self._recover(i, "reset", error)
                return
            lives = _lives(info)
        self.obs[i], self.lives[i] = obs, lives

    def _discard(self, i: int, error: BaseException) -> None:
        """Replace environment i after an exception in its step, and record a truncation with reward 0."""
        self.final_obs[i] = self.obs[i]
        self._recover(i, "step", error)
        self.reward[i] = 0.0
        self.terminated[i] = self.episode_over[i] = self.lost[i] = self.won[i] = False
        self.truncated[i] = self.ended[i] = True
        self.discarded.append(i)

    def _recover(self, i: int, method: str, error: BaseException) -> None:
        """Let `on_failure` replace environment i, or raise the failure if there is no `on_failure`."""
        failed = self._failure(i, method, error)
        if self.on_failure is None or isinstance(failed, EnvsLost):
            raise failed
        self.on_failure(i, failed)

    def _count(self, i: int, reward: float, info: Mapping[str, Any]) -> None:
        """Add a step to the statistics of environment i and store the learner's reward."""
        self.length[i] += 1
        learned = float(np.sign(reward)) if self.config.reward_clip else reward
        if not (-self._bound <= learned <= self._bound and -math.inf < reward < math.inf):
            reward = learned = self._masked_reward(i, reward)
        self.score[i] = float(info[self.game.SCORE]) if self.game.SCORE else self.score[i] + reward
        self.episode_return[i] += learned
        self.reward[i] = learned

    def _next_episode(self, env: gymnasium.Env[Any, Any], i: int) -> tuple[Any, dict[str, Any]]:
        """Start a whole game or, with probability `backplay` after a loss, a backplay episode; return observation and info."""
        options: dict[str, Any] = {}
        if self.backplay:
            options = self._snapshots() | {"backplay": bool(self.failed[i] and self.rng.random() < self.backplay)}
        if self.level_choice and not options.get("backplay"):
            options["level"] = self.playing[i] = self.level_choice.draw(self.rng)
        obs, info = env.reset(options=options) if options else env.reset()
        self.left[i] = BACKPLAY_LENGTH * self.backplay_steps if info.get("backplay") else 0
        return obs, info

    def _snapshots(self) -> dict[str, Any]:
        return {"snapshots": 2 * self.backplay_steps * self.config.frame_skip}  # on average half of that before a loss

    def _failure(self, i: int, method: str, error: BaseException) -> UserError:
        """Return an error that names environment i, with `error` as its cause."""
        number = f"(environment {self.first + i})"
        failed = failure(self.game.name, f"{method} {number}", error)
        if isinstance(error, InvalidStep) and number not in str(error):
            failed = InvalidStep(str(error).replace(self.game.name, f"{self.game.name} {number}", 1))
        if failed is not error:
            failed.__cause__ = error
        return failed

    def _masked_reward(self, i: int, reward: float) -> float:
        self._report(i, f"the reward {reward:g}")
        return 0.0 if math.isnan(reward) else min(max(reward, -self._bound), self._bound)

    def _check(self, values: Array) -> bool:
        """Mask non-finite or too large numbers in observations (N, …), in place; return whether there were any.

        A single NaN would soon spread to every weight of the network.
        """
        if values.dtype.kind != "f":
            return False
        flat = values.reshape(-1)
        if flat.dot(flat) <= self._bound_squared:  # one pass: the sum is NaN or too large if any number is
            return False
        rows = values.reshape(len(values), -1)
        wrong = ~(np.abs(rows) <= self._bound)
        for i in np.flatnonzero(wrong.any(1)).tolist():
            place = int(wrong[i].argmax())
            name = entry_name(getattr(self.envs[i], "flat_space", None), place)
            try:
                self._report(i, f"{rows[i, place]:g} as its observation{name}")
            except InvalidStep as error:
                self._recover(i, "step", error)
        np.nan_to_num(values, copy=False, nan=0.0, posinf=self._bound, neginf=-self._bound)
        np.clip(values, -self._bound, self._bound, out=values)
        return bool(wrong.any())

    def _report(self, i: int, value: str) -> None:
        """Raise InvalidStep for a non-finite or too large value or, if `nonfinite` is mask, count it."""
        text = f"{self.game.name} returned {value} in step {self.length[i]} of an episode"
        if self.config.nonfinite == "stop":
            raise InvalidStep(
                f"{text}, where finite numbers up to {self._bound:g} were expected; correct or wrap the environment, mask "
                "such values (--env.nonfinite mask), or change --env.bound."
            )
        if not self.masked:
            masks = f"Such values are masked: NaN becomes 0, the others at most {self._bound:g}."
            self.notify(f"{text} (environment {self.first + i}). {masks}")
        self.masked += 1

    def close(self) -> None:
        """Close the environments; idempotent. An exception while closing one is reported, not raised."""
        envs, self.envs, self.started = self.envs, [], False
        for env_index, env in enumerate(envs):
            with self._calling(env_index):
                try:
                    env.close()
                except (Exception, SystemExit) as error:
                    self.notify(str(self._failure(env_index, "close", error)))


def env_seeds(seed: int, number: int, first: int, count: int) -> list[int]:
    """Return the seeds of `count` environments from index `first` on."""
    key = random.fold(random.seed_key(seed), torch.tensor(number))
    seeds: list[int] = (random.fold(key, torch.arange(first, first + count)) & 0x7FFFFFFF).tolist()
    return seeds


def _lives(info: Mapping[str, Any]) -> int:
    """Return the remaining lives; 0 if the environment does not report them."""
    return int(info.get("lives", info.get("life", 0)))
