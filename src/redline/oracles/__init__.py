"""Slow twins of the games in plain Python, one game at a time, written from the rules alone.

They define what the tensor games must do, step by step and bit by bit (the tests compare them exactly), and they are the
"one plain Python game" that benchmarks stand beside. They share with the games nothing but the settings and the random hash.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol

from redline.core import random


class Oracle(Protocol):
    """One game. `state()` gives the tensor game's State fields as plain numbers and lists."""

    def __init__(self, config: Any, key: int) -> None: ...
    def step(self, action: int) -> tuple[float, bool, bool, int, bool]: ...  # reward, terminated, truncated, score, won
    def state(self) -> dict[str, Any]: ...
    def observe(self) -> list[list[list[int]]]: ...


def load(name: str) -> type[Oracle]:
    """The oracle of the game called `name`."""
    oracle: type[Oracle] = importlib.import_module(f"{__name__}.{name}").Oracle
    return oracle


def bits(key: int, counter: int) -> int:
    """`redline.core.random.bits` for one key and counter, on Python integers."""
    return random.mix((key + (counter & random.MASK) * random.WEYL) & random.MASK)


def env_key(seed: int, env_index: int) -> int:
    """The root key of a environment."""
    return bits(random.mix(random.mix(seed & random.MASK) ^ ((seed >> 32) & random.MASK)), env_index)


def episode_key(seed: int, env_index: int, episode: int) -> int:
    """The random stream of a environment's n-th episode, the first is 0."""
    return bits(env_key(seed, env_index), episode)
