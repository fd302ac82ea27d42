"""Skyline in plain Python, one game at a time: the reference for `skyline`."""

from __future__ import annotations

from typing import Any

from redline.oracles import below, bits


class Oracle:
    """One game from the random stream `key`."""

    def __init__(self, config: Any, key: int) -> None:
        self.config, self.key = config, key
        self.heights = [0] * config.width
        self.goal = [below(bits(key, column), config.height + 1) for column in range(config.width)]
        if not any(self.goal):
            self.goal[0] = 1

    def step(self, action: int) -> tuple[float, bool, bool, int, bool]:
        """Play one action; return reward, terminated, truncated, score and won."""
        self.heights[action] += 1
        reached = self.heights == self.goal
        used = sum(self.heights) >= sum(self.goal)
        return float(reached), used, False, int(reached), reached

    def state(self) -> dict[str, Any]:
        return {"heights": self.heights, "goal": self.goal, "key": self.key}

    def observe(self) -> list[list[list[int]]]:
        """Return the blocks and the blocks of the goal, row by row from the top."""
        levels = range(self.config.height, -1, -1)
        return [[[int(h > level) for h in heights] for level in levels] for heights in (self.heights, self.goal)]
