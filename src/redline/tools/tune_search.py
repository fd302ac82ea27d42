"""Candidates of `redline tune` and their comparison: sizes are doubled and halved, each compared with the best so far.

Candidates keep the number of gradient samples per environment step, so that environment steps per second are comparable:
batches grow with the number of environments, and a larger batch means fewer gradient steps.
"""

from __future__ import annotations

import dataclasses
import resource
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil

from redline.core.errors import UserError
from redline.engine import hardware
from redline.run.device_choice import workloads
from redline.run.plan import Plan
from redline.run.settings import Settings
from redline.tools.trial import ChildTrial, Trial, warm_updates, why_not

WORTH = 1.03  # a candidate must be this many times as fast as the best so far
_TURNS, _TURN_SECONDS = 3, 0.4  # a candidate and the best so far are measured in turns of at least one iteration
_CLEARLY_SLOWER, _CLEARLY_FASTER = 0.9, 1.25  # ratios after which one turn is enough
_FINAL_TURNS = 5
_SLOW_GRADIENT = 1.0  # seconds; if a gradient takes longer, no larger batch is tried
_SHARE = 0.5  # maximum fraction of a CPU's free memory for a batch: the machine must not swap


@dataclass(frozen=True, eq=False)
class Candidate:
    """Settings to try: fields of Settings and options of the algorithm, overriding the user's."""

    label: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    algo_options: Mapping[str, Any] = field(default_factory=dict)

    def settings(self, base: Settings) -> Settings:
        """Return the settings of a trial."""
        algo_options = {**base.algo_options, **self.algo_options}
        return dataclasses.replace(base, **self.fields, algo_options=algo_options)

    def change(self, label: str, fields: Mapping[str, Any], algo_options: Mapping[str, Any]) -> Candidate:
        """Return a changed copy of this candidate."""
        return Candidate(label, {**self.fields, **fields}, {**self.algo_options, **algo_options})


@dataclass(frozen=True)
class Row:
    """The result of a candidate."""

    label: str
    per_second: float | None = None  # environment steps
    ratio: float | None = None  # to the best so far; in the last round, to the defaults
    reason: str = ""  # why it was not measured
    compiled: bool = False


Scale = Callable[[Plan, int, int], tuple[dict[str, Any], dict[str, Any]]]


