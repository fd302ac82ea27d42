"""Show an agent playing: drawn in the terminal, or recorded as a GIF or a video.

The game shown is the first one of environment 0 for a seed, the same as in a batch of any size. It runs on the CPU, slowly
enough to watch. Tensor games are drawn from their `cells`, CPU environments by their own `render`.
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

import gymnasium
import torch
from PIL import Image
from torch import Tensor

from redline.core.errors import UserError
from redline.envs import Rules, batch
from redline.envs.gym_envs import GymEnvs
from redline.envs.gym_game import GymState, stacked
from redline.games import draw_cells
from redline.tools import draw
from redline.tools.gif import write_images
from redline.tools.pictures import CellDrawings, cell_pixels, enlarge_picture, indexed_boards
from redline.tools.video import write_mp4

# Observations (1, …) and legal actions (1, A) or None, on the CPU -> actions (1,) int64, on any device.
Act = Callable[[Tensor, Tensor | None], Tensor]

BETWEEN_GAMES = 1.0  # seconds the end of a game stays on the screen
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l\x1b[2J", "\x1b[?25h\x1b[?1049l"  # alternate screen without cursor, and back
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


class Result(NamedTuple):
    """A game's state of play, or its result."""

    score: float
    length: int  # steps
    reward: float  # sum of rewards
    won: bool
    truncated: bool  # by the rules, the time limit or the length of the recording

    @property
    def outcome(self) -> str:
        return "won" if self.won else "truncated" if self.truncated else "game over"


class Frame(NamedTuple):
    """One moment of a game."""

    picture: draw.Pixels  # (H, W) cells of a tensor game, (H, W, 3) RGB of a CPU environment
    result: Result  # so far
    ended: bool
    links: draw.Pixels | None = None  # (H, W) of a tensor game that defines links between cells


def play(rules: Rules, act: Act, seed: int) -> Iterator[Frame]:
    """Yield the frames of environment 0's games for `seed`, endlessly: the start of each game, then every step."""
    return _play_cpu_env(rules, act, seed) if rules.game.ON_CPU else _play_tensor_game(rules, act, seed)


@torch.no_grad()
def _play_tensor_game(rules: Rules, act: Act, seed: int) -> Iterator[Frame]:
    envs = batch.reset(rules, batch.env_keys(seed, torch.arange(1)))
    while True:
        painted = draw_cells(rules.game, rules.config, envs.game)
        yield Frame(painted[0].numpy(), Result(0, 0, 0.0, False, False), False, _links(rules, envs.game))
        ended = False
        while not ended:
            before = envs.game
            obs, legal = rules.game.observe(rules.config, envs.game), batch.legal(rules, envs.game)
            envs, step = batch.step(rules, envs, act(obs, legal).to("cpu").view(1))
            episode = step.episode
            score, length, reward = int(episode.score), int(episode.length), float(episode.episode_return)
            result = Result(score, length, reward, bool(step.won), bool(step.truncated))
            ended = bool(step.terminated | step.truncated)
            painted = paint_step(rules, painted, before, step.final_state)
            yield Frame(painted[0].numpy(), result, ended, _links(rules, step.final_state))


@torch.no_grad()
def _play_cpu_env(rules: Rules, act: Act, seed: int) -> Iterator[Frame]:
    game: Any = rules.game
    envs, (camera,) = film(rules, 1, seed % len(game.levels) if game.levels else 0)
    try:
        envs.reset(seed)
        frames, begins = game.spec(rules.config).frames, torch.ones(1, dtype=torch.bool)
        stack = torch.from_numpy(envs.obs).unsqueeze(1).repeat_interleave(frames, 1)
        yield Frame(camera.pictures.pop(), Result(0, 0, 0.0, False, False), False)
        while True:
            stack = stacked(stack, torch.from_numpy(envs.obs), begins)
            obs = game.observe(rules.config, GymState(stack if frames > 1 else stack[:, 0]))
            camera.pictures.clear()
            envs.step(act(obs, None).cpu().numpy())
            begins = torch.from_numpy(envs.terminated | envs.truncated)
            ended, won = bool(envs.episode_over[0]), bool(envs.won[0])
            truncated = ended and not bool(envs.lost[0])
            result = Result(float(envs.score[0]), int(envs.length[0]), float(envs.episode_return[0]), won, truncated)
            yield Frame(camera.pictures[0], result, ended)
            if ended:
                yield Frame(camera.pictures[-1], Result(0, 0, 0.0, False, False), False)
    finally:
        envs.close()


