"""One game at a time, for GameEnv: played by the plain-Python oracle, or as a batch of one.

A batch of one spends most of its time launching operations; the oracle is about forty times as fast. Their trajectories
are bitwise identical. The tensor game is used where there is no oracle, on a GPU, and for afterstates.
"""

from __future__ import annotations

import importlib.util
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from redline import oracles
from redline.core.records import leaves
from redline.envs import batch
from redline.envs.batch import EnvState, Rules
from redline.games import Game

Array = NDArray[Any]


class SingleStep(NamedTuple):
    """Result of one step of one game; length, score and episode_return include this step."""

    reward: float
    terminated: bool
    truncated: bool
    won: bool
    length: int
    score: int
    episode_return: float


class SingleGame(Protocol):
    """Environment 0 of a seed, which plays one episode after another."""

    def reset(self, seed: int) -> None:
        """Start the first episode of environment 0 of `seed`."""

    def next_episode(self) -> None:
        """Start the next episode; an unfinished one is abandoned."""

    def step(self, action: int) -> SingleStep:
        """Play one action. When the episode ends, the game stays in its final state."""

    def observe(self) -> Array:
        """Return the observation, in the shape and dtype of the game's spec."""

    def legal(self) -> Array | None:
        """Return the action mask (A,) bool; None if every action is always legal in the game."""

    def state(self) -> Any:
        """Return the game's State with N = 1, for drawing."""


def single_game(rules: Rules, device: torch.device) -> SingleGame:
    """Return the fastest SingleGame for these rules and `device`."""
    oracle = _find_oracle(rules.game)
    if oracle is None or device.type != "cpu" or rules.game.spec(rules.config).afterstates:
        return TensorGame(rules, device)
    return OracleGame(rules, oracle)


def _find_oracle(game: Game) -> type[oracles.Oracle] | None:
    """Return the oracle of a built-in game; None for other games, or if it has none."""
    built_in = game.module.__name__ == f"redline.games.{game.name}"
    if not built_in or importlib.util.find_spec(f"{oracles.__name__}.{game.name}") is None:
        return None
    return oracles.load(game.name)


class OracleGame:
    """A game played by its oracle."""

    def __init__(self, rules: Rules, oracle: type[oracles.Oracle]) -> None:
        self.rules, self._oracle = rules, oracle
        self._spec = rules.game.spec(rules.config)
        self._dtype = torch.empty(0, dtype=self._spec.obs_dtype).numpy().dtype
        self._seed = self._episode = 0

    def reset(self, seed: int) -> None:
        self._seed, self._episode = seed, 0
        self._start()

    def next_episode(self) -> None:
        self._episode += 1
        self._start()

    def _start(self) -> None:
        self.game: Any = self._oracle(self.rules.config, oracles.episode_key(self._seed, 0, self._episode))
        self._length, self._score, self._return = 0, 0, np.float32(0)

    def step(self, action: int) -> SingleStep:
        exact_reward, terminated, truncated, score, won = self.game.step(action)
        reward = np.float32(exact_reward)  # round sums as the tensor game does
        self._length, self._score, self._return = self._length + 1, self._score + score, self._return + reward
        truncated = not terminated and (truncated or 0 < self.rules.time_limit <= self._length)
        return SingleStep(float(reward), terminated, truncated, won, self._length, self._score, float(self._return))

    def observe(self) -> Array:
        return np.array(self.game.observe(), self._dtype)

    def legal(self) -> Array | None:
        return np.array(self.game.legal(), np.bool_) if self._spec.masked else None

    def state(self) -> Any:
        values = self.game.state()
        like = self.rules.game.init(self.rules.config, torch.zeros(1, dtype=torch.int32))
        fields = {
            name: torch.tensor(values[name]).reshape(x.shape).to(x.dtype)  # random keys wrap around to signed integers
            for name, x in leaves(like).items()
        }
        return type(like)(**fields)


class TensorGame:
    """A game played as a batch of one on a device."""

    def __init__(self, rules: Rules, device: torch.device) -> None:
        self.rules, self._device = rules, device
        self._envs: EnvState | None = None
        self._state: Any = None  # the final state of an ended episode until the next one starts
        self._ended = False

    def reset(self, seed: int) -> None:
        first = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._envs = batch.reset(self.rules, batch.env_keys(seed, first))
        self._state, self._ended = self._envs.game, False

    def next_episode(self) -> None:
        assert self._envs is not None
        if not self._ended:  # otherwise `batch.step` has already started it
            self._envs = batch.next_episode(
                self.rules, self._envs, torch.ones(1, dtype=torch.bool, device=self._device)
            )
        self._state, self._ended = self._envs.game, False

    def step(self, action: int) -> SingleStep:
        assert self._envs is not None
        self._envs, step = batch.step(self.rules, self._envs, torch.tensor([action], device=self._device))
        terminated, truncated = bool(step.terminated), bool(step.truncated)
        self._state, self._ended = step.final_state, terminated or truncated
        length, score, episode_return = (x.item() for x in step.episode)
        return SingleStep(
            float(step.reward), terminated, truncated, bool(step.won), int(length), int(score), float(episode_return)
        )

    def observe(self) -> Array:
        obs: Array = self.rules.game.observe(self.rules.config, self._state)[0].cpu().numpy()
        return obs

    def legal(self) -> Array | None:
        legal = batch.legal(self.rules, self._state)
        return None if legal is None else legal[0].cpu().numpy()

    def state(self) -> Any:
        return self._state
