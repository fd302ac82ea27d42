"""Measure whether prioritized replay saves samples: DQN with and without it, with equal steps and samples, seed by seed.

    python bench/prioritized_gain.py --out FILE [--task tetris] [--seeds 0,1,2,3,4] [--parallel 1] [-- OPTIONS]

A task is one of TASKS, run uncompiled on one thread. Scores are from held-out greedy games; `steps_to_score` is the first step
at which training games reach the task's score on average. Runs are added to the file, and its runs are not repeated. OPTIONS
are more options of `redline train`, for all runs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from agents import redline_json
from redline.tools.bench import describe_machine


class Task(NamedTuple):
    """A task, trained by `redline train` and `words`, and the training score to reach."""

    title: str  # on the page
    words: str
    unit: str  # of scores
    score: float  # to reach in training, far above random play
    window: int  # training games whose mean is compared with `score`
    episodes: int  # of the evaluation


TASKS = {
    # A run takes about 45 CPU seconds for Tetris, eight minutes for Mario.
    "tetris": Task(
        "Tetris 6x12 with DQN on afterstates",
        "tetris --algo dqn --env.width 6 --env.height 12 --steps 60k --num-envs 128 --batch-size 256 --dqn.hidden 32 "
        "--dqn.learning-starts 2000 --dqn.epsilon-steps 20000 --threads 1 --no-compile --device cpu",
        "lines", 10, 100, 256,
    ),
    "mario": Task(
        "Super Mario Bros. 1-1, 42x42, sticky 0.25, with DQN",
        "mario --algo dqn --env.sticky 0.25 --env.size 42 --steps 40k --num-envs 8 --batch-size 128 --actors 1 --threads 1 "
        "--no-compile --device cpu",
        "pixels", 800, 30, 50,
    ),
}  # fmt: skip


def train(task: Task, seed: int, prioritized: bool, options: list[str]) -> dict[str, Any]:
    """Train one run and return its figures."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*task.words.split(), "--seed", str(seed), "--eval-episodes", str(task.episodes)]
        words += ["--prioritized"] if prioritized else []
        result, cpu_seconds = redline_json("train", *words, "--run-dir", f"{folder}/run", *options)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    figures = {name: result[name] for name in ("env_steps", "updates", "samples_trained", "score_mean", "score_ci95")}
    reached = steps_to_score([json.loads(line) for line in lines], task.score, task.window)
    return {"seed": seed, "prioritized": prioritized, **figures, "steps_to_score": reached, "cpu_seconds": cpu_seconds}


def steps_to_score(records: list[dict[str, Any]], score: float, window: int) -> int | None:
    """Return the first step at which the last `window` games or more reached `score` on average; None if there is none."""
    games: list[tuple[int, float]] = []  # number and mean score, by log point
    for record in records:
        if record.get("episodes"):
            games.append((record["episodes"], record["score"]))
        while sum(count for count, _ in games[1:]) >= window:
            del games[0]
        total = sum(count for count, _ in games)
        if total >= window and sum(count * mean for count, mean in games) / total >= score:
            return int(record["env_steps"])
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--task", default="tetris", choices=TASKS)
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--parallel", type=int, default=1, help="runs at the same time")
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    arguments, options = parser.parse_args(words[:split]), words[split + 1 :]
    task = TASKS[arguments.task]
    record = describe_machine("cpu") | {"command": f"redline train {task.words}", "options": options}
    record |= {"title": task.title, "unit": task.unit, "score": task.score, "episodes": task.episodes, "runs": []}
    if arguments.out.exists():
        record = json.loads(arguments.out.read_text())
        if (record["command"], record["options"]) != (f"redline train {task.words}", options):
            raise SystemExit(f"{arguments.out} has runs with other options; use another --out.")
    done = {(run["seed"], run["prioritized"]) for run in record["runs"]}
    jobs = [(seed, kind) for seed in map(int, arguments.seeds.split(",")) for kind in (False, True)]
    with ThreadPoolExecutor(arguments.parallel) as pool:
        runs = [pool.submit(train, task, *job, options) for job in jobs if job not in done]
        for ended in as_completed(runs):
            run = ended.result()
            record["runs"] = sorted([*record["runs"], run], key=lambda run: (run["seed"], run["prioritized"]))
            arguments.out.write_text(json.dumps(record, indent=1) + "\n")
            kind = "prioritized" if run["prioritized"] else "uniform"
            print(
                f"{kind:12} seed {run['seed']}  {run['score_mean']:7.1f} {task.unit}  {task.score} from step "
                f"{run['steps_to_score'] or 0:,}  {run['samples_trained']:,} samples  {run['cpu_seconds']:.0f} CPU seconds",
                flush=True,
            )


if __name__ == "__main__":
    main()
