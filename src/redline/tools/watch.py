"""Watch an agent play: drawn in the terminal, or recorded as a GIF.

The game played is the first of environment 0 of a seed: what a batch of any size plays in its environment 0. It runs on the CPU, at a
person's speed.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from torch import Tensor

from redline.core.errors import UserError
from redline.envs import Rules, batch
from redline.games import draw_cells
from redline.tools import draw
from redline.tools.gif import write_gif

# Observations (1, …) and legal actions (1, A) or None, on the CPU -> actions (1,) int64, on any device.
Act = Callable[[Tensor, Tensor | None], Tensor]

BETWEEN_GAMES = 1.0  # seconds the end of a game stays on the screen
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l\x1b[2J", "\x1b[?25h\x1b[?1049l"  # a screen of our own without cursor, and back
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


class Result(NamedTuple):
    """How a game stands, or ended."""

    score: int
    length: int  # steps
    reward: float  # sum of rewards
    won: bool
    truncated: bool  # cut short by the rules, the time limit or the recording

    @property
    def outcome(self) -> str:
        return "won" if self.won else "cut short" if self.truncated else "died"


class Frame(NamedTuple):
    """A moment of a game."""

    cells: draw.Pixels  # (H, W)
    result: Result  # so far
    ended: bool


@torch.no_grad()
def play(rules: Rules, act: Act, seed: int) -> Iterator[Frame]:
    """The games of environment 0 of `seed`, one after another without end: for each the first board, then one a step."""
    if rules.game.ON_CPU:
        raise UserError("watch shows Redline's own games, not environments of Gymnasium; redline eval plays those.")
    envs = batch.reset(rules, batch.env_keys(seed, torch.arange(1)))
    while True:
        yield Frame(_cells(rules, envs.game), Result(0, 0, 0.0, False, False), False)
        ended = False
        while not ended:
            obs, legal = rules.game.observe(rules.config, envs.game), batch.legal(rules, envs.game)
            action = act(obs, legal).to("cpu").view(1)
            envs, step = batch.step(rules, envs, action)
            score, length, reward = (
                step.episode.score.item(),
                step.episode.length.item(),
                step.episode.episode_return.item(),
            )
            result = Result(int(score), int(length), reward, bool(step.won), bool(step.truncated))
            ended = bool(step.terminated | step.truncated)
            yield Frame(_cells(rules, step.final_state), result, ended)


def play_terminal(
    rules: Rules, act: Act, seed: int, *, fps: float = 12, games: int = 1, out: TextIO | None = None
) -> list[Result]:
    """Play `games` games, drawn in place at `fps` boards a second; then print the last board and a line for each game.

    Where `out` (standard output by default) is no terminal, or one too small for the board, only the end is printed.
    """
    if fps <= 0:
        raise UserError(f"fps is {fps:g}; expected more than 0 boards a second.")
    if games < 1:
        raise UserError(f"games is {games}; expected at least 1.")
    out = sys.stdout if out is None else out
    palette, score_name = rules.game.PALETTE, rules.game.spec(rules.config).score_name
    frames = play(rules, act, seed)
    first = next(frames)
    style, (lines, columns) = draw.style_of(out), _terminal_size(out)
    # Large where there is room: a board of one pixel a cell is small on a screen. 0: do not animate.
    scale = next((s for s in (2, 1) if _fits(first.cells, style, s, lines, columns)), 0)
    if lines and not scale:
        print("The terminal is too small to draw the game as it goes; its end follows.", file=out)

    results: list[Result] = []
    due = time.monotonic()
    with _own_screen(out) if scale else nullcontext():
        for frame in itertools.chain([first], frames):
            if scale:
                status = _line(score_name, frame)
                if games > 1:
                    steps = sum(result.length for result in results) + frame.result.length
                    status = f"game {len(results) + 1} of {games}   {status}   step {steps}"
                _paint(out, [*draw.board_lines(frame.cells, palette, style, scale), "", status[: columns - 1]])
                # Each board is due a fixed time after the last; time lost to a slow agent is not caught up in a rush.
                due = max(due + (1 / fps if not frame.ended else BETWEEN_GAMES), time.monotonic())
            if frame.ended:
                results.append(frame.result)
                if len(results) == games:
                    break
            if scale:
                time.sleep(max(0.0, due - time.monotonic()))
    ended = [_line(score_name, Frame(frame.cells, result, True)) for result in results]
    numbered = [f"game {number}   {line}" for number, line in enumerate(ended, 1)] if games > 1 else ended
    print(*draw.board_lines(frame.cells, palette, style, scale or 1), "", *numbered, sep="\n", file=out, flush=True)
    return results


def record_gif(
    rules: Rules, act: Act, seed: int, path: str | Path, *, fps: float = 12, max_steps: int = 2000, scale: int = 16
) -> Result:
    """Play one game, at most `max_steps` of it, and write it to `path`, a cell `scale` pixels wide."""
    if max_steps < 1:
        raise UserError(f"max_steps is {max_steps}; expected at least 1.")
    last: list[Frame] = []

    def boards() -> Iterator[draw.Pixels]:
        for frame in itertools.islice(play(rules, act, seed), max_steps + 1):  # the first shows the start
            last[:] = [frame]
            yield frame.cells
            if frame.ended:
                return

    write_gif(path, boards(), rules.game.PALETTE, scale, fps)
    return last[0].result if last[0].ended else last[0].result._replace(truncated=True)


def _cells(rules: Rules, state: Any) -> draw.Pixels:
    """The board of a State of one game, (H, W)."""
    board: draw.Pixels = draw_cells(rules.game, rules.config, state)[0].numpy()
    return board


def _line(score_name: str, frame: Frame) -> str:
    """How the game stands, and how it ended if it has."""
    result = frame.result
    line = f"{score_name} {result.score}   length {result.length}   reward {result.reward:.2f}"
    return f"{line}   {result.outcome}" if frame.ended else line


def _terminal_size(out: TextIO) -> tuple[int, int]:
    """Lines and columns; 0 where boards cannot be drawn in place."""
    if not out.isatty() or os.environ.get("TERM") == "dumb":
        return 0, 0
    with suppress(OSError):
        size = os.get_terminal_size(out.fileno())
        if size.columns:  # some report 0: unknown
            return size.lines, size.columns
    size = shutil.get_terminal_size()
    return size.lines, size.columns


def _fits(cells: draw.Pixels, style: draw.Style, scale: int, lines: int, columns: int) -> bool:
    """With the line beneath the board, and without touching the last column, where terminals differ."""
    height, width = cells.shape
    board_lines, board_columns = draw.board_size((height, width), style, scale)
    return board_lines + 2 <= lines and board_columns < columns


@contextmanager
def _own_screen(out: TextIO) -> Iterator[None]:
    """The terminal's second screen, cursor hidden; whatever happens, the user's own comes back as it was."""
    try:
        out.write(_ENTER)
        yield
    finally:
        out.write(_LEAVE)
        out.flush()


def _paint(out: TextIO, lines: list[str]) -> None:
    """Write over what is there, in one piece: clearing first would flicker."""
    out.write(_HOME + "\n".join(line + _CLEAR_LINE for line in lines) + _CLEAR_BELOW)
    out.flush()
