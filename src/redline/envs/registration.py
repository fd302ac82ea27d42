"""Registers every tensor game with Gymnasium as `redline/<Game>-v0`, by string entry points: torch is not imported."""

from __future__ import annotations

import gymnasium

from redline import games

_ADAPTER = "redline.envs.gymnasium_adapter"


def register() -> None:
    """Register an id for every game; idempotent."""
    for name in games.names():
        env_id = f"redline/{''.join(word.capitalize() for word in name.split('_'))}-v0"
        if env_id not in gymnasium.registry:
            gymnasium.register(
                env_id,
                entry_point=f"{_ADAPTER}:GameEnv",
                vector_entry_point=f"{_ADAPTER}:GameVectorEnv",
                kwargs={"game": name},
            )
