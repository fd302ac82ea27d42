"""Snake. Eat the food, grow by one, do not run into the wall or into yourself; the board is full: you have won.

    . . . . . .      The body is kept as *ages*: for each cell, the number of moves until the snake leaves it.
    . 1 2 . . .      The head of a snake of length 5 holds 5, its tail 1, a free cell 0. A move without food takes
    . . 3 4 5 .      one from every cell; a move onto food takes nothing. So the move onto the tail's cell is legal:
    . . . . * .      the tail leaves as the head arrives.

Directions: 0 up, 1 right, 2 down, 3 left. Cells are numbered row by row from the upper left corner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from redline.core import random
from redline.core.errors import UserError
from redline.core.records import Events, Spec, where
from redline.core.select import full_set, nth_cell, one_cell, pack

VERSION = 1  # of the rules: raised whenever the same seed and actions would give another trajectory

PALETTE = (  # what `cells` numbers: name and colour
    ("floor", (24, 26, 32)),
    ("body", (64, 160, 92)),
    ("head", (150, 230, 120)),
    ("food", (226, 74, 62)),
)

# Options that may change while training: they enter tensor arithmetic only, so they may be tensors themselves.
LIVE = ("long_start", "reward_food", "reward_death", "reward_win", "reward_starve", "reward_step", "reward_closer")

_PLACE, _TURN, _LENGTH = -1, -2, -3  # draws made once an episode; that of a food is numbered by the snake's length


@dataclass(frozen=True)
class Config:
    """Rules, rewards and view of a Snake game."""

    width: int = 10  # columns, 4 to 32
    height: int = 10  # rows, 4 to 32
    start_length: int = 3  # of a new snake, laid out straight
    start: Literal["centre", "random"] = "centre"  # where it starts; random also turns it
    long_start: int = 0  # above start_length: new snakes of any length up to this, laid back and forth; 0: none
    starvation: int = 0  # moves without food until the game is truncated; 0: three times the number of cells
    # The whole board; or, with relative actions, what lies around the head, heading up; or the whole board in that way,
    # wrapped around behind a line of wall and mirrored so that on the board the food is never to the left of the head.
    view: Literal["planes", "centred", "wrapped"] = "planes"
    sight: int = (
        0  # cells the centred view reaches in each direction, 0: the whole board; food beyond shows at its edge
    )
    reward_food: float = 1.0
    reward_death: float = -1.0
    reward_win: float = 5.0  # on top of the last food
    reward_starve: float = 0.0  # when the game is cut short for want of food
    reward_step: float = 0.0  # every move
    reward_closer: float = 0.0  # shaping: for a move that shortens the distance to the food; taken away when it grows

    def __post_init__(self) -> None:
        for name in ("width", "height"):
            if not 4 <= getattr(self, name) <= 32:
                raise UserError(f"env.{name} is {getattr(self, name)}; a Snake board has 4 to 32 columns and rows.")
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
        if not 0 <= self.sight <= 31:
            raise UserError(f"env.sight is {self.sight}; expected 0 (the whole board) to 31 cells.")
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
        """Sides of the wrapped view: the board and a line of wall between its edges."""
        return max(self.width, self.height) + 1

    @property
    def patience(self) -> int:
        return self.starvation or 3 * self.cells


class State(NamedTuple):
    """N games of Snake. About 130 bytes a game on the 10x10 board, of which a replay stores 105."""

    ages: Tensor  # (N, H, W) int8, int16 above 127 cells: moves until the cell is free, 0 free
    head: Tensor  # (N,) int16: cell of the head
    food: Tensor  # (N,) int16: cell of the food, -1 on a full board
    heading: Tensor  # (N,) int8: direction of the last move
    tail: Tensor  # (N,) int16: cell of the tail
    free: Tensor  # (N, K) int32: set of the cells the snake does not cover, as in core.select
    length: Tensor  # (N,) int16: cells of the snake
    hunger: Tensor  # (N,) int16: moves since the last food
    key: Tensor  # (N,) int32: random stream of the episode


HIDDEN = ("tail", "free", "length", "hunger", "key")  # fields no observation reads: a replay need not store them


def spec(config: Config) -> Spec:
    dtype = torch.uint8 if config.cells <= 255 else torch.int16
    planes = (3, config.height, config.width)
    if config.view != "planes":
        side = config.around if config.view == "wrapped" else 2 * config.reach + 1
        planes = (3, side, side)
    return Spec(
        obs_shape=planes,
        obs_dtype=dtype,
        obs_scale=(config.cells**-0.5, 1.0, 1.0),  # a snake of ten or twenty cells is seen at about 1
        obs_high=config.cells,
        num_actions=4 if config.view == "planes" else 3,
        score_name="foods",
        truncates=True,  # by starvation
    )


def init(config: Config, key: Tensor) -> State:
    """New games from their streams. key (N,) int32."""
    long_start: Any = config.long_start
    if isinstance(long_start, Tensor):  # live, its value is not known here: both are made, and it chooses
        body = where(long_start > config.start_length, _coiled(config, key), _straight(config, key))
    else:
        body = (_coiled if long_start > config.start_length else _straight)(config, key)
    return State(
        ages=body.ages,
        head=body.head.to(torch.int16),
        food=_new_food(config, body.free, key, body.length).to(torch.int16),
        heading=body.heading.to(torch.int8),
        tail=body.tail.to(torch.int16),
        free=body.free,
        length=body.length.to(torch.int16),
        hunger=torch.zeros_like(key, dtype=torch.int16),
        key=key,
    )


class _Body(NamedTuple):
    """Snakes of new games: as in State, int32 but for `ages`."""

    ages: Tensor
    head: Tensor
    heading: Tensor
    tail: Tensor
    free: Tensor
    length: Tensor


def _straight(config: Config, key: Tensor) -> _Body:
    """Snakes of start_length, laid out straight."""
    height, width, length = config.height, config.width, config.start_length
    if config.start == "random":
        heading = random.below(random.bits(key, _TURN), 4).to(torch.int32)
        down, right = _direction(heading)
        # The body needs length - 1 cells behind the head: fewer rows or columns are left for the head on that axis.
        room_down = height - down.abs() * (length - 1)
        room_right = width - right.abs() * (length - 1)
        place = random.below(random.bits(key, _PLACE), room_down * room_right).to(torch.int32)
        row = place // room_right + torch.where(down > 0, length - 1, 0)
        column = place % room_right + torch.where(right > 0, length - 1, 0)
    else:
        heading = torch.ones_like(key)
        down, right = _direction(heading)
        row = torch.full_like(key, height // 2)
        column = torch.full_like(key, (width + length - 1) // 2)

    head, stride = row * width + column, down * width + right
    free = full_set(config.cells, key.device)
    ages = torch.zeros(1, height, width, dtype=_age_dtype(config), device=key.device)
    for behind in range(length):
        cell = head - behind * stride
        free = free & ~one_cell(cell, config.cells)
        ages = torch.where(_at(config, cell), length - behind, ages)
    return _Body(ages, head, heading, head - (length - 1) * stride, free, torch.full_like(key, length))


def _coiled(config: Config, key: Tensor) -> _Body:
    """Snakes of start_length to long_start cells, laid anywhere along `_path`; it goes on before and behind them."""
    places, closed = _path(config, key.device)
    more: Any = config.long_start - config.start_length + 1
    more = more.clamp(min=1) if isinstance(more, Tensor) else more
    length = config.start_length + random.below(random.bits(key, _LENGTH), more).to(torch.int32)
    place = random.bits(key, _PLACE)
    start = random.below(place, config.cells) if closed else 1 + random.below(place, config.cells - 1 - length)
    start = start.to(torch.int32)  # the tail's place on the path

    behind = places.view(1, -1) - start.view(-1, 1)  # (N, C): cells of the path from the tail to here
    behind = torch.where(behind < 0, behind + config.cells, behind)
    ages = torch.where(behind < length.view(-1, 1), behind + 1, 0)
    # The path the other way round: the cell at each place.
    every = torch.arange(config.cells, dtype=torch.int32, device=key.device)
    cell = torch.empty_like(every).scatter(0, places.to(torch.int64), every)
    head_place = (start + length - 1) % config.cells
    head, neck = cell[head_place], cell[(head_place + config.cells - 1) % config.cells]
    stride = head - neck
    heading = torch.where(stride == 1, 1, torch.where(stride == -1, 3, torch.where(stride > 0, 2, 0)))
    ages = ages.to(_age_dtype(config)).view(-1, config.height, config.width)
    return _Body(ages, head, heading.to(torch.int32), cell[start], pack(ages.flatten(1) == 0), length)


def _path(config: Config, device: torch.device) -> tuple[Tensor, bool]:
    """The place (C,) int32 of every cell on a path back and forth over the whole board; and whether its ends meet.

    0 1 2 3     Where they meet a snake can follow it for ever: no start is lost from the beginning. That takes an even
    7 6 5 4     number of rows (the first column is then the way back, from 7 to 0 here) or, with rows and columns
                exchanged, of columns; else the path ends in a corner.
    """
    every = torch.arange(config.cells, dtype=torch.int32, device=device)
    row, column = _row_column(config, every)
    height, width = config.height, config.width
    closed = height % 2 == 0 or width % 2 == 0
    if height % 2 and closed:
        row, column, height, width = column, row, width, height
    if not closed:
        return row * width + torch.where(row % 2 == 0, column, width - 1 - column), False
    across = torch.where(row % 2 == 0, column - 1, width - 1 - column)
    there = 1 + row * (width - 1) + across
    back = torch.where(row == 0, 0, config.cells - row)
    return torch.where(column == 0, back, there), True


def step(config: Config, state: State, action: Tensor) -> tuple[State, Tensor, Tensor, Events]:
    """One move. action (N,) integer -> State, reward (N,) float32, terminated (N,) bool, Events.

    A snake that dies stays where it was: the last board of an episode is a legal one.
    """
    head, food = state.head.to(torch.int32), state.food.to(torch.int32)
    heading = _turn(config, state, action.to(torch.int32))
    down, right = _direction(heading)
    row, column = _row_column(config, head)
    row, column = row + down, column + right
    inside = (row >= 0) & (row < config.height) & (column >= 0) & (column < config.width)
    target = torch.where(inside, row * config.width + column, head)

    died = ~inside | (_age_at(state, target) > 1)
    ate = (target == food) & ~died
    length = state.length.to(torch.int32) + ate
    won = length == config.cells

    arrives = _at(config, torch.where(died, -1, target))
    leaves = (~died & ~ate).to(state.ages.dtype).view(-1, 1, 1)
    ages = torch.where(arrives, length.to(state.ages.dtype).view(-1, 1, 1), (state.ages - leaves).clamp(min=0))
    leaving = torch.where(died | ate, -1, state.tail.to(torch.int32))
    free = state.free | one_cell(leaving, config.cells)
    free = free & ~one_cell(torch.where(died, -1, target), config.cells)
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
        nearer = _distance(config, head, food) - _distance(config, target, food)
        reward = reward + closer * nearer.to(torch.float32)

    new_state = State(
        ages=ages,
        head=torch.where(died, head, target).to(torch.int16),
        food=torch.where(won, -1, torch.where(ate, new_food, food)).to(torch.int16),
        heading=heading.to(torch.int8),
        tail=torch.where(died | ate, state.tail, _next_tail(config, state, target).to(torch.int16)),
        free=free,
        length=length.to(torch.int16),
        hunger=hunger.to(torch.int16),
        key=state.key,
    )
    events = Events(score=ate.to(torch.int32), won=won, truncated=starved)
    return new_state, reward, terminated, events


def observe(config: Config, state: State) -> Tensor:
    """(N, 3, H, W): planes of ages, head and food; or (N, 3, S, S) seen from the head: ages, what is deadly, food."""
    dtype = spec(config).obs_dtype
    if config.view == "planes":
        if state.ages.device.type == "cuda" and config.cells * dtype.itemsize % 4 == 0:
            return _planes_by_words(config, state, dtype)
        planes = (state.ages, _at(config, state.head), _at(config, state.food))
    else:
        planes = (_wrapped if config.view == "wrapped" else _centred)(config, state)
    return torch.stack([plane.to(dtype) for plane in planes], 1)


def _centred(config: Config, state: State) -> tuple[Tensor, Tensor, Tensor]:
    """Ages, outside and food as far as the snake sees: (N, S, S) each, the head in the middle, heading up."""
    offset = torch.arange(-config.reach, config.reach + 1, dtype=torch.int32, device=state.ages.device)
    ahead, aside = -offset.view(1, -1, 1), offset.view(1, 1, -1)  # the first row lies farthest ahead
    row, column = _seen_from(config, state, ahead, aside)
    inside = (row >= 0) & (row < config.height) & (column >= 0) & (column < config.width)
    ages = _ages_at(config, state, inside, row, column)
    food_ahead, food_aside = (x.clamp(-config.reach, config.reach).view(-1, 1, 1) for x in _food(config, state))
    food = (ahead == food_ahead) & (aside == food_aside) & (state.food >= 0).view(-1, 1, 1)
    return ages, ~inside, food


def _wrapped(config: Config, state: State) -> tuple[Tensor, Tensor, Tensor]:
    """Ages, deadly cells and food of the whole board: (N, S, S) each, the head in the middle, heading up.

    What lies beyond the edge of the view comes in again from the other side: a board of 10x10 takes 11x11 cells, a third of
    what it takes to see all of it from every place. No path leads across the line of wall, so none is lost or made.
    """
    side = config.around
    offset = torch.arange(side, dtype=torch.int32, device=state.ages.device) - side // 2
    aside = offset.view(1, 1, -1) * torch.where(_mirrored(config, state), -1, 1).view(-1, 1, 1)
    row, column = _seen_from(config, state, -offset.view(1, -1, 1), aside)
    row, column = (torch.where(x < 0, x + side, torch.where(x >= side, x - side, x)) for x in (row, column))
    inside = (row < config.height) & (column < config.width)
    ages = _ages_at(config, state, inside, row, column)
    food_row, food_column = _row_column(config, state.food.to(torch.int32).view(-1, 1, 1))
    food = (row == food_row) & (column == food_column) & (state.food >= 0).view(-1, 1, 1)
    return ages, ~inside | (ages > 1), food


def _seen_from(config: Config, state: State, ahead: Tensor, aside: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column (N, S, S) of what lies so far ahead of the heads and to their right."""
    down, right = (x.view(-1, 1, 1) for x in _direction(state.heading.to(torch.int32)))
    row, column = (x.view(-1, 1, 1) for x in _row_column(config, state.head.to(torch.int32)))
    return row + ahead * down + aside * right, column + ahead * right - aside * down


