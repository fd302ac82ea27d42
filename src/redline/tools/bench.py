"""Throughput of this machine: games alone and with learning; eager, compiled, graphed; beside plain Python."""

from __future__ import annotations

import dataclasses
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch

from redline import algos, oracles, recipes
from redline.core import random, select
from redline.core.errors import UserError
from redline.core.records import assign, map_record
from redline.engine import fast, hardware
from redline.envs import Rules, batch, make_rules
from redline.games import load as load_game
from redline.run import options
from redline.run.config import Settings, resolve
from redline.run.progress import quantity
from redline.run.session import Session
from redline.tools.bench_options import Wanted

_WARM_UP = 6  # calls before the clock starts: compilation, capture
_TRAIN_ROWS = 64  # steps a environment's memory holds in `bench train`


class EnvLoop:
    """N games in static buffers, random legal actions, observations made, auto-reset: one call is one step of all."""

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
        env_index = torch.arange(len(self.reward), device=self.key.device)
        draw = random.bits(random.fold(self.key, self.time), env_index)
        legal = batch.legal(self.rules, self.envs.game)
        choices = self.rules.game.spec(self.rules.config).num_actions
        action = random.below(draw, choices) if legal is None else select.draw(legal, draw)
        self.time += 1
        envs, step = batch.step(self.rules, self.envs, action)
        self.obs = self.rules.game.observe(self.rules.config, envs.game)  # a copy would cost as much as making it
        self.reward.copy_(step.reward)
        self.ended.copy_(step.terminated | step.truncated)
        assign(self.envs, envs)


def rate(call: Callable[[], None], seconds: float, device: torch.device, warm_up: int = _WARM_UP) -> float:
    """Calls a second, measured over at least `seconds` after warming up."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(warm_up):
        call()
    wait()
    calls, batch_of_calls, started = 0, 1, time.perf_counter()
    while True:
        for _ in range(batch_of_calls):
            call()
        wait()
        calls += batch_of_calls
        spent = time.perf_counter() - started
        if spent >= seconds:
            return calls / spent
        batch_of_calls = min(2 * batch_of_calls, 1024)


def plain_python(env: str, seconds: float, rules: Rules | None = None) -> float | None:
    """Steps a second of one game in plain Python with its observation made; None where it has no oracle."""
    try:
        oracle: Any = oracles.load(env)
    except ModuleNotFoundError:
        return None
    rules = rules or make_rules(env)
    spec = rules.game.spec(rules.config)
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


def bench_env(wanted: Wanted, out: TextIO) -> dict[str, Any]:
    """Games alone. Steps a second by number of games and way of running."""
    env, place = wanted.env, hardware.pick_device(wanted.device)
    chosen = options.build(load_game(env).Config, wanted.env_options, "env.")
    rules = make_rules(env, dataclasses.asdict(chosen))

    def measure(count: int, compiles: bool, graphs: bool) -> float | None:
        torch._dynamo.reset()
        compiler = fast.Compiler(compiles, _complain, place, recipes.compiler_options(rules.game))
        loop = EnvLoop(rules, count, place, compiler, graphs)
        per_second = rate(loop.call, wanted.seconds, place)
        if compiler.enabled != compiles or loop.call.enabled != graphs:
            return None  # it fell back: this would be another way's figure
        return count * per_second

    plain = plain_python(env, wanted.seconds, rules)
    asked = f", {dict(wanted.env_options)}" if wanted.env_options else ""
    print(f"{env}{asked}: env-steps/s, random actions, observations made, auto-reset ({place})", file=out)
    print(f"  one game in plain Python: {quantity(plain) if plain else '-'}", file=out)
    rows = _table(wanted.games, _ways(place, wanted.compile), measure, out)
    return {"plain_python": plain, "env_options": dict(wanted.env_options), "rows": rows}


def bench_train(wanted: Wanted, out: TextIO) -> dict[str, Any]:
    """Playing and learning. A replay learner takes one gradient sample an environment step, others what they suggest."""
    env, algo, place = wanted.env, wanted.algo, hardware.pick_device(wanted.device)
    replays = "replay_capacity" in algos.load(algo).options
    learner = {"n_step": 1, "net": "mlp", "hidden": (256, 256), "learning_starts": 0} if replays else {}
    learner |= {name.replace("-", "_"): word for name, word in wanted.algo_options.items()}
    # The game as it comes, not as it is best trained.
    chosen = dataclasses.asdict(options.build(load_game(env).Config, wanted.env_options, "env."))

    def measure(count: int, compiles: bool, graphs: bool) -> float | None:
        torch._dynamo.reset()
        fitted = {"batch_size": count, "replay_capacity": _TRAIN_ROWS * count} if replays else {}
        settings = Settings(
            env=env,
            algo=algo,
            num_envs=count,
            device=str(place),
            precision=wanted.precision,
            compile=compiles,
            graph=graphs,
            curriculum=False,
            env_options=chosen,
            algo_options=fitted | learner,
        )
        fallen_back: list[str] = []
        session = Session(resolve(settings), fallen_back.append)
        # Twice the warm-up: the first steps fill the memory before learning starts.
        per_second = rate(lambda: session.iterate(1), wanted.seconds, place, warm_up=2 * _WARM_UP)
        if fallen_back:
            _complain(fallen_back[0])
            return None  # this would be another way's figure
        return session.steps_per_iteration * per_second

    samples = ", one gradient sample a step" if replays else ""
    asked = f", {dict(wanted.env_options)}" if wanted.env_options else ""
    print(f"{env}{asked}: env-steps/s with {algo}{samples}, {learner} ({place})", file=out)
    rows = _table(wanted.games, _ways(place, wanted.compile), measure, out)
    return {"algo": algo, "env_options": dict(wanted.env_options), "algo_options": learner, "rows": rows}


def describe_machine(device: str) -> dict[str, Any]:
    """What a figure must not be read without."""
    machine = hardware.detect(hardware.pick_device(device))
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": _commit(),
        "hardware": f"{machine.name}, {machine.cores} CPU cores, {platform.machine()}",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _commit() -> str | None:
    """The commit of the checkout this runs from, if it is one."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(git, capture_output=True, text=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):
        return None


def _ways(device: torch.device, compile: bool | None) -> dict[str, tuple[bool, bool]]:
    """Columns: compiled, graphed."""
    ways = {"eager": (False, False)}
    if compile is not False:
        ways["compiled"] = (True, False)
    if device.type == "cuda":
        ways["graphed"] = (compile is not False, True)
    return ways


def _table(
    games: tuple[int, ...],
    ways: dict[str, tuple[bool, bool]],
    measure: Callable[[int, bool, bool], float | None],
    out: TextIO,
) -> list[dict[str, Any]]:
    if not games or min(games) < 1:
        raise UserError(f"games is {games}; expected one or more numbers of games, such as 256,4096.")
    print("  " + f"{'games':>10}" + "".join(f"{way:>12}" for way in ways), file=out, flush=True)
    rows = []
    for count in games:
        row: dict[str, Any] = {"games": count}
        print(f"  {count:>10,}", end="", file=out, flush=True)
        for way, (compiles, graphs) in ways.items():
            row[way] = measure(count, compiles, graphs)
            print(f"{quantity(row[way]) if row[way] else '-':>12}", end="", file=out, flush=True)
        print(file=out, flush=True)
        rows.append(row)
    return rows


def _complain(text: str) -> None:
    print(f"\n{text}", file=sys.stderr)
