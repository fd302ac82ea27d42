"""Find which settings made Mario learn: one at a time gets its earlier value, all others are the recipe's.

    python bench/mario_ablation.py --steps 600k --parallel 4 --out FILE [--only gamma,ema] [--seeds 1] [-- OPTIONS]

Runs with equal steps are compared, so `--parallel` runs may share the cores. Results are added to an existing --out file, and
its rows are not repeated, so the table may be made in several calls.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from redline.tools.bench import describe_machine

# Earlier values, from the runs that did not learn.
VARIANTS = {
    "none": [],
    "gamma": ["--ppo.gamma", "0.97"],
    "rollout": ["--num-envs", "28", "--ppo.rollout-steps", "128", "--batch-size", "256"],
    "batch_size": ["--batch-size", "256"],
    "target_kl": ["--ppo.target-kl", "0"],
    "backplay": ["--backplay", "0"],
    "ema": ["--ppo.ema-decay", "0"],
    "show_action": ["--no-env.show-action"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default=",".join(VARIANTS), help="settings that get their earlier value, separated by commas"
    )
    parser.add_argument("--level", default="1-1")
    parser.add_argument("--steps", default="600k", help="decisions of a run")
    parser.add_argument("--minutes", type=float, help="stop a run after this time")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--parallel", type=int, default=1, help="runs at the same time, which share the cores")
    parser.add_argument("--episodes", type=int, default=100, help="games of each evaluation")
    parser.add_argument("--out", type=Path)
    parser.add_argument("options", nargs="*", help="more options of redline train for all runs, after --")
    arguments = parser.parse_args()
    names = arguments.only.split(",")
    if unknown := [name for name in names if name not in VARIANTS]:
        parser.error(f"there is no variant {unknown[0]}; variants: {', '.join(VARIANTS)}")
    rows: list[dict[str, Any]] = []
    if arguments.out and arguments.out.exists():
        rows = json.loads(arguments.out.read_text())["rows"]
    done = {(row["variant"], row["seed"]) for row in rows}
    jobs = [(name, seed) for seed in range(arguments.seeds) for name in names if (name, seed) not in done]
    with ThreadPoolExecutor(arguments.parallel) as pool:
        for row in pool.map(lambda job: play(*job, arguments), jobs):
            rows.append(row)
            if arguments.out:
                record = describe_machine("auto") | {
                    "level": arguments.level,
                    "steps": arguments.steps,
                    "sticky": 0.25,
                    "options": arguments.options,
                    "rows": rows,
                }
                arguments.out.write_text(json.dumps(record, indent=1) + "\n")
            print(f"done: {row['variant']}, seed {row['seed']}, {row['seconds']:.0f} s", file=sys.stderr, flush=True)
    print(f"{'earlier':12} seed  decisions  flags greedy  sampled  in training  furthest x greedy")
    for row in rows:
        print(
            f"{row['variant']:12} {row['seed']:4}  {row['env_steps']:9,}  {row['greedy_flags']:12.0%}  "
            f"{row['sampled_flags']:7.0%}  {row['training_flags']:11.0%}  {row['greedy_x']:17,.0f}"
        )


def play(name: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the results of one run."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run = f"{folder}/run"
        command = ["train", f"mario:{arguments.level}", "--env.sticky", "0.25", "--run-dir", run, "--seed", str(seed)]
        command += ["--steps", arguments.steps, "--eval-episodes", "0", *arguments.options, *VARIANTS[name]]
        if arguments.minutes:
            command += ["--minutes", str(arguments.minutes)]
        if arguments.parallel > 1:
            command += ["--actors", str(max(1, (os.cpu_count() or 1) // arguments.parallel - 1))]
        trained = redline(*command)
        greedy = redline("eval", run, "--episodes", str(arguments.episodes))
        sampled = redline("eval", run, "--episodes", str(arguments.episodes), "--sample")
        curve = training_curve(Path(run) / "metrics.jsonl")
    return {
        "variant": name,
        "seed": seed,
        "env_steps": trained["env_steps"],
        "train_seconds": trained["seconds"],
        "seconds": time.monotonic() - began,
        "greedy_flags": greedy["win_rate"],
        "greedy_x": greedy["score_mean"],
        "sampled_flags": sampled["win_rate"],
        "sampled_x": sampled["score_mean"],
        "training_flags": curve[-1]["flags"] if curve else 0.0,
        "curve": curve,
    }


def redline(*command: str) -> dict[str, Any]:
    """Run a command and return its JSON."""
    process = subprocess.run([sys.executable, "-m", "redline", *command, "--json"], capture_output=True, text=True)
    if process.returncode:
        sys.exit(f"redline {' '.join(command)} failed:\n{process.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result


def training_curve(path: Path, points: int = 20) -> list[dict[str, float]]:
    """Return flags and furthest x of training's complete games, in at most `points` parts of equal length."""
    records = [record for line in path.read_text().splitlines() if (record := json.loads(line)).get("episodes")]
    size = -(-len(records) // points)
    curve = []
    for first in range(0, len(records), size or 1):
        part = records[first : first + size]
        games = sum(record["episodes"] for record in part)
        means = {
            name: sum(record["episodes"] * record[name] for record in part) / games for name in ("win_rate", "score")
        }
        curve.append({"env_steps": part[-1]["env_steps"], "flags": means["win_rate"], "furthest_x": means["score"]})
    return curve


if __name__ == "__main__":
    main()
