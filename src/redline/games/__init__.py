"""The games, found by scanning this folder: a module here that defines `step` is a game, named by its file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from redline.core.errors import UserError as UserError
from redline.core.records import Events, Hardware, Spec
from redline.core.registry import Registry, defines

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


_registry: Registry[Game] = Registry("game", __name__, "redline.games", defines("step"))
names = _registry.names
load = _registry.load
failures = _registry.failures
