"""Tetris in plain Python: the board is a list of rows of cells, the lowest row first; a piece falls row by row.

The functions at the end compute one board feature each, as known from the literature.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from redline.games.tetris import Config
from redline.oracles import below, bits

Board = list[list[int]]  # 1 settled, 0 empty; board[row][column], row 0 is the lowest
Cells = list[tuple[int, int]]  # row, column

DRAWN = (  # I O T S Z J L as they appear, the top row first
    ("####",),
    ("##", "##"),
    (".#.", "###"),
    (".##", "##."),
    ("##.", ".##"),
    ("#..", "###"),
    ("..#", "###"),
)
NOTHING, LEFT, RIGHT, CLOCKWISE, COUNTER, SOFT, HARD, HOLD = range(8)


class Shape(NamedTuple):
    """A piece in one orientation, in its bounding box."""

    cells: Cells  # row 0 is the lowest
    soles: Cells  # the lowest cell of each column
    width: int
    height: int


class Afterstate(NamedTuple):
    """The board after one placement, unchanged if the placement is illegal."""

    board: Board  # with the piece placed and full rows cleared
    lines: int
    legal: bool
    drop: int  # lowest row of the piece, -1 if there is no such placement
    height: int  # of the piece, 0 if there is no such placement
    eroded: int  # see `eroded_cells`


def _shape(picture: tuple[str, ...]) -> Shape:
    rows = list(reversed(picture))
    cells = [(row, column) for row, marks in enumerate(rows) for column, mark in enumerate(marks) if mark == "#"]
    soles = [(row, column) for row, column in cells if (row - 1, column) not in cells]
    return Shape(cells, soles, len(rows[0]), len(rows))


def _orientations(picture: tuple[str, ...]) -> list[Shape]:
    """Return the distinct shapes of a piece, each turned clockwise from the one before."""
    shapes: list[Shape] = []
    while (shape := _shape(picture)) not in shapes:
        shapes.append(shape)
        picture = tuple("".join(column) for column in zip(*reversed(picture), strict=True))
    return shapes


SHAPES = [_orientations(picture) for picture in DRAWN]


class Oracle:
    """One game of Tetris."""

    def __init__(self, config: Config, key: int) -> None:
        self.config, self.key = config, key
        self.board = self._start()
        self.bag, self.drawn = list(range(7)), 0
        self.pieces = [self._draw() for _ in range(1 + config.previews)]
        self.hold, self.held = -1, False
        self._spawn()

    def _start(self) -> Board:
        """Return a board with the starting stack."""
        config = self.config
        board = empty_board(config.width, config.height)
        for row in range(below(bits(self.key, -1), config.start_height + 1)):
            mask = below(bits(self.key, -2 - row), 2**config.width - 1)
            board[row] = [mask // 2**column % 2 for column in range(config.width)]
        return board

    def _draw(self) -> int:
        """Draw the next piece and return it."""
        number = bits(self.key, self.drawn)
        self.drawn += 1
        if self.config.pieces == "uniform":
            return below(number, 7)
        piece = self.bag.pop(below(number, len(self.bag)))
        if not self.bag:
            self.bag = list(range(7))
        return piece

    def _next_piece(self) -> None:
        self.pieces = [*self.pieces[1:], self._draw()]

    def _spawn(self) -> bool:
        """Move the current piece to its spawn position; return False if it overlaps settled cells."""
        shape = SHAPES[self.pieces[0]][0]
        self.turn, self.ticks = 0, 0
        self.x, self.y = (self.config.width - shape.width) // 2, self.top - shape.height
        return self._fits(shape, self.y, self.x)

    @property
    def top(self) -> int:
        """Number of rows that a piece may reach."""
        return self.config.ceiling or self.config.height

    def _fits(self, shape: Shape, y: int, x: int) -> bool:
        return fits(self.board, self.top, shape, y, x)

    def step(self, action: int) -> tuple[float, bool, bool, int, bool]:
        """Play one placement or key; return reward, terminated, truncated, score, won."""
        before = self.board
        play = self._place if self.config.actions == "placement" else self._press
        lines, terminated, locked = play(action)
        return self._reward(before, self.board, lines, terminated, locked), terminated, False, lines, False

    def _reward(self, before: Board, after: Board, lines: int, terminated: bool, locked: bool) -> float:
        config, number = self.config, np.float32
        reward = number(config.reward_line) * number(lines)
        reward += number(config.reward_death) * number(terminated)
        reward += number(config.reward_hole) * number(holes(after) - holes(before))
        reward += number(config.reward_height) * number(max(heights(after)) - max(heights(before)))
        reward += number(config.reward_piece) * number(locked)
        return float(reward)

    # Placements: lines, terminated, locked

    def _place(self, action: int) -> tuple[int, bool, bool]:
        places = self._placements()
        after = self._after(*places[action]) if 0 <= action < len(places) else None
        if after is None or not after.legal:
            return 0, True, False
        self.board = after.board
        self._next_piece()
        self._spawn()
        return after.lines, not any(self.legal()), True

    def _placements(self) -> list[tuple[Shape, int, int]]:
        """Return shape, lowest row and leftmost column of each placement of the current piece, in the order of actions."""
        top = heights(self.board)
        return [
            (shape, drop(self.board, shape, max(top[x : x + shape.width]), x), x)
            for shape in SHAPES[self.pieces[0]]
            for x in range(self.config.width - shape.width + 1)
        ]

    def _is_legal(self, shape: Shape, y: int) -> bool:
        return y + shape.height <= self.top

    @property
    def num_actions(self) -> int:
        if self.config.actions == "placement":
            return 4 * self.config.width - 6
        return 8 if self.config.hold else 7

    def legal(self) -> list[bool]:
        """Return the action mask: whether each action is legal."""
        if self.config.actions == "keys":
            return [True] * self.num_actions
        legal = [self._is_legal(shape, y) for shape, y, _ in self._placements()]
        return legal + [False] * (self.num_actions - len(legal))

    def afterstates(self) -> list[Afterstate]:
        """Return the afterstate of each placement, in the order of actions."""
        afterstates = [self._after(*placement) for placement in self._placements()]
        return afterstates + [Afterstate(self.board, 0, False, -1, 0, 0)] * (self.num_actions - len(afterstates))

    def _after(self, shape: Shape, y: int, x: int) -> Afterstate:
        if not self._is_legal(shape, y):
            return Afterstate(self.board, 0, False, y, shape.height, 0)
        placed = settle(self.board, shape, y, x)
        board, lines = clear(placed)
        return Afterstate(board, lines, True, y, shape.height, eroded_cells(placed, shape, y))

    # Keys: lines, terminated, locked

    @property
    def shape(self) -> Shape:
        """The falling piece in its orientation."""
        return self._turned(self.turn)

    def _turned(self, turn: int) -> Shape:
        orientations = SHAPES[self.pieces[0]]
        return orientations[turn % len(orientations)]

    def _press(self, key: int) -> tuple[int, bool, bool]:
        if key == HOLD and not self.held:
            return 0, not self._swap(), False
        if key == HARD:
            self.y = drop(self.board, self.shape, self.y, self.x)
            return self._lock()
        if key == SOFT:
            self.ticks = 0
            return self._fall()
        if key in (LEFT, RIGHT):
            self._shift(-1 if key == LEFT else 1)
        if key in (CLOCKWISE, COUNTER):
            self._rotate(1 if key == CLOCKWISE else -1)
        self.ticks += 1
        if self.ticks < self.config.gravity:
            return 0, False, False
        self.ticks = 0
        return self._fall()

    def _shift(self, step: int) -> None:
        if self._fits(self.shape, self.y, self.x + step):
            self.x += step

    def _rotate(self, step: int) -> None:
        turn = (self.turn + step) % 4
        shape = self._turned(turn)
        middle = self.x + int((self.shape.width - shape.width) / 2)  # rounded towards 0, so that turning back undoes it
        for x in (middle, middle - 1, middle + 1):
            if self._fits(shape, self.y, x):
                self.turn, self.x = turn, x
                return

    def _swap(self) -> bool:
        """Swap the current piece with the held one; return False if the new one has no room."""
        current, held = self.pieces[0], self.hold
        if held < 0:
            self._next_piece()
        else:
            self.pieces[0] = held
        self.hold, self.held = current, True
        return self._spawn()

    def _fall(self) -> tuple[int, bool, bool]:
        if not self._fits(self.shape, self.y - 1, self.x):
            return self._lock()
        self.y -= 1
        return 0, False, False

    def _lock(self) -> tuple[int, bool, bool]:
        self.board, lines = clear(settle(self.board, self.shape, self.y, self.x))
        self.held = False
        self._next_piece()
        return lines, not self._spawn(), True

    # State and observation

    def state(self) -> dict[str, Any]:
        return {
            "columns": [sum(2**row for row, cell in enumerate(cells) if cell) for cells in columns(self.board)],
            "pieces": list(self.pieces),
            "turn": self.turn,
            "x": self.x,
            "y": self.y,
            "hold": self.hold,
            "held": int(self.held),
            "ticks": self.ticks,
            "bag": sum(2**piece for piece in self.bag),
            "drawn": self.drawn,
            "key": self.key,
        }

    def observe(self) -> Any:
        """Return planes, the top row first: settled, falling, landing, next; or a list of numbers per action."""
        if self.config.view == "afterstates":
            return self._judged()
        if self.config.view == "boards":
            return self._boards()
        width, height = self.config.width, self.config.height
        settled = [list(row) for row in self.board]
        falling, landing, coming = (empty_board(width, height) for _ in range(3))
        mark(falling, self.shape, self.y, self.x)
        above = max(heights(self.board)) if self.config.actions == "placement" else self.y
        mark(landing, self.shape, drop(self.board, self.shape, above, self.x), self.x)
        for place, piece in enumerate(self.pieces[1:]):
            shape = SHAPES[piece][0]
            mark(coming, shape, height - 3 * place - shape.height, (width - shape.width) // 2)
        if self.hold >= 0:
            shape = SHAPES[self.hold][0]
            mark(coming, shape, 0, (width - shape.width) // 2)
        return [list(reversed(plane)) for plane in (settled, falling, landing, coming)]

    def _judged(self) -> list[list[float]]:
        """Return the features of each placement's afterstate; an empty list if it is illegal."""
        rows = []
        for after in self.afterstates():
            placed = [self._placed(after), after.lines, landing_height(after.drop, after.height), after.eroded]
            counted = [count(after.board) for count in COUNTS]
            rows.append([*placed, *counted, *heights(after.board), *self._coming()] if after.legal else [])
        return rows

    def _boards(self) -> list[list[float]]:
        """Return reward, board cells and next pieces of each placement's afterstate; an empty list if it is illegal."""
        rows = []
        for after in self.afterstates():
            cells = [float(cell) for row in reversed(after.board) for cell in row]
            rows.append([self._placed(after), *cells, *self._coming()] if after.legal else [])
        return rows

    def _placed(self, after: Afterstate) -> float:
        """Return the reward of a placement, without the penalty if the next piece has no room."""
        return self._reward(self.board, after.board, after.lines, terminated=False, locked=True)

    def _coming(self) -> list[float]:
        """Return the next pieces, each one-hot among seven."""
        return [float(piece == kind) for piece in self.pieces[1:] for kind in range(7)]


