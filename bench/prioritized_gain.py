"""Whether prioritized replay saves samples: DQN on Tetris with and without it, equal steps and samples, seed by seed.

    python bench/prioritized_gain.py --out FILE [--seeds 0,1,2,3,4] [-- OPTIONS]

A small board (6x12, afterstates), uncompiled, on one thread: a run takes about 45 seconds of processor time. Scores are
lines in held-out greedy games; `steps_to_score` is the step from which games in training clear SCORE lines on average. Runs
are added to the file, and those that it has are not repeated. OPTIONS are more options of `redline train`, for all runs.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from redline.tools.bench import describe_machine

TRAIN = (
    "tetris --algo dqn --env.width 6 --env.height 12 --steps 60k --num-envs 128 --batch-size 256 --dqn.hidden 32 "
    "--dqn.learning-starts 2000 --dqn.epsilon-steps 20000 --threads 1 --no-compile --device cpu"
)
SCORE = 10  # lines; random play clears next to none
EPISODES = 256
WINDOW = 100  # games in training whose mean is compared with SCORE


def train(seed: int, prioritized: bool, options: list[str]) -> dict[str, Any]:
    """Return the figures of one run."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*TRAIN.split(), "--seed", str(seed), "--eval-episodes", str(EPISODES), "--run-dir", f"{folder}/run"]
        words += ["--prioritized"] if prioritized else []
        command = [sys.executable, "-m", "redline", "train", *words, *options, "--json"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = json.loads(output.strip().splitlines()[-1])
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    figures = {name: result[name] for name in ("env_steps", "updates", "samples_trained", "score_mean", "score_ci95")}
    reached = steps_to_score([json.loads(line) for line in lines])
    return {"seed": seed, "prioritized": prioritized, **figures, "steps_to_score": reached, "cpu_seconds": cpu}


def steps_to_score(records: list[dict[str, Any]]) -> int | None:
    """Return the first step at which the last WINDOW games or more had SCORE lines on average; None if there is none."""
    games: list[tuple[int, float]] = []  # number and mean score, by log point
    for record in records:
        if record.get("episodes"):
            games.append((record["episodes"], record["score"]))
        while sum(count for count, _ in games[1:]) >= WINDOW:
            del games[0]
        total = sum(count for count, _ in games)
        if total >= WINDOW and sum(count * score for count, score in games) / total >= SCORE:
            return int(record["env_steps"])
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--out", type=Path, required=True)
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    arguments, options = parser.parse_args(words[:split]), words[split + 1 :]
    record = describe_machine("cpu") | {"command": f"redline train {TRAIN}", "options": options, "score": SCORE}
    record |= {"episodes": EPISODES, "runs": []}
    if arguments.out.exists():
        record = json.loads(arguments.out.read_text())
        if (record["command"], record["options"]) != (f"redline train {TRAIN}", options):
            raise SystemExit(f"{arguments.out} has runs with other options; use another --out.")
    done = {(run["seed"], run["prioritized"]) for run in record["runs"]}
    for seed in map(int, arguments.seeds.split(",")):
        for prioritized in (False, True):
            if (seed, prioritized) in done:
                continue
            run = train(seed, prioritized, options)
            record["runs"].append(run)
            arguments.out.write_text(json.dumps(record, indent=1) + "\n")
            kind = "prioritized" if prioritized else "uniform"
            print(
                f"{kind:12} seed {seed}  {run['score_mean']:6.1f} lines  {SCORE} from step {run['steps_to_score'] or 0:,}  "
                f"{run['samples_trained']:,} samples  {run['cpu_seconds']:.0f} CPU seconds",
                flush=True,
            )


if __name__ == "__main__":
    main()
