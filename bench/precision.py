"""Train Snake in several precisions, the same steps and seeds: `python bench/precision.py [--steps 120000000] [--out FILE]`.

Scores come from runs side by side, as many as --jobs: only what they learn counts there. Speeds are measured afterwards, one
precision at a time and alone on the machine.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from redline.run.settings import Settings
from redline.tools.bench import describe_machine
from redline.tools.trial import Trial, why_not

# Two-sided 95 % quantiles of Student's t by degrees of freedom: seeds are few.
_T = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that all runs share."""
    algo_options = {"net": "mlp", "hidden": tuple(int(width) for width in arguments.hidden.split(","))}
    base = {"env": "snake", "algo": "ppo", "num_envs": arguments.num_envs, "device": arguments.device}
    return base | {"compile": False if arguments.no_compile else None, "algo_options": algo_options}


def train(arguments: argparse.Namespace, precision: str, seed: int, folder: str) -> dict[str, Any]:
    """Train one run in a process of its own; return its score, its speed beside the others and its skipped updates."""
    run_dir = Path(folder) / f"{precision}-{seed}"
    words = [sys.executable, "-m", "redline", "train", "snake", "--algo", "ppo", "--json", "--run-dir", str(run_dir)]
    words += ["--steps", str(arguments.steps), "--num-envs", str(arguments.num_envs), "--seed", str(seed)]
    words += ["--precision", precision, "--device", arguments.device, "--eval-episodes", str(arguments.eval_episodes)]
    words += ["--ppo.net", "mlp", "--ppo.hidden", arguments.hidden, "--checkpoint-minutes", "60"]
    words += ["--no-compile"] if arguments.no_compile else []
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"precision": precision, "seed": seed, "error": done.stderr.strip().splitlines()[-1:]}
    result = json.loads(done.stdout.strip().splitlines()[-1])
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    return {
        "precision": precision,
        "seed": seed,
        "score": result["score_mean"],
        "env_steps": result["env_steps"],
        "seconds": result["seconds"],
        "updates": result["updates"],
        "skipped_updates": last.get("skipped_updates", 0),
    }


def measure_speed(arguments: argparse.Namespace, precision: str) -> dict[str, Any]:
    """Return environment steps per second of training in a precision, as median, lowest and highest of the repeats."""
    try:
        trial = Trial(Settings(**options(arguments), precision=precision, curriculum=False))
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
    parser.add_argument("--steps", type=int, default=120_000_000)
    parser.add_argument("--num-envs", type=int, default=8_192)
    parser.add_argument("--hidden", default="512,512")
    parser.add_argument("--eval-episodes", type=int, default=1_024)
    parser.add_argument("--jobs", type=int, default=9, help="runs side by side")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement of speed")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--out", default="")
    arguments = parser.parse_args()
    precisions = arguments.precisions.split(",")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        jobs = [(arguments, precision, seed, folder) for seed in range(arguments.seeds) for precision in precisions]
        runs = list(pool.map(lambda job: train(*job), jobs))
    record: dict[str, Any] = describe_machine(arguments.device) | {
        "settings": vars(arguments) | options(arguments),
        "runs": runs,
        "precisions": {},
    }
    reference: tuple[float, float] | None = None
    for precision in precisions:
        own = [run for run in runs if run["precision"] == precision]
        scores = [run["score"] for run in own if "score" in run]
        row: dict[str, Any] = {"speed": measure_speed(arguments, precision)}
        if scores:
            low, high = interval(scores)
            reference = reference or (low, high)
            within = reference[0] <= statistics.mean(scores) <= reference[1]
            row |= {"score_mean": statistics.mean(scores), "score_low": low, "score_high": high, "scores": scores}
            row |= {"within_interval_of_first": within, "skipped_updates": sum(run["skipped_updates"] for run in own)}
        row |= {"errors": [run["error"] for run in own if "error" in run]}
        record["precisions"][precision] = row
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(record, indent=1, default=str) + "\n")
    print(f"{'':<6}{'score':>8}{'95 % interval':>20}{'skipped':>9}{'env-steps/s':>13}  within that of {precisions[0]}")
    for precision, row in record["precisions"].items():
        if "score_mean" not in row:
            print(f"{precision:<6}  {row['errors']}")
            continue
        bounds = f"{row['score_low']:.2f} to {row['score_high']:.2f}"
        speed = row["speed"].get("env_steps_per_second", 0.0)
        print(
            f"{precision:<6}{row['score_mean']:>8.2f}{bounds:>20}{row['skipped_updates']:>9}{speed / 1e6:>11.3f} M  "
            f"{'yes' if row['within_interval_of_first'] else 'no'}  {' '.join(f'{x:.2f}' for x in row['scores'])}",
            flush=True,
        )


if __name__ == "__main__":
    main()
