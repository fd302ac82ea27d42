"""Tetris. Place falling pieces of four cells, fill rows to clear them, stay below the top; the score is lines cleared.

    . . . . . .      The board is kept as columns of bits: bit r of a column is its cell in row r, row 0 at the bottom.
    . . # . . .      This column 2 is 0b0101 = 5, its height 3, with one hole at row 1. A piece is 16 bits: four columns of
    . . . # # .      four. So a drop is a maximum of four heights, a clear is two masks and a shift, and boards, holes and
    # # # # # .      transitions of every placement at once are integer arithmetic on a few words.

Two ways to play. `placement`: one decision a piece, its orientation and column. `keys`: left, right, turn, drop, and gravity.
Pieces: 0 I, 1 O, 2 T, 3 S, 4 Z, 5 J, 6 L. Orientations: turned clockwise 0 to 3 times, equal ones counted once.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from redline.core import random
from redline.core.bits import count_bits, count_bits_along, count_octets, fold_octets, heights, weigh_octets
from redline.core.errors import UserError
from redline.core.records import Events, Spec, where
from redline.games._tetrominoes import ABOVE, PLACES, lowest_of, placements, property_of, rows_of, shape_of

VERSION = 1  # of the rules: raised whenever the same seed and actions would give another trajectory

PALETTE = (  # what `cells` numbers: name and colour
    ("floor", (24, 26, 32)),
    ("settled", (86, 124, 190)),
    ("falling", (236, 178, 70)),
    ("landing", (72, 66, 54)),
)

KEYS = ("nothing", "left", "right", "turn clockwise", "turn counter-clockwise", "soft drop", "hard drop", "hold")
NOTHING, LEFT, RIGHT, CLOCKWISE, COUNTER, SOFT, HARD, HOLD = range(8)

FEATURES = (  # of an afterstate, in this order; the heights of all columns follow, then the next pieces one-hot
    *("reward", "lines", "landing_height", "eroded_cells", "row_transitions", "column_transitions", "holes", "wells"),
    *("hole_depth", "rows_with_holes", "diversity", "bumpiness"),
)

_START = -1  # draws of the starting stack: its height, then from -2 downwards its rows; pieces are numbered from 0


@dataclass(frozen=True)
class Config:
    """Rules, rewards and view of a Tetris game."""

    width: int = 10  # columns, 4 to 16
    height: int = 20  # rows, 6 to 32
    actions: Literal["placement", "keys"] = "placement"  # one decision a piece; or one key a tick
    pieces: Literal["bag7", "uniform"] = "bag7"  # every piece once in seven; or each drawn anew
    previews: int = 1  # next pieces shown, 0 to 2
    hold: bool = False  # keys: a piece may be put aside, once for each that falls
    gravity: int = 3  # keys: ticks until the piece falls by one row
    start_height: int = 0  # a new game starts on a random stack of 0 to this many rows
    ceiling: int = 0  # rows a piece may reach, 0: all; a low one teaches how not to die in a tenth of the time
    view: Literal["planes", "afterstates"] = "planes"  # the board; or what each placement would lead to
    reward_line: float = 1.0  # each line cleared
    reward_death: float = -1.0
    reward_hole: float = 0.0  # each hole more; taken back for each hole less
    reward_height: float = 0.0  # each row the stack grows; taken back for each row less
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
        if self.view not in ("planes", "afterstates"):
            raise UserError(f"env.view is '{self.view}'; expected planes or afterstates.")
        if self.view == "afterstates" and self.actions == "keys":
            raise UserError("env.view is 'afterstates', which shows placements; take it with env.actions placement.")
        if self.hold and self.actions != "keys":
            raise UserError("env.hold puts the falling piece aside with a key; take it with env.actions keys.")
        if self.hold and self.previews == 2 and self.height < 7:
            raise UserError("env.height is 6; two previews and a held piece are drawn in at least 7 rows.")


class State(NamedTuple):
    """N games of Tetris. 57 bytes a game on the 10x20 board with one preview."""

    columns: Tensor  # (N, W) int32, int64 above 24 rows: settled cells, bit r is row r from the bottom
    pieces: Tensor  # (N, 1 + previews) int8: the falling piece, then the next ones
    turn: Tensor  # (N,) int8: times the falling piece was turned clockwise, 0 to 3
    x: Tensor  # (N,) int8: its leftmost column
    y: Tensor  # (N,) int8: its lowest row
    hold: Tensor  # (N,) int8: the piece put aside, -1 none
    held: Tensor  # (N,) int8: 1 if that was done since the last piece settled
    ticks: Tensor  # (N,) int8: since the piece last fell
    bag: Tensor  # (N,) int8: set of the pieces still in the bag, bit p is piece p
    drawn: Tensor  # (N,) int32: pieces drawn since the game began
    key: Tensor  # (N,) int32: random stream of the episode


HIDDEN = ("held", "ticks", "bag", "drawn", "key")  # fields no observation reads: a replay need not store them
LIVE = ("start_height", "ceiling", "reward_line", "reward_death", "reward_hole", "reward_height", "reward_piece")


class Afterstates(NamedTuple):
    """What each placement leads to: settled, full rows removed. A placements, W columns."""

    columns: Tensor  # (W, N, A) as State.columns; of a placement that is not legal: meaningless
    legal: Tensor  # (N, A) bool: the piece fits below the top
    lines: Tensor  # (N, A) int32: rows removed
    landing: Tensor  # (N, A) int32: twice the height of the piece's middle above the floor, less one row
    eroded: Tensor  # (N, A) int32: lines times the piece's cells that went with them


def spec(config: Config) -> Spec:
    if config.view == "afterstates":
        rows = config.height**-0.5
        scales = {"reward": 1.0, "lines": 0.5, "landing_height": 0.5 / config.height, "eroded_cells": 0.2}
        scales |= {"row_transitions": 0.3 / config.height, "column_transitions": 0.5 / config.width, "holes": 0.2}
        scales |= {"wells": 0.1, "hole_depth": 0.1, "rows_with_holes": 0.3, "diversity": 0.3, "bumpiness": rows / 5}
        return Spec(
            obs_shape=(num_placements(config), num_features(config)),
            obs_dtype=torch.float32,
            obs_scale=(
                *(scales[name] for name in FEATURES),
                *[2 / config.height] * config.width,
                *[1.0] * 7 * config.previews,
            ),
            obs_low=float("-inf"),
            obs_high=float("inf"),
            num_actions=num_placements(config),
            score_name="lines",
            masked=True,
            afterstates=True,
        )
    keys = config.actions == "keys"
    return Spec(
        obs_shape=(4, config.height, config.width),
        obs_dtype=torch.uint8,
        obs_scale=(1.0, 1.0, 1.0, 1.0),
        obs_high=1,
        num_actions=7 + config.hold if keys else num_placements(config),
        score_name="lines",
        masked=not keys,
    )


def num_placements(config: Config) -> int:
    """Of the pieces with four orientations, which have the most."""
    return 4 * config.width - 6


def num_features(config: Config) -> int:
    return len(FEATURES) + config.width + 7 * config.previews


def init(config: Config, key: Tensor) -> State:
    """New games from their streams. key (N,) int32."""
    placements(config.width, key.device)  # made here, before anything is compiled: later it would be compiled twice
    none = torch.zeros_like(key)
    bag, drawn, pieces = none + 127, none, []
    for _ in range(1 + config.previews):
        piece, bag = _draw(config, key, bag, drawn)
        pieces.append(piece)
        drawn = drawn + 1
    small = none.to(torch.int8)
    state = State(
        columns=_starting_stack(config, key),
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
    return _spawn(config, state)


def step(config: Config, state: State, action: Tensor) -> tuple[State, Tensor, Tensor, Events]:
    """One placement or key. action (N,) integer -> State, reward (N,) float32, terminated (N,) bool, Events.

    A placement that is not legal ends the game and changes nothing else.
    """
    play = _place if config.actions == "placement" else _press
    after, terminated, lines, settled = play(config, state, action.to(torch.int32))
    reward = config.reward_line * lines.to(torch.float32) + config.reward_death * terminated.to(torch.float32)
    reward = _shaped(config, reward, state.columns, after.columns, settled, dim=1)
    false = torch.zeros_like(terminated)
    return after, reward, terminated, Events(score=lines, won=false, truncated=false)


def observe(config: Config, state: State) -> Tensor:
    """(N, 4, H, W) uint8: settled cells, falling piece, where it would land, next pieces; or (N, A, F) float32."""
    if config.view == "afterstates":
        return features(config, state, afterstates(config, state))
    return _planes(config, state)


def legal(config: Config, state: State) -> Tensor:
    """(N, A) bool. Every key may be pressed; a placement must exist and fit below the top."""
    if config.actions == "keys":
        return torch.ones(state.x.shape[0], spec(config).num_actions, dtype=torch.bool, device=state.x.device)
    place, _ = placements(config.width, state.x.device)
    return ((_room(config, state).unsqueeze(1) >> (_listed(config, state, place) >> 24)) & 1) == 1


def cells(config: Config, state: State) -> Tensor:
    """(N, H, W) uint8 indices into PALETTE: the board as a person sees it."""
    settled, falling, landing, _ = (plane > 0 for plane in _planes(config, state).unbind(1))
    board = torch.where(landing, 3, 0)
    board = torch.where(falling, 2, board)
    return torch.where(settled, 1, board).to(torch.uint8)


# ---------------------------------------------------------------------------------------------------------- afterstates


def afterstates(config: Config, state: State) -> Afterstates:
    """Every placement of the falling piece, settled and cleared."""
    place, body = (_listed(config, state, table) for table in placements(config.width, state.x.device))
    x, drop, fits = _dropped(config, heights(state.columns), place, body)
    shape, height = body & 0xFFFF, body >> 16
    board = state.columns.t().unsqueeze(2)  # (W, N, 1)
    drop = torch.where(fits, drop, 0)
    column = torch.arange(config.width, dtype=torch.int32, device=x.device).view(-1, 1, 1)
    shift = 4 * (column - x)  # (W, N, A): where a column lies in the piece's 16 bits
    inside = (shift >= 0) & (shift < 16)
    settled = board | (torch.where(inside, (shape >> shift.clamp(0, 12)) & 15, 0).to(board.dtype) << drop)
    full = functools.reduce(torch.bitwise_and, settled.unbind(0))
    lows, lines = _full_rows(full)
    went = count_bits(shape & (((full >> drop) & 15).to(torch.int32) * 0x1111))  # the piece's cells in those rows
    return Afterstates(_remove(settled, lows), fits, lines, 2 * drop + height - 1, lines * went)


def features(config: Config, state: State, after: Afterstates) -> Tensor:
    """(N, A, F) float32 in the order of FEATURES, heights of columns and next pieces after them.

    Those of Dellacherie and of Thiery and Scherrer, counted after full rows are gone; walls and floor count as filled. Their
    texts leave wells and hole depth open to reading: these are the readings with which published controllers score what was
    published (docs/log.md).
    `landing_height` is doubled and without an offset, so that it is whole. `reward` is that of the placement without what
    may follow from the next piece.
    """
    height = heights(after.columns)  # (W, N, A)
    counts = board_features(config, after.columns, height)
    reward = config.reward_line * after.lines.to(torch.float32)
    reward = _shaped(config, reward, state.columns.t().unsqueeze(2), after.columns, after.legal, dim=0)
    known = {"reward": reward, "lines": after.lines, "landing_height": after.landing, "eroded_cells": after.eroded}
    rows = [(known | counts)[name].to(torch.float32) for name in FEATURES]
    rows += list(height.to(torch.float32).unbind(0))
    for preview in range(1, 1 + config.previews):
        piece = state.pieces[:, preview].unsqueeze(1)
        rows += [(piece == kind).to(torch.float32).expand_as(reward) for kind in range(7)]
    return torch.stack(rows, 2)


def board_features(config: Config, columns: Tensor, height: Tensor) -> dict[str, Tensor]:
    """Counts of boards, columns (W, …) and their heights (W, …) -> each (…) int32.

    row_transitions     from filled to empty or back along rows, walls filled
    column_transitions  the same along columns, floor filled, above the top empty
    holes               empty cells with a filled one above        hole_depth       for each of them, filled cells above
    wells               columns lower than both neighbours, walls are as high as the board: 1 + … + depth
    rows_with_holes     rows                                       diversity        how many of -2 … 2 occur as differences
    bumpiness           absolute differences of neighbours
    """
    octets, places = count_octets(columns)
    filled = fold_octets(octets)  # cells of each column
    wall = (1 << config.height) - 1
    beside = (
        count_bits_along(columns[1:] ^ columns[:-1]) + count_bits(columns[0] ^ wall) + count_bits(columns[-1] ^ wall)
    )
    covered = ((torch.ones_like(columns) << height) - 1) & ~columns
    rows = functools.reduce(torch.bitwise_or, covered.unbind(0))
    sides = (height[1] - height[0]).clamp(min=0), (height[-2] - height[-1]).clamp(min=0)
    well = (torch.minimum(height[:-2], height[2:]) - height[1:-1]).clamp(min=0)
    difference = height[1:] - height[:-1]
    seen = functools.reduce(torch.bitwise_or, (1 << (difference + 3).clamp(0, 6)).unbind(0)) & 0b0111110
    # Columns begin at a filled floor and end in empty air; each run of filled cells above a gap adds two transitions.
    runs = count_bits_along(columns & ~((columns << 1) | 1))
    # A filled cell in row r has r cells below it, of which all that are filled are no holes.
    depth = fold_octets(places) + 8 * weigh_octets(octets) - filled * (filled - 1) // 2
    return {
        "row_transitions": beside,
        "column_transitions": config.width + 2 * runs,
        "holes": _add(height - filled),
        "wells": _add(_triangle(well)) + _triangle(sides[0]) + _triangle(sides[1]),
        "hole_depth": _add(depth),
        "rows_with_holes": count_bits(rows),
        "diversity": count_bits(seen),
        "bumpiness": _add(difference.abs()),
    }


def _add(x: Tensor) -> Tensor:
    return x.sum(0, dtype=torch.int32)


def _triangle(depth: Tensor) -> Tensor:
    """1 + 2 + … + depth."""
    return (depth * (depth + 1)) >> 1


# ------------------------------------------------------------------------------------------------------------ placement


def _place(config: Config, state: State, action: Tensor) -> tuple[State, Tensor, Tensor, Tensor]:
    """Settle the falling piece where `action` says: State, terminated, lines, whether it settled."""
    known = (action >= 0) & (action < num_placements(config))
    number = state.pieces[:, 0].to(torch.int32) * num_placements(config) + torch.where(known, action, 0)
    place, body = (table[number].unsqueeze(1) for table in placements(config.width, action.device))
    x, drop, fits = (found.squeeze(1) for found in _dropped(config, heights(state.columns), place, body))
    fits = fits & known
    settled, lines = _settle(config, state.columns, body.squeeze(1) & 0xFFFF, x, torch.where(fits, drop, 0))
    following = _next_piece(config, state._replace(columns=settled), torch.ones_like(fits))
    after = where(fits, _spawn(config, following), state)
    return after, ~fits | (_room(config, after) == 0), torch.where(fits, lines, 0), fits


def _room(config: Config, state: State) -> Tensor:
    """All legal placements of the falling piece as bits (N,) int64: bit 16 o + x is orientation o at column x.

    A column may be at most so high that the piece above it stays below the top: four sets of columns, for the 1 to 4 rows
    that a piece has above its lowest cell there. An orientation fits where all its columns are in their sets.
    """
    stack, top = heights(state.columns), _top(config)
    kind = state.pieces[:, 0].to(torch.int32)
    column = torch.arange(config.width, device=stack.device)
    sets = torch.zeros_like(kind, dtype=torch.int64)
    for above in range(1, 5):
        low = (stack <= top - above).to(torch.int64) << column
        sets = sets | (low.sum(1) << 16 * (above - 1))
    room = torch.zeros_like(sets)
    for orientation in range(4):
        fits = torch.full_like(sets, 0xFFFF)
        for k in range(4):
            place = property_of(PLACES[orientation][k], kind)
            fits = fits & (((sets >> 16 * (property_of(ABOVE[orientation][k], kind) - 1)) & 0xFFFF) >> place)
        room = room | (fits << 16 * orientation)
    return room


def _listed(config: Config, state: State, table: Tensor) -> Tensor:
    """Entries (N, A) of a table of placements: those of the falling piece."""
    number = torch.arange(num_placements(config), dtype=torch.int32, device=table.device)
    return table[state.pieces[:, 0].to(torch.int32).unsqueeze(1) * num_placements(config) + number]


def _dropped(config: Config, stack: Tensor, place: Tensor, body: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Leftmost column, row it drops to, and legality of placements. stack: heights (N, W); table entries (N, A)."""
    x, drop = (place >> 24) & 15, torch.zeros_like(place)
    for k in range(4):
        column = (x + k).clamp(max=config.width - 1)
        drop = torch.maximum(drop, stack.gather(1, column.to(torch.int64)) - ((place >> 6 * k) & 63))
    return x, drop, drop + (body >> 16) <= _top(config)


