"""Choose the device of a run: where there is a GPU, time playing and learning briefly on it and on the CPU.

The measurement uses the game, network and sizes that the run would have on the GPU, with more games where training will be
compiled: one step of all games, and forward and backward of a batch. Neither side is compiled, which would take longer than the
choice saves; on the GPU each is one CUDA graph, as in training. The rest of a learner's work (replay, returns, optimizer) is
left out on both sides.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from redline import replay
from redline.core.errors import UserError
from redline.core.native import cache_folder
from redline.core.records import assign, map_record
from redline.engine import fast, hardware
from redline.engine.runtime import Runtime
from redline.envs import Rules, batch
from redline.recipes import Setting
from redline.run.plan import HARDWARE, MEASURED, Plan, digest
from redline.run.progress import quantity
from redline.run.resolve import resolve
from redline.run.run_folder import write_json
from redline.run.settings import Settings

Measure = Callable[[Plan], float]
Workload = Callable[[int], Callable[[], None]]  # from a number of games or samples to a function that works on them
_SECONDS = 1.0  # limit of each of the four measurements, approximately
_FIRST, _GROWTH = 16, 4  # games or samples that a CPU works on in the first round, and the factor for each next round
_ROUNDS, _CALLS = 2, 3  # the best of so many rounds of so many calls counts
_MANY_GAMES = 65_536  # that a GPU plays in the measurement, at least, if training is compiled
_VERSION = 3  # of the measurement: figures of different versions are not comparable
_CACHED = 200  # figures in the cache file
_DECISIVE = (
    "env",
    "algo",
    "num_envs",
    "accumulate",
    "precision",
    "compile",
    "graph",
    "time_limit",
    "rules_version",
    "env_options",
)


def decide(settings: Settings, measure: Measure | None = None) -> Plan:
    """Return the plan of `settings`; with device `auto`, on the device that learns from more samples per second.

    A resumed run stays on its device. `measure` returns the samples per second of a plan.
    """
    plan = resolve(settings)
    if settings.device != "auto":
        return plan
    with suppress(UserError):  # there is no such device here
        if before := recorded(plan, "device"):
            return _on(str(hardware.pick_device(str(before))), settings, "the run began there")
    if plan.device.type != "cuda":
        return plan
    gpu = str(plan.device)
    try:
        on_cpu = _on("cpu", settings, "")
    except UserError:  # CUDA graphs and TF32 need one
        return _on(gpu, settings, "the requested settings need a CUDA device")
    try:
        speed, on_cpu_speed = _speeds((plan, _moved(plan, on_cpu)), measure or samples_per_second)
    except Exception as error:  # training will manage without, or report it better
        reason = f"the devices could not be measured ({fast.first_line(error)}); a GPU is usually faster"
        return _on(gpu, settings, reason)
    figures = f"measured before compilation: cpu {quantity(on_cpu_speed)}, {gpu} {quantity(speed)} samples/s"
    return _on("cpu" if on_cpu_speed > speed else gpu, settings, figures)


def _moved(plan: Plan, on_cpu: Plan) -> Plan:
    """Return the work of a GPU's plan as the CPU would do it.

    What recipes choose for a CPU, a small network for instance, is less work for a sample: it would win by that alone.
    """
    machine = {
        name: getattr(on_cpu, name) for name in ("device", "hardware", "precision", "compile", "graph", "threads")
    }
    return dataclasses.replace(plan, **machine)


def _on(device: str, settings: Settings, reason: str) -> Plan:
    """Return the plan for a device that was not requested by name, with the reason for the device."""
    plan = resolve(dataclasses.replace(settings, device=device))
    settings = dataclasses.replace(plan.settings, device=settings.device)
    chosen = Setting(str(plan.device), reason, MEASURED if "measured" in reason else HARDWARE)
    return dataclasses.replace(plan, settings=settings, provenance=plan.provenance | {"device": chosen})


def recorded(plan: Plan, name: str) -> Any:
    """Return a setting of the run that will be resumed; None if there is none."""
    resume = plan.settings.resume
    folder = plan.run_dir if resume in ("auto", "must") else Path(resume).absolute().parent.parent
    if resume != "never":
        with suppress(OSError, ValueError, KeyError, TypeError):
            return json.loads((folder / "config.json").read_text(encoding="utf-8"))[name]
    return None


def _speeds(plans: tuple[Plan, Plan], measure: Measure) -> list[float]:
    """Return the samples per second of each plan: from the cache, or measured now and cached."""
    path = cache_file()
    key = digest([_VERSION, torch.__version__, torch.get_num_threads(), [decisive(plan) for plan in plans]])
    known = recall(path, key)
    if _are_speeds(known):
        return list(known)
    try:
        speeds = []
        for plan in plans:
            with torch_threads(plan.threads):
                speeds.append(float(measure(plan)))
    finally:
        torch.cuda.empty_cache()  # does nothing without a GPU
    remember(path, key, speeds)
    return speeds


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch use so many CPU threads; 0 leaves it as it is."""
    before = torch.get_num_threads()
    if count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def cache_file(name: str = "devices") -> Path:
    """Return the file of cached measurements; delete it to measure again."""
    return cache_folder() / f"{name}.json"


