"""Fill Snake boards by DQN: `python bench/dqn_snake.py [--seeds 0,1,2] [--episodes 4096] [--out FILE] [-- OPTIONS]`.

Each seed trains alone by the bare command, `redline train snake --algo dqn`, and plays held-out greedy games; wall-clock
counts from the command to the end of the evaluation. Runs are added to an --out file that exists, and seeds it has are not
repeated: the table may be made in several calls.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from redline.tools.bench import describe_machine

_RECORDED = ("env_steps", "updates", "samples_trained", "seconds", "seconds_to_first_update", "score_mean", "win_rate")
_RECORDED += ("steps_per_win", "length_mean", "eval_episodes")
_CURVE = ("seconds", "env_steps", "updates", "score", "win_rate", "q_mean")  # of training games, which explore


def train(seed: int, episodes: int, options: list[str]) -> dict[str, Any]:
    """Train and evaluate one seed; return its figures and its curve, or the error that ended it."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "redline", "train", "snake", "--algo", "dqn", "--seed", str(seed), "--json"]
        words += ["--eval-episodes", str(episodes), "--run-dir", f"{folder}/run", *options]
        start = time.monotonic()
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
        run = {"seed": seed, "options": options, "wall_seconds": time.monotonic() - start}
        if done.returncode:
            return run | {"error": f"exit code {done.returncode}"}
        result = json.loads(done.stdout.strip().splitlines()[-1])
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    points = [record for record in map(json.loads, lines) if "score" in record]
    points = points[:: max(1, -(-len(points) // 20))]
    curve = [{name: point[name] for name in _CURVE if name in point} for point in points]
    return run | {name: result.get(name) for name in _RECORDED} | {"curve": curve}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2", help="separated by commas")
    parser.add_argument("--episodes", type=int, default=4096, help="greedy games of each evaluation")
    parser.add_argument("--out", type=Path)
    parser.add_argument("options", nargs="*", help="more options of redline train, after --")
    arguments = parser.parse_args()
    record: dict[str, Any] = describe_machine("auto") | {"runs": []}
    if arguments.out and arguments.out.exists():
        record = json.loads(arguments.out.read_text())
    for seed in map(int, arguments.seeds.split(",")):
        if any(run["seed"] == seed and "error" not in run for run in record["runs"]):
            continue
        record["runs"].append(train(seed, arguments.episodes, arguments.options))
        if arguments.out:
            arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{'seed':>4}{'seconds':>9}{'steps':>9}{'updates':>9}{'foods':>7}{'filled':>8}{'steps a win':>13}")
    for run in record["runs"]:
        if "error" in run:
            print(f"{run['seed']:>4}{run['wall_seconds']:>9.0f}  {run['error']}")
            continue
        print(
            f"{run['seed']:>4}{run['wall_seconds']:>9.0f}{run['env_steps'] / 1e6:>7.0f} M{run['updates'] / 1e3:>7.0f} k"
            f"{run['score_mean']:>7.1f}{run['win_rate']:>8.1%}{run['steps_per_win'] or 0:>13.0f}"
        )


if __name__ == "__main__":
    main()
