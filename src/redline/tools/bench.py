"""Measure the throughput of environments and training on this machine: eager, compiled and graphed, and in plain Python."""

from __future__ import annotations

import dataclasses
import functools
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from redline import algos, oracles, recipes
from redline.core import random, select
from redline.core.errors import UserError
from redline.core.records import assign, map_record
from redline.engine import fast, hardware
from redline.envs import Rules, batch, load_game, make_rules
from redline.envs.gym_envs import GymEnvs
from redline.run import options
from redline.run.progress import quantity
from redline.run.resolve import resolve
from redline.run.session import Session
from redline.run.settings import Settings
from redline.tools.bench_figures import Figure, Use, shown, summarize
from redline.tools.bench_options import BenchRequest

_WARM_UP = 6  # calls before the clock starts, for compilation and capture
_TRAIN_ROWS = 64  # steps of each environment in the replay memory of `bench train`
_REPLAY_LEARNER = {"n_step": 1, "net": "mlp", "hidden": (256, 256), "learning_starts": 0}
_CPU_GAMES = (1, 16, 64)  # CPU environments measured at once by default


class EnvLoop:
    """N games in static buffers: one call observes all, steps them with random legal actions and resets those that end."""

    def __init__(self, rules: Rules, games: int, device: torch.device, compiler: fast.Compiler, graph: bool) -> None:
        keys = batch.env_keys(0, torch.arange(games, device=device))
        self.rules, self.envs = rules, map_record(torch.clone, batch.reset(rules, keys))
        self.key = random.seed_key(1, device)
        self.time = torch.zeros((), dtype=torch.int64, device=device)
        self.obs = rules.game.observe(rules.config, self.envs.game)
        self.reward = torch.zeros(games, device=device)
        self.ended = torch.zeros(games, dtype=torch.bool, device=device)
        self.call = fast.Graph(compiler(self.step), graph, compiler.notify)

    @torch.no_grad()
    def step(self) -> None:
        # First, as in training, so that States are read from their buffers. Not copied: a copy would double the cost.
        self.obs = self.rules.game.observe(self.rules.config, self.envs.game)
        env_index = torch.arange(len(self.reward), device=self.key.device)
        draw = random.bits(random.fold(self.key, self.time), env_index)
        legal = batch.legal(self.rules, self.envs.game)
        choices = self.rules.game.spec(self.rules.config).num_actions
        action = random.below(draw, choices) if legal is None else select.draw(legal, draw)
        self.time += 1
        envs, step = batch.step(self.rules, self.envs, action)
        self.reward.copy_(step.reward)
        self.ended.copy_(step.terminated | step.truncated)
        assign(self.envs, envs)


def rate(call: Callable[[], None], seconds: float, device: torch.device, warm_up: int = _WARM_UP) -> float:
    """Return calls per second, measured over at least `seconds` after `warm_up` calls."""
    return rates(call, seconds, device, 1, warm_up)[0]


def rates(
    call: Callable[[], None],
    seconds: float,
    device: torch.device,
    repeats: int,
    warm_up: int = _WARM_UP,
    clock: Callable[[], float] | None = None,
) -> list[float]:
    """Return calls per second in each of `repeats` parts, which last at least `seconds` in total, after `warm_up` calls."""
    clock = clock or time.perf_counter
    for _ in range(warm_up):
        call()
    hardware.synchronize(device)
    chunk, measured = 1, list[float]()
    while len(measured) < repeats:
        calls, started = 0, clock()
        while True:
            for _ in range(chunk):
                call()
            hardware.synchronize(device)
            calls += chunk
            elapsed = clock() - started
            if elapsed >= seconds / repeats:
                measured.append(calls / elapsed)
                break
            chunk = min(2 * chunk, 1024)
    return measured


def plain_python(env: str, seconds: float, rules: Rules | None = None) -> float | None:
    """Return steps per second of one game in plain Python, including observations.

    None if the game has no oracle, or the oracle lacks `observe` or, in a masked game, `legal`.
    """
    rules = rules or make_rules(env)
    oracle: Any = oracles.find(env)
    spec = rules.game.spec(rules.config)
    if oracle is None or not all(hasattr(oracle, name) for name in ("observe", "legal")[: 1 + spec.masked]):
        return None
    choices: Sequence[int] = range(spec.num_actions)
    steps = episode = 0
    started = time.perf_counter()
    game = oracle(rules.config, oracles.episode_key(0, 0, 0))
    while time.perf_counter() - started < seconds:
        if spec.masked:
            choices = [action for action, allowed in enumerate(game.legal()) if allowed]
        _, terminated, truncated, _, _ = game.step(choices[steps * 7919 % len(choices)])
        game.observe()
        steps += 1
        if terminated or truncated:
            episode += 1
            game = oracle(rules.config, oracles.episode_key(0, 0, episode))
    return steps / (time.perf_counter() - started)


