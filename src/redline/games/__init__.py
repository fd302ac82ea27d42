"""The games, found by scanning this folder: a module here that defines `step` is a game, named by its file."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any, Protocol, cast

from torch import Tensor

from redline.core.errors import UserError, nearest
from redline.core.records import Events, Hardware, Spec

Phases = tuple[tuple[str, float, float, dict[str, Any]], ...]  # of a curriculum: name, from, to, options


class Game(Protocol):
    """What a game's module offers. Config is its frozen dataclass, State its NamedTuple of tensors, batch on axis 0.

    It may have GPU_INLINE: how many operations a compiled step may repeat on a GPU rather than store their result; and
    UNROLL: how many terms of a sum are written out rather than summed by a loop.
    """

    VERSION: int
    PALETTE: tuple[tuple[str, tuple[int, int, int]], ...]
    HIDDEN: tuple[str, ...]  # fields of State that `observe` never reads
    LIVE: tuple[str, ...]  # options that may be 0-dim tensors: used in tensor arithmetic only, never branched on
    Config: type[Any]
    State: type[Any]

    def spec(self, config: Any) -> Spec: ...
    def suggest(self, hardware: Hardware, wanted: Mapping[str, Any]) -> dict[str, tuple[Any, str]]: ...
    def curriculum(self, config: Any) -> Phases: ...
    def init(self, config: Any, key: Tensor) -> Any: ...
    def step(self, config: Any, state: Any, action: Tensor) -> tuple[Any, Tensor, Tensor, Events]: ...
    def observe(self, config: Any, state: Any) -> Tensor: ...
    def legal(self, config: Any, state: Any) -> Tensor: ...
    def cells(self, config: Any, state: Any) -> Tensor: ...


def names() -> list[str]:
    """All games, alphabetically."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def load(name: str) -> Game:
    """The game called `name`."""
    if name not in names():
        hint = nearest(name, names()) or "."
        raise UserError(
            f"There is no game '{name}'{hint} Games: {', '.join(names())}; gym:ID takes one of Gymnasium's."
        )
    return cast(Game, importlib.import_module(f"{__name__}.{name}"))
