"""`redline profile`: where a run spends its time, its bottleneck, and the gain from changed settings.

Measures the unmodified session, then one whose stages are timed separately, then changed settings. Everything runs in a
temporary folder; a given run folder is only read.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import torch

from redline.engine import fast
from redline.run.checkpoint import Checkpoints, RunLock, prepare_run_dir
from redline.run.plan import Plan
from redline.run.run_folder import read_config
from redline.run.session import Session
from redline.run.settings import Settings
from redline.run.thread_choice import decide
from redline.run.trust import check_trust
from redline.tools.profile_advice import BATCH_FACTOR, Actors, Advice, Measurement, bottleneck, diagnose
from redline.tools.profile_candidates import (
    measure_parts,
    promising,
    resolve_with,
    tried_record,
    try_change,
)
from redline.tools.profile_ceilings import FlopCounter, measure_ceilings
from redline.tools.profile_report import describe_stages, write_report
from redline.tools.profile_session import (
    RunMeasurement,
    StagedSession,
    StageMeasurement,
    measure_run,
    measure_stages,
    tensor_bytes,
    warm_up,
)

Notify = Callable[[str], None]
_NOT_KEPT = (  # settings of a run that its profile does not use: budget, files, evaluation; a curriculum is chosen again
    *("steps", "episodes", "minutes", "run_dir", "resume", "checkpoint_minutes", "eval_episodes", "tensorboard"),
    *("wandb", "curriculum", "preset"),
)
_STEPS = 10**12  # a budget that is never reached, so that schedules do not advance
_TRY_SECONDS = 3.0
_MIN_GAIN = 1.05


def settings_of_run(run_dir: Path, trust: bool = False) -> Settings:
    """Return the settings of a run from its config.json."""
    config = read_config(run_dir)
    check_trust(run_dir, config, trust)
    names = {field.name for field in dataclasses.fields(Settings)} - {*_NOT_KEPT}
    values = {name: config[name] for name in names if config.get(name) is not None}
    values["threads"] = values.get("threads") or None  # 0: torch chooses
    values["algo_options"] = {k: tuple(v) if isinstance(v, list) else v for k, v in values["algo_options"].items()}
    return Settings(**values)


def profile(
    settings: Settings, seconds: float, out: Path | None, probes: int = 2, trace: Path | None = None,
    notify: Notify = print, loading_seconds: float = 0.0,
) -> dict[str, Any]:  # fmt: skip
    """Profile a run with `settings` for about `seconds`, not counting compilation; return the fields of KEYS.

    out: Markdown file to write, with its chart and JSON next to it. probes: number of changed settings to measure.
    trace: file for a Chrome trace of a few iterations. loading_seconds: from the start of the command until now, if known.
    """
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory(prefix="redline-profile-") as folder:
        settings = dataclasses.replace(
            settings, run_dir=str(Path(folder) / "run"), resume="never", steps=_STEPS, minutes=None, episodes=None
        )
        try:
            started = time.perf_counter()
            plan = decide(settings)
            start = {"loading": loading_seconds, "settings": time.perf_counter() - started}
            record = _Profile(plan, seconds, out, notify, start).run(probes, trace)
        finally:
            torch.set_num_threads(threads)
    return record | (write_report(record, out) if out is not None else {})


class _Profile:
    """The measurements of one plan."""

    def __init__(self, plan: Plan, seconds: float, out: Path | None, notify: Notify, start: dict[str, float]) -> None:
        """start: seconds of the stages from the start of the command until now."""
        self.plan, self.seconds, self.out, self.notify, self.start = plan, seconds, out, notify, start
        prepare_run_dir(plan.run_dir)
        self.memory: dict[str, int] = {}
        self.host: dict[str, float] = {}
        self.bytes_per_iteration: dict[str, float] = {}
        self.flops: float | None = None
        self.rates: dict[str, float] = {}

    def run(self, probes: int, trace: Path | None) -> dict[str, Any]:
        plan = self.plan
        if plan.compile:
            self.notify(
                f"This measures for about {self.seconds:g} s and compiles the iteration twice, as a whole and in stages, which "
                "can take minutes; --no-compile profiles it uncompiled."
            )
        self.notify(f"Measuring {plan.settings.env} with {plan.settings.algo} on {plan.device} ...")
        started = time.perf_counter()
        measured = self._measure_run(trace)
        self.notify(f"Measuring its stages apart, after {time.perf_counter() - started:.0f} s ...")
        staged = self._measure_stages()
        ceilings = measure_ceilings(plan.device, plan.precision)
        measurement = self._measurement(measured, staged, ceilings)
        finish = functools.partial(self._record, measured, staged, measurement, ceilings)
        record = finish(self._without_probes(measurement), {})
        if not probes:
            return record
        if self.out is not None:  # so that a report exists even if a try-out is interrupted
            write_report(record, self.out)
            self.notify(f"{self.out} is written. Trying changes, after {time.perf_counter() - started:.0f} s ...")
        return finish(*self._advise(measurement, measured, probes))

    # ------------------------------------------------------------------------------------------------------ measuring

    def _measure_run(self, trace: Path | None) -> RunMeasurement:
        on_gpu = self.plan.device.type == "cuda"
        began = time.perf_counter()
        with closing(Session(self.plan, self.notify)) as session:
            if on_gpu:
                torch.cuda.reset_peak_memory_stats(self.plan.device)
            built = time.perf_counter()
            warm_up(session)
            self.start |= _start_stages(session, built - began, time.perf_counter() - built)
            measured = measure_run(session, 0.4 * self.seconds)
            self.memory = _memory(session)
            self.host = _host_stages(session, measured)
            if trace is not None:
                _write_trace(session, trace)
            if session.collector.on_device:
                self.bytes_per_iteration = _bytes_per_iteration(session)
                self.rates = measure_parts(session).rates(session)
            self.flops = _count_flops(session)
        return measured

    def _measure_stages(self) -> StageMeasurement:
        torch._dynamo.reset()
        with closing(StagedSession(self.plan, self.notify)) as session:
            warm_up(session)
            return measure_stages(session, 0.4 * self.seconds)

    def _measurement(
        self, measured: RunMeasurement, staged: StageMeasurement, ceilings: dict[str, float]
    ) -> Measurement:
        plan, metrics, iterations = self.plan, measured.metrics, staged.iterations
        actors = None
        if "actor_busy" in metrics:
            actors = Actors(plan.actors, metrics["actor_busy"], metrics["learner_wait"])
        return Measurement(
            seconds=staged.total / iterations,
            stages={name: seconds / iterations for name, seconds in staged.seconds.items()},
            batch_size=plan.algo_config.batch_size,
            cores=plan.hardware.cores,
            env_workers=max(plan.actors, 1),
            recompilations=measured.recompilations / measured.iterations,
            compile_seconds=measured.compile_seconds / measured.iterations,
            synchronisations=measured.synchronisations,
            synchronisation_seconds=ceilings.get("synchronisation_seconds", 0.0),
            flops=self.flops,
            flops_ceiling=ceilings["flops_per_second"],
            actors=actors,
        )

    # --------------------------------------------------------------------------------------------------------- advice

    def _advise(self, m: Measurement, measured: RunMeasurement, probes: int) -> tuple[list[Advice], dict[str, Any]]:
        """Return ranked advice, and the measured effect of the first."""
        if not self.plan.rules.game.ON_CPU:
            return self._probe(m, measured, probes)
        advice = self._without_probes(m)
        first = next((item for item in advice if item.options), None)
        if first is None:
            return advice, {}
        self.notify(f"Trying {first.change} ...")
        torch._dynamo.reset()
        try:
            with closing(Session(resolve_with(self.plan, first.options), self.notify)) as session:
                warm_up(session)
                after = measure_run(session, max(_TRY_SECONDS, 0.2 * self.seconds))
        except Exception as error:
            self._could_not_try(first.change, error)
            return advice, {}
        return advice, tried_record(first, measured, after)

    def _could_not_try(self, change: str, error: Exception) -> None:
        """Notify the user why a change was not tried, such as out of memory; the profile itself is complete."""
        self.notify(f"{change} could not be tried ({fast.first_line(error)}).")

    def _without_probes(self, m: Measurement) -> list[Advice]:
        """Return advice from the measurement alone, in terms of options of `redline train`."""
        if not self.plan.rules.game.ON_CPU:
            return [item for item in diagnose(m) if item.cause in ("recompiling shapes", "host synchronisation")]
        advice = []
        for item in diagnose(m):
            if item.cause == "slow environment":
                more = min(max(m.cores, 2 * self.plan.actors, 2), self.plan.num_envs)
                if more <= self.plan.actors:
                    continue
                item = dataclasses.replace(
                    item, change=f"actors {self.plan.actors} -> {more}", options={"actors": more}
                )
            if item.cause == "tiny batch":
                item = dataclasses.replace(item, options={"batch_size": BATCH_FACTOR * m.batch_size})
            advice.append(item)
        return advice

    def _probe(self, m: Measurement, measured: RunMeasurement, probes: int) -> tuple[list[Advice], dict[str, Any]]:
        shares = {group: seconds / m.seconds for group, seconds in m.groups().items()}
        seconds = max(_TRY_SECONDS, 0.2 * self.seconds)
        plan, rates, how = self.plan, self.rates, ""
        if plan.compile and plan.device.type == "cpu":  # compiling takes minutes on a CPU: compare without it
            plan, how = resolve_with(plan, {"compile": False}), " uncompiled"
            self.notify("Measuring the run uncompiled, to compare changes with it ...")
            measured, rates = self._measure_uncompiled(plan, seconds)
        results = []
        for candidate, changed in promising(plan, shares, probes, without="compile" if how else ""):
            self.notify(f"Trying {candidate.change}{how} ...")
            try:
                results.append(try_change(candidate, changed, measured, rates, seconds, self.notify))
            except Exception as error:
                self._could_not_try(candidate.change, error)
        results = [result for result in results if result[0].gain >= _MIN_GAIN]
        results.sort(key=lambda result: result[0].gain, reverse=True)
        advice = [*self._without_probes(m), *(advice for advice, _ in results)]
        return advice, results[0][1] if results else {}

    def _measure_uncompiled(self, plan: Plan, seconds: float) -> tuple[RunMeasurement, dict[str, float]]:
        with closing(Session(plan, self.notify)) as session:
            warm_up(session)
            return measure_run(session, seconds), measure_parts(session).rates(session)

    # --------------------------------------------------------------------------------------------------------- record

    def _record(
        self, measured: RunMeasurement, staged: StageMeasurement, m: Measurement, ceilings: dict[str, float],
        advice: list[Advice], tried: dict[str, Any],
    ) -> dict[str, Any]:  # fmt: skip
        plan = self.plan
        per_iteration = measured.seconds / measured.iterations
        achieved = self.flops / per_iteration if self.flops is not None else None
        causes = [item for item in advice if item.seconds]  # advice from tried settings alone has no cause
        return {
            "kind": "run",
            "title": f"Profile of {plan.settings.env} with {plan.settings.algo} on {plan.hardware.name}",
            "device": str(plan.device),
            "bottleneck": bottleneck(m, causes),
            "seconds": staged.wall_seconds,
            "stages": describe_stages(staged.seconds),
            "stages_over_wall": staged.total / staged.wall_seconds,
            "samples_per_second": measured.samples_per_second,
            "host_synchronisations": measured.synchronisations,
            "recompilations": measured.recompilations,
            "compile_seconds": measured.compile_seconds,
            "flops": {
                "per_step": self.flops,
                "per_second": achieved,
                "ceiling_per_second": ceilings["flops_per_second"],
                "share": achieved / ceilings["flops_per_second"] if achieved is not None else None,
            },
            "ceilings": ceilings,
            "advice": [item.describe() for item in advice],
            "env": plan.settings.env,
            "algo": plan.settings.algo,
            "env_steps_per_second": measured.env_steps_per_second,
            "seconds_per_iteration": per_iteration,
            "staged_seconds_per_iteration": staged.wall_seconds / staged.iterations,
            "timed_by": _timed_by(plan),
            "gpu": measured.gpu,
            "memory": self.memory,
            "bytes": self._bytes_per_second(staged),
            "host": self.host,
            "start": self.start,
            "tried": tried,
            "settings": plan.describe(),
        }

    def _bytes_per_second(self, staged: StageMeasurement) -> dict[str, float]:
        return {
            name: count * staged.iterations / staged.seconds[name]
            for name, count in self.bytes_per_iteration.items()
            if staged.seconds.get(name)
        }


def _start_stages(session: Session, building: float, warming_up: float) -> dict[str, float]:
    """Return the seconds of the start-up stages since building the session; each compiled function with its first call."""
    compiled = {f"compiling {name}": seconds for name, seconds in session.compiler.seconds.items()}
    rest = "first iterations" + (", CUDA graphs captured" if session.plan.graph else "")
    return {"games and networks": building} | compiled | {rest: max(warming_up - sum(compiled.values()), 0.0)}


def _timed_by(plan: Plan) -> str:
    compiled = "compiled one by one, " if plan.compile else ""
    captured = "captured as one CUDA graph with an event between stages, " if plan.graph else ""
    clock = "CUDA events" if plan.device.type == "cuda" else "the clock of the host"
    return (
        f"Stages were {compiled}{captured}and timed by {clock}."
        if compiled or captured
        else f"Stages were timed by {clock}."
    )


def _host_stages(session: Session, measured: RunMeasurement) -> dict[str, float]:
    """Return the seconds of a log point, of copying a checkpoint and of writing it."""
    plan, log_points = session.plan, max(1, round(measured.seconds))
    with RunLock(plan.run_dir, notify=session.notify) as lock:
        checkpoints = Checkpoints(plan.run_dir, lock=lock, notify=session.notify)
        started = time.perf_counter()
        tensors = session.tensors(replay=plan.settings.save_replay)
        checkpoints.save(session.env_steps, tensors, {}, background=True)
        copied = time.perf_counter()
        checkpoints.wait()
    return {
        "log_point": measured.logging_seconds / log_points,
        "checkpoint_copy": copied - started,
        "checkpoint_write": time.perf_counter() - copied,
    }


def _memory(session: Session) -> dict[str, int]:
    """Return bytes by owner, and the total of the process or the device."""
    groups = session.learner.state_dict()
    network = sum(tensor_bytes(groups[name]) for name in ("model", "optim") if name in groups)
    rollout = getattr(session.learner, "rollout", None)
    experience = tensor_bytes(groups.get("replay", {})) + tensor_bytes(vars(rollout) if rollout else {})
    games = tensor_bytes(session.collector.tensors())
    owned = {"games": games, "replay": experience, "network": network}
    if session.plan.device.type != "cuda":
        process = psutil.Process().memory_info().rss
        return owned | {"process": process}
    device = session.plan.device
    peak = torch.cuda.max_memory_allocated(device)
    return owned | {
        "activations": max(peak - sum(owned.values()), 0),
        "allocated": torch.cuda.memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "peak": peak,
    }


def _bytes_per_iteration(session: Session) -> dict[str, float]:
    """Return the minimum bytes that each stage must read and write in an iteration, by stage."""
    spec, steps = session.learner.spec, session.steps_per_iteration
    state = tensor_bytes(session.collector.tensors()) / session.plan.num_envs
    observation = math.prod(spec.obs_shape) * spec.obs_dtype.itemsize
    return {"environment step": 2 * state * steps, "observation": (state + observation) * steps}


def _count_flops(session: Session) -> float | None:
    """Return the FLOPs of an iteration's networks, counted in an eager iteration; None if that fails."""
    try:
        with FlopCounter() as counter:
            if session.collector.on_device:
                session._play()
            session.learner.update()
    except Exception as error:  # a missing count must not fail the profile
        session.notify(f"FLOPs could not be counted ({type(error).__name__}).")
        return None
    return counter.total


def _write_trace(session: Session, path: Path) -> None:
    """Write a Chrome trace of a few iterations: open it in chrome://tracing or ui.perfetto.dev."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if session.plan.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as trace:
        session.iterate(3)
        session.synchronize()
    path.parent.mkdir(parents=True, exist_ok=True)
    trace.export_chrome_trace(str(path))