# ----------------------------------------------------------------------------------------------------------------- keys


def _press(config: Config, state: State, action: Tensor) -> tuple[State, Tensor, Tensor, Tensor]:
    """One key, then gravity: State, terminated, lines, whether a piece settled."""
    kind = state.pieces[:, 0].to(torch.int32)
    turn, x, y = (field.to(torch.int32) for field in (state.turn, state.x, state.y))
    _, width, _ = shape_of(kind, turn)
    spin = (action == CLOCKWISE).to(torch.int32) - (action == COUNTER).to(torch.int32)
    turns = spin != 0
    new_turn = (turn + spin) & 3
    _, new_width, _ = shape_of(kind, new_turn)
    aside = (action == RIGHT).to(torch.int32) - (action == LEFT).to(torch.int32)
    # Turned about its middle; where that is not free, a column to the left or to the right.
    wanted = x + torch.where(turns, torch.div(width - new_width, 2, rounding_mode="trunc"), aside)
    moved = torch.zeros_like(turns)
    new_x = x
    for kick in (0, -1, 1):
        free = _free(config, state.columns, kind, new_turn, wanted + kick, y) & ~moved & (turns | (kick == 0))
        new_x = torch.where(free, wanted + kick, new_x)
        moved = moved | free
    turn = torch.where(moved, new_turn, turn)
    shape, width, _ = shape_of(kind, turn)
    room = _fall(config, state.columns, shape, width, new_x, y)

    soft, hard = action == SOFT, action == HARD
    puts = torch.zeros_like(soft)
    if config.hold:
        puts = (action == HOLD) & (state.held == 0)
    ticks = state.ticks.to(torch.int32) + 1
    due = ~soft & ~hard & ~puts & (ticks >= config.gravity)
    falls = soft | due
    locks = hard | (falls & (room == 0))
    y = y - torch.where(hard, room, (falls & ~locks).to(torch.int32))
    ticks = torch.where(soft | hard | due, 0, ticks)

    settled, lines = _settle(config, state.columns, shape, new_x, y)
    lies = state._replace(
        turn=turn.to(torch.int8), x=new_x.to(torch.int8), y=y.to(torch.int8), ticks=ticks.to(torch.int8)
    )
    advanced = _next_piece(
        config, state._replace(columns=torch.where(locks.unsqueeze(1), settled, state.columns)), locks
    )
    advanced = advanced._replace(held=torch.where(locks, 0, state.held).to(torch.int8))
    if config.hold:
        drawn = _next_piece(config, state, puts & (state.hold < 0))
        back = torch.where(state.hold < 0, drawn.pieces[:, 0], state.hold)
        swapped = drawn._replace(
            pieces=torch.cat([back.unsqueeze(1), drawn.pieces[:, 1:]], 1),
            hold=state.pieces[:, 0],
            held=torch.ones_like(state.held),
        )
        advanced = where(puts, swapped, advanced)
    fresh = _spawn(config, advanced)
    comes = locks | puts
    after = where(comes, fresh, lies)
    blocked = ~_free(
        config,
        after.columns,
        after.pieces[:, 0].to(torch.int32),
        after.turn.to(torch.int32),
        after.x.to(torch.int32),
        after.y.to(torch.int32),
    )
    return after, comes & blocked, torch.where(locks, lines, 0), locks


