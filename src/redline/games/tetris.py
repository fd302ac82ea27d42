"""Tetris: place falling pieces of four cells, clear full rows, stay below the top; the score counts cleared lines.

    . . . . . .      The board is stored as columns of bits: bit r of a column is its cell in row r, row 0 at the bottom.
    . . # . . .      Column 2 here is 0b0101 = 5; its height is 3, with a hole in row 1. A piece is 16 bits: four columns of
    . . . # # .      four. A drop is thus a maximum of four heights, a clear is two masks and a shift, and the boards, holes
    # # # # # .      and transitions of all placements take integer arithmetic on a few words.

Two action sets. `placement`: one decision per piece, its orientation and column. `keys`: left, right, turn, drop, and gravity.
Pieces: 0 I, 1 O, 2 T, 3 S, 4 Z, 5 J, 6 L. Orientations: turned clockwise 0 to 3 times, equal ones counted once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from redline.core.errors import UserError
from redline.core.records import Events, Spec
from redline.games._contract import Controls
from redline.games._tetris_board import draw_piece, shape_reward, spawn, starting_stack
from redline.games._tetris_keys import KEYS, press_key
from redline.games._tetris_paint import PALETTE as PALETTE
from redline.games._tetris_paint import board_cells, paint_settled, small_boards
from redline.games._tetris_placements import (
    FEATURES,
    Landing,
    afterstates,
    boards,
    features,
    num_placements,
    place_piece,
    room_for_placements,
    table_entries,
)
from redline.games._tetris_planes import draw_planes
from redline.games._tetrominoes import placements

VERSION = 1  # of the rules: increment it when the same seed and actions give another trajectory

# Options for human players: keys, two next pieces, a held piece, and time to think.
HUMAN = {"actions": "keys", "view": "planes", "previews": 2, "hold": True, "gravity": 20}


@dataclass(frozen=True)
class Config:
    """Rules, rewards and view of a Tetris game."""

    width: int = 10  # columns, 4 to 16
    height: int = 20  # rows, 6 to 32
    actions: Literal["placement", "keys"] = "placement"  # one decision a piece; or one key a tick
    pieces: Literal["bag7", "uniform"] = "bag7"  # every piece once in seven; or each drawn anew
    previews: int = 1  # next pieces shown, 0 to 2
    hold: bool = False  # keys: a piece may be put on hold, once for each that falls
    gravity: int = 3  # keys: ticks until the piece falls by one row
    start_height: int = 0  # a new game starts on a random stack of 0 to this many rows
    ceiling: int = 0  # rows a piece may reach, 0: all; games below a low ceiling are short and teach survival faster
    view: Literal["planes", "afterstates", "boards"] = "planes"  # the board; or features or cells of each afterstate
    reward_line: float = 1.0  # each line cleared
    reward_death: float = -1.0  # when the game is lost
    reward_hole: float = 0.0  # each additional hole; refunded for each hole removed
    reward_height: float = 0.0  # each row the stack grows; refunded for each row it shrinks
    reward_piece: float = 0.0  # each piece settled

    def __post_init__(self) -> None:
        if not 6 <= self.height <= 32:
            raise UserError(f"env.height is {self.height}; expected 6 to 32 rows of a Tetris board.")
        if self.ceiling and not 6 <= self.ceiling <= self.height:
            raise UserError(
                f"env.ceiling is {self.ceiling}; expected 0 (the top of the board) or 6 to {self.height} rows."
            )
        for name, low, high, what in (
            ("width", 4, 16, "columns of a Tetris board"),
            ("previews", 0, 2, "next pieces shown"),
            ("gravity", 1, 120, "ticks"),
            ("start_height", 0, (self.ceiling or self.height) - 4, "rows, four below the top"),
        ):
            if not low <= getattr(self, name) <= high:
                raise UserError(f"env.{name} is {getattr(self, name)}; expected {low} to {high} {what}.")
        if self.actions not in ("placement", "keys"):
            raise UserError(f"env.actions is '{self.actions}'; expected placement or keys.")
        if self.pieces not in ("bag7", "uniform"):
            raise UserError(f"env.pieces is '{self.pieces}'; expected bag7 or uniform.")
        if self.view not in ("planes", "afterstates", "boards"):
            raise UserError(f"env.view is '{self.view}'; expected planes, afterstates or boards.")
        if self.view != "planes" and self.actions == "keys":
            raise UserError(f"env.view is '{self.view}', which shows placements; take it with env.actions placement.")
        if self.hold and self.actions != "keys":
            raise UserError("env.hold puts the falling piece aside with a key; take it with env.actions keys.")
        if self.hold and self.previews == 2 and self.height < 7:
            raise UserError("env.height is 6; two previews and a held piece are drawn in at least 7 rows.")


class State(NamedTuple):
    """N games of Tetris, 57 bytes each on the 10x20 board with one preview."""

    columns: Tensor  # (N, W) int32, int64 above 24 rows: settled cells, bit r is row r from the bottom
    pieces: Tensor  # (N, 1 + previews) int8: the falling piece, then the next ones
    turn: Tensor  # (N,) int8: clockwise turns of the falling piece, 0 to 3
    x: Tensor  # (N,) int8: leftmost column of the falling piece
    y: Tensor  # (N,) int8: lowest row of the falling piece
    hold: Tensor  # (N,) int8: the piece on hold, -1: none
    held: Tensor  # (N,) int8: 1 if hold was used since the last piece settled
    ticks: Tensor  # (N,) int8: ticks since the piece last fell
    bag: Tensor  # (N,) int8: set of the pieces still in the bag, bit p for piece p
    drawn: Tensor  # (N,) int32: pieces drawn since the game began
    key: Tensor  # (N,) int32: random stream of the episode


HIDDEN = ("held", "ticks", "bag", "drawn", "key")  # fields that no observation reads: replay does not store them
LIVE = ("start_height", "ceiling", "reward_line", "reward_death", "reward_hole", "reward_height", "reward_piece")


def spec(config: Config) -> Spec:
    if config.view != "planes":
        return _afterstates_spec(config)
    keys = config.actions == "keys"
    return Spec(
        obs_shape=(4, config.height, config.width),
        obs_dtype=torch.uint8,
        obs_scale=(1.0, 1.0, 1.0, 1.0),
        obs_high=1,
        num_actions=7 + config.hold if keys else num_placements(config),
        score_name="lines",
        winnable=False,
        masked=not keys,
    )


def _afterstates_spec(config: Config) -> Spec:
    board = (config.height, config.width) if config.view == "boards" else None
    cells = 1 + config.height * config.width + 7 * config.previews
    scale = _feature_scales(config) if board is None else (1.0,) * cells
    return Spec(
        obs_shape=(num_placements(config), len(scale)),
        obs_dtype=torch.float32,
        obs_scale=scale,
        obs_low=float("-inf"),
        obs_high=float("inf"),
        num_actions=num_placements(config),
        score_name="lines",
        winnable=False,
        masked=True,
        afterstates=True,
        afterstate_board=board,
    )


def _feature_scales(config: Config) -> tuple[float, ...]:
    rows = config.height**-0.5
    scales = {"reward": 1.0, "lines": 0.5, "landing_height": 0.5 / config.height, "eroded_cells": 0.2}
    scales |= {"row_transitions": 0.3 / config.height, "column_transitions": 0.5 / config.width, "holes": 0.2}
    scales |= {"wells": 0.1, "hole_depth": 0.1, "rows_with_holes": 0.3, "diversity": 0.3, "bumpiness": rows / 5}
    columns, pieces = [2 / config.height] * config.width, [1.0] * 7 * config.previews
    return (*(scales[name] for name in FEATURES), *columns, *pieces)


def init(config: Config, key: Tensor) -> State:
    """Return new games. key (N,) int32: their random streams."""
    placements(config.width, key.device)  # made here, before anything is compiled
    none = torch.zeros_like(key)
    bag, drawn, pieces = none + 127, none, []
    for _ in range(1 + config.previews):
        piece, bag = draw_piece(config, key, bag, drawn)
        pieces.append(piece)
        drawn = drawn + 1
    small = none.to(torch.int8)
    state = State(
        columns=starting_stack(config, key),
        pieces=torch.stack(pieces, 1).to(torch.int8),
        turn=small,
        x=small,
        y=small,
        hold=small - 1,
        held=small,
        ticks=small,
        bag=bag.to(torch.int8),
        drawn=drawn,
        key=key,
    )
    return spawn(config, state)


def step(config: Config, state: State, action: Tensor) -> tuple[State, Tensor, Tensor, Events]:
    """Return the outcome of action (N,) integer: State, reward (N,) float32, terminated (N,) bool, Events.

    An illegal placement ends the game and leaves the State unchanged.
    """
    play = place_piece if config.actions == "placement" else press_key
    after, terminated, lines, settled = play(config, state, action.to(torch.int32))
    reward = config.reward_line * lines.to(torch.float32) + config.reward_death * terminated.to(torch.float32)
    reward = shape_reward(config, reward, state.columns.unbind(1), after.columns.unbind(1), settled)
    false = torch.zeros_like(terminated)
    return after, reward, terminated, Events(score=lines, won=false, truncated=false)


def observe(config: Config, state: State) -> Tensor:
    """Return planes (N, 4, H, W) uint8: settled cells, falling piece, landing position, next pieces; or (N, A, F) float32."""
    if config.view == "planes":
        return draw_planes(config, state)
    return _show_afterstates(config, state, afterstates(config, state))


def observe_afterstate(config: Config, state: State, action: Tensor) -> Tensor:
    """Return the row (N, F) float32 of `observe` that belongs to action (N,) integer: one afterstate per game."""
    return _show_afterstates(config, state, afterstates(config, state, action.to(torch.int32))).squeeze(1)


def _show_afterstates(config: Config, state: State, after: Landing) -> Tensor:
    return (boards if config.view == "boards" else features)(config, state, after)


def legal(config: Config, state: State) -> Tensor:
    """Return the action masks (N, A) bool. Every key is legal; a placement must exist and fit below the top."""
    if config.actions == "keys":
        return torch.ones(state.x.shape[0], spec(config).num_actions, dtype=torch.bool, device=state.x.device)
    place, _ = placements(config.width, state.x.device)
    room = room_for_placements(config, state.pieces[:, 0].to(torch.int32), state.columns.unbind(1))
    return ((room.unsqueeze(1) >> (table_entries(config, state, place) >> 24)) & 1) == 1


def cells(config: Config, state: State) -> Tensor:
    """Return the boards as (N, H, W) uint8 indices into PALETTE; all settled cells have the same colour."""
    return board_cells(config, state)


def paint(config: Config, painted: Tensor, before: State, after: State) -> Tensor:
    """Return `cells` of the State `after`, with each settled cell in the colour of its piece."""
    return paint_settled(config, painted, before, after)


def side_boards(config: Config, state: State) -> dict[str, Tensor]:
    """Return small boards (N, h, w) uint8 of the next pieces and the held one, by title."""
    return small_boards(config, state)


def action_names(config: Config) -> tuple[str, ...]:
    """Return the names of the keys; placements are numbered, because their positions depend on the piece."""
    if config.actions == "keys":
        return KEYS[: spec(config).num_actions]
    return tuple(f"placement {number}" for number in range(1, 1 + num_placements(config)))


def controls(config: Config, level: int) -> Controls | None:
    """Return the controls for playing with keys; None for placements. Pieces fall faster on each level."""
    if config.actions != "keys":
        return None
    keys = {"ArrowLeft": 1, "ArrowRight": 2, "ArrowUp": 3, "x": 3, "z": 4, "ArrowDown": 5, " ": 6}
    if config.hold:
        keys["c"] = 7
    gravity = max(1, round(20 * 0.8 ** (level - 1)))
    return Controls(keys, ticks=25.0, idle=0, level_score=10, agent_ticks=1.0, options={"gravity": gravity})
