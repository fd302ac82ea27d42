"""2048 in plain Python, one game at a time: the reference for `twenty48`."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from redline.oracles import below, bits


class Oracle:
    """One game from the random stream `key`."""

    def __init__(self, config: Any, key: int) -> None:
        self.config, self.key, self.drawn = config, key, 0
        self.board = [[0] * 4 for _ in range(4)]
        self._add_tile()
        self._add_tile()

    def step(self, action: int) -> tuple[float, bool, bool, int, bool]:
        """Play one action; return reward, terminated, truncated, score and won."""
        board, points = slide(self.board, action)
        if board != self.board:
            self.board = board
            self._add_tile()
        return points * self.config.reward_scale, not any(self.legal()), False, points, False

    def legal(self) -> list[bool]:
        return [slide(self.board, action)[0] != self.board for action in range(4)]

    def state(self) -> dict[str, Any]:
        return {"board": self.board, "drawn": self.drawn, "key": self.key}

    def observe(self) -> list[list[float]]:
        """Return, for each move, its reward and the features of the rows and columns it leads to."""
        observation = []
        for action in range(4):
            board, points = slide(self.board, action)
            lines = [*board, *(list(column) for column in zip(*board, strict=True))]
            features = [feature for line in lines for feature in line_features(line)]
            observation.append([points * self.config.reward_scale, *features])
        return observation

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


def line_features(line: list[int]) -> list[float]:
    """Return empty cells, possible merge, disorder and weight of a row or column, each about 1."""
    tiles = [tile for tile in line if tile]
    merges = any(a == b for a, b in pairwise(tiles))
    rises = [b**4 - a**4 for a, b in pairwise(line)]
    disorder = min(sum(max(rise, 0) for rise in rises), sum(max(-rise, 0) for rise in rises))
    return [line.count(0) / 2, float(merges), disorder / 2000, sum(tile**3.5 for tile in line) / 2000]
