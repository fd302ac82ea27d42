"""Measure a run twice: the session as it trains, and a session whose stages are compiled and timed separately.

The second runs the same functions. While the first may be one compiled function in one CUDA graph, its stages are compiled one
by one; on a GPU they are still captured as one graph, with events between stages that every replay records again.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from redline.engine import fast, hardware
from redline.engine.stages import IDLE, EventClock, make_clock, time_stages
from redline.run.budget import next_chunk
from redline.run.plan import Plan
from redline.run.run_folder import to_stderr
from redline.run.session import Session
from redline.tools.profile_counters import CompileCounter, GpuSampler, count_synchronisations

REPLAY = "replay of the graph"  # the launch of a captured graph, split into the stages inside it
_WARM_UP = 6  # updates before the clock starts, for compilation and capture
_SYNC_ITERATIONS = 20  # iterations in which host synchronisations are counted
_CHUNK_SECONDS = 0.25  # between two reads of the events in a graph


class StagedSession(Session):
    """A session whose declared stages are compiled separately and timed by `clock`."""

    def __init__(self, plan: Plan, notify: Callable[[str], None]) -> None:
        self.clock = make_clock(plan.device)
        self._timed = False
        super().__init__(plan, notify)

    def _make_compiler(self) -> fast.Compiler:
        self._stage_compiler = super()._make_compiler()
        return fast.Compiler(False, self.notify, self.plan.device)  # only stages are compiled, not whole functions

    def _fast(self, function: Callable[[], None]) -> Callable[[], None]:
        return fast.Graph(self._stage_compiler(function), self.plan.graph, self.notify)

    def _build(self) -> None:
        if not self._timed:
            for owner in (self.learner, self.collector):
                time_stages(owner, owner.stages, self.clock, self._stage_compiler)
            self._timed = True
        super()._build()
        if self.collector.on_device:
            self._update = self._in_span("update", self._update)
            self._collect_and_learn = self._in_span(REPLAY, self._collect_and_learn)
            self._collect_only = self._in_span(REPLAY, self._collect_only)
        else:
            captured = isinstance(self._update, fast.Graph) and self._update.enabled
            self._update = self._in_span(REPLAY if captured else "update", self._update)

    def _in_span(self, name: str, function: Callable[[], None]) -> Callable[[], None]:
        def call() -> None:
            with self.clock.span(name):
                function()

        return call

    def _play(self) -> None:
        with self.clock.span("collection"):
            super()._play()

    def _play_and_learn(self) -> None:
        if isinstance(self.clock, EventClock) and torch.cuda.is_current_stream_capturing():
            self.clock.forget_captured()  # events of the graph that collected without learning
        super()._play_and_learn()


@dataclass
class RunMeasurement:
    """A session as it trains, over a window of time."""

    seconds: float
    iterations: int
    env_steps: int
    samples: int
    logging_seconds: float  # reading metrics and episode statistics, once a second as in training
    recompilations: int
    compile_seconds: float
    synchronisations: float  # of host and device per iteration, not counting log points
    gpu: dict[str, float]  # mean use in percent, clock in MHz and power in W; empty if unavailable
    metrics: dict[str, float]  # of the learner and the collector

    @property
    def env_steps_per_second(self) -> float:
        return self.env_steps / self.seconds

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds


@dataclass
class StageMeasurement:
    """Seconds of each stage in a window of a StagedSession."""

    wall_seconds: float  # of the window, on the host's clock
    iterations: int
    seconds: dict[str, float]  # by stage, with IDLE
    calls: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def warm_up(session: Session) -> None:
    """Iterate until everything is compiled and captured, and the learner updates."""
    while session.updates == 0:
        session.iterate(1)
    session.iterate(_WARM_UP)
    session.synchronize()


def measure_run(session: Session, seconds: float) -> RunMeasurement:
    """Measure a warmed-up session, with log points about every second."""
    session.collector.episode_stats.read()
    session.read_metrics(0)
    session.synchronize()
    steps, samples, updates, iterations = (
        session.env_steps,
        session.samples_trained,
        session.updates,
        session.iterations,
    )
    metrics: list[dict[str, float]] = []
    logging, chunk, logged = 0.0, 1, updates
    with CompileCounter() as compiled, GpuSampler(session.plan.device) as gpu:
        started = time.perf_counter()
        while True:
            began = time.perf_counter()
            session.iterate(chunk)
            session.synchronize()
            read = time.perf_counter()
            session.collector.episode_stats.read()
            metrics.append(session.read_metrics(session.updates - logged))
            logged = session.updates
            now = time.perf_counter()
            logging += now - read
            if now - started >= seconds:
                break
            left = max(seconds - (now - started), 0.01)
            chunk = min(next_chunk(chunk, now - began), max(1, round(chunk * left / (now - began))))
    return RunMeasurement(
        seconds=now - started,
        iterations=session.iterations - iterations,
        env_steps=session.env_steps - steps,
        samples=session.samples_trained - samples,
        logging_seconds=logging,
        recompilations=compiled.count,
        compile_seconds=compiled.seconds,
        synchronisations=count_synchronisations(lambda: session.iterate(_SYNC_ITERATIONS), session.plan.device)
        / _SYNC_ITERATIONS,
        gpu=gpu.means(),
        metrics=_mean(metrics),
    )


def measure_stages(session: StagedSession, seconds: float) -> StageMeasurement:
    """Measure the stages of a warmed-up session."""
    clock = session.clock
    captured: dict[str, float] = defaultdict(float)
    readings, chunk = 0, 1
    # Discard warm-up spans, but keep the events of a captured graph.
    session.synchronize()
    clock.restart()
    iterations, started = session.iterations, time.perf_counter()
    clock.start()
    while True:
        began = time.perf_counter()
        session.iterate(chunk)
        if isinstance(clock, EventClock):
            for name, inside in clock.read_captured().items():
                captured[name] += inside
            readings += 1
        now = time.perf_counter()
        if now - started >= seconds:
            break
        chunk = max(1, min(2 * chunk, round(chunk * _CHUNK_SECONDS / (now - began))))
    clock.stop()
    spent = clock.read()
    wall = time.perf_counter() - started
    replays = clock.calls.get(REPLAY, 0)
    in_graphs = {name: replays * total / max(readings, 1) for name, total in captured.items()}
    return StageMeasurement(wall, session.iterations - iterations, split_replays(spent, in_graphs), dict(clock.calls))


def split_replays(spent: dict[str, float], inside: dict[str, float]) -> dict[str, float]:
    """Return the seconds by stage, with the time of graph replays distributed over the stages `inside` the graph.

    The remaining replay time is idle: the device waited for the next launch. Without a graph, it is Python between stages.
    """
    seconds = defaultdict(float, spent)
    whole, parts = seconds.pop(REPLAY, 0.0), sum(inside.values())
    scale = min(1.0, whole / parts) if parts else 0.0
    for name, part in inside.items():
        seconds[name] += scale * part
    seconds[IDLE] += whole - scale * parts
    return dict(seconds)


def seconds_per_call(function: Callable[[], None], plan: Plan, seconds: float = 0.3) -> float:
    """Return the seconds of a call, captured as a graph if the plan captures; the fastest of several rounds."""
    call = fast.warmed_up(function, plan.graph, to_stderr)
    hardware.synchronize(plan.device)
    best, calls, ends = float("inf"), 1, time.perf_counter() + seconds
    while True:
        started = time.perf_counter()
        for _ in range(calls):
            call()
        hardware.synchronize(plan.device)
        now = time.perf_counter()
        best = min(best, (now - started) / calls)
        if now >= ends:
            return best
        calls = max(1, min(2 * calls, round(0.05 / best)))


def _mean(records: list[dict[str, float]]) -> dict[str, float]:
    names: dict[str, list[float]] = defaultdict(list)
    for record in records:
        for name, value in record.items():
            names[name].append(float(value))
    return {name: sum(values) / len(values) for name, values in names.items()}


def tensor_bytes(owner: Any) -> int:
    """Return the bytes of the tensors that an object holds directly or in dictionaries and tuples."""
    if isinstance(owner, torch.Tensor):
        return owner.numel() * owner.element_size()
    if isinstance(owner, dict):
        return sum(map(tensor_bytes, owner.values()))
    if isinstance(owner, (list, tuple)):
        return sum(map(tensor_bytes, owner))
    return 0
