"""Oracles: the rules of the games in plain Python, one game at a time, as the reference for tests and benchmarks.

An oracle is written from the rules alone. It shares nothing with the tensor game but its options and the random hash, so
that a step-by-step comparison finds an error in either. A module in this folder that defines `Oracle` belongs to the game
of the same name; an external game has its oracle beside it, `catch_oracle.py` for `catch.py`.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol

from redline.core import random
from redline.core.errors import UserError
from redline.core.registry import Registry, UnknownName, defines


class Oracle(Protocol):
    """One game with the random stream `key`. It may also define `legal() -> list[bool]`, the action mask."""

    def __init__(self, config: Any, key: int) -> None: ...

    def step(self, action: int) -> tuple[float, bool, bool, int, bool]:
        """Play one action; return reward, terminated, truncated, score, won."""

    def state(self) -> dict[str, Any]:
        """Return the tensor game's State fields by name, as plain numbers and lists."""

    def observe(self) -> Any:
        """Return the observation as nested lists of numbers; an empty list for the afterstate of an illegal action."""


def _build(name: str, module: Any) -> type[Oracle]:
    if not isinstance(getattr(module, "Oracle", None), type):
        raise UserError(
            f"The oracle '{name}' has no class Oracle; expected Oracle(config, key) with step, state, observe."
        )
    oracle: type[Oracle] = module.Oracle
    return oracle


registry: Registry[type[Oracle]] = Registry("oracle", __name__, "redline.oracles", defines("Oracle"), _build)


def names() -> list[str]:
    """Return the names of the games that have an oracle, sorted."""
    return registry.names()


def load(name: str) -> type[Oracle]:
    """Return the oracle called `name`: that of a built-in game, or of a module by import name."""
    return registry.load(name)


def find(game: str) -> type[Oracle] | None:
    """Return the oracle of a loaded game: registered, in the module `GAME_oracle`, or in its own module; else None."""
    if game in names():
        return load(game)
    try:
        return load(f"{game}_oracle")
    except UnknownName:
        in_game = isinstance(getattr(sys.modules.get(game), "Oracle", None), type)
        return load(game) if in_game else None


def bits(key: int, counter: int) -> int:
    """Return 32 random bits: `redline.core.random.bits` of a key and counter, on Python integers."""
    return random.mix((key + (counter & random.MASK) * random.WEYL) & random.MASK)


def below(random_bits: int, bound: int) -> int:
    """Return an integer in [0, bound): `redline.core.random.below` on Python integers."""
    return random_bits * bound >> 32


def env_key(seed: int, env_index: int) -> int:
    """Return the root key of an environment."""
    return bits(random.mix(random.mix(seed & random.MASK) ^ ((seed >> 32) & random.MASK)), env_index)


def episode_key(seed: int, env_index: int, episode: int) -> int:
    """Return the random stream of an environment's episode number `episode`, counted from 0."""
    return bits(env_key(seed, env_index), episode)
