"""Snake: eat food, grow by one, avoid the walls and your own body; a full board wins.

    . . . . . .      The body is stored as *ages*: for each cell, the number of moves until the snake leaves it.
    . 1 2 . . .      The head of a snake of length 5 has age 5, its tail 1, a free cell 0. A move without food
    . . 3 4 5 .      decrements the age of every body cell; a move onto food does not. Moving onto the tail's cell
    . . . . * .      is therefore safe: the tail leaves as the head arrives.

Directions: 0 up, 1 right, 2 down, 3 left. Cells are numbered row by row from the upper left corner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from redline.core import random
from redline.core.errors import UserError
from redline.core.records import Events, Spec, where
from redline.core.select import nth_cell, one_cell
from redline.games._contract import Controls
from redline.games._snake_grid import (
    age_at,
    age_bits,
    direction,
    distance,
    every_age,
    mark_cell,
    mark_word,
    occupied,
    row_column,
)
from redline.games._snake_start import Body, coiled, straight
from redline.games._snake_views import body_links, centred, mirrored, planes, with_hunger, wrapped

VERSION = 1  # of the rules: increment it when the same seed and actions give another trajectory

PALETTE = (  # name and colour of each cell value
    ("floor", (24, 26, 32)),
    ("body", (64, 160, 92)),
    ("head", (150, 230, 120)),
    ("food", (226, 74, 62)),
)

# Options for human players; the options of the observation keep their defaults.
HUMAN = {"view": "planes", "mirror": True, "sight": 0, "show_hunger": False}

# Options that may change during training: they are used only in tensor arithmetic.
LIVE = ("long_start", "reward_food", "reward_death", "reward_win", "reward_starve", "reward_step", "reward_closer")


@dataclass(frozen=True)
class Config:
    """Rules, rewards and view of a Snake game."""

    width: int = 10  # columns, 4 to 40
    height: int = 10  # rows, 4 to 40
    start_length: int = 3  # cells of a new snake, laid out straight
    start: Literal["centre", "random"] = "centre"  # where a new snake lies; random also turns it
    long_start: int = 0  # longest new snake, coiled, any length from start_length; 0: all have start_length
    starvation: int = 0  # moves without food until the game is truncated; 0: three times the number of cells
    # planes: the whole board. With actions relative to the heading: centred, the surroundings of the head, heading up;
    # wrapped, the whole board that way, wrapped around a line of wall.
    view: Literal["planes", "centred", "wrapped"] = "planes"
    mirror: bool = True  # mirror the wrapped view where the food lies to the left, so that it is never there
    sight: int = (
        0  # cells the centred view reaches in each direction, 0: the whole board; food beyond shows at its edge
    )
    show_hunger: bool = False  # seen from the head, show there how many eighths of the moves to starvation have passed
    reward_food: float = 1.0  # for every food
    reward_death: float = -1.0  # when the game is lost
    reward_win: float = 5.0  # on top of the last food
    reward_starve: float = 0.0  # when the game is truncated for lack of food
    reward_step: float = 0.0  # every move
    reward_closer: float = 0.0  # shaping: for each cell closer to the food; negative when moving away

    def __post_init__(self) -> None:
        for name in ("width", "height"):
            if not 4 <= getattr(self, name) <= 40:
                raise UserError(f"env.{name} is {getattr(self, name)}; a Snake board has 4 to 40 columns and rows.")
        if not 1 <= self.start_length <= min(self.width, self.height):
            raise UserError(
                f"env.start_length is {self.start_length}; a snake on a {self.width}x{self.height} board can start "
                f"with 1 to {min(self.width, self.height)} cells. Take a shorter snake or a larger board."
            )
        if not 0 <= self.long_start <= self.cells - 2:
            raise UserError(
                f"env.long_start is {self.long_start}; a snake on a {self.width}x{self.height} board can start with up "
                f"to {self.cells - 2} cells (0: all start with start_length)."
            )
        if self.start not in ("centre", "random"):
            raise UserError(f"env.start is '{self.start}'; expected centre or random.")
        if self.view not in ("planes", "centred", "wrapped"):
            raise UserError(f"env.view is '{self.view}'; expected planes, centred or wrapped.")
        if not 0 <= self.sight <= 39:
            raise UserError(f"env.sight is {self.sight}; expected 0 (the whole board) to 39 cells.")
        if not 0 <= self.starvation <= 30_000:
            raise UserError(f"env.starvation is {self.starvation}; expected 0 (automatic) to 30000 moves.")

    @property
    def cells(self) -> int:
        return self.width * self.height

    @property
    def reach(self) -> int:
        return self.sight or max(self.width, self.height) - 1

    @property
    def around(self) -> int:
        """Side length of the wrapped view: the board plus one line of wall between its opposite edges."""
        return max(self.width, self.height) + 1

    @property
    def patience(self) -> int:
        return self.starvation or 3 * self.cells


class State(NamedTuple):
    """N games of Snake, about 130 bytes each on the 10x10 board, of which replay stores 107."""

    ages: Tensor  # (N, V) int32: moves until each cell is free, 0 if free; V words of four cells, or of two above 127
    head: Tensor  # (N,) int16: cell of the head
    food: Tensor  # (N,) int16: cell of the food, -1 on a full board
    heading: Tensor  # (N,) int8: direction of the last move
    tail: Tensor  # (N,) int16: cell of the tail
    free: Tensor  # (N, K) int32: set of the cells that the snake does not cover, see core.select
    length: Tensor  # (N,) int16: cells of the snake
    hunger: Tensor  # (N,) int16: moves since the last food
    key: Tensor  # (N,) int32: random stream of the episode


HIDDEN = ("tail", "free", "length", "key")  # fields that no observation reads: replay does not store them


def spec(config: Config) -> Spec:
    dtype = torch.uint8 if config.cells <= 255 else torch.int16
    planes = (3, config.height, config.width)
    if config.view != "planes":
        side = config.around if config.view == "wrapped" else 2 * config.reach + 1
        planes = (3, side, side)
    return Spec(
        obs_shape=planes,
        obs_dtype=dtype,
        obs_scale=(config.cells**-0.5, 1.0, 1.0),  # the ages of a snake of ten or twenty cells are about 1
        obs_high=config.cells,
        num_actions=4 if config.view == "planes" else 3,
        score_name="foods",
        truncates=True,  # by starvation
    )


def init(config: Config, key: Tensor) -> State:
    """Return new games. key (N,) int32: their random streams."""
    long_start: Any = config.long_start
    if isinstance(long_start, Tensor):  # a live option's value is only known on the device: make both and select
        states = (_first_state(config, key, body(config, key)) for body in (coiled, straight))
        return where(long_start > config.start_length, *states)
    return _first_state(config, key, (coiled if long_start > config.start_length else straight)(config, key))


def step(config: Config, state: State, action: Tensor) -> tuple[State, Tensor, Tensor, Events]:
    """Return the outcome of action (N,) integer: State, reward (N,) float32, terminated (N,) bool, Events.

    A snake that dies stays where it was, so that the final board of an episode is valid.
    """
    head, food = state.head.to(torch.int32), state.food.to(torch.int32)
    heading = _turn(config, state, action.to(torch.int32))
    down, right = direction(heading)
    row, column = row_column(config, head)
    row, column = row + down, column + right
    inside = (row >= 0) & (row < config.height) & (column >= 0) & (column < config.width)
    target = torch.where(inside, row * config.width + column, head)

    died = ~inside | (age_at(config, state.ages, target) > 1)
    ate = (target == food) & ~died
    length = state.length.to(torch.int32) + ate
    won = length == config.cells

    arriving = torch.where(died, -1, target)
    leaving = torch.where(died | ate, -1, state.tail.to(torch.int32))
    ages = state.ages - torch.where((leaving < 0).unsqueeze(1), 0, occupied(config, state.ages))
    ages = ages | mark_word(config, arriving, length, age_bits(config))  # the age there is 0 by now
    both = zip(one_cell(leaving, config.cells), one_cell(arriving, config.cells), strict=True)
    changed = [left ^ taken for left, taken in both]
    free = [word ^ change for word, change in zip(state.free.unbind(1), changed, strict=True)]
    new_food = _new_food(config, free, state.key, length)
    hunger = torch.where(ate, 0, state.hunger.to(torch.int32) + 1)

    terminated = died | won
    starved = ~terminated & (hunger >= config.patience)
    reward = (
        config.reward_step
        + config.reward_food * ate.to(torch.float32)
        + config.reward_win * won.to(torch.float32)
        + config.reward_death * died.to(torch.float32)
        + config.reward_starve * starved.to(torch.float32)
    )
    closer: Any = config.reward_closer
    if isinstance(closer, Tensor) or closer:
        nearer = distance(config, head, food) - distance(config, target, food)
        reward = reward + closer * nearer.to(torch.float32)

    new_state = State(
        ages=ages,
        head=torch.where(died, head, target).to(torch.int16),
        food=torch.where(won, -1, torch.where(ate, new_food, food)).to(torch.int16),
        heading=heading.to(torch.int8),
        tail=torch.where(died | ate, state.tail, _next_tail(config, state, target).to(torch.int16)),
        free=state.free ^ torch.stack(changed, 1),
        length=length.to(torch.int16),
        hunger=hunger.to(torch.int16),
        key=state.key,
    )
    events = Events(score=ate.to(torch.int32), won=won, truncated=starved)
    return new_state, reward, terminated, events


def observe(config: Config, state: State) -> Tensor:
    """Return planes (N, 3, H, W): ages, head, food; or, seen from the head, (N, 3, S, S): ages, deadly cells, food."""
    dtype = spec(config).obs_dtype
    if config.view == "planes":
        return planes(config, state, dtype)
    ages, deadly, food = (wrapped if config.view == "wrapped" else centred)(config, state)
    if config.show_hunger:
        food = with_hunger(config, state, food)
    return torch.stack([plane.to(dtype) for plane in (ages, deadly, food)], 1)


def plane_fields(config: Config) -> tuple[str, ...]:
    """Return the names of the State fields that the planes view shows; empty for the other views."""
    return ("ages", "head", "food") if config.view == "planes" else ()


def legal(config: Config, state: State) -> Tensor:
    """Return an action mask (N, A) bool that is True everywhere: turning back counts as going straight on."""
    return torch.ones(state.head.shape[0], spec(config).num_actions, dtype=torch.bool, device=state.head.device)


def cells(config: Config, state: State) -> Tensor:
    """Return the boards as (N, H, W) uint8 indices into PALETTE."""
    board = torch.where(mark_cell(config, state.head), 2, (every_age(config, state.ages) > 0).to(torch.uint8))
    return torch.where(mark_cell(config, state.food), 3, board).to(torch.uint8)


def links(config: Config, state: State) -> Tensor:
    """Return (N, H, W) uint8: the sides where the body continues (1 up, 2 right, 4 down, 8 left) plus 16 times its heading."""
    return body_links(config, state)


def action_names(config: Config) -> tuple[str, ...]:
    """Return the names of the actions: directions on the board, or turns relative to the heading."""
    if config.view == "planes":
        return ("up", "right", "down", "left")
    mirrors = config.view == "wrapped" and config.mirror
    aside = ("away from food", "towards food") if mirrors else ("left", "right")
    return (aside[0], "straight on", aside[1])


def controls(config: Config, level: int) -> Controls | None:
    """Return the controls (arrow keys and WASD) if actions are directions on the board, else None."""
    if config.view != "planes":
        return None
    arrows = {"ArrowUp": 0, "ArrowRight": 1, "ArrowDown": 2, "ArrowLeft": 3}
    letters = {"w": 0, "d": 1, "s": 2, "a": 3}
    return Controls(arrows | letters, ticks=min(5.0 * 1.12 ** (level - 1), 16.0), level_score=8)


def _first_state(config: Config, key: Tensor, body: Body) -> State:
    """Return the first State of games with these snakes."""
    return State(
        ages=body.ages,
        head=body.head.to(torch.int16),
        food=_new_food(config, body.free, key, body.length).to(torch.int16),
        heading=body.heading.to(torch.int8),
        tail=body.tail.to(torch.int16),
        free=torch.stack(body.free, 1),
        length=body.length.to(torch.int16),
        hunger=torch.zeros_like(key, dtype=torch.int16),
        key=key,
    )


def _turn(config: Config, state: State, action: Tensor) -> Tensor:
    """Return the new heading (N,) int32. Actions are directions on the board, or left, straight, right from the heading."""
    heading = state.heading.to(torch.int32)
    if config.view == "planes":
        return torch.where(((action - heading) & 3) == 2, heading, action)
    turn = action - 1
    if config.view == "wrapped" and config.mirror:
        turn = torch.where(mirrored(config, state), -turn, turn)
    return (heading + turn) & 3


def _new_food(config: Config, free: Sequence[Tensor], key: Tensor, length: Tensor) -> Tensor:
    """Return the next food (N,) int32 for snakes of this length: a free cell, all equally likely."""
    rank = random.below(random.bits(key, length), config.cells - length).to(torch.int32)
    return nth_cell(free, rank, config.cells)


def _next_tail(config: Config, state: State, target: Tensor) -> Tensor:
    """Return the next tail (N,) int32: the neighbour of the tail with age 2. A snake of one cell is its own tail."""
    tail = state.tail.to(torch.int32)
    row, column = row_column(config, tail)
    following = torch.where(state.length == 1, target, tail)
    for stride, exists in (
        (-config.width, row > 0),
        (1, column < config.width - 1),
        (config.width, row < config.height - 1),
        (-1, column > 0),
    ):
        beside = torch.where(exists, tail + stride, tail)
        following = torch.where(age_at(config, state.ages, beside) == 2, beside, following)
    return following
