"""Train and evaluate the agents of docs/benchmarks.md, seed by seed.

    python bench/agents.py ROW [ROW ...] [--seeds 0,1,2] [--out FILE] [--keep FOLDER] [--together] [-- OPTIONS]

A row is one of ROWS: an environment, the words of `redline train`, and the score it must reach. Each seed trains alone and
then plays held-out greedy games. Wall-clock and CPU seconds cover the training command, including start and compilation; the
evaluation is a separate command. Runs are added to an existing --out file, and its seeds are not repeated, so a table may be
made in several calls. --keep writes the best agent of each row to FOLDER/ROW, for bench/pack_agent.py. OPTIONS are more
options of `redline train`, for all rows.

--together trains all runs at the same time, for machines rented by the minute, and records this with each run: a large GPU has
room for several (start `nvidia-cuda-mps-control -d` first, or they take turns). Runs are written as they end.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from redline.core.errors import UserError
from redline.run.statistics import bootstrap, iqm
from redline.tools.bench import describe_machine
from redline.tools.pack import pack


class Row(NamedTuple):
    """An agent to train: `redline train` and `words`."""

    words: str
    title: str  # on the page
    figure: str  # to compare: win_rate, score_mean or score_censored of `redline eval --json`, or lowest_win_rate
    bar: float | None  # value to reach, if one was set before the first run
    games: int  # of the evaluation
    hardware: str = "H200"  # for which the bar was set
    max_steps: int = 0  # of the evaluation, if games are too long to be played to the end


CORES = "2 CPU cores"
_UNIFORM = "--env.pieces uniform --env.previews 0"
# The recipe's settings for DQN on raw boards, with wider layers: planes take 100 times the samples (docs/log.md, 2026-11-19).
_PLANES = (
    "--num-envs 4096 --dqn.net columns --dqn.channels 512,512 --dqn.hidden 512 --dqn.gamma 0.98 --dqn.huber 1000 "
    "--dqn.batch-size 4096 --dqn.learning-rate 5e-4 --dqn.learning-rate-end 3e-5 "
    "--dqn.epsilon-high 0.02 --dqn.epsilon-low 5e-4 --dqn.epsilon-steps 10M"
)
_MARIO = "--env.sticky 0.25 --minutes 16"
_LEVELS = ("1-1", "1-2", "1-3", "1-4", "2-1")

ROWS = {
    "snake-10x10-ppo": Row("snake", "Snake 10x10, PPO", "win_rate", 0.999, 5000),
    "snake-10x10-dqn": Row("snake --algo dqn", "Snake 10x10, DQN", "win_rate", 0.97, 4096),
    "snake-20x20": Row(
        "snake --env.width 20 --env.height 20", "Snake 20x20, PPO", "win_rate", 0.95, 1024
    ),
    "snake-6x6-cpu": Row(
        "snake --env.width 6 --env.height 6 --steps 8M --threads 1", "Snake 6x6, PPO", "win_rate", None, 2048, CORES
    ),
    "snake-8x8-cpu": Row(
        "snake --env.width 8 --env.height 8 --steps 12M --threads 1", "Snake 8x8, PPO", "win_rate", None, 1024, CORES
    ),
    "snake-10x10-cpu": Row("snake", "Snake 10x10, PPO, `make train`", "score_mean", 75, 256, CORES),
    "tetris-10x10": Row(
        f"tetris --env.height 10 {_UNIFORM}", "Tetris 10x10 uniform, PPO", "score_mean", 5_000, 1000
    ),
    "tetris-10x20": Row(
        f"tetris {_UNIFORM} --minutes 5", "Tetris 10x20 uniform, PPO", "score_censored", 51e6, 4096, max_steps=1_500_000_000
    ),
    "tetris-10x20-cpu": Row(
        "tetris --steps 400k --threads 1", "Tetris 10x20, seven-bag, one preview, PPO", "score_censored", None, 64,
        CORES, 200_000,
    ),
    "tetris-10x10-boards": Row(
        f"tetris --env.height 10 --env.view boards {_UNIFORM} --minutes 5",
        "Tetris 10x10 uniform from raw boards, PPO", "score_censored", 1_000, 1024, max_steps=20_000_000,
    ),
    "tetris-10x10-lines": Row(
        f"tetris --env.height 10 --env.view boards {_UNIFORM} --no-curriculum --minutes 5",
        "Tetris 10x10 uniform from raw boards, rewards for lines only, PPO", "score_censored", 1_000, 1024,
        max_steps=20_000_000,
    ),
    "tetris-7x14-dqn": Row(
        f"tetris --algo dqn --env.width 7 --env.height 14 --env.view planes {_UNIFORM} {_PLANES} --minutes 20",
        "Tetris 7x14 uniform from planes, DQN", "score_mean", 752, 1000,
    ),
    "tetris-7x14-dqn-boards": Row(
        f"tetris --algo dqn --env.width 7 --env.height 14 --env.view boards {_UNIFORM} --minutes 6",
        "Tetris 7x14 uniform from raw boards after each placement, DQN", "score_censored", 752, 1024, max_steps=20_000_000,
    ),
    **{
        f"mario-{level}-ppo": Row(
            f"mario{f':{level}' * (level != '1-1')} {_MARIO}", f"Super Mario Bros. {level}, sticky 0.25, PPO", "win_rate",
            0.95 if level == "1-1" else 0.8, 100,
        )
        for level in _LEVELS
    },
    "mario-levels-ppo": Row(
        f"mario:{','.join(_LEVELS)} --env.sticky 0.25 --minutes 25",
        "Super Mario Bros., one agent for five levels, sticky 0.25, PPO", "lowest_win_rate", 0.8, 500,
    ),
    "mario-1-1-dqn": Row(
        f"mario {_MARIO} --algo dqn", "Super Mario Bros. 1-1, sticky 0.25, DQN", "win_rate", 0.8, 100
    ),
    "pong": Row("gym:ALE/Pong-v5 --algo dqn --minutes 9", "Atari Pong, DQN", "score_mean", 19, 100),
    "cartpole": Row("gym:CartPole-v1 --steps 50k --threads 1", "CartPole-v1, PPO", "score_mean", 475, 100, CORES),
    "acrobot": Row("gym:Acrobot-v1 --steps 80k --threads 1", "Acrobot-v1, PPO", "score_mean", -100, 100, CORES),
    "lunarlander": Row(
        "gym:LunarLander-v3 --steps 300k --threads 1", "LunarLander-v3, PPO", "score_mean", 200, 100, CORES
    ),
    "mountaincar": Row("gym:MountainCar-v0 --steps 100k --threads 1", "MountainCar-v0, DQN", "score_mean", -110, 100, CORES),
    "taxi": Row("gym:Taxi-v4 --steps 50k --threads 1", "Taxi-v4, DQN", "score_mean", 7, 1000, CORES),
    "frozenlake": Row("gym:FrozenLake-v1 --steps 50k --threads 1", "FrozenLake-v1, DQN", "score_mean", 0.7, 1000, CORES),
    "minigrid-empty-5x5": Row(
        "gym:minigrid:MiniGrid-Empty-5x5-v0 --steps 25k --threads 1", "MiniGrid-Empty-5x5, PPO", "score_mean", 0.9, 100,
        CORES,
    ),
    "minigrid-doorkey-5x5": Row(
        "gym:minigrid:MiniGrid-DoorKey-5x5-v0 --steps 100k --threads 1", "MiniGrid-DoorKey-5x5, PPO", "score_mean", 0.9,
        100, CORES,
    ),
}  # fmt: skip

CURVE_POINTS = 40
_TRAINED = ("env_steps", "updates", "samples_trained", "seconds", "preparation_seconds")
_PLAYED = ("episodes", "finished", "score_mean", "score_low", "score_high", "length_mean")
_PLAYED += ("score_censored", "score_censored_low", "score_censored_high", "game_overs")
_PLAYED += ("win_rate", "win_rate_low", "win_rate_high", "steps_per_win")


def train(name: str, seed: int, options: list[str], folder: Path) -> dict[str, Any]:
    """Train and evaluate one seed in the empty `folder`; return its figures and its curve, or the error that ended it."""
    row = ROWS[name]
    words = [*row.words.split(), "--seed", str(seed), *options]
    machine = machine_of(options)
    run = {"seed": seed, "options": options, "commit": machine["commit"], "date": machine["date"]}
    started = time.monotonic()
    try:
        trained, cpu_seconds = redline_json("train", *words, "--eval-episodes", "0", "--run-dir", str(folder))
        run |= {"wall_seconds": time.monotonic() - started, "cpu_seconds": cpu_seconds}
        how = ["--max-steps", str(row.max_steps)] if row.max_steps else []
        how += ["--device", "cpu"] if "cpu" in options else []
        played, _ = redline_json("eval", str(folder), "--episodes", str(row.games), *how)
        figures = {key: trained.get(key) for key in _TRAINED} | {key: played.get(key) for key in _PLAYED}
        figures |= by_level(played.get("levels", {}))
        return run | figures | {"curve": training_curve(folder / "metrics.jsonl")}
    except subprocess.CalledProcessError as error:
        message = f"exit code {error.returncode}"
    except (OSError, ValueError, LookupError) as error:  # unreadable results must not lose those of other runs
        message = repr(error)
    return run | {"wall_seconds": time.monotonic() - started, "error": message}


def by_level(levels: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the main figures of each level and the lowest win rate; empty if there are no levels."""
    if not levels:
        return {}
    main = {name: {key: of[key] for key in ("episodes", "score_mean", "win_rate")} for name, of in levels.items()}
    return {"levels": main, "lowest_win_rate": min(of["win_rate"] for of in main.values())}


