"""A Gymnasium environment whose step computes for a millisecond, about as long as four frames of an emulator.

With this folder on the Python path, it is `gym:busy_env:Busy-v0`. bench/growth.py measures actor processes with it.
"""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

STEP_SECONDS = 0.001
EPISODE_STEPS = 200


class Busy(gymnasium.Env[Any, Any]):
    """Four numbers, two actions and episodes of 200 steps; there is nothing to learn."""

    observation_space = spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self.steps = 0
        return np.zeros(4, np.float32), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        until = time.thread_time() + STEP_SECONDS  # CPU time, however busy the processor is
        while time.thread_time() < until:
            pass
        self.steps += 1
        return np.full(4, action, np.float32), float(action), self.steps >= EPISODE_STEPS, False, {}


gymnasium.register("Busy-v0", "busy_env:Busy")
