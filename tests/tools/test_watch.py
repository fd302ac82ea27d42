"""Watching a game: what is drawn, what is returned, and that the terminal is given back."""

from __future__ import annotations

import dataclasses
import io
import itertools
import os
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from redline import envs
from redline.core.errors import UserError
from redline.tools import draw, watch

UP = 0


def go_up(obs: Tensor, legal: Tensor | None = None) -> Tensor:  # noqa: ARG001
    assert obs.shape[0] == 1
    return torch.tensor([UP])


def around(obs: Tensor, legal: Tensor | None = None) -> Tensor:  # noqa: ARG001
    """Along a closed path through all cells of a 4x4 board: a game played so is won.

    v < < <
    v > v ^     0 up, 1 right, 2 down, 3 left
    v ^ v ^
    > ^ > ^
    """
    path = torch.tensor([[2, 3, 3, 3], [2, 1, 2, 0], [2, 0, 2, 0], [1, 0, 1, 0]])
    return path.flatten()[obs[:, 1].flatten(1).long().argmax(1)]


class Terminal(io.StringIO):
    """A text stream that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    for name, value in {"COLUMNS": "80", "LINES": "24", "TERM": "xterm-256color", "COLORTERM": "truecolor"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time that passes only by sleeping: what was slept, in order."""
    naps: list[float] = []
    monkeypatch.setattr(watch.time, "sleep", naps.append)
    monkeypatch.setattr(watch.time, "monotonic", lambda: sum(naps))
    return naps


def small_rules(time_limit: int = 0) -> envs.Rules:
    return envs.make_rules("snake", {"width": 4, "height": 4}, time_limit)


def test_the_game_is_env_0_of_the_seed() -> None:
    rules = envs.make_rules("snake", {"start": "random"})
    env = envs.Env(rules, num_envs=3, seed=5)
    env.reset()
    frames = watch.play(rules, go_up, seed=5)
    for _ in range(4):  # games, each from its own random stream
        assert env.state is not None
        frame = next(frames)
        assert np.array_equal(frame.picture, rules.game.cells(rules.config, env.state.game)[0].numpy())
        assert frame.result == (0, 0, 0.0, False, False)
        while not frame.ended:
            step = env.step(torch.zeros(3, dtype=torch.int64))
            frame = next(frames)
            ended = bool(step.terminated[0] | step.truncated[0])
            assert frame.ended == ended
            assert frame.result.length == step.episode.length[0]
            assert frame.result.score == step.episode.score[0]
            assert frame.result.reward == step.episode.episode_return[0]
            if not ended:
                assert np.array_equal(frame.picture, rules.game.cells(rules.config, env.state.game)[0].numpy())
    boards = [next(watch.play(rules, go_up, seed)).picture.tobytes() for seed in range(5)]
    assert len(set(boards)) == 5


def test_the_agent_is_told_what_is_legal() -> None:
    """An illegal placement would end the game; in Snake nothing is forbidden."""

    def first_legal(obs: Tensor, legal: Tensor | None) -> Tensor:
        assert legal is not None
        assert legal.shape == (len(obs), 34)
        return torch.where(torch.arange(34) >= 9, 2, 1).mul(legal).argmax(1)

    for frame in itertools.islice(watch.play(envs.make_rules("tetris"), first_legal, 3), 5):
        assert not frame.ended
    told: list[Any] = []
    next(itertools.islice(watch.play(small_rules(), lambda obs, legal: told.append(legal) or go_up(obs), 3), 1, 2))
    assert told == [None]


def test_outcomes() -> None:
    out = io.StringIO()
    (won,) = watch.play_terminal(small_rules(), around, 0, out=out)
    (died,) = watch.play_terminal(small_rules(), go_up, 0, out=out)
    (cut,) = watch.play_terminal(small_rules(time_limit=2), go_up, 0, out=out)
    assert (won.score, won.won, won.truncated, won.outcome) == (
        13,
        True,
        False,
        "won",
    )  # 3 cells at first, 16 at the end
    assert (died.length, died.won, died.truncated, died.outcome) == (3, False, False, "game over")  # row 2, 1, 0, wall
    assert (cut.length, cut.won, cut.truncated, cut.outcome) == (2, False, True, "truncated")
    lines = [line for line in out.getvalue().splitlines() if "foods" in line]
    assert [line.split("   ")[-1] for line in lines] == ["won", "game over", "truncated"]
    assert lines[0].startswith(f"foods 13   {won.length} steps   reward 18.00")