def recall(path: Path, key: str) -> Any:
    """Return the cached value of `key`; None if there is none."""
    return _read(path).get(key)


def remember(path: Path, key: str, value: Any) -> None:
    """Cache a value, and forget the oldest if there are too many. Without a cache the next run measures again."""
    known = _read(path)
    known.pop(key, None)
    with suppress(OSError, UserError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, dict([*known.items(), (key, value)][-_CACHED:]))


def _read(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        record = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(record, dict):
            return record
    return {}


def _are_speeds(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(x, float) and x > 0 for x in value)


def decisive(plan: Plan) -> list[Any]:
    """Return the settings that decide the speed of a plan."""
    record = plan.describe()
    return [dataclasses.asdict(plan.hardware), [record[name] for name in _DECISIVE], record["algo_options"]]


def samples_per_second(plan: Plan) -> float:
    """Return how many samples per second the plan learns from, playing included, without compilation."""
    play, learn = workloads(plan)
    # Uncompiled, a GPU launches hundreds of kernels for a step of a game. Many games keep launches from deciding, which
    # training with compiled kernels has few of.
    few = plan.settings.num_envs is not None or plan.rules.game.ON_CPU or not (plan.compile and plan.graph)
    games = plan.num_envs if few else max(plan.num_envs, _MANY_GAMES)
    played, learned = _seconds_each(play, games, plan), _seconds_each(learn, plan.algo_config.batch_size, plan)
    return 1 / (played / samples_per_step(plan) + learned)


def samples_per_step(plan: Plan) -> float:
    """Return how often the plan's learner trains on each environment step."""
    return plan.algo.samples_per_step(plan.algo_config, plan.num_envs, plan.settings.accumulate)


def workloads(plan: Plan) -> tuple[Workload, Workload]:
    """Return what playing and learning cost most: a step of N games with the network, and the gradient of N samples."""
    rules, device = plan.rules, plan.device
    runtime = fast.runtime(device, plan.precision, fast.Compiler(False, _ignore))
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
                values = net(*_network_input(rules, envs.game))
            if not rules.game.ON_CPU:  # CPU environments take the same time whichever device learns
                assign(envs, batch.step(rules, envs, values.argmax(1))[0])

        return step

    def learn(samples: int) -> Callable[[], None]:
        obs, legal = _network_input(rules, begin(samples).game)

        def differentiate() -> None:
            with runtime.autocast():
                values = net(obs, legal)
            torch.autograd.grad(values.mean(), weights, allow_unused=True)

        return differentiate

    return play, learn


def _network_input(rules: Rules, state: Any) -> tuple[Tensor, Tensor | None]:
    """Return observations and legal actions; zeros of the right shape for CPU environments."""
    spec = rules.game.spec(rules.config)
    if rules.game.ON_CPU:
        return torch.zeros(len(state[0]), *spec.obs_shape, dtype=spec.obs_dtype, device=state[0].device), None
    return rules.game.observe(rules.config, state), batch.legal(rules, state)


def _network(plan: Plan, runtime: Runtime) -> nn.Module:
    """Return the policy network of a learner with one game and next to no replay memory."""
    small = {"batch_size": 1, "replay": replay.DEFAULT, "replay_capacity": 1024}
    config = dataclasses.replace(plan.algo_config, **{k: v for k, v in small.items() if k in plan.algo.options})
    one = batch.reset(plan.rules, batch.env_keys(0, torch.arange(1, device=plan.device)))
    learner = plan.algo.Learner(plan.rules, config, one.game, 1, 0, runtime)
    model = learner.state_dict()["model"]
    learner.close()
    net = plan.algo.policy_network(plan.rules.game.spec(plan.rules.config), config, model)
    return net.to(plan.device)


def _seconds_each(prepare: Workload, size: int, plan: Plan) -> float:
    """Return the seconds of `prepare(size)` divided by `size`; on a CPU measured with fewer if `size` takes too long."""
    ends, count = time.perf_counter() + _SECONDS, size if plan.device.type == "cuda" else min(size, _FIRST)
    while True:
        took = _seconds(prepare(count), plan, ends)
        more = min(size, _GROWTH * count)
        expected = took * more / count * (_ROUNDS * _CALLS + 1)
        if count == size or time.perf_counter() + expected > ends:
            return took / count
        count = more


def _seconds(function: Callable[[], None], plan: Plan, ends: float) -> float:
    """Return the seconds of a call, run as in training: captured or launched. Past the time `ends` one round suffices."""
    call = fast.warmed_up(function, plan.graph, _ignore)
    best = float("inf")
    for _ in range(_ROUNDS):
        hardware.synchronize(plan.device)
        started = time.perf_counter()
        for _ in range(_CALLS):
            call()
        hardware.synchronize(plan.device)
        best = min(best, (time.perf_counter() - started) / _CALLS)
        if time.perf_counter() > ends:
            break
    return best


def _ignore(message: str) -> None:
    """Drop a message: training falls back in the same way and reports it."""
    del message
