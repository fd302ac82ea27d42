"""Snake in plain Python: the body is a list of cells, head first."""

from __future__ import annotations

from typing import Any

import numpy as np

from redline.core.select import layout
from redline.games.snake import Config
from redline.oracles import bits

MOVES = ((-1, 0), (0, 1), (1, 0), (0, -1))  # up, right, down, left: rows, columns


def _path(height: int, width: int) -> tuple[list[tuple[int, int]], bool]:
    """Return a path over all cells, and whether it is closed, which requires an even side."""
    if height % 2 and width % 2:
        rows = [[(row, column) for column in range(width)] for row in range(height)]
        return [cell for row, line in enumerate(rows) for cell in (reversed(line) if row % 2 else line)], False
    if height % 2:
        return [(row, column) for column, row in _path(width, height)[0]], True
    path = [(0, 0)]
    for row in range(height):
        columns = range(width - 1, 0, -1) if row % 2 else range(1, width)
        path += [(row, column) for column in columns]
    return path + [(row, 0) for row in range(height - 1, 0, -1)], True


class Oracle:
    """One game of Snake."""

    def __init__(self, config: Config, key: int) -> None:
        self.config, self.key = config, key
        self.hunger = 0
        if config.long_start > config.start_length:
            self._coil()
        else:
            self._lay_straight()
        self.food = self._new_food()

    def _lay_straight(self) -> None:
        config, key = self.config, self.key
        if config.start == "centre":
            self.heading = 1
            head = (config.height // 2, (config.width + config.start_length - 1) // 2)
        else:
            self.heading = bits(key, -2) * 4 >> 32
            head = self._random_place(config.start_length)
        down, right = MOVES[self.heading]
        self.body = [(head[0] - i * down, head[1] - i * right) for i in range(config.start_length)]

    def _coil(self) -> None:
        """Place a long snake at a random position along the path, with free cells at both ends."""
        config = self.config
        path, closed = _path(config.height, config.width)
        length = config.start_length + (bits(self.key, -3) * (config.long_start - config.start_length + 1) >> 32)
        place = bits(self.key, -1)
        tail = place * len(path) >> 32 if closed else 1 + (place * (len(path) - 1 - length) >> 32)
        self.body = [path[(tail + place) % len(path)] for place in reversed(range(length))]
        neck = path[(tail + length - 2) % len(path)]
        self.heading = MOVES.index((self.body[0][0] - neck[0], self.body[0][1] - neck[1]))

    def _random_place(self, length: int) -> tuple[int, int]:
        """Return a random position for the head that leaves room for the body behind it."""
        down, right = MOVES[self.heading]
        places = [
            (row, column)
            for row in range(self.config.height)
            for column in range(self.config.width)
            if 0 <= row - (length - 1) * down < self.config.height
            and 0 <= column - (length - 1) * right < self.config.width
        ]
        return places[bits(self.key, -1) * len(places) >> 32]

    def _new_food(self) -> tuple[int, int] | None:
        taken = set(self.body)
        width = self.config.width
        free = [cell for cell in range(self.config.cells) if (cell // width, cell % width) not in taken]
        if not free:
            return None
        cell = free[bits(self.key, len(self.body)) * len(free) >> 32]
        return cell // width, cell % width

    def step(self, action: int) -> tuple[float, bool, bool, int, bool]:
        """Play one move; return reward, terminated, truncated, score, won."""
        config = self.config
        if config.view != "planes":
            turn = 1 - action if self.mirrored() else action - 1
            self.heading = (self.heading + turn) % 4
        elif (action - self.heading) % 4 != 2:
            self.heading = action
        head = self.body[0]
        new = (head[0] + MOVES[self.heading][0], head[1] + MOVES[self.heading][1])
        inside = 0 <= new[0] < config.height and 0 <= new[1] < config.width
        died = not inside or new in self.body[:-1]
        ate = not died and new == self.food
        self.hunger = 0 if ate else self.hunger + 1

        closer = 0
        if config.reward_closer and self.food is not None:
            closer = self._distance(head) - self._distance(new if inside else head)
        if not died:
            self.body.insert(0, new)
            if ate:
                self.food = self._new_food()
            else:
                self.body.pop()
        won = ate and self.food is None
        starved = not (died or ate) and self.hunger >= config.patience
        return self._reward(ate, won, died, starved, closer), died or won, starved, int(ate), won

    def _reward(self, ate: bool, won: bool, died: bool, starved: bool, closer: int) -> float:
        """Return the reward, summed in float32 in the order of the tensor game, so that both round alike."""
        config, number = self.config, np.float32
        reward = number(config.reward_step)
        for amount, count in (
            (config.reward_food, ate),
            (config.reward_win, won),
            (config.reward_death, died),
            (config.reward_starve, starved),
            (config.reward_closer, closer),
        ):
            if count:
                reward += number(amount) * number(count)
        return float(reward)

    def _distance(self, cell: tuple[int, int]) -> int:
        assert self.food is not None
        return abs(cell[0] - self.food[0]) + abs(cell[1] - self.food[1])

    def state(self) -> dict[str, Any]:
        width = self.config.width
        ages = [0] * self.config.cells
        for place, (row, column) in enumerate(self.body):
            ages[row * width + column] = len(self.body) - place
        size = layout(self.config.cells)[1]
        free = [0] * layout(self.config.cells)[0]
        each = 4 if self.config.cells <= 127 else 2  # cells in a word of ages
        words = [0] * -(-self.config.cells // each)
        for cell, age in enumerate(ages):
            free[cell // size] |= (age == 0) << cell % size
            words[cell // each] |= age << 32 // each * (cell % each)
        return {
            "ages": words,
            "head": self.body[0][0] * width + self.body[0][1],
            "food": -1 if self.food is None else self.food[0] * width + self.food[1],
            "heading": self.heading,
            "tail": self.body[-1][0] * width + self.body[-1][1],
            "free": free,
            "length": len(self.body),
            "hunger": self.hunger,
            "key": self.key,
        }

    def observe(self) -> list[list[list[int]]]:
        """Return planes as nested lists of rows, with the same values as the tensor game's `observe`."""
        age = {cell: len(self.body) - place for place, cell in enumerate(self.body)}
        if self.config.view == "planes":
            board = [[(row, column) for column in range(self.config.width)] for row in range(self.config.height)]
            return [
                [[age.get(cell, 0) for cell in line] for line in board],
                [[int(cell == self.body[0]) for cell in line] for line in board],
                [[int(cell == self.food) for cell in line] for line in board],
            ]
        seen = self._wrapped(age) if self.config.view == "wrapped" else self._centred(age)
        if self.config.show_hunger:
            middle = len(seen[2]) // 2  # the head
            seen[2][middle][middle] = self.hunger * 8 // self.config.patience
        return seen

    def _centred(self, age: dict[tuple[int, int], int]) -> list[list[list[int]]]:
        """Return the planes of the cells within sight, heading up; food beyond is shown at the edge."""
        reach = self.config.sight or max(self.config.width, self.config.height) - 1
        down, right = MOVES[self.heading]
        shown = None  # where the food is shown: rows ahead, columns aside, at the edge if it is farther away
        if self.food is not None:
            food_ahead, food_aside = self._food_from_head()
            shown = (max(-reach, min(reach, food_ahead)), max(-reach, min(reach, food_aside)))
        planes: list[list[list[int]]] = [[], [], []]
        for ahead in range(reach, -reach - 1, -1):
            lines: list[list[int]] = [[], [], []]
            for aside in range(-reach, reach + 1):
                row = self.body[0][0] + ahead * down + aside * right
                column = self.body[0][1] + ahead * right - aside * down
                inside = 0 <= row < self.config.height and 0 <= column < self.config.width
                lines[0].append(age.get((row, column), 0))
                lines[1].append(int(not inside))
                lines[2].append(int((ahead, aside) == shown))
            for plane, line in zip(planes, lines, strict=True):
                plane.append(line)
        return planes

    def _food_from_head(self) -> tuple[int, int]:
        """Return the distances of the food ahead and to the right of the head; (0, 0) without food."""
        (row, column), (down, right) = self.food or self.body[0], MOVES[self.heading]
        row, column = row - self.body[0][0], column - self.body[0][1]
        return row * down + column * right, row * right - column * down

    def mirrored(self) -> bool:
        """Return whether left and right are exchanged because the food is to the left."""
        return self.config.view == "wrapped" and self.config.mirror and self._food_from_head()[1] < 0

    def _wrapped(self, age: dict[tuple[int, int], int]) -> list[list[list[int]]]:
        """Return the planes of the board plus a line of wall below and to its right, rolled, turned and mirrored as needed."""
        side = max(self.config.width, self.config.height) + 1
        down, right = MOVES[self.heading]
        hand = -1 if self.mirrored() else 1
        planes: list[list[list[int]]] = [[], [], []]
        for ahead in range(side // 2, side // 2 - side, -1):
            lines: list[list[int]] = [[], [], []]
            for aside in range(-(side // 2), side - side // 2):
                row = (self.body[0][0] + ahead * down + hand * aside * right) % side
                column = (self.body[0][1] + ahead * right - hand * aside * down) % side
                wall = row >= self.config.height or column >= self.config.width
                lines[0].append(age.get((row, column), 0))
                lines[1].append(int(wall or age.get((row, column), 0) > 1))
                lines[2].append(int((row, column) == self.food))
            for plane, line in zip(planes, lines, strict=True):
                plane.append(line)
        return planes
