"""Choose the device of a run: if there is a GPU, briefly time playing and learning on it and on the CPU.

The measurement uses the game, network and sizes that the run would have on the GPU, with more games if training will be
compiled: one step of all games, then the forward and backward pass of a batch. Nothing is compiled, which would take longer
than the choice saves; on the GPU each part is one CUDA graph, as in training. The rest of a learner's work (replay, returns,
optimizer) is not measured on either device.
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
Workload = Callable[[int], Callable[[], None]]  # number of games or samples -> function that processes them
_SECONDS = 1.0  # limit of each of the four measurements, approximately
_FIRST, _GROWTH = 16, 4  # games or samples of a CPU's first round, and the factor from round to round
_ROUNDS, _CALLS = 2, 3  # the fastest of this many rounds of this many calls counts
_MANY_GAMES = 65_536  # minimum that a GPU plays in the measurement if training is compiled
_VERSION = 3  # of the measurement: speeds of different versions are not comparable
_CACHED = 200  # entries in the cache file
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
    """Return the plan of `settings`; with device `auto`, for the device that trains on more samples per second.

    A resumed run stays on its device. measure: returns the samples per second of a plan.
    """
    plan = resolve(settings)
    if settings.device != "auto":
        return plan
    with suppress(UserError):  # this machine has no such device
        if before := recorded(plan, "device"):
            return _on(str(hardware.pick_device(str(before))), settings, "the run began there")
    if plan.device.type != "cuda":
        return plan
    gpu = str(plan.device)
    try:
        on_cpu = _on("cpu", settings, "")
    except UserError:  # CUDA graphs and TF32 need a GPU
        return _on(gpu, settings, "the requested settings need a CUDA device")
    try:
        speed, on_cpu_speed = _speeds((plan, _moved(plan, on_cpu)), measure or samples_per_second)
    except Exception as error:  # training will manage without, or report it better
        reason = f"the devices could not be measured ({fast.first_line(error)}); a GPU is usually faster"
        return _on(gpu, settings, reason)
    figures = f"measured before compilation: cpu {quantity(on_cpu_speed)}, {gpu} {quantity(speed)} samples/s"
    return _on("cpu" if on_cpu_speed > speed else gpu, settings, figures)


def _moved(plan: Plan, on_cpu: Plan) -> Plan:
    """Return the GPU's plan, moved to the CPU.

    Recipes may choose less work per sample for a CPU, such as a smaller network; the CPU would win by that alone.
    """
    machine = {
        name: getattr(on_cpu, name) for name in ("device", "hardware", "precision", "compile", "graph", "threads")
    }
    return dataclasses.replace(plan, **machine)


def _on(device: str, settings: Settings, reason: str) -> Plan:
    """Return the plan for a device chosen automatically, with the reason for the choice."""
    plan = resolve(dataclasses.replace(settings, device=device))
    settings = dataclasses.replace(plan.settings, device=settings.device)
    chosen = Setting(str(plan.device), reason, MEASURED if "measured" in reason else HARDWARE)
    return dataclasses.replace(plan, settings=settings, provenance=plan.provenance | {"device": chosen})


def recorded(plan: Plan, name: str) -> Any:
    """Return a setting recorded by the run that will be resumed; None if there is none."""
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
    """Let torch use `count` CPU threads while entered; 0 changes nothing."""
    before = torch.get_num_threads()
    if count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def cache_file(name: str = "devices") -> Path:
    """Return the path of a file of cached measurements; delete the file to measure again."""
    return cache_folder() / f"{name}.json"


def recall(path: Path, key: str) -> Any:
    """Return the cached value of `key`; None if there is none."""
    return _read(path).get(key)


def remember(path: Path, key: str, value: Any) -> None:
    """Cache a value and drop the oldest ones if there are too many. If it cannot be written, the next run measures again."""
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
    """Return the settings that determine the speed of a plan."""
    record = plan.describe()
    return [dataclasses.asdict(plan.hardware), [record[name] for name in _DECISIVE], record["algo_options"]]


def samples_per_second(plan: Plan) -> float:
    """Return the samples per second on which the plan trains, including playing, without compilation."""
    play, learn = workloads(plan)
    # Uncompiled, one step of a game launches hundreds of kernels on a GPU; compiled, only a few. With many games, launches do
    # not dominate the measurement.
    few = plan.settings.num_envs is not None or plan.rules.game.ON_CPU or not (plan.compile and plan.graph)
    games = plan.num_envs if few else max(plan.num_envs, _MANY_GAMES)
    played, learned = _seconds_each(play, games, plan), _seconds_each(learn, plan.algo_config.batch_size, plan)
    return 1 / (played / samples_per_step(plan) + learned)


def samples_per_step(plan: Plan) -> float:
    """Return the number of times the plan's learner trains on each environment step."""
    return plan.algo.samples_per_step(plan.algo_config, plan.num_envs, plan.settings.accumulate)


def workloads(plan: Plan) -> tuple[Workload, Workload]:
    """Return the two largest workloads: one step of N games with the network, and the gradient of N samples."""
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
            if not rules.game.ON_CPU:  # CPU environments take the same time on either device
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
    """Return the policy network of a learner with one game and a minimal replay memory."""
    small = {"batch_size": 1, "replay": replay.DEFAULT, "replay_capacity": 1024}
    config = dataclasses.replace(plan.algo_config, **{k: v for k, v in small.items() if k in plan.algo.options})
    one = batch.reset(plan.rules, batch.env_keys(0, torch.arange(1, device=plan.device)))
    learner = plan.algo.Learner(plan.rules, config, one.game, 1, 0, runtime)
    model = learner.state_dict()["model"]
    learner.close()
    net = plan.algo.policy_network(plan.rules.game.spec(plan.rules.config), config, model)
    return net.to(plan.device)


def _seconds_each(prepare: Workload, size: int, plan: Plan) -> float:
    """Return the seconds of `prepare(size)` per game or sample; a CPU measures fewer if `size` takes too long."""
    ends, count = time.perf_counter() + _SECONDS, size if plan.device.type == "cuda" else min(size, _FIRST)
    while True:
        took = _seconds(prepare(count), plan, ends)
        more = min(size, _GROWTH * count)
        expected = took * more / count * (_ROUNDS * _CALLS + 1)
        if count == size or time.perf_counter() + expected > ends:
            return took / count
        count = more


def _seconds(function: Callable[[], None], plan: Plan, ends: float) -> float:
    """Return the seconds of a call, captured or launched as in training. After the time `ends`, one round suffices."""
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