def film(rules: Rules, count: int, first: int = 0) -> tuple[GymEnvs, list[Camera]]:
    """Return `count` CPU environments and their cameras, which render every reset and step; UserError if they cannot.

    first: index of the first environment, which selects its level if there are several.
    """
    game: Any = rules.game
    # pygame draws to memory here: it must not print a greeting or look for a screen or sound device.
    for name, value in (
        ("PYGAME_HIDE_SUPPORT_PROMPT", "1"),
        ("SDL_VIDEODRIVER", "dummy"),
        ("SDL_AUDIODRIVER", "dummy"),
    ):
        os.environ.setdefault(name, value)
    envs = GymEnvs(game, rules.config, count, rules.time_limit, first=first)
    metadata = envs.envs[0].metadata
    if "rgb_array" not in {
        *metadata.get("render_modes", ()),
        *metadata.get("render.modes", ()),
    }:  # new Gym's, old Gym's
        envs.close()
        raise _no_pictures(game.name)
    for env in envs.envs:
        env.close()
    cameras = [
        Camera(game.make(rules.config, "rgb_array", env_index), game.name) for env_index in range(first, first + count)
    ]
    envs.envs = list(cameras)
    return envs, cameras


class Camera(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Keep a picture of every reset and step, because environments are reset in the step that ends their episode."""

    def __init__(self, env: gymnasium.Env[Any, Any], name: str) -> None:
        super().__init__(env)
        self.name = name
        self.pictures: list[draw.Pixels] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        start = self.env.reset(seed=seed, options=options)
        self._shoot()
        return start

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        outcome = self.env.step(action)
        self._shoot()
        return outcome

    def _shoot(self) -> None:
        try:
            picture: Any = self.env.render()
        except (gymnasium.error.Error, ImportError) as error:  # usually pygame is missing, as the message says
            raise UserError(f"{self.name} cannot be drawn: {' '.join(str(error).split()).rstrip('.')}.") from error
        except NotImplementedError as error:
            raise _no_pictures(self.name) from error
        if getattr(picture, "ndim", 0) != 3:
            raise _no_pictures(self.name)
        self.pictures.append(picture[..., :3].copy())


def _no_pictures(name: str) -> UserError:
    return UserError(f"{name} cannot be drawn, because it has no render mode rgb_array; redline eval plays it.")


def why_not_drawn(rules: Rules) -> str:
    """Return the error message if a CPU environment cannot be drawn here; empty if it can."""
    if not rules.game.ON_CPU:
        return ""
    frames = play(rules, lambda obs, _: torch.zeros(len(obs), dtype=torch.int64), 0)
    try:
        next(frames)
    except UserError as error:
        return str(error)
    finally:
        frames.close()  # type: ignore[attr-defined]
    return ""


def play_terminal(
    rules: Rules, act: Act, seed: int, *, fps: float = 12, games: int = 1, out: TextIO | None = None
) -> list[Result]:
    """Play `games` games, drawn in place at `fps` frames per second; then print the last frame and a line for each game.

    If `out` (standard output by default) is not a terminal, or is too small for the board, only the end is printed.
    """
    if fps <= 0:
        raise UserError(f"fps is {fps:g}; expected more than 0 frames per second.")
    if games < 1:
        raise UserError(f"games is {games}; expected at least 1.")
    out = sys.stdout if out is None else out
    frames = play(rules, act, seed)
    first = next(frames)
    screen = _Screen(out, rules, first.picture)
    results: list[Result] = []
    due = time.monotonic()
    with _alternate_screen(out) if screen.scale else nullcontext():
        for frame in itertools.chain([first], frames):
            if screen.scale:
                status = _line(screen.score_name, frame)
                if games > 1:
                    steps = sum(result.length for result in results) + frame.result.length
                    status = f"game {len(results) + 1} of {games}   {status}   step {steps}"
                _paint(out, [*screen.lines(frame.picture), "", status[: screen.columns - 1]])
                # Each frame is due a fixed time after the previous one; delays of a slow agent are not made up for.
                due = max(due + (1 / fps if not frame.ended else BETWEEN_GAMES), time.monotonic())
            if frame.ended:
                results.append(frame.result)
                if len(results) == games:
                    break
            if screen.scale:
                time.sleep(max(0.0, due - time.monotonic()))
    lines = [_line(screen.score_name, Frame(frame.picture, result, True)) for result in results]
    if games > 1:
        lines = [f"game {number}   {line}" for number, line in enumerate(lines, 1)]
    print(*screen.lines(frame.picture), "", *lines, sep="\n", file=out, flush=True)
    return results


class _Screen:
    """How to draw frames on an output: style, size and scale; scale 0 if they cannot be drawn in place."""

    def __init__(self, out: TextIO, rules: Rules, picture: draw.Pixels) -> None:
        self.palette, self.score_name = rules.game.PALETTE, rules.game.spec(rules.config).score_name
        self.style: draw.Style = draw.style_of(out)
        self.rows, self.columns = _terminal_size(out)
        if picture.ndim == 3:  # pictures are resized to fit
            self.scale = int(self.rows > 2 and self.columns > 1 and self.style != "letters")
        else:  # as large as fits: one pixel per cell would be small
            self.scale = next((s for s in (2, 1) if self._fits(picture, s)), 0)
        if self.rows and not self.scale:
            print("The terminal cannot show the game while it is played; its end follows.", file=out)

    def lines(self, picture: draw.Pixels) -> list[str]:
        """Return a frame as lines of text."""
        if picture.ndim == 3:
            rows, columns = (self.rows - 3, self.columns - 1) if self.scale else (20, 79)
            return draw.picture_lines(picture, self.style, rows, columns)
        return draw.board_lines(picture, self.palette, self.style, self.scale or 1)

    def _fits(self, cells: draw.Pixels, scale: int) -> bool:
        """Return whether a board and the line below fit without using the last column, where terminals differ."""
        height, width = cells.shape
        lines, columns = draw.board_size((height, width), self.style, scale)
        return lines + 2 <= self.rows and columns < self.columns


def record(rules: Rules, act: Act, seed: int, max_steps: int = 2000) -> list[Frame]:
    """Return the frames of one game, of at most `max_steps` steps; the last one holds the result."""
    if max_steps < 1:
        raise UserError(f"max_steps is {max_steps}; expected at least 1.")
    frames: list[Frame] = []
    for frame in itertools.islice(play(rules, act, seed), max_steps + 1):  # the first shows the start
        frames.append(frame)
        if frame.ended:
            return frames
    last = frames[-1]
    return [*frames[:-1], last._replace(result=last.result._replace(truncated=True))]


def record_gif(
    rules: Rules, act: Act, seed: int, path: str | Path, *, fps: float = 12, max_steps: int = 2000
) -> Result:
    """Play one game, at most `max_steps` steps, write it to `path` as an animation and return its result."""
    frames = record(rules, act, seed, max_steps)
    if rules.game.ON_CPU:
        images = [enlarge_picture(frame.picture).quantize(256, dither=Image.Dither.NONE) for frame in frames]
    else:
        drawings = _drawings(rules, frames)
        images = list(indexed_boards(drawings, ((frame.picture, frame.links) for frame in frames)))
    write_images(path, images, fps)
    return frames[-1].result


def record_mp4(
    rules: Rules, act: Act, seed: int, path: str | Path, *, fps: float = 12, max_steps: int = 2000
) -> Result:
    """Play one game, at most `max_steps` steps, write it to `path` as a video and return its result."""
    frames = record(rules, act, seed, max_steps)
    drawings = None if rules.game.ON_CPU else _drawings(rules, frames)

    def images() -> Iterator[Image.Image]:
        for frame in frames:
            if drawings is None:
                yield enlarge_picture(frame.picture)
            else:
                yield Image.fromarray(drawings.board(frame.picture, frame.links))

    write_mp4(Path(path), images(), fps)
    return frames[-1].result


def _drawings(rules: Rules, frames: list[Frame]) -> CellDrawings:
    return CellDrawings(rules.game.PALETTE, rules.game.links is not None, cell_pixels(*frames[0].picture.shape))


def paint_step(rules: Rules, painted: Tensor, before: Any, after: Any) -> Tensor:
    """Return the boards of `after` (N, H, W), with colours carried over from `painted` if the game defines `paint`."""
    if rules.game.paint:
        return rules.game.paint(rules.config, painted, before, after)
    return draw_cells(rules.game, rules.config, after)


def _links(rules: Rules, state: Any) -> draw.Pixels | None:
    """Return the links between the cells of one game's board, (H, W); None if the game defines none."""
    if rules.game.links is None:
        return None
    links: draw.Pixels = rules.game.links(rules.config, state)[0].numpy()
    return links


def _line(score_name: str, frame: Frame) -> str:
    """Return score, steps and reward of a game as a line, with the outcome once the game has ended."""
    result = frame.result
    line = f"{score_name} {result.score:g}   {result.length} steps   reward {result.reward:.2f}"
    return f"{line}   {result.outcome}" if frame.ended else line


def _terminal_size(out: TextIO) -> tuple[int, int]:
    """Return lines and columns; 0 if frames cannot be drawn in place."""
    if not out.isatty() or os.environ.get("TERM") == "dumb":
        return 0, 0
    with suppress(OSError):
        size = os.get_terminal_size(out.fileno())
        if size.columns:  # some report 0: unknown
            return size.lines, size.columns
    size = shutil.get_terminal_size()
    return size.lines, size.columns


@contextmanager
def _alternate_screen(out: TextIO) -> Iterator[None]:
    """Switch to the terminal's alternate screen without a cursor while entered, and always back on exit."""
    try:
        out.write(_ENTER)
        yield
    finally:
        leave_screen(out)


def leave_screen(out: TextIO) -> None:
    """Switch a terminal back from its alternate screen, and show the cursor."""
    if out.isatty():
        out.write(_LEAVE)
        out.flush()


def _paint(out: TextIO, lines: list[str]) -> None:
    """Overwrite the screen in one write, since clearing it first would flicker."""
    out.write(_HOME + "\n".join(line + _CLEAR_LINE for line in lines) + _CLEAR_BELOW)
    out.flush()
