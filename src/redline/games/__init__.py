"""Games as pure functions over batches of tensors, one module each; `load` returns one by name.

A module in this folder that defines `step` is a game, named after its file. `docs/guides/adding-a-game.md` explains how
to write one; `redline.testing.check_game` checks it. Importing this package does not import torch.
"""

from __future__ import annotations

from typing import Any

from redline.core.registry import Registry, defines
from redline.games._contract import Controls, Game, build, draw_cells

__all__ = ["Controls", "Game", "build", "draw_cells", "failures", "load", "names", "registry", "validate"]

registry: Registry[Game] = Registry("game", __name__, "redline.games", defines("step"), build)


def names() -> list[str]:
    """Return the names of all built-in and installed games, sorted, without importing them."""
    return registry.names()


def load(name: str) -> Game:
    """Return the game `name`: built in, installed, or a module in the current folder or on the Python path."""
    return registry.load(name)


def failures() -> dict[str, str]:
    """Return error messages by name for the games that cannot be loaded."""
    return registry.failures()


def validate(game: Game, config: Any) -> None:
    """Raise UserError if `game` violates the contract with these options (shapes, dtypes, lengths); cached."""
    from redline.games import _validate

    _validate.validate(game, config)
