"""`redline bench switches ENV`: the speed-up of each performance switch here, measured off and on in turns."""

from __future__ import annotations

import dataclasses
import statistics
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TextIO

import torch

from redline.algos.bodies import body_kind
from redline.core.errors import UserError
from redline.run.plan import Plan
from redline.run.progress import quantity
from redline.run.resolve import resolve
from redline.run.settings import Settings
from redline.tools.bench_options import BenchRequest
from redline.tools.trial import ChildTrial, Rate, Trial, why_not

_ROUNDS = 5  # measurements of each side, in turns


@dataclass(frozen=True)
class Switch:
    """Two settings to compare: fields of Settings (`off`, `on`) and options of the algorithm (`algo_off`, `algo_on`)."""

    name: str
    off: Mapping[str, Any] = field(default_factory=dict)
    on: Mapping[str, Any] = field(default_factory=dict)
    algo_off: Mapping[str, Any] = field(default_factory=dict)
    algo_on: Mapping[str, Any] = field(default_factory=dict)
    unless: str = ""  # why it cannot be measured here
    note: str = ""  # other effects
    own_process: bool = False

    def settings(self, base: Settings, on: bool) -> Settings:
        """Return the settings of one side."""
        algo_options = {**base.algo_options, **(self.algo_on if on else self.algo_off)}
        return dataclasses.replace(base, **{**(self.on if on else self.off), "algo_options": algo_options})

    def spell(self, on: bool) -> str:
        """Return the values of one side as text."""
        own = {} if self.algo_off == self.algo_on else (self.algo_on if on else self.algo_off)
        values = {**(self.on if on else self.off), **own}
        words = (("off", "on")[value] if isinstance(value, bool) else str(value) for value in values.values())
        return " x ".join(words)


