"""Choose the number of CPU threads for a run on a CPU: time its game and network with several numbers, for about a second.

Several threads do not pay off for small tensors, and on a busy machine threads that wait for each other can be many times
slower than one. Sums over several threads round differently, so runs with `--steps` repeat only with the same number of
threads: the choice is cached by machine and settings, fewer threads win unless more are clearly faster, a resumed run keeps its
number, and `config.json` records it. Without `--steps` nothing repeats bit for bit, so a choice made while other programs were
running is not cached, since it would outlast them. `--deterministic` uses a fixed rule instead of measuring, and `--threads`
sets the number.
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
# More threads must be this many times as fast as fewer. Compiled code gains more: two cores measured as 1.16 to 1.2 times as
# fast as one made 1.3 times as many steps of Snake.
_WORTH = 1.1
_BUSY = 0.25  # cores; if other programs use more, the measurement is not cached
_ROUNDS = 3  # minimum; the median counts, as other processes come and go
_SECONDS, _MAX_SECONDS = 0.6, 2.0  # of all rounds together: minimum, and maximum if rounds are long
_CALL_SECONDS = 0.02  # games or samples are added until a call with one thread takes longer
_FIRST, _GROWTH = 64, 4  # games or samples of the first attempt, and the factor between attempts
_VERSION = 1  # of the measurement


def decide(settings: Settings) -> Plan:
    """Return the plan of `settings`, with the device and the number of threads measured unless requested."""
    return choose_threads(device_choice.decide(settings))


def choose_threads(plan: Plan, measure: Measure | None = None) -> Plan:
    """Return the plan with the fastest number of threads. measure: returns samples per second by number of threads."""
    settings = plan.settings
    if settings.threads is not None or plan.device.type != "cpu" or settings.deterministic:
        return plan
    before = device_choice.recorded(plan, "threads")
    if isinstance(before, int) and 0 < before <= plan.hardware.cores:
        return _with(plan, before, "the run began with so many", HARDWARE)
    if plan.actors:  # actors share the cores with the learner
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
    """Return the numbers of threads to try: one, all cores, half and a quarter of them; no more than OMP_NUM_THREADS."""
    most = hardware.most_threads(cores)
    return sorted({max(1, count) for count in (1, most // 4, most // 2, most)})


def measure_threads(plan: Plan, counts: list[int]) -> dict[int, float]:
    """Return the samples per second on which the plan trains, including playing, by number of threads."""
    play, learn = workloads(plan)
    with torch_threads(1):
        parts = [_sized(play, plan.num_envs), _sized(learn, plan.algo_config.batch_size)]
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    share = 1 / device_choice.samples_per_step(plan), 1.0  # games stepped and samples learned from, per sample
    started, elapsed = time.perf_counter(), 0.0
    while elapsed < (_SECONDS if len(seconds[1]) >= _ROUNDS else _MAX_SECONDS):
        for count in counts:  # alternate, so that other programs affect all of them equally
            with torch_threads(count):
                times = [_time(call) / size for call, size in parts]
            seconds[count].append(sum(s * t for s, t in zip(share, times, strict=True)))
        elapsed = time.perf_counter() - started
    return {count: 1 / statistics.median(times) for count, times in seconds.items()}


def _used_by_others() -> Callable[[], float]:
    """Return a function that returns the mean number of cores used by other programs since this call."""
    psutil.cpu_percent()  # start of the measured interval
    began, own = time.perf_counter(), time.process_time()

    def used() -> float:
        seconds = max(time.perf_counter() - began, 1e-9)
        every = psutil.cpu_percent() / 100 * (psutil.cpu_count() or 1)
        return float(every - (time.process_time() - own) / seconds)

    return used


def _sized(prepare: device_choice.Workload, size: int) -> tuple[Callable[[], None], int]:
    """Return a workload of up to `size` games or samples, fewer if that would take too long, and their number."""
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
    """Return cached speeds by number of threads; empty if they do not match `counts`."""
    if not isinstance(value, dict) or value.keys() != {str(count) for count in counts}:
        return {}
    if not all(isinstance(speed, float) and speed > 0 for speed in value.values()):
        return {}
    return {int(count): speed for count, speed in value.items()}


def _with(plan: Plan, threads: int, reason: str, source: str) -> Plan:
    chosen = Setting(threads, reason, source)
    return dataclasses.replace(plan, threads=threads, provenance=plan.provenance | {"threads": chosen})
