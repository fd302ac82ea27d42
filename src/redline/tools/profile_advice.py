"""Diagnose measurements: the causes that cost the most time, and changes with their expected gain.

Works only on numbers, so that it serves both Redline's runs and users' own loops, and can be tested anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from redline.engine.stages import IDLE

# Groups of stages, by words in their names. The first match counts.
_GROUPS = (
    ("actors", ("wait", "queue", "actors", "rings")),
    ("copies", ("copy", "copies", "transfer", "h2d", "to device", "publi")),
    ("environment", ("env", "emulat", "simulat", "observation", "episode", "physics")),
    ("logging", ("log", "print", "metric", "tensorboard")),
    ("checkpoint", ("checkpoint", "save")),
    ("replay", ("replay", "sample", "buffer", "priorit", "memory")),
    (
        "learner",
        ("forward", "backward", "loss", "optim", "target", "shuffle", "update", "learn", "train", "grad", "model"),
    ),
    ("inference", ("infer", "act", "policy", "rollout")),
)
_TITLES = {
    "actors": "waiting for the actors",
    "copies": "copies between host and device",
    "environment": "the environment",
    "logging": "logging",
    "checkpoint": "checkpoints",
    "replay": "the replay memory",
    "inference": "choosing actions",
    "learner": "learning",
    "idle": "gaps in which nothing runs",
    "other": "code outside of any span",
}
_REACHED = 0.25  # fraction of the matrix-product ceiling that small networks reach at a good batch size
_TINY_SHARE = 0.5  # fraction of overhead in the learner's time above which a batch is too small
_EXPLAINED = 0.2  # fraction of the device's idle time that synchronisations must explain to be its cause
_SLOW_ENVIRONMENT = 0.4  # fraction of time above which the environment is slow
BATCH_FACTOR = 8  # factor by which a tiny batch is enlarged
_MIN_GAIN = 1.05


def group_of(stage: str) -> str:
    """Return the group of a stage by its name: `loss.backward` -> learner."""
    if stage == IDLE:
        return "idle"
    name = stage.lower()
    return next((group for group, words in _GROUPS if any(word in name for word in words)), "other")


@dataclass(frozen=True)
class Actors:
    """Actor processes or threads that play for the learner."""

    count: int
    busy: float  # fraction of time they play; otherwise they wait for actions or for room
    learner_wait: float  # fraction of time the learner waits for them


@dataclass(frozen=True)
class Measurement:
    """One step of a loop, or one iteration of a run, on average. Times in seconds per step."""

    seconds: float
    stages: Mapping[str, float]  # seconds by name, with IDLE
    batch_size: int = 0  # samples per gradient step; 0: unknown
    cores: int = 1
    env_workers: int = 1  # processes that step the environments; 0: tensor environments, stepped all at once
    recompilations: float = 0.0
    compile_seconds: float = 0.0
    synchronisations: float = 0.0  # number of times the host waits for the device, not counting copies
    synchronisation_seconds: float = 0.0  # cost of one: the device runs out of work until the host catches up
    device_busy: float | None = None  # seconds in which the device computes or copies
    pageable_seconds: float = 0.0  # of copies from ordinary host memory
    pinned_speedup: float = 1.0  # speed-up of copies from page-locked memory here
    flops: float | None = None  # of matrix products and convolutions
    flops_ceiling: float | None = None  # FLOP/s of a large matrix product here
    actors: Actors | None = None

    def groups(self) -> dict[str, float]:
        """Return the seconds of each group of stages."""
        totals: dict[str, float] = {}
        for name, seconds in self.stages.items():
            group = group_of(name)
            totals[group] = totals.get(group, 0.0) + seconds
        return totals


@dataclass(frozen=True)
class Advice:
    """A cause of lost time, and what to change."""

    cause: str  # such as `tiny batch`
    change: str  # such as `num-envs 8 -> 512`
    gain: float  # predicted throughput factor
    reason: str  # how the prediction was made
    seconds: float = 0.0  # cost of the cause per step; advice is ranked by it
    options: dict[str, Any] = field(default_factory=dict)  # of `redline train` that make the change
    measure: str = "env_steps_per_second"  # the throughput that gains

    def describe(self) -> dict[str, Any]:
        return {
            "cause": self.cause,
            "change": self.change,
            "predicted_gain": self.gain,
            "reason": self.reason,
            "options": self.options,
            "measure": self.measure,
        }


def diagnose(m: Measurement) -> list[Advice]:
    """Return advice for the causes of a loop's lost time, the costliest first."""
    causes = [
        _recompiling(m),
        _pageable(m),
        _synchronising(m),
        *_waiting(m),
        _slow_environment(m),
        _tiny_batch(m),
    ]
    found = [advice for advice in causes if advice and advice.gain >= _MIN_GAIN]
    return sorted(found, key=lambda advice: advice.seconds, reverse=True)