def empty_board(width: int, height: int) -> Board:
    return [[0] * width for _ in range(height)]


def fits(board: Board, top: int, shape: Shape, y: int, x: int) -> bool:
    """Return whether the shape lies inside the board, below the row `top`, on empty cells."""
    inside = 0 <= x <= len(board[0]) - shape.width and 0 <= y <= top - shape.height
    return inside and not any(board[y + row][x + column] for row, column in shape.cells)


def drop(board: Board, shape: Shape, y: int, x: int) -> int:
    """Return the row where a shape lands when falling from row y, which may be above the board."""

    def rests() -> bool:
        below = [(y - 1 + row, x + column) for row, column in shape.soles]
        return y == 0 or any(row < len(board) and board[row][column] for row, column in below)

    while not rests():
        y -= 1
    return y


def mark(board: Board, shape: Shape, y: int, x: int) -> None:
    """Set the shape's cells on the board, in place; those above the board are ignored."""
    for row, column in shape.cells:
        if y + row < len(board):
            board[y + row][x + column] = 1


def settle(board: Board, shape: Shape, y: int, x: int) -> Board:
    """Return a copy of the board with the shape added."""
    placed = [list(row) for row in board]
    mark(placed, shape, y, x)
    return placed


def clear(board: Board) -> tuple[Board, int]:
    """Return the board with full rows removed, and their number."""
    kept = [list(row) for row in board if not all(row)]
    lines = len(board) - len(kept)
    return kept + empty_board(len(board[0]), lines), lines


