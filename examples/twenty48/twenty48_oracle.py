"""2048 in plain Python, one game at a time: the reference for `twenty48`."""

from __future__ import annotations

from typing import Any

from redline.oracles import below, bits

EXPONENTS = 14


class Oracle:
    """One game from the random stream `key`."""

    def __init__(self, config: Any, key: int) -> None:
        self.config, self.key, self.drawn = config, key, 0
        self.board = [[0] * 4 for _ in range(4)]
        self._add_tile()
        self._add_tile()

    def step(self, action: int) -> tuple[float, bool, bool, int, bool]:
        """Play one action: reward, terminated, truncated, score, won."""
        board, points = slide(self.board, action)
        if board != self.board:
            self.board = board
            self._add_tile()
        return points * self.config.reward_scale, not any(self.legal()), False, points, False

    def legal(self) -> list[bool]:
        return [slide(self.board, action)[0] != self.board for action in range(4)]

    def state(self) -> dict[str, Any]:
        return {"board": self.board, "drawn": self.drawn, "key": self.key}

    def observe(self) -> list[list[list[int]]]:
        """Planes of the exponents, then of the cells that equal the one to the right, or below."""
        planes = [
            [[int(min(cell, EXPONENTS - 1) == kind) for cell in row] for row in self.board] for kind in range(EXPONENTS)
        ]
        right = [[int(c < 3 and row[c] > 0 and row[c] == row[c + 1]) for c in range(4)] for row in self.board]
        columns = list(zip(*self.board, strict=True))
        below = [
            [int(r < 3 and columns[c][r] > 0 and columns[c][r] == columns[c][r + 1]) for c in range(4)]
            for r in range(4)
        ]
        return [*planes, right, below]

    def _add_tile(self) -> None:
        empty = [(row, column) for row in range(4) for column in range(4) if not self.board[row][column]]
        row, column = empty[below(bits(self.key, 2 * self.drawn), len(empty))]
        chance = (bits(self.key, 2 * self.drawn + 1) >> 8) / 2**24
        self.board[row][column] = 2 if chance < self.config.fours else 1
        self.drawn += 1


def slide(board: list[list[int]], action: int) -> tuple[list[list[int]], int]:
    """Return the board after a move (0 up, 1 right, 2 down, 3 left), before a new tile, and its points."""
    rows = [list(column) for column in zip(*board, strict=True)] if action in (0, 2) else board
    points, moved = 0, []
    for row in rows:
        tiles = [tile for tile in (reversed(row) if action in (1, 2) else row) if tile]
        merged: list[int] = []
        while tiles:
            tile = tiles.pop(0)
            if tiles and tiles[0] == tile:
                tiles.pop(0)
                tile += 1
                points += 2**tile
            merged.append(tile)
        merged += [0] * (4 - len(merged))
        moved.append(merged[::-1] if action in (1, 2) else merged)
    return ([list(column) for column in zip(*moved, strict=True)] if action in (0, 2) else moved), points
