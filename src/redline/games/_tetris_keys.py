"""Tetris by keys: one key a tick, then gravity."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from redline.core.records import where
from redline.games._tetris_board import fall_distance, is_free, next_piece, settle, spawn
from redline.games._tetrominoes import shape_of

if TYPE_CHECKING:
    from redline.games.tetris import Config, State


KEYS = ("nothing", "left", "right", "turn clockwise", "turn counter-clockwise", "soft drop", "hard drop", "hold")


NOTHING, LEFT, RIGHT, CLOCKWISE, COUNTER, SOFT, HARD, HOLD = range(8)


def press_key(config: Config, state: State, action: Tensor) -> tuple[State, Tensor, Tensor, Tensor]:
    """Return State, terminated, lines, and whether a piece settled, after one key press (N,) int32 and gravity."""
    kind = state.pieces[:, 0].to(torch.int32)
    turn, x, y = (field.to(torch.int32) for field in (state.turn, state.x, state.y))
    _, width, _ = shape_of(kind, turn)
    spin = (action == CLOCKWISE).to(torch.int32) - (action == COUNTER).to(torch.int32)
    turns = spin != 0
    new_turn = (turn + spin) & 3
    _, new_width, _ = shape_of(kind, new_turn)
    aside = (action == RIGHT).to(torch.int32) - (action == LEFT).to(torch.int32)
    # A piece turns about its middle; if that is blocked, one column to the left or right of it.
    target_x = x + torch.where(turns, torch.div(width - new_width, 2, rounding_mode="trunc"), aside)
    moved = torch.zeros_like(turns)
    new_x = x
    for kick in (0, -1, 1):
        free = is_free(config, state.columns, kind, new_turn, target_x + kick, y) & ~moved & (turns | (kick == 0))
        new_x = torch.where(free, target_x + kick, new_x)
        moved = moved | free
    turn = torch.where(moved, new_turn, turn)
    shape, width, _ = shape_of(kind, turn)
    room = fall_distance(config, state.columns, shape, width, new_x, y)

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

    settled, lines = settle(config, state.columns, shape, new_x, y)
    lies = state._replace(
        turn=turn.to(torch.int8), x=new_x.to(torch.int8), y=y.to(torch.int8), ticks=ticks.to(torch.int8)
    )
    advanced = next_piece(
        config, state._replace(columns=torch.where(locks.unsqueeze(1), settled, state.columns)), locks
    )
    advanced = advanced._replace(held=torch.where(locks, 0, state.held).to(torch.int8))
    if config.hold:
        advanced = where(puts, _swap_hold(config, state, puts), advanced)
    fresh = spawn(config, advanced)
    comes = locks | puts
    after = where(comes, fresh, lies)
    blocked = ~is_free(
        config,
        after.columns,
        after.pieces[:, 0].to(torch.int32),
        after.turn.to(torch.int32),
        after.x.to(torch.int32),
        after.y.to(torch.int32),
    )
    return after, comes & blocked, torch.where(locks, lines, 0), locks


def _swap_hold(config: Config, state: State, puts: Tensor) -> State:
    """Return the State with the falling piece and the held one swapped; if none is held yet, the next piece falls."""
    drawn = next_piece(config, state, puts & (state.hold < 0))
    back = torch.where(state.hold < 0, drawn.pieces[:, 0], state.hold)
    return drawn._replace(
        pieces=torch.cat([back.unsqueeze(1), drawn.pieces[:, 1:]], 1),
        hold=state.pieces[:, 0],
        held=torch.ones_like(state.held),
    )
