"""Random moves, for learners that would otherwise always take what seems best."""

from __future__ import annotations

import torch
from torch import Tensor


def epsilon_ladder(start: float, high: float, low: float, done: Tensor, env_index: Tensor, num_envs: int) -> Tensor:
    """Share of random moves of each environment, (N,) float32: from start, on a straight line as `done` () goes to 1, to its own end.

    The ends are spread geometrically from high (environment 0) to low (the last).
    """
    place = env_index.to(torch.float32) / max(num_envs - 1, 1)
    low = max(low, 1e-8)  # a geometric ladder has no rung at 0
    end = high * (low / max(high, low)) ** place
    return start + (end - start) * done.clamp(0.0, 1.0)