def test_no_terminal_gets_the_last_board_and_the_result(slept: list[float]) -> None:
    out = io.StringIO()
    (result,) = watch.play_terminal(small_rules(), go_up, 0, out=out)
    *board, empty, line = out.getvalue().splitlines()
    frames = watch.play(small_rules(), go_up, 0)
    last = next(frame for frame in frames if frame.ended)
    assert board == draw.board_lines(last.picture, small_rules().game.PALETTE, "letters")
    assert sum(board_line.count("h") for board_line in board) == 1
    assert empty == ""
    assert line == f"foods {result.score}   3 steps   reward {result.reward:.2f}   game over"
    assert slept == []  # nobody watches: full speed


def test_drawn_in_place(terminal: Terminal, slept: list[float]) -> None:
    rules = small_rules()
    results = watch.play_terminal(rules, go_up, 0, fps=10, games=2, out=terminal)
    text = terminal.getvalue()
    during, after = text.split("\x1b[?25h\x1b[?1049l")  # cursor and screen are given back, once
    enter, *painted = during.split("\x1b[H")
    assert enter == "\x1b[?1049h\x1b[?25l\x1b[2J"
    frames = watch.play(rules, go_up, 0)
    steps = sum(result.length for result in results)
    assert len(painted) == steps + 2  # and the two first boards
    for picture in painted:
        expected = draw.board_lines(next(frames).picture, rules.game.PALETTE, "rgb", scale=2)
        lines = picture.split("\x1b[K\n")
        assert lines[: len(expected)] == expected
        assert "\x1b[2J" not in picture  # clearing would flicker
    assert "game 2 of 2   foods" in painted[-1]
    assert f"game over   step {steps}" in painted[-1]
    assert [line.split("   ")[0] for line in after.splitlines()[-2:]] == ["game 1", "game 2"]
    held = sum(abs(nap - watch.BETWEEN_GAMES) < 1e-6 for nap in slept)
    assert held == 1  # between the games; after the last there is nothing to wait for
    assert sum(abs(nap - 0.1) < 1e-6 for nap in slept) == len(slept) - held == len(painted) - 2


def test_time_lost_to_a_slow_agent_is_not_caught_up(terminal: Terminal, slept: list[float]) -> None:
    def slow_once(obs: Tensor, legal: Tensor | None = None) -> Tensor:  # noqa: ARG001
        if 7.0 not in slept:
            watch.time.sleep(7.0)
        return go_up(obs)

    watch.play_terminal(small_rules(), slow_once, 0, fps=10, out=terminal)
    pauses = [nap for nap in slept if nap != 7.0]
    assert pauses == pytest.approx([0.1, 0.0, 0.1])


def test_the_terminal_is_given_back_after_ctrl_c(terminal: Terminal, slept: list[float]) -> None:
    def interrupted(obs: Tensor, legal: Tensor | None = None) -> Tensor:  # noqa: ARG001
        if len(slept) == 2:
            raise KeyboardInterrupt
        return go_up(obs)

    with pytest.raises(KeyboardInterrupt):
        watch.play_terminal(small_rules(), interrupted, 0, out=terminal)
    assert terminal.getvalue().count("\x1b[?25l") == 1
    assert terminal.getvalue().endswith("\x1b[?25h\x1b[?1049l")


@pytest.mark.parametrize(
    ("setting", "value", "animated", "coloured"),
    [
        ("LINES", "7", True, True),  # 4 rows and the border in 3 lines, an empty one, the status
        ("LINES", "4", False, True),
        ("COLUMNS", "6", False, True),
        ("TERM", "dumb", False, False),
        ("NO_COLOR", "1", True, False),
    ],
)
def test_terminals_of_all_kinds(
    terminal: Terminal,
    slept: list[float],
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    value: str,
    animated: bool,
    coloured: bool,
) -> None:
    monkeypatch.setenv(setting, value)
    watch.play_terminal(small_rules(), go_up, 0, out=terminal)
    text = terminal.getvalue()
    assert ("\x1b[H" in text) == animated == bool(slept)
    assert ("▀" in text) == ("\x1b[38;2" in text) == coloured
    assert ("cannot show" in text) == (setting in ("LINES", "COLUMNS") and not animated)
    assert text.endswith("game over\n")


