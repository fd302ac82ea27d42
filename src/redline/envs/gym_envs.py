"""Any environment of Gymnasium with discrete actions, as gym:CartPole-v1.

Only a CPU can run them: Python objects, stepped one after the other in this process. What they see and give goes into arrays of
fixed place, from which a collector takes it to the device. To learners such an environment is a game whose State is its
observation. `gym:ID` takes one that is registered, `gym:module:ID` imports the module first; other kinds derive from HostGame.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from redline.core import random
from redline.core.errors import UserError
from redline.core.records import Spec
from redline.envs.frames import Frames, is_image
from redline.envs.gym_make import ask, open_env

PREFIX = "gym:"
_MEASURED_STEPS, _MEASURED_SECONDS = 64, 0.5  # of an environment, to know what a step costs
BACKPLAY_LENGTH = 4  # times `retry_steps` it lasts
WORTH_A_PROCESS = 500e-6  # seconds a step must take to be asked of another process
_LARGE = 1e6  # bounds beyond this say nothing of what is usually seen


@dataclass(frozen=True)
class GymConfig:
    """Options of an environment of Gymnasium."""

    frame_skip: int = 1  # times an action is repeated
    frame_max: bool = False  # of the last two images the brighter is seen, cell by cell
    grey: bool = False  # images without colours
    size: int = 0  # rows and columns that images are brought to; 0: as they are
    binary: int = 0  # brightness, 1 to 255, from which a cell is seen as 1, all others as 0; 0: as bright as it is
    stack: int = 1  # frames that are seen at once
    sticky: float = 0.0  # chance that the action before is taken instead
    life_loss: bool = False  # to the learner the loss of a life is the end; the game and its score go on
    reward_clip: bool = False  # rewards are learned from as -1, 0 or 1; the score counts them as they are
    timeout: float = 60.0  # seconds after which a step is taken to hang, where actors play
    restarts: int = 20  # actors that may fail and be replaced in a run

    def __post_init__(self) -> None:
        for name, least in (("frame_skip", 1), ("size", 0), ("stack", 1), ("restarts", 0)):
            if getattr(self, name) < least:
                raise UserError(f"env.{name} is {getattr(self, name)}; expected at least {least}.")
        if not 0 <= self.binary <= 255:
            raise UserError(f"env.binary is {self.binary}; expected 1 to 255, or 0 for images as they are.")
        if not 0 <= self.sticky < 1:
            raise UserError(f"env.sticky is {self.sticky}; expected a number from 0 to below 1.")
        if not self.timeout > 0:
            raise UserError(f"env.timeout is {self.timeout}; expected seconds above 0.")


class GymState(NamedTuple):
    """Of N environments, as far as it is known."""

    obs: Tensor  # (N, …) the newest frame; where frames are stacked (N, stack, …), the newest last


class GymGame:
    """An environment of Gymnasium in the place of a game. It has no rules in tensors: only the host can step it.

    One that `GOES_BACK` keeps moments of its whole games when `reset` is given the option `moments`, the frames between two;
    with the option `again` it begins at the last moment before a loss, if it has one, and says so: `again` in the info.
    """

    ON_CPU = True
    CAN_RESTORE = False
    cells = None  # frames are drawn by the environment itself

    SPELLING = "gym:ID"  # how people name one
    SCORE_NAME = "return"
    SCORE = ""  # what `info` calls the score so far; empty: rewards are added up
    WON = ""  # what `info` calls that the game was won; empty: it does not say
    VERSION = 1
    PALETTE = ()
    HIDDEN = ()
    LIVE = ()
    RESUME_FREE = ("timeout", "restarts")  # options that do not change what is played: a continued run may have others
    STACKED = ("obs",)
    Config: type[GymConfig] = GymConfig
    State = GymState

    def __init__(self, name: str) -> None:
        """`name` is as SPELLING says."""
        self.name = name
        self.known: tuple[GymConfig, Spec] | None = None

    @staticmethod
    def knows(name: str) -> bool:
        """Return whether Gymnasium has an environment registered under the id `name`."""
        return name in gymnasium.registry

    def open(self, config: Any, render_mode: str | None = None) -> gymnasium.Env[Any, Any]:
        """One environment, as it is."""
        del config
        return open_env(self.name.removeprefix(PREFIX), render_mode)

    def make(self, config: GymConfig, render_mode: str | None = None) -> gymnasium.Env[Any, Any]:
        """One environment whose observations are arrays, planes first, and whose actions count from 0."""
        treated = (config.frame_skip, config.frame_max, config.grey, config.size, config.sticky)
        return _Uniform(Frames(self.open(config, render_mode), *treated, name=self.name), self.name)

    def spec(self, config: GymConfig) -> Spec:
        """Of the environment with these options; it is made once to be asked."""
        if self.known is None or self.known[0] is not config:  # compiled code must find it known
            kind: Any = type(self)
            self.known = (config, _spec(kind, self.name, config))
        return self.known[1]

    def step_seconds(self, config: GymConfig) -> float:
        """What a step costs, by a short measurement; it is made once."""
        kind: Any = type(self)
        return _step_seconds(kind, self.name, config)

    def check_installed(self) -> None:
        """Raise UserError if the environment is unknown or needs a package that is missing."""
        ask(self.name.removeprefix(PREFIX))

    def init(self, config: GymConfig, key: Tensor) -> GymState:
        """States of the right shape in which nothing is seen yet: what a learner needs to know before anything is played."""
        spec = self.spec(config)
        return GymState(torch.zeros(len(key), *frame_shape(spec), dtype=spec.obs_dtype, device=key.device))

    def observe(self, config: GymConfig, state: GymState) -> Tensor:
        """Planes of all frames, one behind the other; of a single frame where it is not stacked."""
        one = state.obs.ndim == 1 + len(self.spec(config).obs_shape)  # frame, not a stack of them
        planes = state.obs if one else state.obs.flatten(1, 2)
        return (planes >= config.binary).to(torch.uint8) if config.binary else planes

    def legal(self, config: GymConfig, state: GymState) -> Tensor:
        return torch.ones(len(state.obs), self.spec(config).num_actions, dtype=torch.bool, device=state.obs.device)


def frame_shape(spec: Spec) -> tuple[int, ...]:
    """Of one of the frames that an observation shows."""
    return (spec.obs_shape[0] // spec.frames, *spec.obs_shape[1:])


def stacked(stack: Tensor, newest: Tensor, episode_start: Tensor | None = None) -> Tensor:
    """The stack (N, F, …) with the newest frame (N, …) appended; at an `episode_start` (N,) bool it fills the whole stack."""
    later = torch.cat([stack[:, 1:], newest.unsqueeze(1)], 1)
    if episode_start is None:
        return later
    return torch.where(episode_start.view(-1, *(1,) * (stack.ndim - 1)), newest.unsqueeze(1), later)


class GymEnvs:
    """Environments of one kind in this process. After `reset` and every `step` the arrays hold what came of it.

    An environment whose episode ended has begun the next one by then: `obs` is of the new one, `final_obs` of the old.
    """

    def __init__(
        self, game: Any, config: Any, count: int, time_limit: int = 0, backplay: float = 0.0, backplay_steps: int = 32
    ) -> None:
        """The share `retry` of episodes begins about `retry_steps` before the last loss, where the game can go back; such
        practice is cut short, and to its end the game is not over: only whole games count.
        """
        self.game, self.config, self.time_limit = game, config, time_limit
        self.backplay, self.backplay_steps = backplay, backplay_steps
        spec = game.spec(config)
        self.envs = [game.make(config) for _ in range(count)]
        self.obs = np.zeros((count, *frame_shape(spec)), _numpy_dtype(spec.obs_dtype))
        self.final_obs = np.zeros_like(self.obs)
        self.reward = np.zeros(count, np.float32)
        self.terminated, self.truncated = np.zeros(count, bool), np.zeros(count, bool)
        self.episode_over = np.zeros(count, bool)  # the game is; to a learner it may end before
        self.lost = np.zeros(count, bool)  # and was not cut short
        self.won = np.zeros(count, bool)  # and had reached its aim, as far as the environment tells
        self.current_env: Any = np.zeros(1, np.int64)  # the one being stepped: who looks on learns where it failed
        self.first = 0  # number of the first among those of all processes
        self.lives = np.zeros(count, np.int64)
        self.ended = np.zeros(count, bool)  # the episode did, practice or not
        self.left = np.zeros(count, np.int64)  # steps of practice to come; 0: a whole game is played
        self.failed = np.zeros(count, bool)  # the last whole game was lost
        # Of the game under way, with this step; where it is over, its result.
        self.length, self.score, self.episode_return = np.zeros(count, np.int64), np.zeros(count), np.zeros(count)
        self.begun = False

    def reset(self, seed: int, number: int = 0, first: int = 0) -> None:
        """Begin all episodes anew. Environment i, from `first` on, is seeded once, by `seed`, `number` and i."""
        if not self.envs:
            raise RuntimeError(f"reset of {self.game.name} was called after close; make it anew.")
        self.first = first
        for env_index, (env, own) in enumerate(
            zip(self.envs, env_seeds(seed, number, first, len(self.envs)), strict=True)
        ):
            self.current_env[0] = first + env_index
            options = self._snapshots() if self.backplay else None
            self.obs[env_index], info = env.reset(seed=own, options=options)
            self.lives[env_index] = _lives(info)
        self.luck = np.random.default_rng([seed, number, first])
        for array in (
            self.length,
            self.score,
            self.episode_return,
            self.terminated,
            self.truncated,
            self.episode_over,
            self.won,
        ):
            array[:] = 0
        self.ended[:], self.left[:], self.failed[:] = False, 0, False
        self._check("observation", self.obs)
        self.begun = True

    def step(self, actions: np.ndarray[Any, Any], busy: np.ndarray[Any, Any] | None = None) -> None:
        """One step of every environment, or of those that are `busy` (N,) bool."""
        if not self.begun:
            when = "before reset; call reset first" if self.envs else "after close; make it anew"
            raise RuntimeError(f"step of {self.game.name} was called {when}.")
        for array in (self.length, self.score, self.episode_return):
            array[self.ended] = 0
        for env_index, (env, action) in enumerate(zip(self.envs, actions.tolist(), strict=True)):
            if busy is not None and not busy[env_index]:
                continue
            self.current_env[0] = self.first + env_index
            obs, reward, terminated, truncated, info = env.step(action)
            self.length[env_index] += 1
            self.score[env_index] = (
                float(info[self.game.SCORE]) if self.game.SCORE else self.score[env_index] + float(reward)
            )
            learned = float(np.sign(float(reward))) if self.config.reward_clip else float(reward)
            self.episode_return[env_index] += learned
            self.reward[env_index] = learned
            if self.time_limit and self.length[env_index] >= self.time_limit:
                truncated = True
            practice = self.left[env_index] > 0
            if practice:
                self.left[env_index] -= 1
                truncated = truncated or not self.left[env_index]
            lives = _lives(info)
            lost = self.config.life_loss and lives < self.lives[env_index]
            self.final_obs[env_index] = obs
            over = terminated or truncated
            self.ended[env_index], self.episode_over[env_index], self.lost[env_index] = (
                over,
                over and not practice,
                terminated,
            )
            self.won[env_index] = terminated and bool(info.get(self.game.WON))
            if self.episode_over[env_index]:
                self.failed[env_index] = terminated and not self.won[env_index]
            self.terminated[env_index] = terminated or lost
            self.truncated[env_index] = truncated and not self.terminated[env_index]
            if over:
                obs, info = self._begin(env, env_index)
                lives = _lives(info)
            self.obs[env_index], self.lives[env_index] = obs, lives
        self._check("reward", self.reward)
        self._check("observation", self.final_obs)
        if self.ended.any():
            self._check("observation", self.obs)

    def _begin(self, env: gymnasium.Env[Any, Any], env_index: int) -> tuple[Any, dict[str, Any]]:
        """The next episode: a whole game, or practice."""
        if not self.backplay:
            return env.reset()
        again = bool(self.failed[env_index] and self.luck.random() < self.backplay)
        obs, info = env.reset(options=self._snapshots() | {"again": again})
        self.left[env_index] = BACKPLAY_LENGTH * self.backplay_steps if info.get("again") else 0
        return obs, info

    def _snapshots(self) -> dict[str, Any]:
        return {"snapshots": 2 * self.backplay_steps * self.config.frame_skip}  # on average half of that before a loss

    def _check(self, what: str, given: np.ndarray[Any, Any]) -> None:
        """What is no number, (N, …), would soon be in every weight of a network."""
        if given.dtype.kind == "f" and math.isnan(given.max()):  # nothing is more than what is no number
            env_index = int(np.isnan(given.reshape(len(given), -1)).any(1).argmax())
            raise UserError(
                f"{self.game.name} gave the {what} {given[env_index].tolist()} in step {self.length[env_index]} of an episode, "
                "where numbers were expected; correct the environment, or wrap it."
            )

    def close(self) -> None:
        for env in self.envs:
            env.close()
        self.envs, self.begun = [], False


def env_seeds(seed: int, number: int, first: int, count: int) -> list[int]:
    """Of `count` environments from number `first` on."""
    key = random.fold(random.seed_key(seed), torch.tensor(number))
    found: list[int] = (random.fold(key, torch.arange(first, first + count)) & 0x7FFFFFFF).tolist()
    return found


class _Uniform(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Observations as one array each: planes first, numbers in float32; actions from 0."""

    def __init__(self, env: gymnasium.Env[Any, Any], name: str) -> None:
        super().__init__(env)
        space = env.action_space
        if not isinstance(space, spaces.Discrete):
            raise UserError(
                f"{name} takes actions of {space}; Redline's learners choose one of a few (Discrete). "
                "Take an environment with discrete actions, or wrap it so that it has them."
            )
        self.first = int(space.start)
        seen = env.observation_space
        self.flat = None if isinstance(seen, spaces.Box) else seen
        box = seen if isinstance(seen, spaces.Box) else spaces.flatten_space(seen)
        if not isinstance(box, spaces.Box):
            raise UserError(f"{name} is seen as {seen}, which has no fixed size; wrap it so that it is a Box.")
        self.planes_last = is_image(box)
        self.dtype = np.uint8 if box.dtype == np.uint8 else np.float32
        low, high = (self.observation(x) for x in (box.low, box.high))
        self.observation_space = spaces.Box(low, high, dtype=self.dtype)
        self.action_space = spaces.Discrete(int(space.n))

    def observation(self, obs: Any) -> np.ndarray[Any, Any]:
        array = np.asarray(obs)
        if array.ndim == 0:
            array = array.reshape(1)
        return (np.moveaxis(array, 2, 0) if self.planes_last else array).astype(self.dtype, copy=False)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(seed=seed, options=options)
        return self._seen(obs), info

    def step(self, action: int) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action + self.first)
        return self._seen(obs), reward, bool(terminated), bool(truncated), info

    def _seen(self, obs: Any) -> np.ndarray[Any, Any]:
        return self.observation(obs if self.flat is None else spaces.flatten(self.flat, obs))


