"""Epsilon-greedy exploration, with a separate epsilon for each environment."""

from __future__ import annotations

import torch
from torch import Tensor

from redline.core import random, select


def epsilon_ladder(start: float, high: float, low: float, fraction: Tensor, env_index: Tensor, num_envs: int) -> Tensor:
    """Return epsilon per environment, (N,) float32: from start to its final value, linear in `fraction` () from 0 to 1.

    Final values are spaced geometrically from high (environment 0) to low (environment num_envs - 1), as in Ape-X.
    """
    position = env_index.to(torch.float32) / max(num_envs - 1, 1)
    low = max(low, 1e-8)  # a geometric spacing cannot reach 0
    final = high * (low / max(high, low)) ** position
    return start + (final - start) * fraction.clamp(0.0, 1.0)


def epsilon_greedy(values: Tensor, legal: Tensor | None, epsilon: Tensor, key: Tensor, env_index: Tensor) -> Tensor:
    """Return a uniformly random legal action with probability epsilon (N,), else the best one: (N,) int64.

    values: (N, A), far lower for illegal actions than for legal ones. key: () int32, never used twice. env_index: (N,) int64.
    """
    explore = random.uniform(random.bits(key, 2 * env_index)) < epsilon
    bits = random.bits(key, 2 * env_index + 1)
    uniform = random.below(bits, values.shape[1]) if legal is None else select.draw(legal, bits)
    return torch.where(explore, uniform, values.argmax(1))
