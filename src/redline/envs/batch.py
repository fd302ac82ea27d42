"""N games on one device: time limit, auto-reset, final state and episode statistics, once for all games.

`reset` and `step` are pure functions over tensors, so that a whole training iteration compiles and captures; `Env` in
`redline.envs` holds their state for people.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from redline.core import random
from redline.core.records import Episode, Step, where
from redline.games import Game


class Rules(NamedTuple):
    """A game with its settings: everything about an environment that is not a tensor."""

    game: Game
    config: Any
    time_limit: int  # steps until an episode is truncated, 0: none


class EnvState(NamedTuple):
    """The state of N environments. A environment plays one game after another, each from its own random stream."""

    game: Any  # the game's State
    key: Tensor  # (N,) int32: root of the environment's streams, from seed and environment number
    played: Tensor  # (N,) int32: episodes finished
    episode: Episode  # the one under way


def env_keys(seed: int, envs: Tensor) -> Tensor:
    """Root keys of the given environment numbers (N,) int64 -> (N,) int32. Lane i has the same key in a batch of any size."""
    return random.fold(random.seed_key(seed, envs.device), envs)


def reset(rules: Rules, keys: Tensor) -> EnvState:
    """Start every environment's first episode. keys (N,) int32."""
    zero = torch.zeros_like(keys)
    episode = Episode(length=zero, score=zero.clone(), episode_return=torch.zeros_like(keys, dtype=torch.float32))
    state = rules.game.init(rules.config, random.fold(keys, zero))
    return EnvState(game=state, key=keys, played=zero.clone(), episode=episode)


def legal(rules: Rules, state: Any) -> Tensor | None:
    """(N, A) bool: the actions that may be taken in each State; None where the game forbids none."""
    if not rules.game.spec(rules.config).masked:
        return None
    return rules.game.legal(rules.config, state)


def step(rules: Rules, envs: EnvState, action: Tensor, truncate: Tensor | None = None) -> tuple[EnvState, Step]:
    """Play one action (N,) in every environment; environments whose episode ended start the next one in the same step.

    Where `cut` (N,) bool an episode is truncated that would go on.
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