@functools.lru_cache(maxsize=64)
def _spec(kind: Any, name: str, config: GymConfig) -> Spec:
    env = kind(name).make(config)
    seen, actions = env.observation_space, env.action_space
    limit = env.spec.max_episode_steps if env.spec else None
    env.close()
    assert isinstance(seen, spaces.Box)
    assert isinstance(actions, spaces.Discrete)
    bytes_seen = seen.dtype == np.uint8
    if config.binary:
        if not (bytes_seen and len(seen.shape) == 3):
            raise UserError(f"env.binary is set, but what is seen here, {seen}, is no image; leave it away.")
        seen = spaces.Box(0, 1, seen.shape, np.uint8)
    high = np.maximum(np.abs(seen.low.astype(np.float64)), np.abs(seen.high.astype(np.float64)))
    per_channel = high.reshape(len(high), -1).max(1)
    known = bool((high < _LARGE).all())
    return Spec(
        obs_shape=(config.stack * seen.shape[0], *seen.shape[1:]),
        obs_dtype=torch.uint8 if bytes_seen else torch.float32,
        obs_scale=tuple(1.0 / x if 0 < x < _LARGE else 1.0 for x in per_channel.tolist()) * config.stack,
        obs_high=float(seen.high.max()) if known else math.inf,
        obs_low=float(seen.low.min()) if known else -math.inf,
        num_actions=int(actions.n),
        score_name=kind.SCORE_NAME,
        winnable=bool(kind.WON),
        frames=config.stack,
        truncates=True,
        limit=math.ceil(limit / config.frame_skip) if limit else 0,
    )


@functools.lru_cache(maxsize=64)
def _step_seconds(kind: Any, name: str, config: GymConfig) -> float:
    env = kind(name).make(config)
    try:
        env.reset(seed=0)
        env.action_space.seed(0)
        began, steps = time.perf_counter(), 0
        while steps < _MEASURED_STEPS and time.perf_counter() - began < _MEASURED_SECONDS:
            _, _, terminated, truncated, _ = env.step(env.action_space.sample())
            steps += 1
            if terminated or truncated:
                env.reset()
        return (time.perf_counter() - began) / steps
    finally:
        env.close()


def _lives(info: Mapping[str, Any]) -> int:
    """Left in the game, as far as the environment tells."""
    return int(info.get("lives", info.get("life", 0)))


def _numpy_dtype(dtype: torch.dtype) -> Any:
    return torch.empty(0, dtype=dtype).numpy().dtype


Config = GymConfig  # as a game's module names it
