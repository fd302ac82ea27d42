"""N copies of a game on one device: time limit, auto-reset, final state and episode statistics, shared by all games.

`reset` and `step` are pure functions over tensors, so that a whole training iteration compiles and captures. `Env` in
`redline.envs.env` holds their state between steps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from redline.core import random
from redline.core.records import Episode, Step, where
from redline.games import Game


class Rules(NamedTuple):
    """A game with its options and time limit: the part of an environment that is not tensors."""

    game: Game
    config: Any
    time_limit: int  # steps after which an episode is truncated; 0: none


class EnvState(NamedTuple):
    """The state of N environments. Each plays one episode after another; every episode has its own random stream."""

    game: Any  # the game's State
    key: Tensor  # (N,) int32: root of the environment's random streams, derived from the seed and its index
    played: Tensor  # (N,) int32: episodes finished
    episode: Episode  # statistics of the current episode


def env_keys(seed: int, env_index: Tensor) -> Tensor:
    """Return the root keys (N,) int32 of environments env_index (N,) int64; they do not depend on the batch size."""
    return random.fold(random.seed_key(seed, env_index.device), env_index)


def reset(rules: Rules, keys: Tensor) -> EnvState:
    """Return environments at the start of their first episodes. keys (N,) int32."""
    zero = torch.zeros_like(keys)
    episode = Episode(length=zero, score=zero.clone(), episode_return=torch.zeros_like(keys, dtype=torch.float32))
    state = rules.game.init(rules.config, random.fold(keys, zero))
    return EnvState(game=state, key=keys, played=zero.clone(), episode=episode)


def legal(rules: Rules, state: Any) -> Tensor | None:
    """Return the action masks (N, A) bool of N States; None if every action is always legal in the game."""
    if not rules.game.spec(rules.config).masked:
        return None
    return rules.game.legal(rules.config, state)


def step(rules: Rules, envs: EnvState, action: Tensor, truncate: Tensor | None = None) -> tuple[EnvState, Step]:
    """Return the environments after action (N,), and the outcome; an environment whose episode ends resets in the same step.

    truncate (N,) bool: environments whose episodes are truncated at this step in any case.
    """
    state, reward, terminated, events = rules.game.step(rules.config, envs.game, action)
    episode = Episode(
        length=envs.episode.length + 1,
        score=envs.episode.score + events.score,
        episode_return=envs.episode.episode_return + reward,
    )
    truncated = events.truncated
    if rules.time_limit:
        truncated = truncated | (episode.length >= rules.time_limit)
    if truncate is not None:
        truncated = truncated | truncate
    truncated = truncated & ~terminated
    ended = terminated | truncated

    played = envs.played + ended.to(torch.int32)
    fresh = rules.game.init(rules.config, random.fold(envs.key, played))
    zero = Episode(*(torch.zeros_like(x) for x in episode))
    after = EnvState(
        game=where(ended, fresh, state),
        key=envs.key,
        played=played,
        episode=where(ended, zero, episode),
    )
    return after, Step(reward, terminated, truncated, events.won, state, episode)


def next_episode(rules: Rules, envs: EnvState, chosen: Tensor) -> EnvState:
    """Return `envs` with the current episode abandoned and the next one started where `chosen` (N,) bool is True."""
    played = envs.played + chosen.to(torch.int32)
    fresh = EnvState(
        game=rules.game.init(rules.config, random.fold(envs.key, played)),
        key=envs.key,
        played=played,
        episode=Episode(*(torch.zeros_like(x) for x in envs.episode)),
    )
    return where(chosen, fresh, envs)
