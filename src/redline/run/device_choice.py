"""Which device a run trains on. Where there is a GPU, playing and learning are timed for a moment on it and on the CPU.

What is timed is the run's own game and network at the run's own sizes: a step of all games, and forward and backward of a
batch. Neither side is compiled, which would take longer than the choice is worth; on the GPU each is one CUDA graph, as in
training. What a learner does besides (replay, returns, optimizer) is left out on both sides.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from redline import replay
from redline.core.errors import UserError
from redline.core.records import assign, map_record
from redline.engine import fast, hardware
from redline.engine.runtime import Runtime
from redline.envs import Rules, batch
from redline.run.config import Plan, Settings, digest, resolve
from redline.run.progress import quantity
from redline.run.run_folder import write_json

Measure = Callable[[Plan], float]
_SECONDS = 1.0  # about as long as each of the four measurements may take
_FIRST, _GROWTH = 16, 4  # games or samples in the first round, and times as many in each next one
_ROUNDS, _CALLS = 2, 3  # the best of so many times so many calls counts
_VERSION = 1  # of this way to measure: figures of another are not comparable
_KEPT = 200  # figures that are kept
_DECIDES = ("env", "algo", "num_envs", "accumulate", "precision", "graph", "time_limit", "rules_version", "env_options")


def decide(settings: Settings, measure: Measure | None = None) -> Plan:
    """The plan of `settings`; where their device is `auto`, on the device that learns from more samples a second.

    A run that is continued stays where it began. `measure` gives the samples a second of a plan.
    """
    plan = resolve(settings)
    if settings.device != "auto":
        return plan
    began = _began(plan)
    if began:
        return _on(began, settings, "the run began there")
    if plan.device.type != "cuda":
        return plan
    gpu = str(plan.device)
    try:
        on_cpu = _on("cpu", settings, "")
    except UserError:  # CUDA graphs and TF32 need one
        return _on(gpu, settings, "what is asked for needs a CUDA device")
    try:
        speed, on_cpu_speed = _speeds((plan, on_cpu), measure or samples_per_second)
    except Exception as error:  # whatever it was, training will do without or say it better
        why = fast.first_line(error)
        return _on(gpu, settings, f"the devices could not be measured ({why}); a GPU is usually the faster one")
    figures = f"measured before compilation: cpu {quantity(on_cpu_speed)}, {gpu} {quantity(speed)} samples/s"
    return _on("cpu" if on_cpu_speed > speed else gpu, settings, figures)


def _on(device: str, settings: Settings, why: str) -> Plan:
    """The plan for a device that was not asked for by name, and why it is this one."""
    plan = resolve(dataclasses.replace(settings, device=device))
    settings = dataclasses.replace(plan.settings, device=settings.device)
    return dataclasses.replace(plan, settings=settings, reasons=plan.reasons | {"device": why})


def _began(plan: Plan) -> str:
    """The device of the run that will be continued; an empty string where there is none, or no such device here."""
    resume = plan.settings.resume
    folder = plan.run_dir if resume in ("auto", "must") else Path(resume).absolute().parent.parent
    if resume != "never":
        with suppress(OSError, ValueError, KeyError, TypeError, UserError):
            return str(hardware.pick_device(str(json.loads((folder / "config.json").read_text())["device"])))
    return ""


def _speeds(plans: tuple[Plan, Plan], measure: Measure) -> list[float]:
    """Samples a second of each plan: as measured before, or measured now and kept."""
    path = cache_file()
    known = _read(path)
    key = digest([_VERSION, torch.__version__, torch.get_num_threads(), [_decisive(plan) for plan in plans]])
    if key in known:
        return known[key]
    try:
        found = [float(measure(plan)) for plan in plans]
    finally:
        torch.cuda.empty_cache()  # nothing where there is no GPU
    with suppress(OSError, UserError):  # without a place to keep them they are measured again
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, dict([*known.items(), (key, found)][-_KEPT:]))
    return found


def cache_file() -> Path:
    """Where figures are kept; delete it to have them measured again."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (folder if folder.is_absolute() else Path.home() / ".cache") / "redline" / "devices.json"


def _read(path: Path) -> dict[str, list[float]]:
    """Figures kept earlier, but for what is garbled."""
    with suppress(OSError, ValueError):
        record = json.loads(path.read_text())
        if isinstance(record, dict):
            return {key: found for key, found in record.items() if _are_speeds(found)}
    return {}