def test_the_size_is_that_of_the_terminal_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("LINES", "24")
    monkeypatch.setattr(watch.os, "get_terminal_size", lambda descriptor: os.terminal_size((descriptor, 9)))
    out = Terminal()
    monkeypatch.setattr(out, "fileno", lambda: 33, raising=False)
    assert watch._terminal_size(out) == (9, 33)
    assert watch._terminal_size(io.StringIO()) == (0, 0)


def test_recording(tmp_path: Path) -> None:
    rules = small_rules()
    result = watch.record_gif(rules, around, 0, tmp_path / "won.gif")
    assert result.won
    with Image.open(tmp_path / "won.gif") as image:
        assert image.n_frames == result.length + 1
        for number, frame in zip(range(image.n_frames), watch.play(rules, around, 0), strict=False):
            image.seek(number)
            size = image.width // 4
            assert image.size == (4 * size, 4 * size)
            assert image.width >= 480
            middles = np.array(image.convert("RGB")).astype(int)[size // 2 :: size, size // 2 :: size]
            expected = draw.colours(rules.game.PALETTE)[frame.picture]
            plain = (frame.picture == 1) | (frame.picture == 3)  # body and food; the head has eyes
            assert np.abs(middles - expected)[plain].max(initial=0) <= 2
        assert frame.ended
        assert (frame.picture > 0).all()  # the board of the win is full


def test_a_long_recording_is_truncated_short(tmp_path: Path) -> None:
    result = watch.record_gif(small_rules(), around, 0, tmp_path / "a.gif", max_steps=5)
    assert (result.length, result.truncated, result.won, result.outcome) == (5, True, False, "truncated")
    with Image.open(tmp_path / "a.gif") as image:
        assert image.n_frames == 6
    assert (
        watch.record_gif(small_rules(), go_up, 0, tmp_path / "b.gif", max_steps=3).outcome == "game over"
    )  # on the last step


def test_bad_numbers_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="fps is 0"):
        watch.play_terminal(small_rules(), go_up, 0, fps=0)
    with pytest.raises(UserError, match="games is 0"):
        watch.play_terminal(small_rules(), go_up, 0, games=0)
    with pytest.raises(UserError, match="max_steps is 0"):
        watch.record_gif(small_rules(), go_up, 0, tmp_path / "a.gif", max_steps=0)
    with pytest.raises(UserError, match="fps is 99"):
        watch.record_gif(small_rules(), go_up, 0, tmp_path / "a.gif", fps=99)
    assert not list(tmp_path.iterdir())


# ---- CPU environments


