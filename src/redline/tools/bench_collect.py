"""`redline bench collect`: how much of the environments' raw speed training keeps.

The table compares frames per second of the environments alone, in one process per core; of training with actor processes, with
actions chosen by the actors or centrally, and of training in one process; then of the same learner with Gymnasium's
AsyncVectorEnv, and of SB3's PPO with SubprocVecEnv and the same numbers of environments, steps and epochs. The last row
compares shared rings with a multiprocessing queue for transferring transitions.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TextIO

import numpy as np
import torch

from redline.collect.actor_collector import ActorCollector
from redline.core.errors import UserError
from redline.envs import load_game, make_rules
from redline.envs.gym_envs import GymEnvs
from redline.run.plan import Plan
from redline.run.progress import quantity
from redline.run.resolve import resolve
from redline.run.session import Session
from redline.run.settings import Settings
from redline.tools.bench import rates
from redline.tools.bench_figures import Figure, Use, shown, summarize
from redline.tools.bench_options import BenchRequest
from redline.tools.bench_peers import TRANSPORT_PROCESSES, sb3_frames, train_over_gymnasium, transport

_DEFAULT_ENV = "gym:CartPole-v1"  # measured instead of a tensor game
_READY = "ready to play"  # each worker process writes this before all begin
_PEER_ALGO = "ppo"  # the algorithm that SB3 can be compared with


def bench_collect(request: BenchRequest, out: TextIO) -> dict[str, Any]:
    """Print a table of frames per second, alone and in training, and return its figures."""
    settings, cores = _settings(request)
    plan = resolve(settings)
    actors, seconds, repeats = plan.actors, request.seconds, request.repeats
    table = _Table(plan, cores, seconds, out)
    table.row(
        "bare",
        f"environments alone, {cores} processes and nothing else",
        lambda: {
            "frames": measure_envs(plan, cores, seconds, repeats, preprocessed=False),
            "of_actors": measure_envs(plan, actors, seconds, repeats, preprocessed=False),
        },
    )
    table.ceiling = table.record["bare"]["of_actors"]["value"]
    table.print_rate("the same with as many processes as actors: the ceiling", table.ceiling)
    table.row(
        "treated",
        "environments with preprocessing, as many processes",
        lambda: {"frames": measure_envs(plan, actors, seconds, repeats, preprocessed=True)},
    )
    for processes in dict.fromkeys((actors,) if request.quick else (actors, cores)):
        for inference, where in (("central", "centrally"), ("actors", "in them"))[request.quick :]:
            label = f"training, {processes} actor{'s' * (processes > 1)}, actions chosen {where}"
            variant = replace(settings, inference=inference, actors=processes)
            table.row(f"{inference}_{processes}", label, functools.partial(train, variant, seconds, repeats))
    alone = replace(settings, actors=0)
    table.row("in_step", "training in one process", functools.partial(train, alone, seconds, repeats))
    if request.quick:
        return table.record
    label = "the same learner over Gymnasium's AsyncVectorEnv"
    table.row(
        "gymnasium",
        label,
        lambda: train_over_gymnasium(
            Session(resolve(alone), _warn), functools.partial(measure_training, repeats=repeats), seconds
        ),
    )
    if plan.settings.algo == _PEER_ALGO:
        table.row("sb3", "SB3's PPO over SubprocVecEnv", functools.partial(sb3_frames, plan, seconds))
    table.transport(min(seconds, 5.0))
    return table.record


def _settings(request: BenchRequest) -> tuple[Settings, int]:
    """Return the training settings and the number of cores."""
    env = request.env if load_game(request.env).ON_CPU else _DEFAULT_ENV
    settings = Settings(
        env=env,
        algo=_PEER_ALGO if request.algo == BenchRequest.algo else request.algo,
        num_envs=request.games[0] if len(request.games) == 1 else None,
        device=request.device,
        precision=request.precision,
        compile=request.compile,
        backplay=0.0,  # whole episodes, like the peers
        env_options=dict(request.env_options),
        algo_options=dict(request.algo_options),
    )
    cores = resolve(settings).hardware.cores
    actors = max(1, cores - 1) if request.actors is None else request.actors
    return replace(settings, actors=actors), cores


class _Table:
    """Measure and print rows, and store their figures in `record`."""

    def __init__(self, plan: Plan, cores: int, seconds: float, out: TextIO) -> None:
        self.out, self.ceiling = out, 0.0
        settings, skip = plan.settings, plan.rules.config.frame_skip
        self.record: dict[str, Any] = {
            "env": settings.env,
            "algo": settings.algo,
            "envs": plan.num_envs,
            "actors": plan.actors,
            "frame_skip": skip,
            "seconds": float(seconds),
        }
        print(
            f"{settings.env}: {plan.num_envs} environments on {plan.actors} of {cores} cores, {skip} frames a step, "
            f"{settings.algo} on {plan.device}\n  {'':<58}{'frames/s':>14}  {'of the ceiling':>14}",
            file=out,
            flush=True,
        )

    def row(self, name: str, label: str, measure: Callable[[], Any]) -> None:
        """Measure and print frames per second. measure: returns a number, or a dict with the figure `frames`."""
        print(f"  {label:<58}", end="", file=self.out, flush=True)
        try:
            self.record[name] = measure()
        except ImportError as error:
            self.record[name] = None
            print(f"{'-':>14}  ({error})", file=self.out, flush=True)
            return
        measured = self.record[name]
        figure = measured["frames"] if isinstance(measured, Mapping) else summarize([measured])
        percent = f"  {figure['value'] / self.ceiling:>14.1%}" if self.ceiling else ""
        print(f"{shown(figure):>14}{percent}", file=self.out, flush=True)

    def print_rate(self, label: str, rate: float) -> None:
        print(f"  {label:<58}{quantity(rate):>14}", file=self.out, flush=True)

    def transport(self, seconds: float) -> None:
        """Measure and print the speeds of transferring transitions."""
        self.record["transport"] = rates = transport(seconds)
        times = rates["rings"] / rates["queue"]
        print(f"\n  Transport from {TRANSPORT_PROCESSES} processes{'transitions/s':>42}", file=self.out)
        self.print_rate(f"shared rings ({times:.0f} times the queue)", rates["rings"])
        self.print_rate("multiprocessing queue", rates["queue"])


# ----------------------------------------------------------------------------------------------- environments alone


def measure_envs(plan: Plan, processes: int, seconds: float, repeats: int, preprocessed: bool) -> Figure:
    """Return frames per second of `processes` processes that each step an actor's environments with random actions."""
    job = {
        "env": plan.settings.env,
        "options": vars(plan.rules.config),
        "time_limit": plan.rules.time_limit,
        "num_envs": -(-plan.num_envs // max(plan.actors, 1)),
        "preprocessed": preprocessed,
        "seconds": seconds,
        "repeats": repeats,
    }
    path = os.pathsep.join(path for path in sys.path if path)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    workers = []
    for seed in range(processes):
        worker = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        assert worker.stdin
        worker.stdin.write(json.dumps(job | {"seed": seed}) + "\n")
        worker.stdin.flush()
        workers.append(worker)
    for worker in workers:  # wait until all are ready
        assert worker.stdout
        while (line := worker.stdout.readline()).strip() not in (_READY, ""):
            pass
        if not line:
            for other in workers:
                other.kill()
                other.wait()
            raise UserError(f"{plan.settings.env} cannot be played in a process of its own; its message is above.")
    outputs = []
    for worker in workers:
        assert worker.stdin
        worker.stdin.close()
    for worker in workers:
        assert worker.stdout
        outputs.append(json.loads(worker.stdout.read().splitlines()[-1]))
        worker.wait()
    return summarize([sum(part) for part in zip(*outputs, strict=True)])


def _play(job: dict[str, Any]) -> list[float]:
    """Return frames per second of a job's environments in this process, one number per repeat."""
    torch.set_num_threads(1)
    rules = make_rules(job["env"], job["options"], job["time_limit"])
    step = _preprocessed_step(rules, job) if job["preprocessed"] else _bare_step(rules, job)
    step()
    print(f"\n{_READY}", flush=True)
    sys.stdin.read()  # it is closed once all workers are ready
    per_step = rules.config.frame_skip * job["num_envs"]
    parts, cpu = job["repeats"], torch.device("cpu")
    return [per_step * steps for steps in rates(step, float(job["seconds"]), cpu, parts, warm_up=0)]


def _preprocessed_step(rules: Any, job: dict[str, Any]) -> Callable[[], None]:
    """Return a function that steps the environments with preprocessing, as an agent sees them."""
    envs = GymEnvs(rules.game, rules.config, job["num_envs"], rules.time_limit)
    envs.reset(job["seed"])
    rng, num_actions = np.random.default_rng(job["seed"]), rules.game.spec(rules.config).num_actions
    return lambda: envs.step(rng.integers(num_actions, size=job["num_envs"]))


def _bare_step(rules: Any, job: dict[str, Any]) -> Callable[[], None]:
    """Return a function that steps the unwrapped environments, repeating each action as for an agent."""
    envs = [rules.game.open(rules.config) for _ in range(job["num_envs"])]
    for env in envs:
        env.reset(seed=job["seed"])

    def step() -> None:
        for env in envs:
            action = int(env.action_space.sample())
            for _ in range(rules.config.frame_skip):
                _, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    env.reset()

    return step


# -------------------------------------------------------------------------------------------------------- training


def train(settings: Settings, seconds: float, repeats: int) -> dict[str, Any]:
    """Return the figure `frames`, frames per second in training, and the collector's metrics."""
    session = Session(resolve(settings), _warn)
    try:
        return measure_training(session, seconds, repeats)
    finally:
        session.close()


def measure_training(session: Session, seconds: float, repeats: int) -> dict[str, Any]:
    """Return frames per second of whole iterations, after two of warm-up, and the collector's metrics.

    With actors, count the frames they play: the learner reads them in batches."""

    def played() -> int:
        collector = session.collector
        return collector.env_steps_played if isinstance(collector, ActorCollector) else session.env_steps

    session.iterate(2)
    session.read_metrics(0)
    samples = []
    with Use(session.plan.device) as use:
        for _ in range(repeats):
            began, before = time.perf_counter(), played()
            while (spent := time.perf_counter() - began) < seconds / repeats:
                session.iterate(1)
            samples.append((played() - before) * session.plan.rules.config.frame_skip / spent)
    return {"frames": summarize(samples, use.record)} | session.read_metrics(0)


def _warn(text: str) -> None:
    print(f"\n{text}", file=sys.stderr)


if __name__ == "__main__":
    try:
        print(json.dumps(_play(json.loads(sys.stdin.readline()))))
    except UserError as error:
        sys.exit(str(error))
