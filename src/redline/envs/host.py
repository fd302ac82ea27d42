"""Environments that only a CPU can run: any of Gymnasium's with discrete actions, as `gym:ID` or `gym:module:ID`.

They are Python objects, stepped one after the other in this process; what they see and give goes into arrays of fixed place,
from which a collector takes it to the device. To learners such an environment is a game whose State is its observation.
"""

from __future__ import annotations

import functools
import math
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
from redline.core.records import Hardware, Spec

PREFIX = "gym:"
_LARGE = 1e6  # bounds beyond this say nothing of what is usually seen


@dataclass(frozen=True)
class HostConfig:
    """Options of an environment of Gymnasium."""

    reward_clip: bool = False  # rewards are learned from as -1, 0 or 1; the score counts them as they are

    def __post_init__(self) -> None:
        if not isinstance(self.reward_clip, bool):
            raise UserError(f"env.reward_clip is {self.reward_clip!r}; expected true or false.")


class HostState(NamedTuple):
    """Of N environments, as far as it is known."""

    obs: Tensor  # (N, …)


class HostGame:
    """An environment of Gymnasium in the place of a game. It has no rules in tensors: only the host can step it."""

    VERSION = 1
    PALETTE = ()
    HIDDEN = ()
    LIVE = ()
    Config = HostConfig
    State = HostState

    def __init__(self, name: str) -> None:
        """`name` begins with `gym:`."""
        self.name = name

    def make(self, config: HostConfig) -> gymnasium.Env[Any, Any]:
        """One environment whose observations are arrays, planes first, and whose actions count from 0."""
        del config
        return _Uniform(_make(self.name.removeprefix(PREFIX)))

    def spec(self, config: HostConfig) -> Spec:
        return _spec(self.name, config)

    def suggest(self, hardware: Hardware, wanted: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        del hardware, wanted
        return {"algo": ("ppo", "needs the fewest settings to be right")}

    def curriculum(self, config: HostConfig) -> tuple[()]:
        del config
        return ()

    def init(self, config: HostConfig, key: Tensor) -> HostState:
        """States of the right shape in which nothing is seen yet: what a learner needs to know before anything is played."""
        spec = self.spec(config)
        return HostState(torch.zeros(len(key), *spec.obs_shape, dtype=spec.obs_dtype, device=key.device))

    def observe(self, config: HostConfig, state: HostState) -> Tensor:
        del config
        return state.obs

    def legal(self, config: HostConfig, state: HostState) -> Tensor:
        return torch.ones(len(state.obs), self.spec(config).num_actions, dtype=torch.bool, device=state.obs.device)


def is_host(game: Any) -> bool:
    """The host must step it."""
    return isinstance(game, HostGame)


class HostEnvs:
    """Environments of one kind in this process. After `reset` and every `step` the arrays hold what came of it.

    An environment whose episode ended has begun the next one by then: `obs` is of the new one, `final` of the old.
    """

    def __init__(self, game: Any, config: Any, count: int, time_limit: int = 0) -> None:
        self.game, self.config, self.time_limit = game, config, time_limit
        spec = game.spec(config)
        dtype = _numpy_dtype(spec.obs_dtype)
        self.envs = [game.make(config) for _ in range(count)]
        self.obs = np.zeros((count, *spec.obs_shape), dtype)
        self.final = np.zeros_like(self.obs)
        self.reward = np.zeros(count, np.float32)
        self.terminated, self.truncated = np.zeros(count, bool), np.zeros(count, bool)
        # Of the episode under way, with this step; where it ended, its result.
        self.length, self.score, self.earned = np.zeros(count, np.int64), np.zeros(count), np.zeros(count)

    def reset(self, seed: int, number: int = 0) -> None:
        """Begin all episodes anew. Environment i is seeded once, by `seed`, `number` and i: its episodes follow from that."""
        key = random.fold(random.seed_key(seed), torch.tensor(number))
        seeds = random.fold(key, torch.arange(len(self.envs))) & 0x7FFFFFFF
        for lane, (env, own) in enumerate(zip(self.envs, seeds.tolist(), strict=True)):
            self.obs[lane] = env.reset(seed=own)[0]
        for array in (self.length, self.score, self.earned, self.terminated, self.truncated):
            array[:] = 0

    def step(self, actions: np.ndarray[Any, Any], busy: np.ndarray[Any, Any] | None = None) -> None:
        """One step of every environment, or of those that are `busy` (N,) bool."""
        ended = self.terminated | self.truncated
        for array in (self.length, self.score, self.earned):
            array[ended] = 0
        for lane, (env, action) in enumerate(zip(self.envs, actions.tolist(), strict=True)):
            if busy is not None and not busy[lane]:
                continue
            obs, reward, terminated, truncated, _ = env.step(action)
            self.length[lane] += 1
            self.score[lane] += float(reward)
            learned = float(np.sign(float(reward))) if self.config.reward_clip else float(reward)
            self.earned[lane] += learned
            self.reward[lane] = learned
            if self.time_limit and self.length[lane] >= self.time_limit:
                truncated = True
            self.terminated[lane], self.truncated[lane] = terminated, truncated and not terminated
            self.final[lane] = obs
            self.obs[lane] = env.reset()[0] if terminated or truncated else obs

    def close(self) -> None:
        for env in self.envs:
            env.close()
        self.envs = []


class _Uniform(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Observations as one array each: planes first, numbers in float32; actions from 0."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        space = env.action_space
        if not isinstance(space, spaces.Discrete):
            raise UserError(
                f"{_name(env)} takes actions of {space}; Redline's learners choose one of a few (Discrete). "
                "Take an environment with discrete actions, or wrap it so that it has them."
            )
        self.first = int(space.start)
        seen = env.observation_space
        self.flat = None if isinstance(seen, spaces.Box) else seen
        box = seen if isinstance(seen, spaces.Box) else spaces.flatten_space(seen)
        if not isinstance(box, spaces.Box):
            raise UserError(f"{_name(env)} is seen as {seen}, which has no fixed size; wrap it so that it is a Box.")
        self.planes_last = len(box.shape) == 3 and box.dtype == np.uint8 and box.shape[2] in (1, 3, 4)
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
def _spec(name: str, config: HostConfig) -> Spec:
    env = HostGame(name).make(config)
    try:
        seen, actions = env.observation_space, env.action_space
    finally:
        env.close()
    assert isinstance(seen, spaces.Box)
    assert isinstance(actions, spaces.Discrete)
    high = np.maximum(np.abs(seen.low.astype(np.float64)), np.abs(seen.high.astype(np.float64)))
    per_channel = high.reshape(len(high), -1).max(1)
    known = bool((high < _LARGE).all())
    return Spec(
        obs_shape=tuple(seen.shape),
        obs_dtype=torch.uint8 if seen.dtype == np.uint8 else torch.float32,
        obs_scale=tuple(1.0 / x if 0 < x < _LARGE else 1.0 for x in per_channel.tolist()),
        obs_high=float(seen.high.max()) if known else math.inf,
        obs_low=float(seen.low.min()) if known else -math.inf,
        num_actions=int(actions.n),
        score_name="return",
        truncates=True,
    )


def _make(name: str) -> gymnasium.Env[Any, Any]:
    """The environment of that name, with the time limit it is registered with."""
    if not name:
        raise UserError("gym: names no environment; give its id, as in gym:CartPole-v1.")
    try:
        return gymnasium.make(name)
    except UserError:
        raise
    except gymnasium.error.Error as error:  # unknown, deprecated, or something it needs is missing: it says so well
        raise UserError(f"{PREFIX}{name} cannot be made: {_sentence(error)}") from error
    except ModuleNotFoundError as error:
        raise UserError(f"{PREFIX}{name} cannot be made: {_sentence(error)}") from error


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split()).strip("`'\"")
    return text if text.endswith((".", "?", "!")) else f"{text}."


def _name(env: gymnasium.Env[Any, Any]) -> str:
    return f"{PREFIX}{env.spec.id}" if env.spec else str(env)


def _numpy_dtype(dtype: torch.dtype) -> Any:
    return torch.empty(0, dtype=dtype).numpy().dtype


Config = HostConfig  # as a game's module names it
