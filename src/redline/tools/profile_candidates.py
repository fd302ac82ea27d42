"""Changes to a run's settings that may make it faster: their speeds are predicted from the run's parts, then measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from redline import replay
from redline.core.errors import UserError
from redline.replay.contract import Location, UsesReplay
from redline.run.memory import check_memory
from redline.run.plan import Plan
from redline.run.resolve import resolve
from redline.run.session import Session
from redline.tools.profile_advice import Advice
from redline.tools.profile_session import RunMeasurement, measure_run, seconds_per_call, warm_up

_MORE = 4  # factor for the number of environments or the batch size
_MIN_SHARE = 0.1  # fraction of time that a change must aim at
Notify = Callable[[str], None]


@dataclass(frozen=True)
class Candidate:
    """A change of settings."""

    change: str  # such as `num-envs 8 -> 32`
    options: dict[str, Any]  # of `redline train`
    aims_at: tuple[str, ...]  # groups of stages it speeds up
    measure: str = "env_steps_per_second"  # throughput that gains


@dataclass(frozen=True)
class Parts:
    """Seconds of one step of all environments and of one update, measured separately."""

    collect: float
    update: float

    def seconds(self, session: Session) -> float:
        """Return the seconds of an iteration."""
        return session.learner.rollout_steps * self.collect + self.update

    def rates(self, session: Session) -> dict[str, float]:
        """Return the throughputs implied by these parts, by name."""
        learner, seconds = session.learner, self.seconds(session)
        samples = learner.updates_per_iteration * learner.samples_per_update
        return {"env_steps_per_second": session.steps_per_iteration / seconds, "samples_per_second": samples / seconds}


def candidates(plan: Plan) -> list[Candidate]:
    """Return the possible changes to this plan of a tensor game, the most promising first."""
    found = []
    everything = ("environment", "inference", "learner", "replay", "idle", "other")
    if not plan.compile and (plan.hardware.compiler or plan.device.type == "cuda"):
        found.append(Candidate("compile off -> on", {"compile": True}, everything))
    if plan.device.type == "cuda" and not plan.graph:
        found.append(Candidate("graph off -> on", {"graph": True}, everything))
    config = plan.algo_config
    if isinstance(config, UsesReplay) and replay.load(config.replay).location != Location.DEVICE:
        change = f"replay {config.replay} -> {replay.DEFAULT}"
        found.append(Candidate(change, {"replay": replay.DEFAULT}, ("copies", "replay")))
    more = _MORE * plan.num_envs
    found.append(Candidate(f"num-envs {plan.num_envs:,} -> {more:,}", {"num_envs": more}, everything))
    if plan.device.type == "cuda" and plan.precision in ("fp32", "tf32"):
        precision = "bf16" if plan.hardware.bf16 else "fp16"
        found.append(
            Candidate(f"precision {plan.precision} -> {precision}", {"precision": precision}, ("learner", "inference"))
        )
    if "replay_capacity" in plan.algo.options:  # on-policy learners derive the batch from the rollout
        size = config.batch_size
        options = {"batch_size": _MORE * size}
        found.append(
            Candidate(f"batch-size {size:,} -> {_MORE * size:,}", options, ("learner", "replay"), "samples_per_second")
        )
    if plan.device.type == "cpu" and plan.hardware.cores > 1:
        threads = 1 if plan.threads != 1 else plan.hardware.cores
        found.append(Candidate(f"threads {plan.threads} -> {threads}", {"threads": threads}, everything))
    return found


def promising(plan: Plan, shares: Mapping[str, float], limit: int, without: str = "") -> list[tuple[Candidate, Plan]]:
    """Return up to `limit` candidates that affect a sizable share of the time and fit into memory, with their plans.

    without: an option that must not be changed.
    """
    chosen: list[tuple[Candidate, Plan]] = []
    for candidate in candidates(plan):
        if len(chosen) == limit:
            break
        if without in candidate.options or sum(shares.get(group, 0.0) for group in candidate.aims_at) < _MIN_SHARE:
            continue
        try:
            changed = resolve_with(plan, candidate.options)
            check_memory(changed)
        except UserError:  # does not fit, or does not divide the rollout
            continue
        chosen.append((candidate, changed))
    return chosen


def resolve_with(plan: Plan, options: Mapping[str, Any]) -> Plan:
    """Return the plan with other options; everything else stays as resolved."""
    kept: dict[str, Any] = {"device": str(plan.device), "num_envs": plan.num_envs, "threads": plan.threads or None}
    kept |= {"compile": plan.compile, "graph": plan.graph, "precision": plan.precision, "backplay": plan.backplay}
    if plan.rules.game.ON_CPU:
        kept["actors"] = plan.actors
    return resolve(dataclasses.replace(plan.settings, **(kept | dict(options))))


def measure_parts(session: Session) -> Parts:
    """Return the parts of a warmed-up session, which must not be used for training afterwards."""
    return Parts(
        seconds_per_call(session._collect, session.plan), seconds_per_call(session.learner.update, session.plan)
    )


def try_change(
    candidate: Candidate, plan: Plan, before: RunMeasurement, rates: Mapping[str, float], seconds: float, notify: Notify
) -> tuple[Advice, dict[str, Any]]:
    """Return advice with the gain predicted from the changed session's parts, and the record of a short training.

    rates: throughputs of the original run, predicted in the same way from its parts.
    """
    torch._dynamo.reset()
    with closing(Session(plan, notify)) as session:
        warm_up(session)
        after = measure_run(session, seconds)
        parts = measure_parts(session)
        predicted = parts.rates(session)[candidate.measure] / rates[candidate.measure]
    uncompiled = "" if plan.compile else " uncompiled and"
    reason = (
        f"measured{uncompiled} apart: a step of all environments takes {1e3 * parts.collect:.3g} ms, an update "
        f"{1e3 * parts.update:.3g} ms"
    )
    advice = Advice(candidate.change, candidate.change, predicted, reason, 0.0, candidate.options, candidate.measure)
    return advice, tried_record(advice, before, after)


def tried_record(advice: Advice, before: RunMeasurement, after: RunMeasurement) -> dict[str, Any]:
    """Return the measured effect of a change, next to the prediction."""
    old, new = getattr(before, advice.measure), getattr(after, advice.measure)
    return {
        "change": advice.change,
        "options": advice.options,
        "measure": advice.measure,
        "predicted_gain": advice.gain,
        "measured_gain": new / old,
        "before": old,
        "after": new,
        "seconds": after.seconds,
    }
