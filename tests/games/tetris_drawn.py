"""Tetris boards as drawings: one game, held by the tensor game and by its oracle, set up and checked by pictures."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from versus_oracle import same_observation, same_state, state_of

from redline.games import tetris
from redline.games.tetris import Config
from redline.oracles.tetris import Board, Oracle

PIECES = "IOTSZJL"
WIDTHS = {"I": (4, 1), "O": (2,), "T": (3, 2, 3, 2), "S": (3, 2), "Z": (3, 2), "J": (3, 2, 3, 2), "L": (3, 2, 3, 2)}
MARKS = {"floor": ".", "settled": "#", "landing": "-"} | dict.fromkeys("IOTSZJL", "o")  # of PALETTE
KEYS = {"n": 0, "l": 1, "r": 2, "c": 3, "a": 4, "s": 5, "h": 6, "k": 7}  # a: against the clock, k: keep (hold)


class Outcome(NamedTuple):
    """What a step brought."""

    reward: float
    terminated: bool
    lines: int


def clean(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


def rows_of(picture: str, height: int = 0) -> list[str]:
    """The rows of a drawing, the top row first; empty rows are added above up to `height`."""
    rows = clean(picture).splitlines()
    return ["." * len(rows[0])] * (height - len(rows)) + rows


def board_of(picture: str, height: int = 0) -> Board:
    """The settled cells of a drawing, the lowest row first."""
    return [[int(mark == "#") for mark in row] for row in reversed(rows_of(picture, height))]


def side_by_side(picture: str, height: int) -> list[Board]:
    """The boards of a drawing that has several beside each other; `o` counts as settled."""
    lines = [line.replace("o", "#").split() for line in clean(picture).splitlines()]
    return [board_of("\n".join(rows), height) for rows in zip(*lines, strict=True)]


def board_in(state: tetris.State, height: int) -> Board:
    """The settled cells of a State of one game."""
    return [[column >> row & 1 for column in state.columns[0].tolist()] for row in range(height)]


def action_of(piece: str, orientation: int, x: int, width: int) -> int:
    """The number of a placement."""
    return sum(width - w + 1 for w in WIDTHS[piece][:orientation]) + x


class Game:
    """One game. Whatever is done to the tensor game is done to the oracle, and both must agree on everything."""

    def __init__(self, picture: str, pieces: str, *, turn: int = 0, aside: str = "", ticks: int = 0, **options: Any):
        """pieces: the current one, then the next. `o` in the picture: where the current one is, turned `turn` times.

        aside: the piece on hold.
        """
        rows = rows_of(picture, options.pop("height", 0))
        self.config = Config(width=len(rows[0]), height=len(rows), previews=len(pieces) - 1, **options)
        self.player = Oracle(self.config, key=12345)
        self.player.board = board_of("\n".join(rows))
        self.player.pieces = [PIECES.index(piece) for piece in pieces]
        self.player.hold = PIECES.index(aside) if aside else -1
        self.player._spawn()
        falling = [(row, x) for row, marks in enumerate(reversed(rows)) for x, mark in enumerate(marks) if mark == "o"]
        if falling:
            self.player.turn, self.player.x, self.player.y = turn, min(x for _, x in falling), min(falling)[0]
        self.player.ticks = ticks
        self.state = state_of(tetris, [self.player])
        self._compare()
        if falling:
            assert self.shown(landing=False) == clean("\n".join(rows)), "the falling piece is not the one drawn"

    def _compare(self) -> None:
        same_state(self.state, [self.player])
        assert tetris.legal(self.config, self.state)[0].tolist() == self.player.legal()
        same_observation(tetris.observe(self.config, self.state), [self.player])

    def step(self, action: int) -> Outcome:
        self.state, reward, terminated, events = tetris.step(self.config, self.state, torch.tensor([action]))
        assert (reward.item(), terminated.item(), False, events.score.item(), False) == self.player.step(action)
        assert not events.won.item()
        assert not events.truncated.item()
        self._compare()
        return Outcome(reward.item(), terminated.item(), events.score.item())

    def press(self, keys: str) -> Outcome:
        """Keys one after another, as in KEYS; what the last one brought."""
        outcome = Outcome(0, False, 0)
        for key in keys:
            assert not outcome.terminated, "the game was over before the last key"
            outcome = self.step(KEYS[key])
        return outcome

    def give(self, pieces: str) -> None:
        """Other pieces, from the current one on."""
        self.player.pieces = [PIECES.index(piece) for piece in pieces]
        self.player._spawn()
        self.state = state_of(tetris, [self.player])

    def place(self, orientation: int, x: int) -> Outcome:
        return self.step(action_of(self.current, orientation, x, self.config.width))

    @property
    def current(self) -> str:
        return PIECES[self.state.pieces[0, 0]]

    @property
    def board(self) -> Board:
        return board_in(self.state, self.config.height)

    def shown(self, landing: bool = True) -> str:
        """The board as `cells` shows it; landing: with the place where the piece would come to rest, as `-`."""
        names = [name for name, _ in tetris.PALETTE]
        rows = tetris.cells(self.config, self.state)[0].tolist()
        text = "\n".join("".join(MARKS[names[cell]] for cell in row) for row in rows)
        return text if landing else text.replace("-", ".")

    def planes(self) -> str:
        """The observation, its planes side by side."""
        rows = zip(*tetris.observe(self.config, self.state)[0].tolist(), strict=True)
        return "\n".join("  ".join("".join(".#"[cell] for cell in plane) for plane in row) for row in rows)