def switches(plan: Plan) -> Iterator[Switch]:
    """Yield every performance switch; one that has no effect on this plan gives the reason in `unless`."""
    gpu, cores = plan.device.type == "cuda", plan.hardware.cores
    no_gpu = "" if gpu else "needs a GPU"
    spec, config = plan.rules.game.spec(plan.rules.config), plan.algo_config
    if spec.afterstates or not hasattr(config, "net"):
        kind = "columns" if getattr(config, "net", "") == "columns" else "mlp"
    else:
        kind = body_kind(spec, config)
    no_convolutions = "the network has no convolutions" if kind in ("mlp", "columns") else ""
    no_actors = "" if plan.actors else "there are no actors"
    yield Switch("precision tf32", {"precision": "fp32"}, {"precision": "tf32"}, unless=no_gpu)
    for precision in ("bf16", "fp16"):
        yield Switch(f"precision {precision}", {"precision": "fp32"}, {"precision": precision})
    no_compiler = "" if gpu or plan.hardware.compiler else "no C++ compiler was found"
    yield Switch("compile", {"compile": False}, {"compile": True}, unless=no_compiler)
    tuned = {"compile": True, "compile_mode": "max-autotune"}
    yield Switch("compile mode", {"compile": True, "compile_mode": "default"}, tuned, unless=no_compiler)
    yield Switch("CUDA graphs", {"graph": False}, {"graph": True}, unless=no_gpu)
    yield Switch("fused optimizer", {"fused_optimizer": False}, {"fused_optimizer": True})
    unless = no_convolutions
    yield Switch("channels last", algo_off={"channels_last": False}, algo_on={"channels_last": True}, unless=unless)
    unless = no_gpu or ("" if kind == "mlp" else "the network is no MLP")
    yield Switch("fused MLP", algo_off={"fused_mlp": False}, algo_on={"fused_mlp": True}, unless=unless)
    unless = no_gpu or ("" if kind == "cnn" else "the network is no CNN")
    yield Switch("fused convolution", algo_off={"fused_conv": False}, algo_on={"fused_conv": True}, unless=unless)
    unless = no_gpu or no_convolutions
    yield Switch("cuDNN benchmark", {"cudnn_benchmark": False}, {"cudnn_benchmark": True}, unless=unless)
    unless, note = "" if kind == "pixels" else "the network is not pixels", "changes what is learned"
    yield Switch("batch norm", {}, {}, {"batch_norm": False}, {"batch_norm": True}, unless, note)
    on_gpu = "the GPU does the work" if gpu else "" if cores > 1 else "there is one core"
    yield Switch("threads", {"threads": 1}, {"threads": cores}, unless=on_gpu)
    yield Switch("inter-op threads", {"interop_threads": 1}, {"interop_threads": max(2, cores)}, own_process=True)
    replays = {"replay": "pinned"} if hasattr(config, "replay") else {}
    unless = no_gpu or ("" if replays or plan.actors else "nothing moves between host and device")
    yield Switch("pinned staging", {"pin_memory": False}, {"pin_memory": True}, replays, replays, unless)
    yield Switch("inference mode", {"inference_mode": False}, {"inference_mode": True})
    half = {"batch_size": config.batch_size // 2} if config.batch_size % 2 == 0 else {}
    yield Switch(
        "accumulation",
        {"accumulate": 1},
        {"accumulate": 2},
        {"batch_size": config.batch_size},
        half,
        unless="" if half else "the batch is odd",
    )
    every = "train_every" if hasattr(config, "train_every") else "rollout_steps"
    steps = getattr(config, every, 0)
    yield Switch(
        "train every",
        algo_off={every: steps},
        algo_on={every: 4 * steps},
        unless="" if steps else "the algorithm has no such option",
        note="a quarter of the samples per step" if every == "train_every" else "a quarter of the updates per step",
    )
    yield Switch("log interval", {"log_seconds": 0.05}, {"log_seconds": 1.0})
    yield Switch("ring rows", {"ring_rows": 16}, {"ring_rows": 256}, unless=no_actors)
    yield Switch("staged rows", {"staged_rows": 1}, {"staged_rows": 8}, unless=no_actors)


def bench_switches(request: BenchRequest, out: TextIO) -> dict[str, Any]:
    """Measure training with each switch off and on, and print one row per switch."""
    base = Settings(
        env=request.env,
        algo=request.algo,
        num_envs=request.num_envs,
        device=request.device,
        compile=bool(request.compile),  # eager unless requested: compiling every row would take most of the time
        curriculum=False,
        env_options=dict(request.env_options),
        algo_options=dict(request.algo_options),
    )
    plan = resolve(base)
    print(
        f"{request.env} with {plan.settings.algo} on {plan.hardware.name} ({plan.device}), {plan.num_envs:,} environments, "
        f"batch {plan.algo_config.batch_size:,}, {'compiled' if base.compile else 'not compiled'}: env-steps/s, off and on "
        f"in {_ROUNDS} turns of {request.seconds:g} s; ratio with the lowest and highest of the turns",
        file=out,
    )
    print(f"  {'switch':<18}{'off':>14}{'on':>14}{'off':>10}{'on':>10}{'on / off':>10}", file=out, flush=True)
    rows = []
    for switch in switches(plan):
        if request.only and switch.name.partition(" ")[0] not in request.only and switch.name not in request.only:
            continue
        row = _row(switch, base, request.seconds)
        rows.append(row)
        print(_line(row), file=out, flush=True)
    if request.only and not rows:
        names = ", ".join(switch.name for switch in switches(plan))
        raise UserError(f"only is {', '.join(request.only)}, which is no switch. Switches: {names}.")
    return {
        "env": request.env,
        "algo": plan.settings.algo,
        "device": str(plan.device),
        "num_envs": plan.num_envs,
        "compile": bool(base.compile),
        "rounds": _ROUNDS,
        "rows": rows,
    }


def _row(switch: Switch, base: Settings, seconds: float) -> dict[str, Any]:
    row = {"switch": switch.name, "off": switch.spell(False), "on": switch.spell(True), "note": switch.note}
    if switch.unless:
        return row | {"reason": switch.unless}
    torch._dynamo.reset()  # functions of the previous row count against torch's limit
    sides = [switch.settings(base, on) for on in (False, True)]
    try:
        with warnings.catch_warnings(action="ignore"):  # for example about a precision that this processor emulates
            rates, messages = _measure_in_turns(sides, seconds, switch.own_process)
    except Exception as error:  # a refusal or missing support is a result too: measure the others
        return row | {"reason": why_not(error)}
    if messages:
        return row | {"reason": messages[0]}
    off, on = rates
    ratios = [b.env_steps / a.env_steps for a, b in zip(off, on, strict=True)]
    return row | {
        "off_per_second": statistics.median(rate.env_steps for rate in off),
        "on_per_second": statistics.median(rate.env_steps for rate in on),
        "ratio": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        "skipped_updates": on[-1].skipped,
    }


def _measure_in_turns(sides: list[Settings], seconds: float, own_process: bool) -> tuple[list[list[Rate]], list[str]]:
    """Return the rates of each side, measured in turns, and the messages of both, such as a fallback to eager mode.

    Sides with actor processes are opened one at a time: the other side's actors would take its cores.
    """
    rates: list[list[Rate]] = [[] for _ in sides]
    messages: list[str] = []
    if resolve(sides[0]).actors:
        for _ in range(_ROUNDS):
            for number, side in enumerate(sides):
                with ExitStack() as stack:
                    trial = Trial(side)
                    stack.callback(trial.close)
                    rates[number].append(trial.measure(seconds))
                    messages += trial.messages
        return rates, messages
    with ExitStack() as stack:
        trials: list[Trial | ChildTrial] = []
        for side in sides:
            opened: Trial | ChildTrial = ChildTrial(side) if own_process else Trial(side)
            stack.callback(opened.close)
            if isinstance(opened, ChildTrial):
                opened.wait_ready(300.0)
            trials.append(opened)
        for _ in range(_ROUNDS):
            for opened, measured in zip(trials, rates, strict=True):
                measured.append(opened.measure(seconds))
        return rates, [message for opened in trials for message in opened.messages]


def _line(row: Mapping[str, Any]) -> str:
    start = f"  {row['switch']:<18}{row['off']:>14}{row['on']:>14}"
    if "ratio" not in row:
        return f"{start}  {row['reason']}"
    skipped = f", {row['skipped_updates']} updates skipped" if row["skipped_updates"] else ""
    note = f"  {row['note']}" if row["note"] else ""
    speeds = f"{quantity(row['off_per_second']):>10}{quantity(row['on_per_second']):>10}"
    return f"{start}{speeds}{row['ratio']:>9.2f}x  {row['ratio_low']:.2f} to {row['ratio_high']:.2f}{skipped}{note}"
