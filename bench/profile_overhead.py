"""Measure the cost of profiling, whether stages add up, and how busy a GPU is in steady training.

    python bench/profile_overhead.py --seconds-total 190 --out overhead.json
    python bench/profile_overhead.py --device cpu --num-envs 256 --no-compile --seconds 2 --out overhead.json

For Snake with PPO and DQN: the slowdown by `redline.Profiler` spans around every iteration, and by `redline profile`'s
measurements of an unmodified run (rounds with and without alternate; medians are compared), and the sum of the stages,
uncompiled to save time, divided by the wall-clock time. For Snake and Tetris with PPO, PQN and DQN: GPU use from NVML or
nvidia-smi.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

import redline
from redline.run.resolve import resolve
from redline.run.run_folder import to_stderr, write_json
from redline.run.session import Session
from redline.run.settings import Settings
from redline.tools.bench import describe_machine
from redline.tools.profile_counters import CompileCounter, GpuSampler
from redline.tools.profile_session import StagedSession, measure_run, measure_stages, warm_up

ROUNDS = 15


def settings_of(env: str, algo: str, arguments: argparse.Namespace, compile: bool | None) -> Settings:
    return Settings(
        env,
        algo,
        num_envs=arguments.num_envs,
        steps=10**12,
        device=arguments.device,
        compile=compile,
        curriculum=False,
        run_dir=arguments.folder,
        resume="never",
    )


def seconds_of(loop: Callable[[int], None], count: int, session: Session) -> float:
    """Return the seconds of `count` iterations: wall-clock on a GPU, CPU time on a CPU, which other programs may share."""
    clock = time.perf_counter if session.plan.device.type == "cuda" else time.process_time
    session.synchronize()
    started = clock()
    loop(count)
    session.synchronize()
    return clock() - started


def overhead(session: Session, seconds: float) -> dict[str, float]:
    """Return the slowdown in percent by Profiler spans around every iteration, and by the counters of `redline profile`."""
    profiler = redline.Profiler(session.plan.device)

    def plain(count: int) -> None:
        for _ in range(count):
            session.iterate(1)

    def profiled(count: int) -> None:
        for _ in range(count):
            with profiler.step(batch_size=session.learner.samples_per_update), profiler.span("iteration"):
                session.iterate(1)

    def counted(count: int) -> None:
        with CompileCounter(), GpuSampler(session.plan.device):
            plain(count)

    profiled(profiler.warm_up + 5)  # beyond the inspected steps
    one = min(seconds_of(plain, 2, session) for _ in range(3)) / 2
    count = max(1, round(seconds / (3 * ROUNDS) / one))
    times: dict[str, list[float]] = {"plain": [], "profiled": [], "counted": []}
    for _ in range(ROUNDS):
        for name, loop in (("plain", plain), ("profiled", profiled), ("counted", counted)):
            times[name].append(seconds_of(loop, count, session))
    middle = {name: statistics.median(values) for name, values in times.items()}
    return {f"{name}_percent": 100 * (middle[name] / middle["plain"] - 1) for name in ("profiled", "counted")}


def measure(env: str, algo: str, arguments: argparse.Namespace, staged: bool) -> dict[str, Any]:
    torch._dynamo.reset()
    started = time.perf_counter()
    with closing(Session(resolve(settings_of(env, algo, arguments, arguments.compile)), to_stderr)) as session:
        warm_up(session)
        row: dict[str, Any] = {"env": env, "algo": algo, "warm_up_seconds": time.perf_counter() - started}
        run = measure_run(session, arguments.seconds)
        row |= {"env_steps_per_second": run.env_steps_per_second, "gpu": run.gpu}
        row["synchronisations"] = run.synchronisations
        row["seconds_per_iteration"] = run.seconds / run.iterations
        if staged:
            row |= overhead(session, arguments.seconds / 2)
    if staged:
        with closing(StagedSession(resolve(settings_of(env, algo, arguments, False)), to_stderr)) as session:
            warm_up(session)
            stages = measure_stages(session, arguments.seconds / 4)
        row["stages_over_wall"] = stages.total / stages.wall_seconds
        row["stages"] = {name: seconds / stages.total for name, seconds in stages.seconds.items()}
    return row


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'':14} {'steps/s':>10} {'GPU use':>8} {'Profiler':>9} {'counters':>9} {'stages/wall':>12}"]
    for row in rows:
        use = f"{row['gpu']['use_percent']:.1f} %" if row["gpu"] else "-"
        more = ""
        if "stages_over_wall" in row:
            more = f" {row['profiled_percent']:+8.2f}% {row['counted_percent']:+8.2f}% {row['stages_over_wall']:>12.4f}"
        lines.append(f"{row['env']:7} {row['algo']:6} {row['env_steps_per_second']:>10.3g} {use:>8}{more}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--num-envs", type=int)
    parser.add_argument("--no-compile", dest="compile", action="store_const", const=False)
    parser.add_argument("--seconds", type=float, default=4.0, help="per measurement")
    parser.add_argument("--seconds-total", type=float, default=190.0, help="start nothing that would end later")
    parser.add_argument("--folder", default="/tmp/redline-profile-bench", help="for files of the runs; nothing is kept")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    started = time.perf_counter()
    record: dict[str, Any] = describe_machine(arguments.device) | {"rows": []}
    cases = [("snake", "ppo", True), ("snake", "dqn", True)]
    if torch.cuda.is_available() and arguments.device != "cpu":
        cases += [("tetris", "ppo", False), ("tetris", "dqn", False), ("tetris", "pqn", False), ("snake", "pqn", False)]
    longest = 0.0
    for env, algo, staged in cases:
        began = time.perf_counter()
        if began - started + longest > arguments.seconds_total:
            print(f"{env} {algo}: left out, it would take too long", flush=True)
            continue
        record["rows"].append(measure(env, algo, arguments, staged))
        longest = max(longest, time.perf_counter() - began)
        print(table(record["rows"]), f"{time.perf_counter() - started:.0f} s so far", sep="\n", flush=True)
        if arguments.out:
            write_json(arguments.out, record)


if __name__ == "__main__":
    main()
