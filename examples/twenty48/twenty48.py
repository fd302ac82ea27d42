"""2048: slide all tiles to one side; equal tiles that meet merge into their sum; the score is the sum of merged tiles.

.  .  2  .      The board is stored as exponents, 0 for an empty cell: tile 2 is 1, tile 4 is 2, tile 2048 is 11.
.  4  .  .      Actions: 0 up, 1 right, 2 down, 3 left. A move that changes nothing is illegal; if it is played
2  .  .  .      anyway, the board stays the same and no tile is drawn. The game ends when no move is legal.
8  4  2  .
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from redline.core import random, select
from redline.core.errors import UserError
from redline.core.records import Events, Spec
from redline.games import Controls

LINE_FEATURES = 4  # per row or column: empty cells, merges, disorder, weight
HIDDEN = ("drawn", "key")
LIVE = ("reward_scale",)
PALETTE = (
    ("empty", (205, 193, 180)),
    *((str(2**n), (238 - 4 * n, 228 - 12 * n, 218 - 12 * n)) for n in range(1, 18)),
)

_tables: dict[torch.device, _Lines] = {}


@dataclass(frozen=True)
class Config:
    """Options of 2048."""

    fours: float = 0.1  # probability that a new tile is a 4
    reward_scale: float = 1 / 128  # reward for each point of the score

    def __post_init__(self) -> None:
        if not 0 <= self.fours <= 1:
            raise UserError(f"env.fours is {self.fours}; expected a probability from 0 to 1.")


class State(NamedTuple):
    """N games of 2048."""

    board: Tensor  # (N, 4, 4) int8: exponents, 0 empty
    drawn: Tensor  # (N,) int32: tiles drawn, the counter of the random stream
    key: Tensor  # (N,) int32: random stream of the episode


def spec(config: Config) -> Spec:
    """Return the description of observations and actions."""
    del config
    features = 1 + 8 * LINE_FEATURES
    return Spec(
        obs_shape=(4, features),
        obs_dtype=torch.float32,
        obs_scale=(1.0,) * features,
        obs_high=float("inf"),
        num_actions=4,
        score_name="points",
        masked=True,
        afterstates=True,
        winnable=False,
    )


def init(config: Config, key: Tensor) -> State:
    """Start games with two tiles. key (N,) int32."""
    _moves(key.device)  # build the tables here, before anything is compiled
    board = torch.zeros(key.shape[0], 4, 4, dtype=torch.int8, device=key.device)
    state = State(board, torch.zeros_like(key), key)
    return _add_tile(config, _add_tile(config, state))


def step(config: Config, state: State, action: Tensor) -> tuple[State, Tensor, Tensor, Events]:
    """Slide the tiles to one side and add a new one. action (N,) integer."""
    boards, gains = _afterstates(state.board)
    choice = action.to(torch.int64).clamp(0, 3)
    board = boards.gather(1, choice.view(-1, 1, 1, 1).expand(-1, 1, 4, 4)).squeeze(1)
    points = gains.gather(1, choice.unsqueeze(1)).squeeze(1)
    moved = (board != state.board).flatten(1).any(1)
    added = _add_tile(config, state._replace(board=board))
    after = State(
        board=torch.where(moved.view(-1, 1, 1), added.board, state.board),
        drawn=torch.where(moved, added.drawn, state.drawn),
        key=state.key,
    )
    terminated = ~legal(config, after).any(1)
    never = torch.zeros_like(terminated)
    return after, points.to(torch.float32) * config.reward_scale, terminated, Events(points, never, never)


def observe(config: Config, state: State) -> Tensor:
    """Return (N, 4, F) float32: for each move, its reward and the features of the rows and columns it leads to."""
    boards, points = _afterstates(state.board)
    lines = torch.cat([boards, boards.transpose(2, 3)], 2)  # (N, 4, 8, 4)
    features = _moves(boards.device).features[_number(lines)].flatten(2)
    return torch.cat([points.unsqueeze(2) * config.reward_scale, features], 2)


def legal(config: Config, state: State) -> Tensor:
    """Return action masks (N, 4) bool: a legal move slides or merges a tile."""
    del config
    boards, _ = _afterstates(state.board)
    return (boards != state.board.unsqueeze(1)).flatten(2).any(2)


def cells(config: Config, state: State) -> Tensor:
    """Return the boards as (N, 4, 4) uint8 indices into PALETTE."""
    del config
    return state.board.to(torch.uint8)


def action_names(config: Config) -> tuple[str, ...]:
    """Return the sides that tiles slide to."""
    del config
    return ("up", "right", "down", "left")


def controls(config: Config, level: int) -> Controls:
    """Return the arrow keys; the game waits for a key."""
    del config, level
    return Controls({"ArrowUp": 0, "ArrowRight": 1, "ArrowDown": 2, "ArrowLeft": 3})


class _Lines(NamedTuple):
    """Tables over all lines of four cells, numbered by `_number`."""

    slid: Tensor  # (65536, 4) int8: the line after it slides left
    points: Tensor  # (65536,) int32: points for that slide
    features: Tensor  # (65536, 4) float32: empty cells, possible merges, disorder and weight, each about 1


def _afterstates(board: Tensor) -> tuple[Tensor, Tensor]:
    """Return the boards (N, 4, 4, 4) after each move, before a new tile, and the points (N, 4) int32 of each."""
    table, columns = _moves(board.device), board.transpose(1, 2)
    number = _number(torch.stack([columns, board.flip(2), columns.flip(2), board], 1))  # each line slides left
    up, right, down, left = table.slid[number].unbind(1)
    boards = [up.transpose(1, 2), right.flip(2), down.flip(2).transpose(1, 2), left]
    return torch.stack(boards, 1), table.points[number].sum(2, dtype=torch.int32)


def _number(lines: Tensor) -> Tensor:
    """Return the index (…) int64 of lines (…, 4) int8 in the tables: 4 bits per cell."""
    cell = lines.to(torch.int64)
    return cell[..., 0] | cell[..., 1] << 4 | cell[..., 2] << 8 | cell[..., 3] << 12


def _moves(device: torch.device) -> _Lines:
    """Return the tables, built once per device."""
    if device not in _tables:
        number = torch.arange(16**4)
        cells = [(number >> 4 * i & 15).to(torch.int8) for i in range(4)]
        line, points = _pack(list(cells)), torch.zeros(16**4, dtype=torch.int32)
        for i in range(3):
            merges = (line[i] == line[i + 1]) & (line[i] > 0)
            line[i] = (line[i] + merges.to(torch.int8)).clamp(max=15)
            line[i + 1] = torch.where(merges, 0, line[i + 1])
            points += torch.where(merges, 1 << line[i].to(torch.int32), 0)
        exponent = torch.stack(cells, 1).to(torch.float32)
        rises = exponent[:, 1:].pow(4) - exponent[:, :-1].pow(4)
        disorder = torch.minimum(rises.clamp(min=0).sum(1), (-rises).clamp(min=0).sum(1)) / 2000
        weight, merges = exponent.pow(3.5).sum(1) / 2000, (points > 0).to(torch.float32)
        features = torch.stack([(exponent == 0).sum(1) / 2, merges, disorder, weight], 1)
        _tables[device] = _Lines(torch.stack(_pack(line), 1).to(device), points.to(device), features.to(device))
    return _tables[device]


def _pack(line: list[Tensor]) -> list[Tensor]:
    """Move empty cells to the end, keeping the order of the others."""
    for last in (3, 2, 1):
        for i in range(last):
            empty = line[i] == 0
            line[i], line[i + 1] = torch.where(empty, line[i + 1], line[i]), torch.where(empty, 0, line[i + 1])
    return line


def _add_tile(config: Config, state: State) -> State:
    """Put a 2 or a 4 on a uniformly drawn empty cell; leave a full board unchanged."""
    empty = state.board.flatten(1) == 0
    cell = select.draw(empty, random.bits(state.key, 2 * state.drawn))
    four = random.uniform(random.bits(state.key, 2 * state.drawn + 1)) < config.fours
    here = torch.arange(16, device=cell.device) == cell.unsqueeze(1)
    tile = (1 + four.to(torch.int8)).unsqueeze(1)
    board = torch.where(here & empty, tile, state.board.flatten(1)).view(-1, 4, 4)
    return State(board, state.drawn + 1, state.key)