def bottleneck(m: Measurement, advice: list[Advice]) -> str:
    """Return one sentence that names the bottleneck."""
    groups = m.groups()
    group = max(groups, key=lambda name: groups[name])
    share = 100 * groups[group] / max(m.seconds, 1e-12)
    largest = max((name for name in m.stages if group_of(name) == group), key=lambda name: m.stages[name])
    most = "" if group in ("idle", "other") or largest in _TITLES[group] else f", most of it {largest}"
    if not advice:
        return f"The bottleneck is {_TITLES[group]}, with {share:.0f} % of the time{most}."
    first = advice[0]
    lost = 100 * min(first.seconds / max(m.seconds, 1e-12), 1.0)
    where = f"{_TITLES[group]} takes {share:.0f} %{most}"
    return f"The bottleneck is {_name(first.cause)}, which costs about {lost:.0f} % of the time ({where})."


def _name(cause: str) -> str:
    return {
        "slow environment": "a slow environment",
        "host synchronisation": "host synchronisation",
        "tiny batch": "a tiny batch",
        "pageable copies": "copies from pageable memory",
        "recompiling shapes": "recompilation",
        "starved actors": "a learner that starves its actors",
        "too few actors": "too few actors",
    }.get(cause, _TITLES.get(cause, cause))


def _faster(m: Measurement, saved: float) -> float:
    return m.seconds / max(m.seconds - saved, 0.02 * m.seconds)


def _recompiling(m: Measurement) -> Advice | None:
    if not m.recompilations:
        return None
    return Advice(
        "recompiling shapes",
        "fixed shapes (pad batches to one size, or mark the changing dimension dynamic)",
        _faster(m, m.compile_seconds),
        f"{m.recompilations:.3g} compilations per step took {1e3 * m.compile_seconds:.3g} ms of its "
        f"{1e3 * m.seconds:.3g} ms",
        m.compile_seconds,
    )


def _pageable(m: Measurement) -> Advice | None:
    if not m.pageable_seconds or m.pinned_speedup <= 1:
        return None
    copying = max(m.pageable_seconds, m.groups().get("copies", 0.0))
    saved = copying * (1 - 1 / m.pinned_speedup)
    return Advice(
        "pageable copies",
        "copy from page-locked memory (tensor.pin_memory(), non_blocking=True)",
        _faster(m, saved),
        f"{1e3 * copying:.3g} ms per step are copies from pageable memory; page-locked memory is {m.pinned_speedup:.1f} "
        "times as fast here",
        saved,
    )


def _lost_to_synchronisation(m: Measurement) -> float:
    """Return the seconds lost to synchronisations: their own, and the device's idle time if they explain much of it.

    After each one, the device also waits for the operations that the host launches next, however short they are.
    """
    lost = m.synchronisations * m.synchronisation_seconds
    if m.device_busy is None:
        return lost
    idle = max(m.seconds - m.device_busy, 0.0)
    return idle if lost >= _EXPLAINED * idle else lost


def _synchronising(m: Measurement) -> Advice | None:
    if m.synchronisations < 0.5:
        return None
    lost = _lost_to_synchronisation(m)
    return Advice(
        "host synchronisation",
        "read tensors on the host (.item(), .cpu(), print, if tensor) once in many steps",
        _faster(m, lost),
        f"{m.synchronisations:.3g} synchronisations per step, {1e6 * m.synchronisation_seconds:.0f} µs each",
        lost,
    )


