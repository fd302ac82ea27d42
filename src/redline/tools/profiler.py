"""Profiler: `redline profile` for your own training loop.

    profiler = redline.Profiler(device="cuda")
    for batch in batches:
        with profiler.step(batch_size=len(batch)):
            with profiler.span("environment"):
                ...
            with profiler.span("forward"):
                ...
    profiler.report("profile.md")

Spans may be nested: time counts for the innermost. On a GPU they are timed with events that are read after the loop, so that
the loop never waits.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler_util import DeviceType  # type: ignore[attr-defined]

from redline.core.errors import UserError
from redline.engine import hardware
from redline.engine.stages import IDLE, make_clock
from redline.tools.profile_advice import Actors, Advice, Measurement, bottleneck, diagnose
from redline.tools.profile_ceilings import FlopCounter, measure_ceilings
from redline.tools.profile_counters import CompileCounter, SyncCounter
from redline.tools.profile_report import describe_stages, write_report

OUTSIDE = "outside of spans"  # code of a step that is in no span
_COPIED_FROM_HOST = "HtoD (Pageable"


class Profiler:
    """Time the spans of a loop's steps and find its bottleneck.

    The first `warm_up` steps are ignored: they compile and allocate. The next few are inspected with slower tools (FLOPs,
    synchronisations, copies) instead of being timed. All later steps are timed.
    """

    def __init__(
        self, device: str | torch.device = "cpu", warm_up: int = 3, env_workers: int = 1, precision: str = "fp32"
    ) -> None:
        """env_workers: processes that step your environments; 0 for tensor environments, such as Redline's games.
        precision: of your matrix products, to measure their peak speed.
        """
        self.device = hardware.pick_device(str(device))
        self.warm_up, self.env_workers, self.precision = warm_up, env_workers, precision
        self.clock = make_clock(self.device)
        self.steps = 0  # entered so far
        self.timed_steps = 0
        self.samples = 0  # in timed steps
        self.actors: Actors | None = None  # set it if actor processes play for your learner
        self._compiled = CompileCounter()
        self._flops = FlopCounter()
        self._synchronised: dict[str, float] = {}  # per step, by source line
        self._copies: dict[str, tuple[float, float]] = {}  # kind of copy -> count and seconds per step
        self._device_busy: float | None = None
        self._inspected = 1 + 3 * (self.device.type == "cuda")  # inspected steps
        self._began = self._ended = 0.0

    @contextlib.contextmanager
    def step(self, batch_size: int = 0) -> Iterator[None]:
        """Time one step of the loop, which trains on `batch_size` samples."""
        number, self.steps = self.steps, self.steps + 1
        first_timed = self.warm_up + self._inspected
        if number < first_timed:
            with self._inspection(number - self.warm_up):
                yield
            return
        if number == first_timed:
            self._compiled.open()
            self._began = time.perf_counter()
            self.clock.restart()
            self.clock.start()
        self.clock.enter(OUTSIDE)
        try:
            yield
        finally:
            self.clock.leave()
            self.timed_steps += 1
            self.samples += batch_size
            self._ended = time.perf_counter()

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Count the time of the block for `name`. The report recognises words in names, such as env, forward or copy."""
        self.clock.enter(name)
        try:
            yield
        finally:
            self.clock.leave()

    @contextlib.contextmanager
    def _inspection(self, number: int) -> Iterator[None]:
        """Inspect step `number` after the warm-up: the first for FLOPs, the next ones for copies and synchronisations."""
        if number == 0:
            with self._flops:
                yield
        elif number == 1:
            with SyncCounter(self.device) as counter:
                yield
            self._synchronised = dict(counter.lines)
        elif number > 1 and self._device_busy is None:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                yield
                torch.cuda.synchronize(self.device)
            self._read_kernels(profile)
        else:
            yield

    def _read_kernels(self, profile: Any) -> None:
        """Read the times of kernels and copies from torch.profiler's records."""
        busy = 0.0
        for event in profile.events():
            if event.device_type != DeviceType.CUDA:
                continue
            seconds = event.time_range.elapsed_us() / 1e6
            busy += seconds
            if event.name.startswith("Memcpy"):
                count, total = self._copies.get(event.name, (0.0, 0.0))
                self._copies[event.name] = count + 1, total + seconds
        self._device_busy = busy or None  # None if the driver provides no records

    def measurement(self) -> Measurement:
        """Return the average step."""
        if not self.timed_steps:
            raise UserError(
                f"The profiler has seen {self.steps} steps; it needs more than {self.warm_up + self._inspected}, the first of "
                "which are not timed."
            )
        spent = self.clock.read()
        steps = self.timed_steps
        ceilings = self.ceilings()
        pageable = [copy for name, copy in self._copies.items() if _COPIED_FROM_HOST in name]
        # A copy from pageable memory also synchronises; count it once, as a copy.
        waits = sum(self._synchronised.values()) - sum(count for count, _ in pageable)
        return Measurement(
            seconds=sum(spent.values()) / steps,
            stages={name: seconds / steps for name, seconds in spent.items() if seconds},
            batch_size=round(self.samples / steps),
            cores=hardware.detect(torch.device("cpu")).cores,
            env_workers=self.env_workers,
            recompilations=self._compiled.count / steps,
            compile_seconds=self._compiled.seconds / steps,
            synchronisations=max(waits, 0.0),
            synchronisation_seconds=ceilings.get("synchronisation_seconds", 0.0),
            device_busy=self._device_busy,
            pageable_seconds=sum(seconds for _, seconds in pageable),
            pinned_speedup=_ratio(ceilings, "pinned_bytes_per_second", "pageable_bytes_per_second"),
            flops=self._flops.total,
            flops_ceiling=ceilings["flops_per_second"],
            actors=self.actors,
        )

    def ceilings(self) -> dict[str, float]:
        """Return this machine's peak performance; measured once."""
        if not hasattr(self, "_ceilings"):
            self._ceilings = measure_ceilings(self.device, self.precision)
        return self._ceilings

    def advice(self) -> list[Advice]:
        """Return advice on what to change, the costliest cause first."""
        return diagnose(self.measurement())

    def report(self, path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """Return the findings, with the fields of `redline profile --json`; write them to `path` as Markdown, PNG and JSON."""
        measured = self.measurement()
        advice = diagnose(measured)
        self._compiled.close()
        wall = self._ended - self._began
        record: dict[str, Any] = {
            "kind": "loop",
            "title": "Profile of a training loop",
            "device": str(self.device),
            "bottleneck": bottleneck(measured, advice),
            "seconds": wall,
            "steps": self.timed_steps,
            "steps_per_second": self.timed_steps / wall,
            "samples_per_second": self.samples / wall,
            "stages": describe_stages({name: x * self.timed_steps for name, x in measured.stages.items()}),
            "stages_over_wall": measured.seconds * self.timed_steps / wall,
            "host_synchronisations": measured.synchronisations,
            "synchronising_lines": self._synchronised,
            "recompilations": self._compiled.count,
            "compile_seconds": self._compiled.seconds,
            "flops": {"per_step": measured.flops, "ceiling_per_second": measured.flops_ceiling},
            "ceilings": self.ceilings(),
            "advice": [item.describe() for item in advice],
        }
        if path is not None:
            record |= write_report(record, Path(path))
        return record


def _ratio(ceilings: dict[str, float], above: str, below: str) -> float:
    return ceilings[above] / ceilings[below] if above in ceilings else 1.0


__all__ = ["IDLE", "OUTSIDE", "Profiler"]
