"""Choose the number of CPU threads of a run on a CPU: time its own game and network with several, for about a second.

Small tensors do not pay for several threads, and on a busy machine threads that wait for each other can be many times
slower than one. Sums over several threads round differently, so that the number of threads is part of what a run repeats
with `--steps`: the choice is cached by machine and settings, one thread less wins unless more are clearly faster, a resumed
run keeps its number, and `config.json` records it. Without `--steps` nothing repeats bit for bit: there, a choice made beside
other programs is not cached, since it would outlast them. `--deterministic` does not measure but follows a fixed rule, and
`--threads` names a number.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import psutil
import torch

from redline.engine import fast, hardware
from redline.recipes import Setting
from redline.run import device_choice
from redline.run.device_choice import torch_threads, workloads
from redline.run.plan import HARDWARE, MEASURED, Plan, digest
from redline.run.progress import quantity
from redline.run.settings import Settings

Measure = Callable[[Plan, list[int]], dict[int, float]]
# More threads must be so many times as fast as fewer. Compiled, more is gained: two cores that were 1.16 to 1.2 times as fast
# as one made 1.3 times as many steps of Snake.
_WORTH = 1.1
_BUSY = 0.25  # cores that other programs use in a measurement that is not cached
_ROUNDS = 3  # the median of so many rounds at least: other processes come and go
_SECONDS, _MAX_SECONDS = 0.6, 2.0  # of all rounds together: at least, and at most where rounds are long
_CALL_SECONDS = 0.02  # once a call takes longer with one thread, it works on enough games or samples
_FIRST, _GROWTH = 64, 4  # games or samples of the first attempt, and the factor of the next
_VERSION = 1  # of the measurement


def decide(settings: Settings) -> Plan:
    """Return the plan of `settings` with its device and its number of threads measured, where they are left open."""
    return choose_threads(device_choice.decide(settings))


def choose_threads(plan: Plan, measure: Measure | None = None) -> Plan:
    """Return the plan with the number of threads that trains fastest. `measure` returns samples per second by number."""
    settings = plan.settings
    if settings.threads is not None or plan.device.type != "cpu" or settings.deterministic:
        return plan
    before = device_choice.recorded(plan, "threads")
    if isinstance(before, int) and 0 < before <= plan.hardware.cores:
        return _with(plan, before, "the run began with so many", HARDWARE)
    if plan.actors:  # they share the cores with the learner
        return plan
    counts = candidates(plan.hardware.cores)
    if counts == [1]:
        return _with(plan, 1, "OMP_NUM_THREADS or the machine allows one", HARDWARE)
    path = device_choice.cache_file("threads")
    key = digest([_VERSION, torch.__version__, device_choice.decisive(plan), counts])
    speeds = _as_speeds(device_choice.recall(path, key), counts)
    if not speeds:
        others = _used_by_others()
        try:
            speeds = (measure or measure_threads)(plan, counts)
        except Exception as error:  # training will manage without, or report it better
            return _with(plan, plan.threads, f"threads could not be measured ({fast.first_line(error)})", HARDWARE)
        if settings.steps is not None or others() < _BUSY:
            device_choice.remember(path, key, {str(count): speed for count, speed in speeds.items()})
    best = max(speeds.values())
    count = min(count for count in counts if speeds[count] * _WORTH >= best)
    figures = ", ".join(f"{count}: {quantity(speed)}" for count, speed in speeds.items())
    return _with(plan, count, f"measured before compilation, samples/s by threads: {figures}", MEASURED)


def candidates(cores: int) -> list[int]:
    """Return the numbers of threads to try: one, all cores, a half and a quarter; no more than OMP_NUM_THREADS."""
    most = hardware.most_threads(cores)
    return sorted({max(1, count) for count in (1, most // 4, most // 2, most)})


def measure_threads(plan: Plan, counts: list[int]) -> dict[int, float]:
    """Return the samples per second that the plan learns from, playing included, by number of threads."""
    play, learn = workloads(plan)
    with torch_threads(1):
        parts = [_sized(play, plan.num_envs), _sized(learn, plan.algo_config.batch_size)]
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    share = 1 / device_choice.samples_per_step(plan), 1.0  # games stepped, and samples learned from, per sample
    started, elapsed = time.perf_counter(), 0.0
    while elapsed < (_SECONDS if len(seconds[1]) >= _ROUNDS else _MAX_SECONDS):
        for count in counts:  # in turn: all of them meet the same neighbours
            with torch_threads(count):
                times = [_time(call) / size for call, size in parts]
            seconds[count].append(sum(s * t for s, t in zip(share, times, strict=True)))
        elapsed = time.perf_counter() - started
    return {count: 1 / statistics.median(times) for count, times in seconds.items()}


def _used_by_others() -> Callable[[], float]:
    """Return a function that returns how many cores other programs have used since, on average."""
    psutil.cpu_percent()  # the next call counts from here
    began, own = time.perf_counter(), time.process_time()

    def used() -> float:
        seconds = max(time.perf_counter() - began, 1e-9)
        every = psutil.cpu_percent() / 100 * (psutil.cpu_count() or 1)
        return float(every - (time.process_time() - own) / seconds)

    return used


def _sized(prepare: device_choice.Workload, size: int) -> tuple[Callable[[], None], int]:
    """Return the work on `size` games or samples and their number, on fewer where that would take too long."""
    count = min(size, _FIRST)
    while True:
        call = prepare(count)
        call()
        if count == size or _time(call) > _CALL_SECONDS:
            return call, count
        count = min(size, _GROWTH * count)


def _time(call: Callable[[], None]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _as_speeds(value: object, counts: list[int]) -> dict[int, float]:
    """Return cached speeds by number of threads; empty if they are not those of `counts`."""
    if not isinstance(value, dict) or value.keys() != {str(count) for count in counts}:
        return {}
    if not all(isinstance(speed, float) and speed > 0 for speed in value.values()):
        return {}
    return {int(count): speed for count, speed in value.items()}


def _with(plan: Plan, threads: int, reason: str, source: str) -> Plan:
    chosen = Setting(threads, reason, source)
    return dataclasses.replace(plan, threads=threads, provenance=plan.provenance | {"threads": chosen})
