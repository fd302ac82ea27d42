"""Progress on standard error: a live panel on a terminal, plain lines in a pipe. Imports no torch."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import sys
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TextIO, cast

import psutil
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    import torch

_PLAIN_SECONDS = 10.0  # between two plain lines
_DOT_SECONDS = 2.0  # between two dots in a pipe, which show that an activity without records is still running
_SPARKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 40  # characters of a sparkline
_BAR_WIDTH = 40
_LEARNING = {  # metrics of learners -> label
    "td_error": "TD error",
    "entropy": "entropy",
    "approx_kl": "KL",
    "explained_variance": "explained",
    "epsilon": "epsilon",
    "learning_rate": "lr",
    "grad_norm": "gradient",
    "replay_fill": "replay",
}


def quantity(number: float) -> str:
    """Return a number with a unit: 1234567 -> 1.23 M."""
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def duration(seconds: float) -> str:
    """Return seconds as a duration: 75 -> 1:15."""
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def sparkline(values: Sequence[float], width: int = _SPARK_WIDTH) -> str:
    """Return a line of at most `width` bars, each the mean of its part of `values`: [1, 2, 3] -> ▁▅█."""
    count = min(width, len(values))
    if not count:
        return ""
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    return "".join(_SPARKS[round((len(_SPARKS) - 1) * (x - low) / span)] if span else _SPARKS[0] for x in means)


def _peak(record: dict[str, Any]) -> str:
    """Return the peak of memory in a log record as text, `, peak 1.5`, or an empty string."""
    return f", peak {record['memory/peak_bytes'] / 2**30:.1f}" if "memory/peak_bytes" in record else ""


def device_use(device: torch.device) -> dict[str, float]:
    """Return memory in GB and, if NVML is available, GPU use in percent; on a CPU, memory and CPU use of the process.

    CPU use is measured since the last call; each core counts as 100 percent.
    """
    if device.type != "cuda":
        process = _this_process(os.getpid())
        return {"memory_gb": process.memory_info().rss / 2**30, "cpu_percent": process.cpu_percent()}
    import torch

    use = {"memory_gb": torch.cuda.memory_reserved(device) / 2**30}
    with contextlib.suppress(Exception):  # no NVML bindings, or a driver that reports nothing: leave it out
        use["gpu_percent"] = float(torch.cuda.utilization(device))
    return use


@functools.cache
def _this_process(pid: int) -> psutil.Process:
    """Return the process object, cached because it measures CPU use between two calls."""
    process = psutil.Process(pid)
    process.cpu_percent()
    return process


class _Stream:
    """A text stream that ignores failures: a closed terminal or a full disk must not stop training."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        try:
            return self._file.write(text)
        except UnicodeEncodeError as error:  # a terminal without ± and … gets question marks
            return self.write(text.encode(error.encoding, "replace").decode(error.encoding))
        except (OSError, ValueError, RuntimeError):  # RuntimeError: a signal handler writes while the main thread does
            return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class Progress:
    """Display of messages, the current activity and log records.

    On a terminal, a panel shows title, activity, progress bar with the time left, score and figures; messages appear above
    it. In a pipe, a line is printed every ten seconds with the latest record, or with the time of an activity that shows no
    records, and then a dot every two seconds. As a context manager it closes at the end and erases the panel after an
    exception.
    """

    def __init__(
        self,
        title: str,
        score_name: str = "score",
        phases: int = 0,
        file: TextIO | None = None,
        erase: bool = False,
        quiet: bool = False,
    ) -> None:
        """Arguments as in `describe`. file: to write to, standard error by default.

        erase: remove the panel at the end. quiet: show nothing, for ranks other than 0.
        """
        self._erase = erase
        stream = _Stream(
            file or sys.stderr or io.StringIO()
        )  # standard error is None if it was closed before the start
        self.console = Console(file=cast(TextIO, stream), highlight=False, quiet=quiet)
        self.describe(title, score_name, phases)
        self._activity, self._activity_started = "", time.monotonic()
        self._shows_records = False  # whether the activity does
        self._seconds: dict[str, float] = {}  # by finished activity
        self._fraction: float | None = None  # of the current activity, None: unknown
        self._detail = ""  # of the activity: time left, or a count
        self._scores: list[float] = []
        self._figures: dict[str, str] = {}
        self._last_line = -_PLAIN_SECONDS  # when a line was written
        self._last_sign = time.monotonic()  # when a line or a dot was written
        self._lock = threading.RLock()  # for the line of dots; a signal handler may write while the main thread does
        self._dots = 0  # at the end of the current line
        self._said = ""  # the last line written
        self._closed = threading.Event()
        self._live: Live | None = None
        if quiet:
            return
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            # Printing to the same terminal must go through the panel; redirected standard output must not.
            shared = bool(sys.stdout) and sys.stdout.isatty()
            self._live = Live(
                console=self.console, get_renderable=self._panel, refresh_per_second=4, redirect_stdout=shared
            )
            self._live.start()
        else:
            threading.Thread(target=self._report_activity, name="progress", daemon=True).start()

    def describe(self, title: str, score_name: str, phases: int) -> None:
        """Set the title, the name of the score in log records and the number of curriculum phases, 0 for none."""
        self.title, self.score_name, self.phases = title, score_name, phases

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._erase |= kind is not None
        self.close()

    def say(self, text: str) -> None:
        """Print a message."""
        with self._lock:
            if self._dots:
                self.console.print()
                self._dots = 0
            self._said, self._last_sign = text, time.monotonic()
            self.console.print(text, soft_wrap=True, markup=False)

    def start_activity(self, name: str, announce: bool = False, shows_records: bool = False) -> None:
        """Show the name of the current activity from now on, and its elapsed time.

        announce: print the name in a pipe too. shows_records: the activity shows log records, like training.
        """
        self._seconds = self.activity_seconds()
        self._shows_records = shows_records or name == "Training"
        self._activity, self._activity_started = name, time.monotonic()
        self._fraction, self._detail = None, ""
        self._last_line = -_PLAIN_SECONDS if self._shows_records else time.monotonic()
        if announce and self._live is None:
            self.say(f"{name}…")

    @property
    def detail(self) -> str:
        """The current part of the activity, if known."""
        return self._detail

    def explain(self, detail: str) -> None:
        """Show the current part of the activity. Thread-safe."""
        self._detail = detail

    def activity_seconds(self) -> dict[str, float]:
        """Return the seconds of each activity so far."""
        if not self._activity:
            return dict(self._seconds)
        spent = self._seconds.get(self._activity, 0.0) + time.monotonic() - self._activity_started
        return self._seconds | {self._activity: spent}

    def count(self, done: int, total: int, unit: str) -> None:
        """Show how much of the activity is done, and the time left once it can be estimated.

        Games that start together end together: the first few to end say little about the rest.
        """
        self._fraction, self._detail = done / total, f"{done:,} of {total:,} {unit}"
        elapsed = time.monotonic() - self._activity_started
        if elapsed > _DOT_SECONDS and total <= 10 * done < 10 * total:
            self._detail += f", about {duration(elapsed * (total - done) / done)} left"

    def show(self, record: dict[str, Any], fraction: float | None, seconds_left: float | None) -> None:
        """Show a log record: `env_steps`, rates, score, loss, device use, phase of the curriculum, actors.

        fraction: of training that is done; None before training time counts, to show the activity and its detail instead.
        """
        left = duration(seconds_left) if seconds_left is not None else "-"
        if fraction is None:
            self._figures = self._describe(record, "-", left) | {self._activity.lower(): self._detail or "-"}
        else:
            self._fraction = min(fraction, 1.0)
            self._detail = f"{left} left" if seconds_left is not None else ""
            self._figures = self._describe(record, f"{100 * self._fraction:.0f} %", left)
        if "score" in record:
            self._scores.append(record["score"])
        if self._live is None and time.monotonic() - self._last_line >= _PLAIN_SECONDS:
            self._last_line = time.monotonic()
            self.say("  ".join(f"{name} {value}" for name, value in self._figures.items()))

    def close(self) -> None:
        """Stop refreshing. The panel stays on the screen unless `erase` is set."""
        self._closed.set()
        with self._lock:
            if self._dots:
                self.console.print()
                self._dots = 0
        if self._live:
            self._live.transient = self._erase
            self._live.stop()
            self._live = None

    def _describe(self, record: dict[str, Any], done: str, left: str) -> dict[str, str]:
        """Return the figures of a log record, by name."""
        figures = {
            "steps": quantity(record["env_steps"]),
            "steps/s": quantity(record["env_steps_per_second"]),
            "samples/s": quantity(record["samples_per_second"]),
            self.score_name: f"{record['score']:.2f}" if "score" in record else "-",
            "loss": f"{record['loss']:.4f}" if "loss" in record else "-",
            "memory": f"{record['memory_gb']:.1f} GB{_peak(record)}",
            "done": done,
            "left": left,
        }
        if self.phases:
            figures["phase"] = f"{record['phase']} {record['phase_number']}/{self.phases}"
        if "actor_busy" in record:
            figures["actors"] = f"{100 * record['actor_busy']:.0f} % busy"
            figures["queue"] = f"{100 * record['queue']:.0f} %"
            figures["lag"] = f"{record['policy_lag']:.1f}"
            figures["waiting"] = f"{100 * record['learner_wait']:.0f} %"
            if record["drops"]:
                figures["dropped"] = quantity(record["drops"])
        if "gpu_percent" in record:
            figures["GPU"] = f"{record['gpu_percent']:.0f} %"
        return figures | {label: f"{record[name]:.3g}" for name, label in _LEARNING.items() if name in record}

    def _panel(self) -> Group:
        """Return the live panel. Called four times a second by the refreshing thread."""
        fraction = self._fraction
        row = Table.grid(padding=(0, 2))
        row.add_row(
            Text(self._activity, style="bold"),
            ProgressBar(total=1.0, completed=fraction or 0.0, width=_BAR_WIDTH, pulse=fraction is None),
            f"{100 * fraction:3.0f} %" if fraction is not None else "",
            duration(time.monotonic() - self._activity_started),
            self._detail,
        )
        lines: list[Any] = [Text(self.title, style="bold"), row] if self._activity else [Text(self.title, style="bold")]
        if self._scores:
            score = self._figures.get(self.score_name, "-")
            lines.append(Text(f"{self.score_name} {score}  {sparkline(self._scores)}"))
        elsewhere = (self.score_name, "done", "left", self._activity.lower())  # shown in the lines above
        figures = {name: value for name, value in self._figures.items() if name not in elsewhere}
        learning = {label: figures.pop(label) for label in _LEARNING.values() if label in figures}
        for group in (figures, learning):
            if group:
                lines.append(Text("  ".join(f"{name} {value}" for name, value in group.items())))
        return Group(*lines)

    def _report_activity(self) -> None:
        """Print a dot every two seconds and a line every ten to a pipe, during an activity that shows no records."""
        while not self._closed.wait(min(_DOT_SECONDS, _PLAIN_SECONDS) / 4 or 0.01):
            now = time.monotonic()
            with self._lock:
                if not self._activity or self._activity == "Training" or self._closed.is_set():
                    continue
                if self._shows_records and now - self._last_line < 1.5 * _PLAIN_SECONDS:
                    continue
                if now - self._last_line >= _PLAIN_SECONDS:
                    self._last_line = self._last_sign = now
                    self._said = self._activity
                    detail = f", {self._detail}" if self._detail else ""
                    text = f"{self._activity}: {duration(now - self._activity_started)} so far{detail}."
                    self.console.print(f"{' ' * bool(self._dots)}{text}", soft_wrap=True, markup=False)
                    self._dots = 0
                elif now - self._last_sign >= _DOT_SECONDS:
                    if not self._said.startswith(self._activity):  # say what the dots stand for
                        self.say(f"{self._activity}…")
                        continue
                    self._last_sign = now
                    self._dots += 1
                    self.console.print(".", end="")
                    self.console.file.flush()