def _are_speeds(found: Any) -> bool:
    return isinstance(found, list) and len(found) == 2 and all(isinstance(x, float) and x > 0 for x in found)


def _decisive(plan: Plan) -> list[Any]:
    """What the speed of a plan follows from."""
    record = plan.describe()
    return [dataclasses.asdict(plan.hardware), [record[name] for name in _DECIDES], record["algo_options"]]


def samples_per_second(plan: Plan) -> float:
    """Learned from, together with the playing that goes with them, in a second; without compilation."""
    rules, device = plan.rules, plan.device
    runtime = fast.runtime(device, plan.precision, fast.Compiler(False, _say_nothing))
    net = _network(plan, runtime)
    weights = list(net.parameters())

    def begin(count: int) -> batch.EnvState:
        envs = batch.reset(rules, batch.env_keys(0, torch.arange(count, device=device)))
        return map_record(torch.clone, envs)

    def play(games: int) -> Callable[[], None]:
        envs = begin(games)

        @torch.no_grad()
        def step() -> None:
            with runtime.autocast():
                values = net(*_seen(rules, envs.game))
            if not rules.game.ON_CPU:  # the host's environments take as long whichever device learns
                assign(envs, batch.step(rules, envs, values.argmax(1))[0])

        return step

    def learn(samples: int) -> Callable[[], None]:
        obs, legal = _seen(rules, begin(samples).game)

        def differentiate() -> None:
            with runtime.autocast():
                values = net(obs, legal)
            torch.autograd.grad(values.mean(), weights, allow_unused=True)

        return differentiate

    played, learned = _seconds_each(play, plan.num_envs, plan), _seconds_each(learn, plan.algo_config.batch_size, plan)
    return 1 / (played / _samples_per_step(plan) + learned)


def _seen(rules: Rules, state: Any) -> tuple[Tensor, Tensor | None]:
    """Observations and legal actions; where the host stacks frames, as many zeros."""
    spec = rules.game.spec(rules.config)
    if rules.game.ON_CPU:
        return torch.zeros(len(state[0]), *spec.obs_shape, dtype=spec.obs_dtype, device=state[0].device), None
    return rules.game.observe(rules.config, state), batch.legal(rules, state)


def _network(plan: Plan, runtime: Runtime) -> nn.Module:
    """The policy of a learner of one game that remembers next to nothing."""
    small = {"batch_size": 1, "replay": replay.DEFAULT, "replay_capacity": 1024}
    config = dataclasses.replace(plan.algo_config, **{k: v for k, v in small.items() if k in plan.algo.options})
    one = batch.reset(plan.rules, batch.env_keys(0, torch.arange(1, device=plan.device)))
    learner = plan.algo.Learner(plan.rules, config, one.game, 1, 0, runtime)
    model = learner.state_dict()["model"]
    learner.close()
    net = plan.algo.policy_network(plan.rules.game.spec(plan.rules.config), config, model)
    return net.to(plan.device)


def _samples_per_step(plan: Plan) -> float:
    """How often a step that is played is learned from."""
    return plan.algo.samples_per_step(plan.algo_config, plan.num_envs, plan.settings.accumulate)


def _seconds_each(prepare: Callable[[int], Callable[[], None]], size: int, plan: Plan) -> float:
    """What `prepare(size)` takes, divided by `size`; measured with fewer where so many would take too long."""
    ends, count = time.perf_counter() + _SECONDS, min(size, _FIRST)
    while True:
        took = _seconds(prepare(count), plan, ends)
        more = min(size, _GROWTH * count)
        expected = took * more / count * (_ROUNDS * _CALLS + 1)
        if count == size or time.perf_counter() + expected > ends:
            return took / count
        count = more


def _seconds(function: Callable[[], None], plan: Plan, ends: float) -> float:
    """Of a call, as it will be run: captured or launched. After the time `ends` one round must do."""

    def wait() -> None:
        if plan.device.type == "cuda":
            torch.cuda.synchronize(plan.device)

    call = fast.Graph(function, plan.graph, _say_nothing)
    call()
    while not call.ready:
        call()
    best = float("inf")
    for _ in range(_ROUNDS):
        wait()
        started = time.perf_counter()
        for _ in range(_CALLS):
            call()
        wait()
        best = min(best, (time.perf_counter() - started) / _CALLS)
        if time.perf_counter() > ends:
            break
    return best


def _say_nothing(text: str) -> None:
    """What falls back here falls back in training too, and is told there."""
    del text
