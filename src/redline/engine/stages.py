"""Stages: the named parts of an iteration, and the clocks that time them.

Learners and collectors declare their parts in `stages`. Training ignores the declaration; `redline profile` replaces the
declared attributes with timed ones, so that timing costs nothing in other runs.

A clock charges every moment to exactly one name: that of the innermost open span, or IDLE outside all spans. Totals
therefore add up to the time between `start` and `stop`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch

IDLE = "idle gaps"  # time outside spans: Python between two stages, or a device that waits for the host
_UNREAD = 4096  # number of events from which finished ones are read, so that they do not pile up in a long loop


class Stage(NamedTuple):
    """A part of an iteration that is timed separately."""

    name: str
    compiled: bool = True  # a function over tensors to compile separately; False: Python, or already compiled


Stages = Mapping[str, Stage]
"""Stages by the attribute that holds their function, dotted for an attribute of an attribute: `optimizer.gradient`."""


class HostClock:
    """Times spans by the host's clock, for a CPU, where nothing runs asynchronously."""

    def __init__(self) -> None:
        self._open: list[str] = []  # names of the open spans
        self.restart()

    def restart(self) -> None:
        """Reset all times."""
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self._since = 0

    def start(self) -> None:
        """Start timing."""
        self._since = time.perf_counter_ns()

    def stop(self) -> None:
        """Stop timing."""
        self._charge()

    def enter(self, name: str) -> None:
        self._charge()
        self._open.append(name)
        self.calls[name] += 1

    def leave(self) -> None:
        self._charge()
        self._open.pop()

    def _charge(self) -> None:
        now = time.perf_counter_ns()
        self.seconds[self._open[-1] if self._open else IDLE] += (now - self._since) / 1e9
        self._since = now

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Charge the time of the `with` block to `name`, excluding nested spans."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

    def read(self) -> dict[str, float]:
        """Return the seconds charged to each name so far."""
        return dict(self.seconds)


class EventClock(HostClock):
    """Times spans by events on the current CUDA stream, which are read later: the host never waits in the loop.

    Events recorded during the capture of a CUDA graph become part of it and are recorded again by each replay. They are
    stored separately, in the order of the graph, and give the spans of the latest replay.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: list[torch.cuda.Event] = []
        self._captured: list[tuple[str, torch.cuda.Event]] = []
        super().__init__()

    def restart(self) -> None:
        """Reset all times, but keep the events in a captured graph."""
        super().restart()
        self._marks: list[tuple[str, torch.cuda.Event]] = []  # event, and name charged for the time before

    def start(self) -> None:
        self._mark(IDLE)

    def _charge(self) -> None:
        self._mark(self._open[-1] if self._open else IDLE)

    def _mark(self, name: str) -> None:
        if torch.cuda.is_current_stream_capturing():
            event = torch.cuda.Event(enable_timing=True, external=True)
            event.record()
            self._captured.append((name, event))
            return
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((name, event))
        if len(self._marks) >= _UNREAD:
            self._read_finished()

    def _read_finished(self) -> None:
        """Charge the spans whose events have completed; the last of these events starts the next span."""
        done = len(self._marks)
        while done and not self._marks[done - 1][1].query():
            done //= 2
        if done > 1:
            self._add(self._marks[:done])
            self._free += [event for _, event in self._marks[: done - 1]]
            del self._marks[: done - 1]

    def _add(self, marks: list[tuple[str, torch.cuda.Event]]) -> None:
        for (_, begin), (name, end) in pairwise(marks):
            self.seconds[name] += begin.elapsed_time(end) / 1e3

    def read(self) -> dict[str, float]:
        """Return the seconds charged to each name so far; synchronizes with the device."""
        torch.cuda.synchronize(self.device)
        self._read_finished()
        return dict(self.seconds)

    def read_captured(self) -> dict[str, float]:
        """Return the seconds of each span in the latest replay of the captured graph; synchronizes with the device."""
        torch.cuda.synchronize(self.device)
        seconds: dict[str, float] = defaultdict(float)
        for (_, begin), (name, end) in pairwise(self._captured):
            seconds[name] += begin.elapsed_time(end) / 1e3
        return dict(seconds)

    def forget_captured(self) -> None:
        """Drop the spans of a graph that is no longer replayed."""
        self._captured.clear()


def make_clock(device: torch.device) -> HostClock:
    """Return the clock that times work on a device."""
    return EventClock(device) if device.type == "cuda" else HostClock()


def time_stages(owner: Any, stages: Stages, clock: HostClock, compile: Callable[[Any], Any]) -> None:
    """Replace the functions of `owner` declared in `stages` with timed ones, compiled separately if so declared."""
    for path, stage in stages.items():
        *parents, attribute = path.split(".")
        holder = owner
        for parent in parents:
            holder = getattr(holder, parent)
        function = getattr(holder, attribute)
        setattr(holder, attribute, _timed(stage.name, compile(function) if stage.compiled else function, clock))


def _timed(name: str, function: Callable[..., Any], clock: HostClock) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        clock.enter(name)
        try:
            return function(*arguments)
        finally:
            clock.leave()

    return call