def machine_of(options: list[str]) -> dict[str, Any]:
    """Return the description of the machine, or of its processor with `--device cpu`."""
    return describe_machine("cpu" if "cpu" in options else "auto")


def redline_json(*words: str) -> tuple[dict[str, Any], float]:
    """Run a Redline command; return its JSON and CPU seconds, since wall-clock means little on a busy machine."""
    command = [sys.executable, "-m", "redline", *words, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        output = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    result: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return result, used.ru_utime + used.ru_stime


def training_curve(metrics: Path, points: int = CURVE_POINTS) -> list[dict[str, float]]:
    """Return at most `points` points of a run's training games, which explore; each is a mean over the games in between."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    lines = [line for line in lines if line.get("episodes") and "score" in line]
    won = any(line.get("win_rate") for line in lines)
    curve = []
    for part in np.array_split(np.array(lines, dtype=object), min(points, len(lines))) if lines else ():
        games = [line["episodes"] for line in part]
        point = {"seconds": round(part[-1]["seconds"], 1), "env_steps": part[-1]["env_steps"]}
        for key in ("score", "win_rate") if won else ("score",):
            point[key] = round(float(np.average([line[key] for line in part], weights=games)), 4)
        curve.append(point)
    return curve


def value(row: dict[str, Any], run: dict[str, Any]) -> float:
    """Return a run's figure; if no game ended in its evaluation, the lower end of the interval of the score per game over."""
    figure = run[row["figure"]]
    return float(run["score_censored_low"] if figure is None else figure)


def summary(row: dict[str, Any]) -> dict[str, float]:
    """Return IQM and 95 % interval of a row's figure over its seeds, and the number of seeds that reach its bar, if any."""
    values = np.array([value(row, run) for run in row["runs"] if "error" not in run])
    if not len(values):
        return {}
    low, high = bootstrap(values)[1]
    reached = {} if row["bar"] is None else {"reached": int((values >= row["bar"]).sum())}
    return {"iqm": float(iqm(values)), "low": low, "high": high, **reached}


def write(path: Path, record: dict[str, Any]) -> None:
    """Write the record, with a summary of each row and each point of a curve on one line."""
    for row in record["rows"].values():
        row["summary"] = summary(row)
    text = json.dumps(record, indent=1)
    point = re.compile(r"\{\s+(\"seconds\"[^{}]*?)\s+\}")
    path.write_text(point.sub(lambda match: "{" + " ".join(match[1].split()) + "}", text) + "\n")


def add(row: dict[str, Any], run: dict[str, Any], folder: Path, keep: Path | None) -> None:
    """Add a run to its row, replacing a failed one with the same seed; pack its folder to `keep` if it is the best so far."""
    others = [other for other in row["runs"] if other["seed"] != run["seed"]]
    row["runs"] = sorted([*others, run], key=lambda run: run["seed"])
    if keep and "error" not in run:
        ended = (other for other in others if "error" not in other)
        if all(value(row, run) >= value(row, other) for other in ended):
            try:
                pack(folder, keep)
            except (OSError, UserError) as error:  # the figures of this run and of the others must not be lost
                print(f"{folder.name} was not kept: {error}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", choices=ROWS, metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--seeds", default="0,1,2,3,4", help="separated by commas")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keep", type=Path, help="folder for the best agent of each row")
    parser.add_argument("--together", action="store_true", help="train all seeds of all rows at the same time")
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    arguments, options = parser.parse_args(words[:split]), words[split + 1 :]
    record: dict[str, Any] = machine_of(options) | {"rows": {}}
    if arguments.out and arguments.out.exists():
        record = json.loads(arguments.out.read_text())
    for name in arguments.rows:
        known = record["rows"].get(name, {})
        row = {"command": f"redline train {ROWS[name].words}", **ROWS[name]._asdict(), "runs": known.get("runs", [])}
        if differing := [key for key in ("words", "games", "max_steps") if known and known[key] != row[key]]:
            raise SystemExit(f"{arguments.out} has {name} with other {', '.join(differing)}; use another --out.")
        if any(run["options"] != options for run in row["runs"]):
            raise SystemExit(f"{arguments.out} has runs of {name} with other options; use another --out.")
        record["rows"][name] = row
    wanted = [
        (name, seed)
        for name in arguments.rows
        for seed in map(int, arguments.seeds.split(","))
        if not any(run["seed"] == seed and "error" not in run for run in record["rows"][name]["runs"])
    ]
    with tempfile.TemporaryDirectory() as scratch:
        folders = {pair: Path(scratch) / f"{pair[0]}-{pair[1]}" for pair in wanted}
        workers = ThreadPoolExecutor(max(1, len(wanted)) if arguments.together else 1)
        runs = {workers.submit(train, *pair, options, folders[pair]): pair for pair in wanted}
        try:
            for ended in as_completed(runs):
                name, seed = runs[ended]
                run, row = ended.result(), record["rows"][name]
                if arguments.together and len(wanted) > 1:
                    run["note"] = f"{len(wanted)} runs at the same time"
                add(row, run, folders[name, seed], arguments.keep and arguments.keep / name)
                if arguments.out:
                    write(arguments.out, record)
                shutil.rmtree(folders[name, seed], ignore_errors=True)
        finally:  # after an exception or Ctrl-C, start no more runs
            workers.shutdown(cancel_futures=True)
    for name in arguments.rows:
        _print_row(name, record["rows"][name])


def _print_row(name: str, row: dict[str, Any]) -> None:
    print(f"{name}: redline train {row['words']}")
    print(f"{'seed':>4}{'seconds':>9}{'CPU':>7}{'steps':>10}{'score':>11}{'won':>8}{'steps a win':>13}")
    for run in row["runs"]:
        if "error" in run:
            print(f"{run['seed']:>4}{run['wall_seconds']:>9.0f}  {run['error']}")
            continue
        print(
            f"{run['seed']:>4}{run['wall_seconds']:>9.0f}{run['cpu_seconds'] or 0:>7.0f}{run['env_steps'] / 1e6:>8.2f} M"
            f"{run['score_mean'] or 0:>11,.1f}{run['win_rate']:>8.1%}{run['steps_per_win'] or 0:>13.0f}"
        )
    if seeds := summary(row):
        interval = f"{seeds['low']:,.4g} to {seeds['high']:,.4g}"
        bar = "" if row["bar"] is None else f", bar {row['bar']:,.4g}"
        print(f"{row['figure']}: IQM {seeds['iqm']:,.4g} ({interval}){bar}")


if __name__ == "__main__":
    main()