def _waiting(m: Measurement) -> list[Advice]:
    """Return advice if actors and learner wait for each other: too few actors, or too slow a learner."""
    if m.actors is None:
        waiting = m.groups().get("actors", 0.0)
        if waiting < 0.25 * m.seconds:
            return []
        return [
            Advice(
                "too few actors",
                "more actors, or more environments in each",
                _faster(m, waiting / 2),
                f"the learner waits {1e3 * waiting:.3g} ms per step; twice the actors halve that",
                waiting,
            )
        ]
    actors = m.actors
    advice = []
    if actors.learner_wait > 0.25 and actors.busy > 0.5:
        more = max(min(2 * actors.count, m.cores), actors.count + 1)
        saved = actors.learner_wait * m.seconds * (1 - actors.count / more)
        if actors.count < m.cores:
            advice.append(
                Advice(
                    "too few actors",
                    f"actors {actors.count} -> {more}",
                    _faster(m, saved),
                    f"the learner waits {100 * actors.learner_wait:.0f} % of the time for actors that are "
                    f"{100 * actors.busy:.0f} % busy",
                    actors.learner_wait * m.seconds,
                    {"actors": more},
                )
            )
    elif actors.busy < 0.5 and actors.learner_wait <= 0.25:
        learning = m.groups().get("learner", 0.0)
        advice.append(
            Advice(
                "starved actors",
                "less learning per step (a larger batch with fewer updates, a smaller network) or a faster device",
                1 / max(1 - (1 - actors.busy) / 2, 0.1),
                f"actors play only {100 * actors.busy:.0f} % of the time and wait for the learner otherwise",
                max(learning, (1 - actors.busy) * m.seconds),
            )
        )
    elif actors.busy < 0.5:
        advice.append(
            Advice(
                "starved actors",
                "inference in the actors (--inference actors)",
                1 / max(1 - actors.learner_wait / 2, 0.1),
                f"learner and actors both wait ({100 * actors.learner_wait:.0f} % and {100 * (1 - actors.busy):.0f} % of the "
                "time): actions are chosen too slowly",
                max(actors.learner_wait, 1 - actors.busy) * m.seconds,
                {"inference": "actors"},
            )
        )
    return advice


def _slow_environment(m: Measurement) -> Advice | None:
    spent = m.groups().get("environment", 0.0)
    if not m.env_workers or spent < _SLOW_ENVIRONMENT * m.seconds:
        return None
    workers = max(m.cores, 2 * m.env_workers)
    saved = spent * (1 - m.env_workers / workers)
    return Advice(
        "slow environment",
        f"environments in {workers} processes instead of {m.env_workers} (actors)",
        _faster(m, saved),
        f"stepping environments takes {100 * spent / m.seconds:.0f} % of the time and can be divided",
        spent,
    )


def _tiny_batch(m: Measurement) -> Advice | None:
    """Return advice if the batch is so small that launching operations takes longer than their arithmetic."""
    if not m.batch_size or m.flops is None or not m.flops_ceiling:
        return None
    groups = m.groups()
    learning = groups.get("learner", 0.0) + groups.get("inference", 0.0)
    elsewhere = m.compile_seconds + _lost_to_synchronisation(m)
    work = min(m.flops / (_REACHED * m.flops_ceiling), learning)
    overhead = learning - work - elsewhere
    if overhead < _TINY_SHARE * learning or learning <= 0:
        return None
    gain = BATCH_FACTOR * m.seconds / (m.seconds + (BATCH_FACTOR - 1) * (m.seconds - overhead))
    return Advice(
        "tiny batch",
        f"batch size {m.batch_size:,} -> {BATCH_FACTOR * m.batch_size:,}",
        gain,
        f"arithmetic takes {1e3 * work:.3g} ms of the {1e3 * learning:.3g} ms of learning; the rest does not grow with the "
        "batch",
        overhead,
        measure="samples_per_second",
    )
