"""What a person sees: a panel on a terminal, plain lines in a pipe."""

from __future__ import annotations

import io
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest

from redline.run import progress as module
from redline.run.progress import Progress, duration, quantity, sparkline

RECORD = {
    "env_steps": 1_234_567,
    "env_steps_per_second": 5_600.0,
    "samples_per_second": 78_900.0,
    "score": 3.25,
    "loss": 0.125,
    "memory_gb": 1.5,
}


class Stream(io.StringIO):
    """Standard error, of a terminal or of a pipe."""

    terminal = False

    def isatty(self) -> bool:
        return self.terminal


@pytest.fixture
def stream() -> Stream:
    return Stream()


@pytest.fixture
def terminal(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> Stream:
    stream.terminal = True
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    return stream


def screen(stream: Stream) -> str:
    """The text of everything written, without colours and cursor movements."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())


def wait_for(stream: Stream, text: str, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while text not in screen(stream):
        assert time.monotonic() < deadline, screen(stream)
        time.sleep(0.02)


@pytest.mark.fault("H5")
def test_a_pipe_gets_plain_lines(stream: Stream) -> None:
    progress = Progress("title", "foods", phases=2, file=stream)
    progress.start_activity("Training")
    progress.show(RECORD | {"phase": "easy", "phase_number": 1, "gpu_percent": 97.0}, 0.254, 75.4)
    progress.show(RECORD | {"phase": "easy", "phase_number": 1}, 0.3, None)  # within ten seconds of the line before
    progress.close()
    assert stream.getvalue().splitlines() == [
        "steps 1.23 M  steps/s 5.6 k  samples/s 78.9 k  foods 3.25  loss 0.1250  memory 1.5 GB  done 25 %  left 1:15  "
        "phase easy 1/2  GPU 97 %"
    ]


def test_figures_of_the_learner_are_shown(stream: Stream) -> None:
    progress = Progress("title", "foods", file=stream)
    learner = {"td_error": 0.0123, "epsilon": 0.5, "learning_rate": 1e-4, "grad_norm": 3.0, "replay_fill": 0.25}
    progress.show(RECORD | learner, 0.5, 1.0)
    progress.close()
    assert stream.getvalue().rstrip().endswith("TD error 0.0123  epsilon 0.5  lr 0.0001  gradient 3  replay 0.25")


def test_a_pipe_hears_of_a_long_activity(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PLAIN_SECONDS", 0.0)
    progress = Progress("title", "foods", file=stream)
    progress.start_activity("Compiling")
    wait_for(stream, "Compiling: 0:0")
    assert "so far." in stream.getvalue()
    progress.start_activity("Evaluating")
    progress.count(12, 256, "games")
    wait_for(stream, "so far, 12 of 256 games.")
    progress.close()


def test_a_pipe_hears_which_function_is_compiled(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PLAIN_SECONDS", 0.0)
    with Progress("title", "foods", file=stream) as progress:
        progress.start_activity("Compiling")
        progress.explain("loss, function 2 of 5")
        wait_for(stream, "so far, loss, function 2 of 5.")


def test_the_seconds_of_activities_are_kept(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with Progress("title", file=stream, quiet=True) as progress:
        assert progress.activity_seconds() == {}
        for name, seconds in (("Loading", 2.0), ("Compiling", 3.0), ("Loading", 0.5)):
            progress.start_activity(name)
            now[0] += seconds
        assert progress.activity_seconds() == {"Loading": 2.5, "Compiling": 3.0}


def test_records_of_learning_while_compiling_say_so(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    with Progress("title", "foods", file=stream) as progress:
        progress.start_activity("Compiling", shows_records=True)
        progress.explain("loss, function 2 of 5")
        progress.show(RECORD, None, None)
        line = stream.getvalue()
        assert line.startswith("steps 1.23 M ")
        assert "done -  left -" in line
        assert line.rstrip().endswith("compiling loss, function 2 of 5")
        monkeypatch.setattr(module, "_PLAIN_SECONDS", 0.0)
        wait_for(stream, "Compiling: 0:0")  # no record for long, as where functions are read from the cache


def test_a_pipe_is_never_silent_for_long(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DOT_SECONDS", 0.05)
    with Progress("title", file=stream) as progress:
        progress.start_activity("Loading", announce=True)
        wait_for(stream, "Loading…\n...")
        progress.say("A message.")
        wait_for(stream, "\nA message.\nLoading…\n..")
        monkeypatch.setattr(module, "_PLAIN_SECONDS", 0.3)
        wait_for(stream, ". Loading: 0:0")
        progress.start_activity("Saving")
        wait_for(stream, "\nSaving…\n.")
        progress.start_activity("Training")  # shows records
        progress.show(RECORD, 0.5, 1.0)
        shown = stream.getvalue()
        assert re.search(r"\nsteps 1.23 M .*\n$", shown)
        time.sleep(0.2)
        assert stream.getvalue() == shown


def test_the_panel_of_a_refused_command_is_erased(terminal: Stream) -> None:
    def refuse() -> None:
        with Progress("title", file=terminal) as progress:
            progress.start_activity("Loading")
            wait_for(terminal, "Loading")
            raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        refuse()
    assert terminal.getvalue().rstrip("\r\n").endswith("\x1b[2K")


def test_a_terminal_shows_what_is_done_and_for_how_long(terminal: Stream) -> None:
    progress = Progress("snake · ppo", "foods", file=terminal)
    progress.start_activity("Compiling")
    wait_for(terminal, "Compiling")
    wait_for(terminal, "0:01")  # the clock runs while nothing else happens
    progress.say("A message.")
    progress.start_activity("Training")
    for score in (1.0, 2.0, 4.0):
        progress.show(RECORD | {"score": score}, 0.5, 61.0)
    wait_for(terminal, "1:01 left")
    progress.close()
    shown = screen(terminal)
    assert "snake · ppo" in shown
    assert "A message." in shown
    assert " 50 %" in shown
    assert "foods 4.00  ▁▃█" in shown
    assert "steps 1.23 M  steps/s 5.6 k  samples/s 78.9 k  loss 0.1250  memory 1.5 GB" in shown
    assert "━" in shown  # the bar


def test_the_panel_stays_at_the_end(terminal: Stream) -> None:
    progress = Progress("title", "foods", file=terminal)
    progress.start_activity("Training")
    progress.show(RECORD, 1.0, 0.0)
    progress.close()
    assert "100 %" in screen(terminal).rstrip().splitlines()[-3]
    assert not terminal.getvalue().rstrip().endswith("\x1b[2K")  # not erased


@pytest.mark.fault("H5")
def test_a_dumb_terminal_gets_plain_lines(terminal: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    progress = Progress("title", "foods", file=terminal)
    progress.start_activity("Training")
    progress.show(RECORD, 0.5, 1.0)
    progress.close()
    assert terminal.getvalue().startswith("steps 1.23 M")
    assert "\x1b" not in terminal.getvalue()


@pytest.mark.parametrize(
    ("values", "line"),
    [([], ""), ([3.0], "▁"), ([1.0, 2.0, 3.0], "▁▅█"), ([2.0, 2.0], "▁▁"), ([-1.0, 1.0, 0.0], "▁█▅")],
)
def test_sparkline(values: list[float], line: str) -> None:
    assert sparkline(values) == line


def test_a_long_history_is_averaged() -> None:
    assert sparkline([0.0, 2.0, 4.0, 6.0, 8.0, 10.0], width=3) == "▁▅█"
    assert len(sparkline(list(map(float, range(1000))), width=40)) == 40


@pytest.mark.parametrize(
    ("number", "text"), [(0.5, "0.5"), (999, "999"), (1234, "1.23 k"), (2.5e6, "2.5 M"), (3e9, "3 G")]
)
def test_quantity(number: float, text: str) -> None:
    assert quantity(number) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (75, "1:15"), (3600, "1:00:00"), (7384, "2:03:04")])
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_nothing_is_formatted_that_is_not_there(stream: Stream) -> None:
    record: dict[str, Any] = {k: v for k, v in RECORD.items() if k not in ("score", "loss")}
    progress = Progress("title", "foods", file=stream)
    progress.start_activity("Training")
    progress.show(record, 0.0, None)
    progress.close()
    assert "foods -  loss -" in stream.getvalue()
    assert "left -" in stream.getvalue()


def test_the_first_games_of_an_evaluation_give_no_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DOT_SECONDS", 0.0)
    with Progress("snake · ppo", "foods", file=Stream()) as progress:
        progress.start_activity("Evaluating")
        progress.count(1, 100, "games")
        assert progress.detail == "1 of 100 games"
        progress.count(10, 100, "games")
        assert re.fullmatch(r"10 of 100 games, about .* left", progress.detail)
        progress.count(100, 100, "games")
        assert progress.detail == "100 of 100 games"