def scale_envs(plan: Plan, up: int, down: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the changes for `up / down` times as many environments, with batches scaled equally."""
    batch_size = plan.algo_config.batch_size
    return {"num_envs": _times(plan.num_envs, up, down)}, {"batch_size": _times(batch_size, up, down)}


def scale_batch(plan: Plan, up: int, down: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the changes for a batch `up / down` times as large; replay learners then train less or more often."""
    config = plan.algo_config
    changes = {"batch_size": _times(config.batch_size, up, down)}
    if hasattr(config, "train_every"):
        updates, every = config.updates * down, config.train_every * up
        common = 2 if updates % 2 == every % 2 == 0 else 1
        changes |= {"updates": updates // common, "train_every": every // common}
    return {}, changes


def scale_rollout(plan: Plan, up: int, down: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the changes for rollouts `up / down` times as long, with the same batch size."""
    if not hasattr(plan.algo_config, "rollout_steps"):
        raise UserError(f"{plan.settings.algo} has no rollouts")
    steps = _times(plan.algo_config.rollout_steps, up, down)
    return {}, {"rollout_steps": steps, "batch_size": plan.algo_config.batch_size}


def _times(value: int, up: int, down: int) -> int:
    if value * up % down:
        raise UserError(f"{value} cannot be halved")
    return value * up // down


SCALES: dict[str, Scale] = {"num_envs": scale_envs, "batch_size": scale_batch, "rollout_steps": scale_rollout}


class Search:
    """Search for the fastest candidate without compilation, until a deadline."""

    def __init__(self, base: Settings, deadline: float, show: Callable[[Row], None]) -> None:
        """Measure the defaults. base: the user's settings, uncompiled. show: called with every row."""
        self.base, self.deadline, self.show = base, deadline, show
        self.best = Candidate("defaults")
        self.trial = Trial(self.best.settings(base))
        self.default_plan = self.trial.plan
        show(Row("defaults", self.trial.measure(_TURN_SECONDS).env_steps, 1.0))

    def run(self) -> Candidate:
        """Try every size, then every precision; return the fastest candidate."""
        for name, scale in SCALES.items():
            if not self._climb(name, scale, 2, 1):
                self._climb(name, scale, 1, 2)
        for precision in self._precisions():
            self._challenge(self.best.change(f"precision {precision}", {"precision": precision}, {}), 1.0)
        return self.best

    def _precisions(self) -> Iterator[str]:
        if self.default_plan.device.type == "cuda":
            yield from (p for p in ("bf16", "fp16", "tf32") if p != self.default_plan.precision)

    def _climb(self, name: str, scale: Scale, up: int, down: int) -> bool:
        """Double or halve one size as long as that is faster; return whether it ever was."""
        climbed = False
        while time.perf_counter() < self.deadline:
            plan = self.trial.plan
            try:
                fields, algo_options = scale(plan, up, down)
            except UserError:
                break
            value = {**fields, **algo_options}[name]
            candidate = self.best.change(f"{name} {value:,}", fields, algo_options)
            if not self._challenge(candidate, up / down):
                break
            climbed = True
        return climbed

    def _challenge(self, candidate: Candidate, factor: float) -> bool:
        """Measure a candidate in turns with the best so far, keep it if it is clearly faster, and return whether it was.

        factor: upper bound for the length of its iterations, relative to those of the best.
        """
        left = self.deadline - time.perf_counter()
        turn = max(_TURN_SECONDS, self.trial.iteration_seconds)
        # Estimated, since the first trial's preparation also loaded code that all trials share.
        warm_up = warm_updates(self.trial.plan) * self.trial.iteration_seconds
        if left < factor * (warm_up + turn) + turn:
            self.show(Row(candidate.label, reason="no time left"))
            return False
        try:
            with warnings.catch_warnings(action="ignore"):
                challenger = Trial(candidate.settings(self.base), patience=left)
        except Exception as error:  # refused, out of memory, or impossible here
            self.show(Row(candidate.label, reason=why_not(error)))
            return False
        speeds, ratios = [], []
        for _ in range(_TURNS):
            ours, theirs = self.trial.measure(_TURN_SECONDS), challenger.measure(_TURN_SECONDS)
            speeds.append(theirs.env_steps)
            ratios.append(theirs.env_steps / ours.env_steps)
            if not _CLEARLY_SLOWER < ratios[0] < _CLEARLY_FASTER or time.perf_counter() > self.deadline:
                break
        ratio = statistics.median(ratios)
        self.show(Row(candidate.label, statistics.median(speeds), ratio))
        faster = ratio >= WORTH and not challenger.messages
        loser = self.trial if faster else challenger
        if faster:
            self.best, self.trial = candidate, challenger
        loser.close()
        return faster

    def close(self) -> None:
        """Release the best trial."""
        self.trial.close()


def compare(
    finalists: list[Candidate],
    base: Settings,
    opened: Mapping[Candidate, ChildTrial],
    deadlines: tuple[float, float],
    show: Callable[[Row], None],
) -> dict[Candidate, float]:
    """Return the speed of each finalist relative to the first one, measured in turns.

    Each runs in a separate process, some already `opened`, and they compile at the same time. deadlines: when they must be
    ready, or else drop out, and when to end. The result is empty if the first drops out.
    """
    trials = {candidate: opened.get(candidate) or ChildTrial(candidate.settings(base)) for candidate in finalists}
    rates: dict[Candidate, list[float]] = {candidate: [] for candidate in finalists}
    try:
        for candidate, trial in trials.items():
            if reason := _wait(trial, deadlines[0]):
                trial.close()  # it would keep compiling while others are measured
                del rates[candidate]
                show(Row(candidate.label, reason=reason, compiled=True))
        while finalists[0] in rates and len(rates[finalists[0]]) < _FINAL_TURNS:
            for candidate, measured in rates.items():
                measured.append(trials[candidate].measure(_TURN_SECONDS).env_steps)
            if time.perf_counter() > deadlines[1]:
                break
    finally:
        for trial in trials.values():
            trial.close()
    first = rates.get(finalists[0], [])
    ratios = {}
    for candidate, speeds in rates.items() if first else ():
        ratios[candidate] = statistics.median(b / a for a, b in zip(first, speeds, strict=True))
        show(Row(candidate.label, statistics.median(speeds), ratios[candidate], compiled=True))
    return ratios


def _wait(trial: ChildTrial, deadline: float) -> str:
    """Wait until a trial is ready; return why it cannot be measured, or an empty string."""
    try:
        trial.wait_ready(deadline - time.perf_counter())
    except UserError as error:
        return str(error)
    return trial.messages[0] if trial.messages else ""


def largest_batch(plan: Plan, deadline: float) -> tuple[int, str]:
    """Return the largest batch whose gradient fits, a power of two times the plan's, and why no larger one was tried."""
    learn, on_gpu = workloads(plan)[1], plan.device.type == "cuda"
    used_before = psutil.Process().memory_info().rss
    size, largest = plan.algo_config.batch_size, 0
    while time.perf_counter() < deadline:
        try:
            call = learn(size)
            started = time.perf_counter()
            call()
            hardware.synchronize(plan.device)
        except (RuntimeError, MemoryError):  # torch.OutOfMemoryError is a RuntimeError
            return largest, f"{size:,} do not fit"
        largest = size
        if time.perf_counter() - started > _SLOW_GRADIENT:
            return largest, "a gradient takes longer than a second"
        size *= 2
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - used_before
        if not on_gpu and 2 * peak > _SHARE * hardware.free_bytes(plan.device):
            return largest, f"{size:,} would need more than half of the free memory"
    return largest, "there was no time for larger ones"