def _ages_at(config: Config, state: State, inside: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Of cells by row and column, (N, S, S); 0 where they are not `inside`."""
    cell = torch.where(inside, row * config.width + column, 0)
    ages = state.ages.flatten(1).gather(1, cell.to(torch.int64).flatten(1)).view_as(cell)
    return torch.where(inside, ages, 0)


def _food(config: Config, state: State) -> tuple[Tensor, Tensor]:
    """How far ahead of the head the food lies, and how far to its right: (N,) int32 each."""
    down, right = _direction(state.heading.to(torch.int32))
    row, column = _row_column(config, state.head.to(torch.int32))
    food_row, food_column = _row_column(config, state.food.to(torch.int32))
    food_down, food_right = food_row - row, food_column - column
    return food_down * down + food_right * right, food_down * right - food_right * down


def _mirrored(config: Config, state: State) -> Tensor:
    """(N,) bool: left and right are exchanged, for the food lies to the left."""
    return (_food(config, state)[1] < 0) & (state.food >= 0)


def _planes_by_words(config: Config, state: State, dtype: torch.dtype) -> Tensor:
    """The planes, written four bytes at a time: a GPU is bound by how many stores it makes, not by their size."""
    each, shift = 4 // dtype.itemsize, 3 - dtype.itemsize  # cells in a word, and the power of two that this is
    word = torch.arange(config.cells // each, dtype=torch.int32, device=state.ages.device)

    def mark(cell: Tensor) -> Tensor:
        cell = cell.to(torch.int32).unsqueeze(1)  # -1, nowhere, is in no word
        one = torch.ones_like(cell) << 8 * dtype.itemsize * (cell & (each - 1))
        return torch.where(cell >> shift == word, one, 0)

    ages = state.ages.flatten(1)
    ages = (ages if ages.element_size() == dtype.itemsize else ages.to(dtype)).view(torch.int32)  # none is negative
    words = torch.stack([ages, mark(state.head), mark(state.food)], 1)
    return words.view(dtype).view(-1, 3, config.height, config.width)


def legal(config: Config, state: State) -> Tensor:
    """(N, A) bool. Every key may be pressed: turning back on oneself is read as going straight on."""
    return torch.ones(state.head.shape[0], spec(config).num_actions, dtype=torch.bool, device=state.head.device)


def cells(config: Config, state: State) -> Tensor:
    """(N, H, W) uint8 indices into PALETTE: the board as a person sees it."""
    board = torch.where(_at(config, state.head), 2, (state.ages > 0).to(torch.uint8))
    return torch.where(_at(config, state.food), 3, board).to(torch.uint8)


def _turn(config: Config, state: State, action: Tensor) -> Tensor:
    """The new direction: of the board's four, or of left, straight on, right as seen from the head."""
    heading = state.heading.to(torch.int32)
    if config.view == "planes":
        return torch.where(((action - heading) & 3) == 2, heading, action)
    turn = action - 1
    if config.view == "wrapped":
        turn = torch.where(_mirrored(config, state), -turn, turn)
    return (heading + turn) & 3


def _direction(heading: Tensor) -> tuple[Tensor, Tensor]:
    """Rows down and columns right of one move, int32."""
    down = (heading == 2).to(torch.int32) - (heading == 0).to(torch.int32)
    right = (heading == 1).to(torch.int32) - (heading == 3).to(torch.int32)
    return down, right


def _new_food(config: Config, free: Tensor, key: Tensor, length: Tensor) -> Tensor:
    """The food of a snake of this length: a free cell, each as likely as any other. (N,) int32."""
    rank = random.below(random.bits(key, length), config.cells - length).to(torch.int32)
    return nth_cell(free, rank, config.cells)


def _age_at(state: State, cell: Tensor) -> Tensor:
    """Ages of one cell of each board. cell (N,) int32."""
    return state.ages.flatten(1).gather(1, cell.to(torch.int64).unsqueeze(1)).squeeze(1)


def _next_tail(config: Config, state: State, target: Tensor) -> Tensor:
    """The cell that holds age 2, beside the tail: the tail once this one has left. A snake of one is its own tail."""
    tail = state.tail.to(torch.int32)
    row, column = _row_column(config, tail)
    following = torch.where(state.length == 1, target, tail)
    for stride, exists in (
        (-config.width, row > 0),
        (1, column < config.width - 1),
        (config.width, row < config.height - 1),
        (-1, column > 0),
    ):
        beside = torch.where(exists, tail + stride, tail)
        following = torch.where(_age_at(state, beside) == 2, beside, following)
    return following


def _row_column(config: Config, cell: Tensor) -> tuple[Tensor, Tensor]:
    """Of cells (…) int32; -1 is in no row."""
    row = torch.div(cell, config.width, rounding_mode="floor")
    return row, cell - row * config.width


def _distance(config: Config, a: Tensor, b: Tensor) -> Tensor:
    """Rows plus columns between two cells."""
    (row_a, column_a), (row_b, column_b) = _row_column(config, a), _row_column(config, b)
    return (row_a - row_b).abs() + (column_a - column_b).abs()


def _at(config: Config, cell: Tensor) -> Tensor:
    """(N, H, W) bool: True at the given cell of each board. cell (N,) integer, -1: nowhere.

    Compared in the narrowest dtype that holds a cell's number: on int8 sixteen cells are one instruction on a CPU.
    """
    dtype = _age_dtype(config)
    every = torch.arange(config.cells, dtype=dtype, device=cell.device).view(1, config.height, config.width)
    return every == cell.to(dtype).view(-1, 1, 1)


def _age_dtype(config: Config) -> torch.dtype:
    return torch.int8 if config.cells <= 127 else torch.int16
