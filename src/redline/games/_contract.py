"""The contract between a game and everything that plays it, and the record `games.load` makes of a game's module."""

from __future__ import annotations

import colorsys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from redline.core.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from redline.core.records import Events, Spec

Palette = tuple[tuple[str, tuple[int, int, int]], ...]


class Controls(NamedTuple):
    """How a person plays one level of a game with the keyboard."""

    keys: dict[str, int]  # name of a key in browsers (KeyboardEvent.key) -> action
    ticks: float = 0.0  # steps per second; 0: every key press is a step, and the game waits for it
    idle: int | None = (
        None  # action of a step without a key press; None: repeat the last one, and wait for the first key to start
    )
    level_score: int = 0  # points needed for the next level; 0: there is only one level
    agent_ticks: float = (
        0.0  # steps per second of an opponent whose actions differ from these keys; 0: the same as `ticks`
    )
    options: dict[str, Any] = {}  # noqa: RUF012 (never changed): options of the game on this level


REQUIRED = {  # member -> the form that the contract requires
    "Config": "a frozen dataclass whose fields all have defaults",
    "State": "a NamedTuple of tensors",
    "spec": "spec(config) -> Spec",
    "init": "init(config, key) -> State",
    "step": "step(config, state, action) -> (State, reward, terminated, Events)",
    "observe": "observe(config, state) -> Tensor",
}


def default_palette() -> Palette:
    """Return 32 colours named 0 to 9 and a to v: dark for 0, the others from around the colour wheel."""
    colours: list[tuple[str, tuple[int, int, int]]] = [("0", (24, 26, 32))]
    for number in range(1, 32):
        red, green, blue = colorsys.hsv_to_rgb(number * 0.31 % 1.0, 0.65, 0.9)
        colours.append(
            ("0123456789abcdefghijklmnopqrstuv"[number], (int(255 * red), int(255 * green), int(255 * blue)))
        )
    return tuple(colours)