def bench_env(request: BenchRequest, out: TextIO) -> dict[str, Any]:
    """Measure environments alone: steps per second by number of games and execution mode."""
    device = hardware.pick_device(request.device)
    rules = _rules(request)
    measure = functools.partial(_cpu_env_rate if rules.game.ON_CPU else _tensor_game_rate, request, rules, device)
    title = f"{_title(request)}: env-steps/s, random actions, observations included, auto-reset ({device})"
    print(title, file=out, flush=True)
    plain = None if rules.game.ON_CPU else plain_python(request.env, request.seconds, rules)
    if plain:
        print(f"  one game in plain Python: {quantity(plain)}", file=out, flush=True)
    rows = _table(_games(request, rules), _ways(device, request.compile, rules), measure, out)
    settings = {"env": request.env, "device": device.type, "env_options": dict(request.env_options)}
    return settings | {"plain_python": plain, "rows": rows}


def _tensor_game_rate(
    request: BenchRequest, rules: Rules, device: torch.device, count: int, compiles: bool, graphs: bool
) -> Figure | None:
    """Return env-steps per second of a tensor game; None if it fell back to another execution mode."""
    torch._dynamo.reset()
    compiler = fast.Compiler(compiles, _warn, device, recipes.compiler_options(rules.game))
    loop = EnvLoop(rules, count, device, compiler, graphs)
    per_second = rates(loop.call, request.seconds, device, request.repeats)
    if compiler.enabled != compiles or loop.call.enabled != graphs:
        return None
    return summarize([count * calls for calls in per_second])


def _cpu_env_rate(
    request: BenchRequest, rules: Rules, device: torch.device, count: int, compiles: bool, graphs: bool
) -> Figure:
    """Return env-steps per second of `count` CPU environments in this process."""
    del compiles, graphs
    envs = GymEnvs(rules.game, rules.config, count, rules.time_limit)
    num_actions = rules.game.spec(rules.config).num_actions
    rng = np.random.default_rng(0)
    try:
        envs.reset(0)
        step = functools.partial(_random_step, envs, rng, num_actions)
        per_second = rates(step, request.seconds, device, request.repeats)
        return summarize([count * calls for calls in per_second])
    finally:
        envs.close()


def _random_step(envs: GymEnvs, rng: np.random.Generator, num_actions: int) -> None:
    envs.step(rng.integers(num_actions, size=len(envs.envs)))


def bench_train(request: BenchRequest, out: TextIO) -> dict[str, Any]:
    """Measure playing and learning. Replay learners train on one sample per step; others use their own settings."""
    device, rules = hardware.pick_device(request.device), _rules(request)
    replays = "replay_capacity" in algos.load(request.algo).options
    learner = dict(_REPLAY_LEARNER) if replays else {}
    learner |= {name.replace("-", "_"): word for name, word in request.algo_options.items()}
    measure = functools.partial(_train_rate, request, rules, device, learner, replays)
    samples = ", one gradient sample per step" if replays else ""
    title = f"{_title(request)}: env-steps/s with {request.algo}{samples}{_spell(learner)} ({device})"
    print(title, file=out, flush=True)
    rows = _table(_games(request, rules), _ways(device, request.compile, rules), measure, out)
    return {
        "env": request.env,
        "algo": request.algo,
        "device": device.type,
        "precision": request.precision,
        "env_options": dict(request.env_options),
        "algo_options": learner,
        "rows": rows,
    }