def _free(config: Config, columns: Tensor, piece: Tensor, turn: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """(N,) bool: the piece lies inside the board and on no settled cell."""
    shape, width, height = shape_of(piece, turn)
    free: Tensor = (x >= 0) & (x + width <= config.width) & (y + height <= _top(config))
    for k in range(4):
        column = columns.gather(1, (x + k).clamp(0, config.width - 1).to(torch.int64).unsqueeze(1)).squeeze(1)
        free = free & ((((column >> y) & (shape >> 4 * k)) & 15) == 0)
    return free


def _fall(config: Config, columns: Tensor, shape: Tensor, width: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Rows the piece can fall from where it is. Each (N,) int32."""
    room = y
    for k in range(4):
        column = columns.gather(1, (x + k).clamp(0, config.width - 1).to(torch.int64).unsqueeze(1)).squeeze(1)
        bottom = y + lowest_of((shape >> 4 * k) & 15)
        below = heights(column & ((torch.ones_like(column) << bottom) - 1))
        room = torch.where(k < width, torch.minimum(room, bottom - below), room)
    return room


# --------------------------------------------------------------------------------------------------------------- common


def _settle(config: Config, columns: Tensor, shape: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Put a piece on each board and remove full rows: columns (N, W), lines (N,) int32."""
    place = torch.arange(config.width, dtype=torch.int32, device=x.device)
    shift = 4 * (place - x.unsqueeze(1))
    inside = (shift >= 0) & (shift < 16)
    piece = torch.where(inside, (shape.unsqueeze(1) >> shift.clamp(0, 12)) & 15, 0)
    settled = columns | (piece.to(columns.dtype) << y.unsqueeze(1))
    full = settled[:, 0]
    for column in range(1, config.width):
        full = full & settled[:, column]
    lows, lines = _full_rows(full)
    return _remove(settled, [low.unsqueeze(1) for low in lows]), lines


def _full_rows(full: Tensor) -> tuple[list[Tensor], Tensor]:
    """Masks of the rows below each full row, lowest first, as they lie when it is removed; and how many rows are full.

    A piece fills at most four. A mask of all rows stands for no row: removing it changes nothing.
    """
    lows, lines = [], torch.zeros_like(full, dtype=torch.int32)
    for _ in range(4):
        row = full & -full
        lows.append(row - 1)
        lines = lines + (row != 0)
        full = (full & ~row) >> 1
    return lows, lines


def _remove(columns: Tensor, lows: list[Tensor]) -> Tensor:
    for low in lows:
        columns = (columns & low) | ((columns >> 1) & ~low)
    return columns


def _next_piece(config: Config, state: State, due: Tensor) -> State:
    """The next piece becomes the falling one in the environments `due`, and one more is drawn."""
    drawn, bag = _draw(config, state.key, state.bag.to(torch.int32), state.drawn)
    pieces = torch.cat([state.pieces[:, 1:], drawn.to(torch.int8).unsqueeze(1)], 1)
    return state._replace(
        pieces=torch.where(due.unsqueeze(1), pieces, state.pieces),
        bag=torch.where(due, bag.to(torch.int8), state.bag),
        drawn=state.drawn + due.to(torch.int32),
    )


def _draw(config: Config, key: Tensor, bag: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
    """The piece of that number and the bag without it, each (N,) int32."""
    bits = random.bits(key, number)
    if config.pieces == "uniform":
        return random.below(bits, 7).to(torch.int32), bag
    rank = random.below(bits, count_bits(bag)).to(torch.int32)
    piece = torch.zeros_like(bag)
    for kind in range(1, 7):  # the last kind in the bag with at most `rank` others before it
        held = (bag >> kind) & 1
        before = count_bits(bag & ((1 << kind) - 1))
        piece = torch.where((held == 1) & (before <= rank), kind, piece)
    left = bag & ~(torch.ones_like(bag) << piece)
    return piece, torch.where(left == 0, 127, left)


def _spawn(config: Config, state: State) -> State:
    """The falling piece at the top, in the middle, not turned."""
    kind = state.pieces[:, 0].to(torch.int32)
    _, width, height = shape_of(kind, torch.zeros_like(kind))
    x = torch.div(config.width - width, 2, rounding_mode="floor").to(torch.int8)
    none = torch.zeros_like(x)
    return state._replace(turn=none, x=x, y=(_top(config) - height).to(torch.int8), ticks=none)


def _top(config: Config) -> Any:
    """Rows a piece may reach: a number, or a tensor () while training changes it."""
    ceiling: Any = config.ceiling
    return (
        torch.where(ceiling == 0, config.height, ceiling) if isinstance(ceiling, Tensor) else ceiling or config.height
    )


def _starting_stack(config: Config, key: Tensor) -> Tensor:
    """(N, W): rows with random gaps, 0 to start_height of them; no row is full."""
    dtype = torch.int32 if config.height <= 24 else torch.int64
    if isinstance(config.start_height, int) and config.start_height == 0:
        return torch.zeros(1, config.width, dtype=dtype, device=key.device).expand(key.shape[0], -1)
    height = random.below(random.bits(key, _START), config.start_height + 1)
    row = torch.arange(config.height, device=key.device)
    cells = random.below(random.bits(key.unsqueeze(1), _START - 1 - row), (1 << config.width) - 1)  # (N, H)
    cells = torch.where(row < height.unsqueeze(1), cells, 0)
    column = torch.arange(config.width, device=key.device).view(1, -1, 1)
    return (((cells.unsqueeze(1) >> column) & 1) << row).sum(2).to(dtype)


def _shaped(config: Config, reward: Tensor, before: Tensor, after: Tensor, settled: Tensor, dim: int) -> Tensor:
    """The reward with what holes, height and settled pieces add. Boards with columns on axis `dim`; settled (…) bool."""
    if _used(config.reward_hole) or _used(config.reward_height):
        low, high = heights(before), heights(after)
        holes = (high - count_bits(after)).sum(dim) - (low - count_bits(before)).sum(dim)
        growth = high.amax(dim) - low.amax(dim)
        reward = reward + config.reward_hole * torch.where(settled, holes, 0).to(torch.float32)
        reward = reward + config.reward_height * torch.where(settled, growth, 0).to(torch.float32)
    if _used(config.reward_piece):
        reward = reward + config.reward_piece * settled.to(torch.float32)
    return reward


def _used(weight: Any) -> bool:
    """Whether a reward can be anything but 0: a tensor may change while training."""
    return isinstance(weight, Tensor) or weight != 0


# --------------------------------------------------------------------------------------------------------------- planes


def _planes(config: Config, state: State) -> Tensor:
    """(N, 4, H, W) uint8: settled cells, falling piece, where it would land, next pieces.

    Up to eight cells are written at once, as one integer over whose bytes their bits are spread by a multiplication. So
    rows are joined until they can be cut into so many.
    """
    cells, joined = _grouping(config, state.x.device)
    word = torch.int32 if joined * config.width < 32 else torch.int64
    pieces = _shown(config, state)
    planes: list[list[Tensor]] = [[], [], [], []]
    for i in range(joined):
        row = torch.arange(config.height - 1 - i, -1, -joined, dtype=torch.int32, device=state.x.device).unsqueeze(0)
        settled = torch.zeros_like(row)
        for column in range(config.width):
            settled = settled | (((state.columns[:, column].unsqueeze(1) >> row) & 1).to(torch.int32) << column)
        drawn = (_union([_drawn(*piece, row) for piece in plane]) for plane in pieces)
        for plane, rows in zip(planes, (settled, *drawn), strict=True):
            plane.append(rows.to(word) << config.width * i if i else rows.to(word))
    boards = torch.stack([_union(plane) for plane in planes], 1)  # (N, 4, H / joined)
    place = torch.arange(0, joined * config.width, cells, dtype=torch.int32, device=state.x.device)
    bits = ((boards.unsqueeze(3) >> place) & ((1 << cells) - 1)).to(torch.int32)
    return _spread(bits, cells).view(torch.uint8).view(-1, 4, config.height, config.width)


def _union(sets: list[Tensor]) -> Tensor:
    return functools.reduce(torch.bitwise_or, sets)


def _grouping(config: Config, device: torch.device) -> tuple[int, int]:
    """Cells that are written at once, and rows that are joined so that they are whole numbers of them.

    A GPU gains by wide stores; a CPU loses more by computing with wide integers.
    """
    for cells in (8, 4, 2):
        joined = cells // math.gcd(config.width, cells)
        fits = config.height % joined == 0 and joined * config.width < 64
        if fits and (joined == 1 or device.type == "cuda"):
            return cells, joined
    return 1, 1


def _spread(bits: Tensor, cells: int) -> Tensor:
    """Bit k of an int32 to byte k of an integer of so many bytes."""

    def bytes_of(four: Tensor) -> Tensor:
        return (four * 0x00204081) & 0x01010101

    if cells == 8:
        return bytes_of(bits & 15).to(torch.int64) | (bytes_of(bits >> 4).to(torch.int64) << 32)
    return bytes_of(bits).to({1: torch.uint8, 2: torch.int16, 4: torch.int32}[cells])


def _shown(config: Config, state: State) -> tuple[list[tuple[Tensor, Tensor, Tensor]], ...]:
    """Pieces in each of the planes falling, landing, next: rows of a piece, column and row it lies at, each (N,) int32."""
    kind, turn, x, y = (field.to(torch.int32) for field in (state.pieces[:, 0], state.turn, state.x, state.y))
    shape, width, _ = shape_of(kind, turn)
    # A placement is dropped from above the board: its place at the top may be taken.
    above = torch.full_like(y, config.height) if config.actions == "placement" else y
    landing = above - _fall(config, state.columns, shape, width, x, above)
    lying = rows_of(kind, turn)
    upcoming = [
        _at_top(config, state.pieces[:, preview].to(torch.int32), 3 * (preview - 1))
        for preview in range(1, 1 + config.previews)
    ]
    if config.hold:
        held = state.hold.to(torch.int32)
        rows, column, _ = _at_top(config, held.clamp(min=0), 0)
        upcoming.append((torch.where(held < 0, 0, rows), column, torch.zeros_like(column)))  # on the floor
    return [(lying, x, y)], [(lying, x, landing)], upcoming or [(torch.zeros_like(x), x, y)]


def _at_top(config: Config, piece: Tensor, below: int) -> tuple[Tensor, Tensor, Tensor]:
    """A piece in the middle, so many rows below the top: its rows, column and row."""
    none = torch.zeros_like(piece)
    _, width, height = shape_of(piece, none)
    x = torch.div(config.width - width, 2, rounding_mode="floor")
    return rows_of(piece, none), x, config.height - height - below


def _drawn(lying: Tensor, x: Tensor, y: Tensor, row: Tensor) -> Tensor:
    """Rows of bits (N, H) of one piece of rows `lying` (N,) at column x and row y."""
    shift = 4 * (row - y.unsqueeze(1))
    inside = (shift >= 0) & (shift < 16)
    return torch.where(inside, ((lying.unsqueeze(1) >> shift.clamp(0, 12)) & 15) << x.unsqueeze(1), 0)
