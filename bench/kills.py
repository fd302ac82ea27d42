"""Kill training runs at random moments, resume them, and compare their final files with uninterrupted runs.

    python bench/kills.py --out kills.json                                   20 runs of each case, on the CPU
    python bench/kills.py --device cuda --cases dqn,ppo --runs 5 --out kills.json

Every second run is killed inside a save: at a random phase of a random save, by the fault hook. The others are killed at a
random time. After each kill, a run is resumed with the same arguments, and killed again with probability one third. The final
checkpoints must contain the same bytes in every tensor: weights, optimizer, random streams, games and replay memory.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import redline
from redline.core import faults
from redline.run.checkpoint import Checkpoint, Checkpoints
from redline.run.run_folder import write_json
from redline.tools.bench import describe_machine

NETWORK = {"hidden": (32,), "net": "mlp"}
DQN = NETWORK | {"learning_starts": 512, "replay_capacity": 20_000, "train_every": 4}
CASES: dict[str, tuple[str, dict[str, Any]]] = {  # name -> algorithm, its options
    "dqn": ("dqn", DQN | {"replay": "device"}),
    "dqn-prioritized": ("dqn", DQN | {"replay": "device", "prioritized": True}),
    "dqn-pinned": ("dqn", DQN | {"replay": "pinned"}),
    "pqn": ("pqn", NETWORK | {"rollout_steps": 8}),
    "ppo": ("ppo", NETWORK | {"rollout_steps": 8}),
}
DEFAULT = ("dqn", "dqn-pinned", "pqn", "ppo")
MAX_KILLS = 5  # per run; then it may finish
TIMEOUT = 300.0  # seconds of one start


def start(case: str, folder: Path, device: str, steps: int, fault: str = "") -> int:
    """Start or resume the run in a forked child process, which has already imported torch; return its process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with open(folder.parent / "log.txt", "ab") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        faults.arm(fault)
        algo, options = CASES[case]
        redline.train(
            "snake",
            algo=algo,
            algo_options=options,
            run_dir=str(folder),
            device=device,
            steps=steps,
            num_envs=64,
            batch_size=128,
            compile=False,
            threads=1,
            deterministic=True,
            eval_episodes=0,
            log_seconds=0.05,
            checkpoint_minutes=0.1 / 60,
        )
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


def wait(child: int, seconds: float) -> int | None:
    """Return the exit code of a child process, negative for a signal; None if it is still running after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.005)


def finish(child: int) -> None:
    """Wait for a child process that must succeed."""
    code = wait(child, TIMEOUT)
    if code is None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if code != 0:
        raise SystemExit(f"a run that nobody killed ended with {code}")


def kill_somewhere(case: str, folder: Path, device: str, steps: int, seconds: float, rng: random.Random) -> str:
    """Start the run and kill it inside a save or at a random time; return where, or "" if it finished first."""
    phase = ""
    if rng.random() < 0.5:
        phase = f"{rng.choice(faults.SAVE_PHASES)}:{rng.randint(1, 4)}"
        if phase.startswith("save.replay") and not case.startswith("dqn"):  # other cases have no such file
            phase = phase.replace("replay", "envs")
    child = start(case, folder, device, steps, f"kill@{phase}" if phase else "")
    code = wait(child, TIMEOUT if phase else rng.uniform(0.05, 1.0) * seconds)
    if code is None:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        phase = phase or "time"
    if code not in (0, -signal.SIGKILL):
        raise SystemExit(f"a run of {case} ended with {code} instead of being killed")
    return phase if code else ""


def newest(folder: Path) -> Checkpoint:
    checkpoint = Checkpoints(folder).load()
    assert checkpoint
    return checkpoint


def difference(one: Checkpoint, other: Checkpoint) -> str:
    """Return the first difference between two checkpoints, or an empty string."""
    if one.step != other.step:
        return f"step {one.step} and {other.step}"
    for group in sorted({*one.tensors, *other.tensors}):
        here, there = one.tensors.get(group, {}), other.tensors.get(group, {})
        if here.keys() != there.keys():
            return f"the tensors of {group}"
        for name, tensor in here.items():
            if name != "histories" and not torch.equal(tensor, there[name]):
                return f"{group}.{name}"
    return ""


def measure(case: str, runs: int, device: str, steps: int, seed: int) -> dict[str, Any]:
    """Kill and resume `runs` runs of a case; return how many ended like the uninterrupted one."""
    torch.set_num_threads(1)  # a forked child does not have its parent's threads and would wait for them forever
    rng = random.Random(f"{case}{seed}")
    row: dict[str, Any] = {"case": case, "runs": runs, "equal": 0, "kills": 0, "kills_in_saves": 0, "differences": []}
    with tempfile.TemporaryDirectory(prefix="kills-") as root:
        straight = Path(root) / "straight"
        began = time.monotonic()
        finish(start(case, straight, device, steps))
        seconds = row["seconds_straight"] = time.monotonic() - began
        expected = newest(straight)
        for number in range(runs):
            folder = Path(root) / f"run-{number}"
            kills = 0
            while kills < MAX_KILLS and (not kills or rng.random() < 1 / 3):
                where = kill_somewhere(case, folder, device, steps, seconds, rng)
                if not where:  # it finished first
                    if kills:
                        break
                    shutil.rmtree(folder)
                    continue
                kills += 1
                row["kills_in_saves"] += where != "time"
            finish(start(case, folder, device, steps))
            differs = difference(newest(folder), expected)
            row["kills"] += kills
            row["equal"] += not differs
            row["differences"] += [f"run {number}: {differs}"] if differs else []
            shutil.rmtree(folder)
    return row


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'case':16} {'equal':>10} {'kills':>6} {'in saves':>9}"]
    for row in rows:
        equal = f"{row['equal']} of {row['runs']}"
        lines.append(f"{row['case']:16} {equal:>10} {row['kills']:>6} {row['kills_in_saves']:>9}")
        lines += [f"  {text}" for text in row["differences"]]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cases", default=",".join(DEFAULT), help=f"of {', '.join(CASES)}")
    parser.add_argument("--runs", type=int, default=20, help="of each case")
    parser.add_argument("--steps", type=int, default=30_000, help="environment steps of a run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    for case in arguments.cases.split(","):
        rows.append(measure(case, arguments.runs, arguments.device, arguments.steps, arguments.seed))
        print(table(rows), flush=True)
        if arguments.out:  # describe the machine last: no process may be forked after CUDA is used
            write_json(arguments.out, {"rows": rows})
    if arguments.out:
        write_json(arguments.out, describe_machine(arguments.device) | {"rows": rows})
    sys.exit(any(row["equal"] < row["runs"] for row in rows))


if __name__ == "__main__":
    main()
