"""Measure the seconds from SIGTERM to a durable checkpoint and to the process's exit, with a full replay memory.

    python bench/sigterm.py --out sigterm.json
    python bench/sigterm.py --device cpu --transitions 100k --num-envs 256 --no-compile --out sigterm.json

Train Snake with DQN in a separate process until the replay memory is full, send SIGTERM, and repeat with the resumed run. A
checkpoint is durable once its folder has its public name: all files have been written and synced by then.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from redline.run.manifest import FOLDER
from redline.run.options import parse_value
from redline.run.run_folder import to_stderr, write_json
from redline.tools.bench import describe_machine

WAIT = 300.0  # maximum seconds until the memory is full


def command(arguments: argparse.Namespace, run_dir: Path) -> list[str]:
    words = f"train snake --algo dqn --replay device --replay-capacity {arguments.transitions} --steps 1000G"
    words += f" --num-envs {arguments.num_envs} --device {arguments.device} --checkpoint-minutes 600 --eval-episodes 0"
    words += " --no-compile" if arguments.no_compile else ""
    return [sys.executable, "-m", "redline", *words.split(), "--run-dir", str(run_dir), "--json"]


def last_steps(run_dir: Path) -> int:
    """Return the environment steps of the newest log record; 0 if there is none."""
    try:
        return int(json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])["env_steps"])
    except (OSError, ValueError, IndexError):
        return 0


def checkpoints(run_dir: Path) -> set[str]:
    folder = run_dir / "checkpoints"
    return {name for name in os.listdir(folder) if FOLDER.fullmatch(name)} if folder.is_dir() else set()


def interrupt(arguments: argparse.Namespace, run_dir: Path, least_steps: int) -> dict[str, Any]:
    """Train until `least_steps`, send SIGTERM and return the seconds to a durable checkpoint and to the exit."""
    before, started = checkpoints(run_dir), time.monotonic()
    with open(run_dir.with_suffix(".log"), "ab") as log:
        process = subprocess.Popen(command(arguments, run_dir), stdout=subprocess.PIPE, stderr=log, text=True)
    while last_steps(run_dir) < least_steps:
        if process.poll() is not None or time.monotonic() - started > WAIT:
            process.kill()
            raise SystemExit(
                f"{run_dir.with_suffix('.log').read_text()}\nTraining did not reach {least_steps:,} steps."
            )
        time.sleep(0.1)
    ready = time.monotonic() - started
    sent = time.monotonic()
    process.send_signal(signal.SIGTERM)
    durable = None
    while process.poll() is None:
        if durable is None and checkpoints(run_dir) - before:
            durable = time.monotonic() - sent
        time.sleep(0.005)
    ended = time.monotonic() - sent
    result = json.loads((process.stdout.read() if process.stdout else "").splitlines()[-1])
    saved = run_dir / "checkpoints" / max(checkpoints(run_dir))
    return {
        "exit_code": process.returncode,
        "device": result["device"],
        "env_steps": result["env_steps"],
        "seconds_until_sent": ready,
        "seconds_to_durable": ended if durable is None else durable,
        "seconds_to_exit": ended,
        "checkpoint_bytes": sum(path.stat().st_size for path in saved.iterdir()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--transitions", default="10M")
    parser.add_argument("--num-envs", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--no-compile", action="store_true", help="start sooner; the time to save is the same")
    parser.add_argument("--folder", help="where to put the run; a temporary folder by default")
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    transitions = parse_value(int, arguments.transitions, "transitions")
    rows = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        run_dir = Path(folder) / "run"
        for _ in range(arguments.repeats):
            least = max(transitions, last_steps(run_dir) + arguments.num_envs)
            rows.append(interrupt(arguments, run_dir, least))
            to_stderr(json.dumps(rows[-1]))
    record = describe_machine(rows[0]["device"]) | {"transitions": transitions, "rows": rows}
    write_json(Path(arguments.out), record)
    print("replay      checkpoint  durable  exit   code")
    for row in rows:
        print(
            f"{transitions:>11,}  {row['checkpoint_bytes'] / 1e9:6.2f} GB  {row['seconds_to_durable']:5.2f} s "
            f"{row['seconds_to_exit']:5.2f} s  {row['exit_code']}"
        )


if __name__ == "__main__":
    main()