# Board features


def columns(board: Board) -> list[list[int]]:
    """Return the columns from left to right, each from the bottom up."""
    return [list(cells) for cells in zip(*board, strict=True)]


def heights(board: Board) -> list[int]:
    """Return the height of each column: the rows up to its highest settled cell."""
    return [len(cells) - cells[::-1].index(1) if 1 in cells else 0 for cells in columns(board)]


def landing_height(row: int, piece_height: int) -> int:
    """Return twice the height of the middle of a piece whose lowest cells landed in `row`."""
    return 2 * row + piece_height - 1


def eroded_cells(placed: Board, shape: Shape, y: int) -> int:
    """Return the number of full rows times the piece's cells in them. placed: the board before rows are removed."""
    full = [row for row, cells in enumerate(placed) if all(cells)]
    return len(full) * sum(y + row in full for row, _ in shape.cells)


def row_transitions(board: Board) -> int:
    """Return the number of changes between settled and empty along rows; walls count as settled."""
    bounded = [[1, *cells, 1] for cells in board]
    return sum(a != b for cells in bounded for a, b in pairwise(cells))


def column_transitions(board: Board) -> int:
    """Return the number of changes between settled and empty along columns; the floor counts as settled, above as empty."""
    bounded = [[1, *cells, 0] for cells in columns(board)]
    return sum(a != b for cells in bounded for a, b in pairwise(cells))


