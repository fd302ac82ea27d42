"""Atari games of ale-py: constructor arguments that leave all preprocessing to `frames`, and how episodes start.

Sticky actions follow Machado et al. 2018, as in ALE/*-v5 (on every frame, the emulator repeats the previous action with
probability 0.25); no-op starts and FIRE follow Mnih et al. 2015.
"""

from __future__ import annotations

import contextlib
from typing import Any

import gymnasium
import numpy as np

from redline.core.errors import UserError

PREFIX = "ALE/"  # of an id
_FIRE_FRAMES = 4  # as long as one of the agent's actions: sticky actions may swallow the first frames


def is_atari(name: str) -> bool:
    """Return whether `name` is the name of an Atari game, such as gym:ALE/Pong-v5."""
    return name.rpartition(":")[2].startswith(PREFIX)


def constructor_arguments(name: str, config: Any) -> dict[str, Any]:
    """Return constructor arguments that turn off frame skipping and colour where the preprocessing takes over; else empty."""
    if not is_atari(name):
        return {}
    arguments: dict[str, Any] = {"frameskip": 1} if config.frame_skip > 1 else {}
    return arguments | ({"obs_type": "grayscale"} if config.grey else {})


def action_meanings(env: gymnasium.Env[Any, Any]) -> tuple[str, ...]:
    """Return the names of the actions, such as FIRE; empty if the environment does not provide them."""
    with contextlib.suppress(Exception):  # another environment may have a method of this name
        return tuple(map(str, env.unwrapped.get_action_meanings()))  # type: ignore[attr-defined]
    return ()


class EpisodeStart(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Plays the first steps of every episode before the agent takes over.

    noops: maximum number of no-op steps (action 0) at the start; their number is random, at least 1.
    fire: press FIRE at the start and after the loss of a life.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], noops: int, fire: bool, name: str) -> None:
        super().__init__(env)
        self.noops, self.lives, self.rng = noops, 0, np.random.default_rng()
        meanings = action_meanings(env)
        if fire and "FIRE" not in meanings:
            raise UserError(f"env.fire is set, but {name} has no action FIRE; remove env.fire.")
        self.fire = meanings.index("FIRE") if fire else None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(seed=seed, options=options)
        if seed is not None:
            self.rng = np.random.default_rng(
                [seed, 2]
            )  # independent of the environment's own draws and of sticky actions
        actions = [0] * int(self.rng.integers(1, self.noops + 1)) if self.noops else []
        actions += [self.fire] * _FIRE_FRAMES if self.fire is not None else []
        for action in actions:
            obs, _, terminated, truncated, info = self.env.step(action)
            if terminated or truncated:
                obs, info = self.env.reset()
        self.lives = info.get("lives", 0)
        return obs, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        lives, self.lives = self.lives, info.get("lives", 0)
        total: Any = reward
        if self.fire is not None and self.lives < lives:
            for _ in range(_FIRE_FRAMES):
                if terminated or truncated:
                    break
                obs, reward, terminated, truncated, info = self.env.step(self.fire)
                total += reward
        return obs, total, terminated, truncated, info
