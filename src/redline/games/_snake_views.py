"""Views of Snake: the board seen from the head, and planes of the whole board."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from redline.games._snake_grid import age_at, age_bits, direction, every_age, mark_cell, mark_word, row_column

if TYPE_CHECKING:
    from redline.games.snake import Config, State


def centred(config: Config, state: State) -> tuple[Tensor, Tensor, Tensor]:
    """Return ages, cells outside the board, and food within sight, (N, S, S) each, head in the middle, heading up."""
    offset = torch.arange(-config.reach, config.reach + 1, dtype=torch.int32, device=state.ages.device)
    ahead, aside = -offset.view(1, -1, 1), offset.view(1, 1, -1)  # the first row is the farthest ahead
    row, column = _seen_from(config, state, ahead, aside)
    inside = (row >= 0) & (row < config.height) & (column >= 0) & (column < config.width)
    ages = _ages_at(config, state, inside, row, column)
    food_ahead, food_aside = (x.clamp(-config.reach, config.reach).view(-1, 1, 1) for x in _food(config, state))
    food = (ahead == food_ahead) & (aside == food_aside) & (state.food >= 0).view(-1, 1, 1)
    return ages, ~inside, food


def wrapped(config: Config, state: State) -> tuple[Tensor, Tensor, Tensor]:
    """Return ages, deadly cells and food of the whole board, (N, S, S) each, head in the middle, heading up.

    Cells beyond one edge of the view appear at the opposite edge: a 10x10 board takes 11x11 cells, a third of an unwrapped
    view of the whole board. No path crosses the line of wall, so wrapping neither removes nor adds paths.
    """
    side = config.around
    offset = torch.arange(side, dtype=torch.int32, device=state.ages.device) - side // 2
    aside = offset.view(1, 1, -1)
    if config.mirror:
        aside = aside * torch.where(mirrored(config, state), -1, 1).view(-1, 1, 1)
    row, column = _seen_from(config, state, -offset.view(1, -1, 1), aside)
    row, column = (torch.where(x < 0, x + side, torch.where(x >= side, x - side, x)) for x in (row, column))
    inside = (row < config.height) & (column < config.width)
    ages = _ages_at(config, state, inside, row, column)
    food_row, food_column = row_column(config, state.food.to(torch.int32).view(-1, 1, 1))
    food = (row == food_row) & (column == food_column) & (state.food >= 0).view(-1, 1, 1)
    return ages, ~inside | (ages > 1), food


def with_hunger(config: Config, state: State, food: Tensor) -> Tensor:
    """Return the food plane (N, S, S) int32 with the hunger, 0 to 8 (starved), at the head in the middle."""
    offset = torch.arange(food.shape[1], dtype=torch.int32, device=food.device) - food.shape[1] // 2
    head = (offset.view(1, -1, 1) == 0) & (offset.view(1, 1, -1) == 0)
    eighths = state.hunger.to(torch.int32) * 8 // config.patience
    return torch.where(head, eighths.view(-1, 1, 1), food.to(torch.int32))


def _seen_from(config: Config, state: State, ahead: Tensor, aside: Tensor) -> tuple[Tensor, Tensor]:
    """Return row and column (N, S, S) of the cells `ahead` of the heads and `aside`, to their right."""
    down, right = (x.view(-1, 1, 1) for x in direction(state.heading.to(torch.int32)))
    row, column = (x.view(-1, 1, 1) for x in row_column(config, state.head.to(torch.int32)))
    return row + ahead * down + aside * right, column + ahead * right - aside * down


def _ages_at(config: Config, state: State, inside: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Return the ages (N, S, S) of cells by row and column; 0 where they are not `inside`."""
    cell = torch.where(inside, row * config.width + column, 0)
    return torch.where(inside, age_at(config, state.ages, cell), 0)


def _food(config: Config, state: State) -> tuple[Tensor, Tensor]:
    """Return the distances (N,) int32 of the food ahead of the head and to its right."""
    down, right = direction(state.heading.to(torch.int32))
    row, column = row_column(config, state.head.to(torch.int32))
    food_row, food_column = row_column(config, state.food.to(torch.int32))
    food_down, food_right = food_row - row, food_column - column
    return food_down * down + food_right * right, food_down * right - food_right * down


def mirrored(config: Config, state: State) -> Tensor:
    """Return (N,) bool: whether left and right are exchanged because the food lies to the left."""
    return (_food(config, state)[1] < 0) & (state.food >= 0)


def body_links(config: Config, state: State) -> Tensor:
    """Return (N, H, W) uint8: the sides on which each body cell is connected to the body, and the head's heading."""
    ages = F.pad(every_age(config, state.ages), (1, 1, 1, 1))  # a border of free cells
    own = ages[:, 1:-1, 1:-1]
    links = torch.zeros_like(own)
    for side, beside in enumerate((ages[:, :-2, 1:-1], ages[:, 1:-1, 2:], ages[:, 2:, 1:-1], ages[:, 1:-1, :-2])):
        linked = ((own - beside).abs() == 1) & (own > 0) & (beside > 0)
        links = links | (linked.to(torch.int32) << side)
    looks = (torch.full_like(state.heading, 16, dtype=torch.int32) << state.heading.to(torch.int32)).view(-1, 1, 1)
    return torch.where(mark_cell(config, state.head), links | looks, links).to(torch.uint8)


def planes(config: Config, state: State, dtype: torch.dtype) -> Tensor:
    """Return planes (N, 3, H, W) of the whole board: ages, head and food. They are computed a word at a time."""
    bits, ages = 8 * dtype.itemsize, state.ages
    if age_bits(config) != bits:  # 128 to 255 cells: ages are stored in 16 bits but observed in 8
        cells = every_age(config, ages).to(dtype).flatten(1)
        ages = F.pad(cells, (0, -config.cells % 4)).view(torch.int32)
    # Zeros computed from ages tie the planes together, so that the compiler writes all three in one loop over the words.
    # With a loop for each plane, every cache line of a large batch would be written to a GPU's memory three times.
    zeros = ages & 0
    head, food = (mark_word(config, cell.to(torch.int32), 1, bits) | zeros for cell in (state.head, state.food))
    board = torch.stack([ages, head, food], 1).view(dtype)
    return board[:, :, : config.cells].reshape(-1, 3, config.height, config.width)
