"""`redline bench [KIND]`: throughput tables for this machine."""

from __future__ import annotations

import sys
from pathlib import Path

from redline.cli import catalog
from redline.cli.command import Command, Request, options_of, show_progress
from redline.cli.parse import fold
from redline.core.errors import UserError, nearest
from redline.run.options import build
from redline.run.run_folder import write_json
from redline.run.settings import split_groups
from redline.tools.bench_options import BenchOptions, BenchRequest

KINDS = ("env", "train", "replay", "collect")  # measured without a name
_SWITCHES = "switches"


def target(request: Request) -> tuple[str, str]:
    """Return the environment and algorithm to measure: of switches, the algorithm that `redline train ENV` chooses."""
    if request.arguments[:1] == [_SWITCHES]:
        env = (request.arguments[1:] or [str(request.options.get("env", BenchOptions.env))])[0]
        return env, str(request.options.get("algo") or catalog.default_algorithm(env))
    return str(request.options.get("env", BenchOptions.env)), str(request.options.get("algo", BenchOptions.algo))


def run(request: Request) -> int:
    """Measure one kind, or all of them, and print a table each."""
    kinds = (*KINDS, _SWITCHES)
    named = request.arguments[:1] if request.arguments[:1] == [_SWITCHES] else request.arguments
    if named == [_SWITCHES] and len(request.arguments) > 2:
        raise UserError("redline bench switches takes one ENV; see redline bench --help.")
    for kind in named:
        if kind not in kinds:
            raise UserError(
                f"There is no benchmark '{kind}'{nearest(kind, kinds) or '.'} Benchmarks: {', '.join(kinds)}."
            )
    env, algo = target(request)
    on_cpu = env.partition(":")[0] in catalog.cpu_kinds()
    if on_cpu and "replay" in named:
        raise UserError(f"redline bench replay measures the memory of tensor games, and {env} is a CPU environment.")
    plain, groups = split_groups(fold(request.options), algo)
    options = build(BenchOptions, plain, "")
    bench_request = BenchRequest(
        **vars(options) | {"env": env, "algo": algo},
        env_options=groups["env"],
        algo_options=groups[catalog.group_of(algo)],
    )
    with show_progress("bench", erase=True):
        from redline.tools import bench
        from redline.tools.bench_collect import bench_collect
        from redline.tools.bench_replay import bench_replay
        from redline.tools.bench_switches import bench_switches

    measure = {"env": bench.bench_env, "train": bench.bench_train, "replay": bench_replay, "collect": bench_collect}
    measure[_SWITCHES] = bench_switches
    record = bench.describe_machine(options.device)
    for kind in named or [kind for kind in KINDS if not (on_cpu and kind == "replay")]:
        record[kind] = measure[kind](bench_request, sys.stderr if request.json else sys.stdout)
    if options.out:
        write_json(Path(options.out), record)
    if request.json:
        request.print_json(record)
    return 0


COMMAND = Command(
    "measure throughput on this machine: environments, training, replay, collection, switches of speed",
    run,
    "[env|train|replay|collect|switches] [ENV...]",
    options_of(BenchOptions),
    target,
    position=6,
)
