"""Train Snake in several precisions, the same steps and seeds: `python bench/precision.py [--steps 100000000] [--out FILE]`.

Scores come from --jobs parallel runs, whose speed does not matter. Speeds are measured afterwards, one precision at a time,
alone on the machine. Both parts have a time limit; results are written as they arrive.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from redline.run.settings import Settings
from redline.tools.bench import describe_machine
from redline.tools.trial import Trial, why_not

# Two-sided 95 % quantiles of Student's t by degrees of freedom, since there are few seeds.
_T = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that all runs share."""
    algo_options = {"net": "mlp", "hidden": tuple(int(width) for width in arguments.hidden.split(","))}
    base = {"env": "snake", "algo": "ppo", "num_envs": arguments.num_envs, "device": arguments.device}
    return base | {"compile": False if arguments.no_compile else None, "algo_options": algo_options}


def train(arguments: argparse.Namespace, precision: str, seed: int, folder: str, deadline: float) -> dict[str, Any]:
    """Train one run in a separate process; return its score and skipped updates, or the reason for failure."""
    run_dir = Path(folder) / f"{precision}-{seed}"
    words = [sys.executable, "-m", "redline", "train", "snake", "--algo", "ppo", "--json", "--run-dir", str(run_dir)]
    words += ["--steps", str(arguments.steps), "--num-envs", str(arguments.num_envs), "--seed", str(seed)]
    words += ["--precision", precision, "--device", arguments.device, "--eval-episodes", str(arguments.eval_episodes)]
    words += ["--ppo.net", "mlp", "--ppo.hidden", arguments.hidden, "--checkpoint-minutes", "60"]
    words += ["--no-compile"] if arguments.no_compile else []
    run: dict[str, Any] = {"precision": precision, "seed": seed}
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "4"}  # for each run that compiles in parallel
    try:
        left = max(deadline - time.monotonic(), 1.0)
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=left, env=environment)
    except subprocess.TimeoutExpired:
        return run | {"error": "out of time", "reached": last_record(run_dir)}
    if done.returncode:
        return run | {"error": " ".join(done.stderr.strip().splitlines()[-1:])}
    result = json.loads(done.stdout.strip().splitlines()[-1])
    return run | {
        "score": result["score_mean"],
        "env_steps": result["env_steps"],
        "seconds": result["seconds"],
        "updates": result["updates"],
        "skipped_updates": last_record(run_dir).get("skipped_updates", 0),
    }


def last_record(run_dir: Path) -> dict[str, Any]:
    """Return the last log record of a run; empty if there is none."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return json.loads(lines[-1]) if lines else {}


def measure_speed(arguments: argparse.Namespace, precision: str) -> dict[str, Any]:
    """Return training's environment steps per second in a precision: median, lowest and highest of the repeats."""
    try:
        trial = Trial(Settings(**options(arguments), precision=precision))
    except Exception as error:
        return {"error": why_not(error)}
    rates = [trial.measure(arguments.seconds).env_steps for _ in range(arguments.repeats)]
    messages = list(trial.messages)
    trial.close()
    speeds = {"env_steps_per_second": statistics.median(rates), "low": min(rates), "high": max(rates)}
    return speeds | ({"messages": messages} if messages else {})


def interval(scores: list[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean over seeds."""
    mean = statistics.mean(scores)
    if len(scores) < 2:
        return mean, mean
    half = _T.get(len(scores) - 1, 1.96) * statistics.stdev(scores) / math.sqrt(len(scores))
    return mean - half, mean + half


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precisions", default="fp32,bf16,fp16")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100_000_000)
    parser.add_argument("--num-envs", type=int, default=8_192)
    parser.add_argument("--hidden", default="512,512")
    parser.add_argument("--eval-episodes", type=int, default=1_024)
    parser.add_argument("--jobs", type=int, default=9, help="runs side by side")
    parser.add_argument("--score-seconds", type=float, default=170.0, help="limit of all runs together")
    parser.add_argument("--speed-seconds", type=float, default=40.0, help="no measurement of speed starts later")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement of speed")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--out", default="")
    arguments = parser.parse_args()
    precisions = arguments.precisions.split(",")
    record: dict[str, Any] = describe_machine(arguments.device)
    record |= {"settings": vars(arguments) | options(arguments), "precisions": {}}

    def write() -> None:
        if arguments.out:
            Path(arguments.out).write_text(json.dumps(record, indent=1, default=str) + "\n")

    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        deadline = started + arguments.score_seconds
        jobs = [(precision, seed) for seed in range(arguments.seeds) for precision in precisions]
        record["runs"] = list(pool.map(lambda job: train(arguments, *job, folder, deadline), jobs))
    record["score_seconds"] = time.monotonic() - started
    record["precisions"] = {precision: summary(record["runs"], precision, precisions[0]) for precision in precisions}
    write()
    started = time.monotonic()
    for row, precision in zip(record["precisions"].values(), precisions, strict=True):
        late = time.monotonic() - started > arguments.speed_seconds
        row["speed"] = {"error": "out of time"} if late else measure_speed(arguments, precision)
        record["speed_seconds"] = time.monotonic() - started
        write()
    print_table(record["precisions"])


def summary(runs: list[dict[str, Any]], precision: str, reference: str) -> dict[str, Any]:
    """Return the scores of a precision with their interval, and whether their mean is within the reference's interval."""

    def scores_of(name: str) -> list[float]:
        return [run["score"] for run in runs if run["precision"] == name and "score" in run]

    own = [run for run in runs if run["precision"] == precision]
    row: dict[str, Any] = {"errors": [run["error"] for run in own if "error" in run]}
    scores, others = scores_of(precision), scores_of(reference)
    if scores:
        low, high = interval(scores)
        row |= {"scores": scores, "score_mean": statistics.mean(scores), "score_low": low, "score_high": high}
        row["skipped_updates"] = sum(run.get("skipped_updates", 0) for run in own)
    if scores and others:
        low, high = interval(others)
        row["within_interval_of_first"] = low <= statistics.mean(scores) <= high
    return row


def print_table(rows: dict[str, dict[str, Any]]) -> None:
    """Print one line per precision."""
    first = next(iter(rows))
    print(
        f"{'':<6}{'score':>8}{'95 % interval':>20}{'skipped':>9}{'env-steps/s':>13}  mean within that of {first}; scores"
    )
    for precision, row in rows.items():
        speed = row["speed"].get("env_steps_per_second")
        steps = f"{speed / 1e6:.3f} M" if speed else row["speed"].get("error", "-")
        if "score_mean" not in row:
            print(f"{precision:<6}{'-':>8}{'-':>20}{'-':>9}{steps:>13}  {'; '.join(row['errors'])}")
            continue
        bounds = f"{row['score_low']:.2f} to {row['score_high']:.2f}"
        within = {True: "yes", False: "no"}.get(row.get("within_interval_of_first"), "-")  # type: ignore[arg-type]
        scores = " ".join(f"{score:.2f}" for score in row["scores"])
        words = "; ".join([within, scores, *row["errors"]])
        print(f"{precision:<6}{row['score_mean']:>8.2f}{bounds:>20}{row['skipped_updates']:>9}{steps:>13}  {words}")


if __name__ == "__main__":
    main()