@dataclass(frozen=True, eq=False)
class Game:
    """A game as pure functions over batches: each treats the rows of axis 0 independently.

    A module provides the six required members `Config`, `State`, `spec`, `init`, `step` and `observe`; the others have
    the defaults shown here. N games, A actions.

    An environment that only the CPU can step (Gymnasium, Mario) has the same attributes as a Game, with `ON_CPU` True and
    without `step`.
    """

    name: str  # registry name or import name: `load(name)` returns this game
    module: ModuleType = field(repr=False)
    # Frozen dataclass of the options, all with defaults. Its __post_init__ raises UserError for invalid values.
    Config: type[Any] = field(repr=False)
    # Flat NamedTuple of tensors, each (N, …): the whole state of N games, including their random streams.
    State: type[Any] = field(repr=False)
    # spec(config): describe observations and actions.
    spec: Callable[[Any], Spec] = field(repr=False)
    # init(config, key (N,) int32) -> State: new games, with `key` as their random streams.
    init: Callable[[Any, Tensor], Any] = field(repr=False)
    # step(config, state, action (N,) integer) -> State, reward (N,) float32, terminated (N,) bool, Events.
    step: Callable[[Any, Any, Tensor], tuple[Any, Tensor, Tensor, Events]] = field(repr=False)
    # observe(config, state) -> (N, *spec.obs_shape) of spec.obs_dtype: the observations, which depend on State alone.
    observe: Callable[[Any, Any], Tensor] = field(repr=False)
    # legal(config, state) -> (N, A) bool: the action masks, with at least one legal action per row. Default: all legal.
    legal: Callable[[Any, Any], Tensor] = field(repr=False)
    # observe_afterstate(config, state, action (N,) int64) -> (N, F): row `action` of an observation (N, A, F), for a spec
    # with `afterstates`. Learners then get only this row of past States, at a fraction of the cost.
    observe_afterstate: Callable[[Any, Any, Tensor], Tensor] | None = field(default=None, repr=False)
    # plane_fields(config) -> names of three fields of State if an observation (N, 3, H, W) shows exactly these, else (): a
    # board copied as it is, of the observation's size, and two cell numbers (N,), each shown as a plane with a one at that
    # cell (-1: nowhere). Replay can then build observations on a GPU without gathering States first.
    plane_fields: Callable[[Any], tuple[str, ...]] | None = field(default=None, repr=False)
    # cells(config, state) -> (N, H, W) uint8 indices into PALETTE: the board as drawn for people. None: cannot be drawn.
    cells: Callable[[Any, Any], Tensor] | None = field(default=None, repr=False)
    # links(config, state) -> (N, H, W) uint8: the sides on which a cell continues into its neighbour (1 up, 2 right, 4 down,
    # 8 left), plus 16 times the side that it faces. Linked cells are drawn as one body, all others as discs.
    links: Callable[[Any, Any], Tensor] | None = field(default=None, repr=False)
    # paint(config, painted, before, after) -> (N, H, W): `cells` of the State `after`, with colours that are not part of a
    # State carried over from `painted`, the cells drawn one step `before`.
    paint: Callable[[Any, Tensor, Any, Any], Tensor] | None = field(default=None, repr=False)
    # side_boards(config, state) -> title -> (N, h, w) uint8 indices into PALETTE: small boards shown beside the game.
    side_boards: Callable[[Any, Any], dict[str, Tensor]] | None = field(default=None, repr=False)
    # action_names(config) -> names of the A actions. Default: numbers.
    action_names: Callable[[Any], tuple[str, ...]] | None = field(default=None, repr=False)
    # controls(config, level from 1) -> Controls; None if people cannot play with these options.
    controls: Callable[[Any, int], Controls | None] | None = field(default=None, repr=False)
    HUMAN: dict[str, Any] = field(default_factory=dict, repr=False)  # options for human players
    VERSION: int = 1  # of the rules: increment it when the same seed and actions give another trajectory
    PALETTE: Palette = field(
        default_factory=default_palette, repr=False
    )  # (name, (red, green, blue)) of each cell value
    HIDDEN: tuple[str, ...] = ()  # fields of State that `observe` and `legal` never read: replay does not store them
    LIVE: tuple[str, ...] = ()  # options used only in tensor arithmetic, so that a curriculum can change them
    ON_CPU: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "__doc__", self.module.__doc__)  # `redline list` prints its first line

    def __reduce__(self) -> tuple[Callable[[str], Game], tuple[str]]:
        """Pickle and copy by name: the functions of a module are not copied."""
        from redline.games import load

        return load, (self.name,)


def draw_cells(game: Game, config: Any, state: Any) -> Tensor:
    """Return the boards of N games, (N, H, W) uint8 indices into PALETTE; raise UserError if the game has no `cells`."""
    if game.cells is None:
        raise UserError(f"{game.name} cannot be drawn: the game does not define cells(config, state).")
    return game.cells(config, state)


_OPTIONAL = (
    *(
        "legal",
        "observe_afterstate",
        "plane_fields",
        "cells",
        "links",
        "paint",
        "side_boards",
        "action_names",
        "controls",
        "HUMAN",
    ),
    *("VERSION", "PALETTE", "HIDDEN", "LIVE"),
)


def from_module(name: str, module: Any) -> Game:
    """Return a Game made from a module, or any object with these attributes; optional members get their defaults."""
    for member, form in REQUIRED.items():
        if not hasattr(module, member):
            raise UserError(f"The game '{name}' has no member '{member}'; expected {form}.")
    members = {member: getattr(module, member) for member in REQUIRED}
    members |= {member: getattr(module, member) for member in _OPTIONAL if hasattr(module, member)}
    members.setdefault("legal", _all_actions(members["spec"]))
    return Game(name, module, **members)


def build(name: str, module: Any) -> Game:
    """Return a Game made from a module and validated with default options; raise UserError naming an invalid member."""
    from redline.games._validate import validate

    game = from_module(name, module)
    validate(game)
    return game


def _all_actions(spec: Callable[[Any], Spec]) -> Callable[[Any, Any], Tensor]:
    """Return a `legal` function for a game in which every action is always legal."""
    import torch

    def all_actions_legal(config: Any, state: Any) -> Tensor:
        first: Tensor = state[0]
        return torch.ones(first.shape[0], spec(config).num_actions, dtype=torch.bool, device=first.device)

    return all_actions_legal
