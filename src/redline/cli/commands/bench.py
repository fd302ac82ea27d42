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
from redline.tools.bench_options import ALL_TABLES, QUICK, BenchOptions, BenchRequest

KINDS = ("env", "train", "replay", "collect")  # measured if no kind is named
_SWITCHES = "switches"


def target(request: Request) -> tuple[str, str]:
    """Return the environment and algorithm to measure; for switches, the algorithm that `redline train ENV` chooses."""
    if request.arguments[:1] == [_SWITCHES]:
        env = (request.arguments[1:] or [str(request.options.get("env", BenchOptions.env))])[0]
        return env, str(request.options.get("algo") or catalog.default_algorithm(env))
    return str(request.options.get("env", BenchOptions.env)), str(request.options.get("algo", BenchOptions.algo))


def run(request: Request) -> int:
    """Measure one kind or all kinds and print a table for each; with --compare, return 1 if anything became slower."""
    kinds = _kinds(request)
    requests = {kind: _request(request, kind) for kind in kinds}
    with show_progress("bench", erase=True):
        from redline.tools import bench, bench_figures
        from redline.tools.bench_collect import bench_collect
        from redline.tools.bench_replay import bench_replay
        from redline.tools.bench_switches import bench_switches

    measure = {"env": bench.bench_env, "train": bench.bench_train, "replay": bench_replay, "collect": bench_collect}
    measure[_SWITCHES] = bench_switches
    out, options = sys.stderr if request.json else sys.stdout, requests[kinds[0]]
    record = bench.describe_machine(options.device)
    old = bench_figures.read_record(options.compare) if options.compare else None
    if old:
        bench_figures.check_machine(old, record)
    print(f"{record['hardware']}, torch {record['torch']}: {', '.join(kinds)}", file=out, flush=True)
    for kind in kinds:
        record[kind] = measure[kind](requests[kind], out)
    if options.out:
        write_json(Path(options.out), record)
    lines, slower = bench_figures.compare(old, record, options.tolerance) if old else ([], 0)
    for line in lines:
        print(line, file=out)
    if request.json:
        request.print_json(record | ({"slower": slower} if old else {}))
    return 1 if slower else 0


def _kinds(request: Request) -> list[str]:
    """Return the tables to measure: the requested ones, else all that apply to the environment."""
    named, known = request.arguments, (*KINDS, _SWITCHES)
    if named[:1] == [_SWITCHES]:
        if len(named) > 2:
            raise UserError("redline bench switches takes one ENV; see redline bench --help.")
        return [_SWITCHES]
    for kind in named:
        if kind not in known:
            raise UserError(
                f"There is no benchmark '{kind}'{nearest(kind, known) or '.'} Benchmarks: {', '.join(known)}."
            )
    env, _ = target(request)
    on_cpu = env.partition(":")[0] in catalog.cpu_kinds()
    if on_cpu and "replay" in named:
        raise UserError(f"redline bench replay measures the memory of tensor games, and {env} is a CPU environment.")
    return named or [kind for kind in KINDS if not (on_cpu and kind == "replay")]


def _request(request: Request, kind: str) -> BenchRequest:
    """Return the options of one table: the requested ones over its defaults for --quick or for measuring all tables."""
    env, algo = target(request)
    plain, groups = split_groups(fold(request.options), algo)
    occasion = QUICK if build(BenchOptions, plain, "").quick else {} if request.arguments else ALL_TABLES
    options = build(BenchOptions, occasion.get(kind, {}) | plain, "")
    if options.repeats < 1:
        raise UserError(f"repeats is {options.repeats}; expected at least 1.")
    return BenchRequest(
        **vars(options) | {"env": env, "algo": algo},
        env_options=groups["env"],
        algo_options=groups[catalog.group_of(algo)],
    )


COMMAND = Command(
    "measure throughput on this machine: environments, training, replay, collection, switches of speed",
    run,
    "[env|train|replay|collect|switches] [ENV...]",
    options_of(BenchOptions),
    target,
    position=6,
)