class Walk(gymnasium.Env[np.ndarray, int]):
    """A dot that walks along a strip of 8 cells; at its end the episode is over. The strip is the picture."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}  # noqa: RUF012  (as Gymnasium has it)
    observation_space = gymnasium.spaces.Box(0, 8, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self.place = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.place += action
        return np.full(1, self.place, np.float32), float(action), self.place == 7, False, {}

    def render(self) -> Any:
        assert self.render_mode == "rgb_array"
        picture = np.zeros((4, 8, 3), np.uint8)
        picture[:, self.place] = (250, 80, 20)
        return picture


gymnasium.register("Walk-v0", entry_point=Walk, disable_env_checker=True)


def step_right(obs: Tensor, legal: Tensor | None = None) -> Tensor:  # noqa: ARG001
    assert obs.shape == (1, 1)
    return torch.tensor([1])


def place(frame: watch.Frame) -> int:
    return int(frame.picture[0, :, 0].argmax())


def test_a_gymnasium_environment_is_rendered(tmp_path: Path) -> None:
    rules = envs.make_rules("gym:Walk-v0")
    result = watch.record_gif(rules, step_right, 3, tmp_path / "walk.gif")
    assert result == (7.0, 7, 7.0, False, False)
    assert result.outcome == "game over"
    frames = list(itertools.islice(watch.play(rules, step_right, 3), 10))
    # The last picture of an episode is its own, although the step that ends it resets the environment.
    assert [place(frame) for frame in frames] == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1]
    assert [frame.ended for frame in frames] == [False] * 7 + [True, False, False]
    assert [frame.result.length for frame in frames] == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1]
    with Image.open(tmp_path / "walk.gif") as image:
        assert (image.size, image.n_frames) == ((480, 240), 8)
        image.seek(7)
        assert image.convert("RGB").getpixel((479, 0)) == (250, 80, 20)


def test_a_gymnasium_environment_as_video(tmp_path: Path) -> None:
    reader = pytest.importorskip("imageio_ffmpeg").read_frames
    rules = envs.make_rules("gym:Walk-v0")
    assert watch.record_mp4(rules, step_right, 3, tmp_path / "walk.mp4", fps=10).length == 7
    (_, *frames) = reader(str(tmp_path / "walk.mp4"))  # the first item describes the video
    lit = [np.frombuffer(frame, np.uint8).reshape(240, 480, 3)[120, :, 0] > 128 for frame in frames]
    assert [int(columns.argmax()) // 60 for columns in lit[:7]] == list(range(7))
    assert int(lit[-1].argmax()) // 60 == 7


def test_a_gymnasium_environment_in_the_terminal(terminal: Terminal, slept: list[float]) -> None:
    rules = envs.make_rules("gym:Walk-v0", time_limit=5)
    (result,) = watch.play_terminal(rules, step_right, 3, out=terminal)
    assert (result.length, result.outcome) == (5, "truncated")
    assert terminal.getvalue().count("\x1b[H") == 6 == len(slept) + 1
    assert "▀" in terminal.getvalue()
    assert terminal.getvalue().endswith("return 5   5 steps   reward 5.00   truncated\n")
    out = io.StringIO()
    watch.play_terminal(rules, step_right, 3, out=out)
    assert out.getvalue() == "\nreturn 5   5 steps   reward 5.00   truncated\n"  # a file gets no picture


def test_a_library_that_rendering_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def render(_: Any) -> None:
        raise gymnasium.error.DependencyNotInstalled('pygame is not installed, run `pip install "gymnasium[toy-text]"`')

    monkeypatch.setattr(Walk, "render", render)
    with pytest.raises(UserError, match=r"gym:Walk-v0 cannot be drawn: pygame is not installed, run"):
        next(watch.play(envs.make_rules("gym:Walk-v0"), step_right, 0))


def test_an_environment_that_cannot_be_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Walk, "render", lambda _: None)
    with pytest.raises(UserError, match=r"gym:Walk-v0 cannot be drawn, because it has no render mode rgb_array"):
        next(watch.play(envs.make_rules("gym:Walk-v0"), step_right, 0))


class Blind(Walk):
    """Has nothing to show, like most environments at first."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  (as Gymnasium has it)

    def __init__(self) -> None:  # not even the argument
        super().__init__()

    def render(self) -> Any:
        raise NotImplementedError


gymnasium.register("Blind-v0", entry_point=Blind, disable_env_checker=True)


@pytest.mark.parametrize("modes", [[], ["rgb_array"]])
def test_an_environment_without_pictures(
    modes: list[str], monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """Refused in one sentence, also if it promises pictures; Gymnasium's warnings do not reach the terminal."""
    monkeypatch.setitem(Blind.metadata, "render_modes", modes)
    if modes:
        monkeypatch.setattr(Blind, "__init__", Walk.__init__)
    rules = envs.make_rules("gym:Blind-v0")
    sentence = "gym:Blind-v0 cannot be drawn, because it has no render mode rgb_array; redline eval plays it."
    with pytest.raises(UserError) as raised:
        next(watch.play(rules, step_right, 0))
    assert str(raised.value) == sentence
    assert watch.why_not_drawn(rules) == sentence
    assert not [warning for warning in recwarn if "render" in str(warning.message)]


def test_nothing_is_said_about_what_can_be_watched() -> None:
    assert watch.why_not_drawn(envs.make_rules("gym:Walk-v0")) == ""
    assert watch.why_not_drawn(small_rules()) == ""


def test_a_game_without_cells_is_refused() -> None:
    rules = small_rules()
    rules = rules._replace(game=dataclasses.replace(rules.game, cells=None))
    with pytest.raises(UserError, match="snake cannot be drawn"):
        next(watch.play(rules, go_up, 0))