def _train_rate(
    request: BenchRequest,
    rules: Rules,
    device: torch.device,
    learner: Mapping[str, Any],
    replays: bool,
    count: int,
    compiles: bool,
    graphs: bool,
) -> Figure | None:
    """Return env-steps per second in training and device use; None if it fell back to another execution mode."""
    torch._dynamo.reset()
    fitted = {"batch_size": count, "replay_capacity": _TRAIN_ROWS * count} if replays else {}
    settings = Settings(
        env=request.env,
        algo=request.algo,
        num_envs=count,
        device=str(device),
        precision=request.precision,
        compile=compiles,
        graph=graphs,
        curriculum=False,
        actors=0 if rules.game.ON_CPU else None,
        env_options=dataclasses.asdict(rules.config),  # the game's defaults, not the recipe's
        algo_options=fitted | dict(learner),
    )
    messages: list[str] = []
    session = Session(resolve(settings), messages.append)
    try:
        # Twice the warm-up: the first steps only fill the memory, before learning starts.
        rates(lambda: session.iterate(1), 0.0, device, 1, warm_up=2 * _WARM_UP)
        with Use(device) as use:
            per_second = rates(lambda: session.iterate(1), request.seconds, device, request.repeats, warm_up=0)
    finally:
        session.close()
    if messages:
        _warn(messages[0])
        return None
    return summarize([session.steps_per_iteration * calls for calls in per_second], use.record)


def _rules(request: BenchRequest) -> Rules:
    """Return the environment's rules with the requested options."""
    config = options.build(load_game(request.env).Config, request.env_options, "env.")
    return make_rules(request.env, dataclasses.asdict(config))


def _title(request: BenchRequest) -> str:
    return f"{request.env}{_spell(request.env_options)}"


def _spell(values: Mapping[str, Any]) -> str:
    """Return options as text, each preceded by a comma: `, hidden 256,256`."""
    texts = ((name, ",".join(map(str, v)) if isinstance(v, (tuple, list)) else v) for name, v in values.items())
    return "".join(f", {name} {text}" for name, text in texts)


def _games(request: BenchRequest, rules: Rules) -> tuple[int, ...]:
    """Return the numbers of games, one per row; fewer by default if one process steps them one after another."""
    if rules.game.ON_CPU and request.games == BenchRequest.games:
        return _CPU_GAMES
    return request.games


def describe_machine(device: str) -> dict[str, Any]:
    """Return the date, commit, hardware and versions stored with every figure."""
    machine = hardware.detect(hardware.pick_device(device))
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": _commit(),
        "hardware": f"{machine.name}, {machine.cores} CPU cores, {platform.machine()}",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _commit() -> str | None:
    """Return the commit of the current checkout; None outside of a checkout."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(git, capture_output=True, text=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):
        return None


def _ways(device: torch.device, compile: bool | None, rules: Rules | None = None) -> dict[str, tuple[bool, bool]]:
    """Return the columns of a table: name -> (compiled, graphed). CPU environments have only one."""
    ways = {"eager": (False, False)}
    if rules and rules.game.ON_CPU:
        return ways
    if compile is not False:
        ways["compiled"] = (True, False)
    if device.type == "cuda":
        ways["graphed"] = (compile is not False, True)
    return ways


def _table(
    games: tuple[int, ...],
    ways: dict[str, tuple[bool, bool]],
    measure: Callable[[int, bool, bool], Figure | None],
    out: TextIO,
) -> list[dict[str, Any]]:
    """Measure and print a table, figure by figure: a row per number of games, a column per execution mode."""
    if not games or min(games) < 1:
        raise UserError(f"games is {games}; expected one or more numbers of games, such as 256,4096.")
    print("  " + f"{'games':>10}" + "".join(f"{way:>16}" for way in ways), file=out, flush=True)
    rows = []
    for count in games:
        row: dict[str, Any] = {"games": count}
        print(f"  {count:>10,}", end="", file=out, flush=True)
        for way, (compiles, graphs) in ways.items():
            row[way] = measure(count, compiles, graphs)
            print(f"{shown(row[way]):>16}", end="", file=out, flush=True)
        print(_use(row), file=out, flush=True)
        rows.append(row)
    return rows


def _use(row: Mapping[str, Any]) -> str:
    """Return the device use of a row's last figure as text; empty if it was not measured."""
    figure = list(row.values())[-1]
    if not isinstance(figure, dict) or "peak_bytes" not in figure:
        return ""
    percents = {
        name: figure[f"{name.lower()}_percent"] for name in ("GPU", "CPU") if f"{name.lower()}_percent" in figure
    }
    used = "".join(f", {name} {percent:.0f} %" for name, percent in percents.items())
    return f"   {figure['peak_bytes'] / 2**30:.2f} GB{used}"


def _warn(text: str) -> None:
    print(f"\n{text}", file=sys.stderr)