def holes(board: Board) -> int:
    """Return the number of empty cells with a settled cell anywhere above them."""
    return sum(not board[row][x] for x, height in enumerate(heights(board)) for row in range(height))


def wells(board: Board) -> int:
    """Return the sum of 1 + 2 + ... + depth over columns; depth is measured from the lower neighbour, walls are high."""
    top = [len(board), *heights(board), len(board)]
    depths = [min(top[x - 1], top[x + 1]) - top[x] for x in range(1, len(top) - 1)]
    return sum(sum(range(depth + 1)) for depth in depths if depth > 0)


def hole_depth(board: Board) -> int:
    """Return the number of settled cells above each hole in its column, summed over holes."""
    return sum(sum(cells[row:]) for cells in columns(board) for row, cell in enumerate(cells) if not cell)


def rows_with_holes(board: Board) -> int:
    top = heights(board)
    return sum(any(not cell and row < top[x] for x, cell in enumerate(cells)) for row, cells in enumerate(board))


def steps(board: Board) -> list[int]:
    """Return the height of each column minus the height of its right neighbour."""
    top = heights(board)
    return [a - b for a, b in pairwise(top)]


def diversity(board: Board) -> int:
    """Return how many of the steps -2, -1, 0, 1 and 2 occur."""
    return len({step for step in steps(board) if abs(step) <= 2})


def bumpiness(board: Board) -> int:
    return sum(abs(step) for step in steps(board))


COUNTS = (row_transitions, column_transitions, holes, wells, hole_depth, rows_with_holes, diversity, bumpiness)
