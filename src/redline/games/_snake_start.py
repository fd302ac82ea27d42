"""New snakes: laid out straight, or coiled over the board."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from redline.core import random
from redline.core.select import full_set, layout, one_cell, pack
from redline.games._snake_grid import age_bits, direction, mark_word, row_column

if TYPE_CHECKING:
    from redline.games.snake import Config


_PLACE, _TURN, _LENGTH = -1, -2, -3  # random counters of draws made once per episode; foods use the snake's length


class Body(NamedTuple):
    """Snakes of new games. The fields are those of State, (N,) int32 each except `ages` and `free`."""

    ages: Tensor
    head: Tensor
    heading: Tensor
    tail: Tensor
    free: list[Tensor]
    length: Tensor


def straight(config: Config, key: Tensor) -> Body:
    """Return straight snakes of start_length cells."""
    return (_anywhere if config.start == "random" else _in_the_middle)(config, key)


def _in_the_middle(config: Config, key: Tensor) -> Body:
    """Return straight snakes in the middle of the board, heading right, from constants."""
    length = config.start_length
    head = config.height // 2 * config.width + (config.width + length - 1) // 2
    ages = torch.zeros(1, 1, dtype=torch.int32, device=key.device)
    words, (_, size) = full_set(config.cells), layout(config.cells)
    for behind in range(length):
        cell = head - behind
        words[cell // size] -= 1 << cell % size
        ages = ages | mark_word(config, torch.full_like(key, cell), length - behind, age_bits(config))
    free = [torch.full_like(key, word) for word in words]
    numbers = {"head": head, "heading": 1, "tail": head - length + 1, "length": length}
    return Body(ages=ages, free=free, **{name: torch.full_like(key, number) for name, number in numbers.items()})


def _anywhere(config: Config, key: Tensor) -> Body:
    """Return straight snakes at random positions, heading in random directions."""
    length = config.start_length
    heading = random.below(random.bits(key, _TURN), 4).to(torch.int32)
    down, right = direction(heading)
    # The body needs length - 1 cells behind the head, which leaves fewer rows or columns for the head on that axis.
    room_down = config.height - down.abs() * (length - 1)
    room_right = config.width - right.abs() * (length - 1)
    place = random.below(random.bits(key, _PLACE), room_down * room_right).to(torch.int32)
    row = place // room_right + torch.where(down > 0, length - 1, 0)
    column = place % room_right + torch.where(right > 0, length - 1, 0)

    head, stride = (row * config.width + column).to(torch.int32), down * config.width + right
    free = [torch.full_like(key, word) for word in full_set(config.cells)]
    ages = torch.zeros(1, 1, dtype=torch.int32, device=key.device)
    for behind in range(length):
        cell = head - behind * stride
        free = [word ^ taken for word, taken in zip(free, one_cell(cell, config.cells), strict=True)]
        ages = ages | mark_word(config, cell, length - behind, age_bits(config))
    return Body(ages, head, heading, head - (length - 1) * stride, free, torch.full_like(key, length))


def coiled(config: Config, key: Tensor) -> Body:
    """Return snakes of start_length to long_start cells at random positions along `_path`, with free cells at both ends."""
    places, closed = _path(config, key.device)
    more: Any = config.long_start - config.start_length + 1
    more = more.clamp(min=1) if isinstance(more, Tensor) else more
    length = config.start_length + random.below(random.bits(key, _LENGTH), more).to(torch.int32)
    place = random.bits(key, _PLACE)
    start = random.below(place, config.cells) if closed else 1 + random.below(place, config.cells - 1 - length)
    start = start.to(torch.int32)  # the tail's place on the path

    def ages_at(places: Tensor) -> Tensor:
        """Return the ages (N, P) int32 at places (P,) int32 of the path."""
        behind = places.view(1, -1) - start.view(-1, 1)  # cells along the path from the tail to here
        behind = torch.where(behind < 0, behind + config.cells, behind)
        return torch.where(behind < length.view(-1, 1), behind + 1, 0)

    bits = age_bits(config)
    # Padding of the last word: places farther from every tail than a snake is long.
    by_word = F.pad(places, (0, -config.cells % (32 // bits)), value=2 * config.cells).view(-1, 32 // bits)
    ages = ages_at(by_word[:, 0])
    for number in range(1, by_word.shape[1]):
        ages = ages | ages_at(by_word[:, number]) << bits * number
    free = pack(ages_at(places) == 0)
    # Invert the path: the cell at each place.
    every = torch.arange(config.cells, dtype=torch.int32, device=key.device)
    cell = torch.empty_like(every).scatter(0, places.to(torch.int64), every)
    head_place = (start + length - 1) % config.cells
    head, neck = cell[head_place], cell[(head_place + config.cells - 1) % config.cells]
    stride = head - neck
    heading = torch.where(stride == 1, 1, torch.where(stride == -1, 3, torch.where(stride > 0, 2, 0)))
    return Body(ages, head, heading.to(torch.int32), cell[start], list(free.unbind(1)), length)


def _path(config: Config, device: torch.device) -> tuple[Tensor, bool]:
    """Return the place (C,) int32 of every cell on a path that covers the board, and whether the path is closed.

    0 1 2 3     A snake can follow a closed path indefinitely, so every start can be won. A closed path needs an even
    7 6 5 4     number of rows (the first column leads back, here from 7 to 0) or, with rows and columns exchanged, of
                columns; otherwise the path ends in a corner.
    """
    every = torch.arange(config.cells, dtype=torch.int32, device=device)
    row, column = row_column(config, every)
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
