"""Train for half an hour with a fault every 20 to 40 seconds: `python bench/soak.py [--minutes 30] [--out FILE.json]`.

Like a cluster's supervisor, it restarts `redline train` with the same words whenever it ends. Faults, in random order:

    kill       SIGKILL to the learner                      actor   SIGKILL to an actor process
    sigterm    SIGTERM, the notice of a preemption         hang    an environment never returns from a step
    disk_full  no file may grow for 8 seconds              nan     weights become NaN (twice), later a gradient
    corrupt    a byte of the newest checkpoint is flipped, then SIGKILL

A run has recovered from a fault once training has passed the step reached before it. Then a run without faults trains for
equally many steps, and both are evaluated. The report (Markdown on standard output, JSON in --out) gives faults injected and
recovered, steps lost, scores and the memory of the process. Exits with 1 unless the run recovered from every fault.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from redline.tools.bench import describe_machine

KINDS = ("kill", "sigterm", "disk_full", "corrupt", "actor", "nan", "hang")
ENDING = ("kill", "sigterm", "corrupt")  # faults that end the process
CHECKPOINT_SECONDS = 6.0
FULL_SECONDS = 8.0
ENV_TIMEOUT = 5.0
_MAX_EXITS = 5  # unexpected exits before the soak gives up
RECOVERY_SECONDS = 120.0  # limit for recovering from a fault


@dataclass
class Fault:
    """One injected fault and its outcome."""

    kind: str
    second: float  # of the soak
    at_step: int  # the last step logged before it
    resumed_step: int | None = None  # of the checkpoint from which the next process resumed
    recovery_seconds: float | None = None  # until training passed `at_step`; None: it never did
    exit_code: int | None = None  # of the process, if it ended
    last_words: str = ""  # of a process that ended with an error

    @property
    def lost_steps(self) -> int:
        return max(0, self.at_step - self.resumed_step) if self.resumed_step is not None else 0


@dataclass
class Soak:
    """The disturbed run: its folder, its process and all observations of it."""

    folder: Path
    words: list[str]
    rng: random.Random
    kinds: tuple[str, ...]
    every: tuple[float, float]
    started: float = field(default_factory=time.monotonic)
    faults: list[Fault] = field(default_factory=list)
    exits: list[int] = field(default_factory=list)  # of processes that no fault should have ended
    memory: list[tuple[float, int, float]] = field(default_factory=list)  # second, process, bytes
    starts: int = 0
    nans: int = 0
    first_step: int | None = None  # in the log when this process started
    last_exit: int = 0
    left: list[str] = field(default_factory=list)  # remaining kinds of this round

    # ---- the process

    def start(self) -> None:
        """Start training. Faults inside the process are triggered by a file with their name."""
        rules = {"hang": "hang@env.step", "nan_weights": "nan@weights", "nan_gradient": "nan@gradient"}
        faults = ",".join(f"{rule}:{self.folder / name}" for name, rule in rules.items())
        self.starts += 1
        self.log = (self.folder / f"process-{self.starts}.log").open("w")
        line = [sys.executable, "-m", "redline", *self.words]
        environment = os.environ | {"REDLINE_FAULT": faults}
        self.process = subprocess.Popen(line, stdout=self.log, stderr=subprocess.STDOUT, env=environment)
        self.born, self.first_step = time.monotonic(), None

    def _next_kind(self) -> str:
        """Return the next kind, in random order: each kind once before any repeats."""
        self.left = self.left or self.rng.sample(self.kinds, len(self.kinds))
        return self.left.pop()

    def records(self) -> list[dict[str, Any]]:
        """Return the run's last log records, the newest last."""
        try:
            lines = (self.folder / "run" / "metrics.jsonl").read_bytes().splitlines()[-4:]
        except OSError:
            return []
        records = []
        for line in lines:
            with contextlib.suppress(ValueError):  # a partially written line
                records.append(json.loads(line))
        return records

    def step(self) -> int:
        """Return the last logged step of the run."""
        return max((record["env_steps"] for record in self.records()), default=0)

    def watch(self) -> None:
        """Record memory and progress; restart the process if it has ended."""
        now = time.monotonic()
        code = self.process.poll()
        if code is not None:
            self.log.close()
            open_faults = [fault for fault in self.faults if fault.recovery_seconds is None]
            if open_faults and open_faults[-1].exit_code is None:
                open_faults[-1].exit_code = code
                lines = Path(self.log.name).read_text(errors="replace").splitlines()
                open_faults[-1].last_words = next((line for line in reversed(lines) if line.startswith("redline:")), "")
            else:
                self.exits.append(code)
                if len(self.exits) > _MAX_EXITS:
                    sys.exit(f"Training ends by itself:\n{Path(self.log.name).read_text()[-2000:]}")
            resumed = self._newest_good()
            for fault in open_faults:
                fault.resumed_step = resumed
            self.start()
            return
        try:
            process = psutil.Process(self.process.pid)
            if now - self.born > 10.0:
                self.memory.append((now - self.started, self.starts, process.memory_info().rss))
        except psutil.Error:
            return
        step = self.step()
        self.first_step = step if self.first_step is None else self.first_step
        for fault in self.faults:
            waited = now - self.started - fault.second
            if fault.recovery_seconds is None and step > fault.at_step and self._over(fault, waited):
                fault.recovery_seconds = waited

    def _over(self, fault: Fault, waited: float) -> bool:
        """Return whether the fault has taken effect, so that progress means recovery."""
        if fault.kind in ENDING:
            return fault.exit_code is not None
        if fault.kind == "hang":
            return waited > ENV_TIMEOUT and not (self.folder / "hang").exists()
        if fault.kind == "nan":  # no update was skipped recently
            skipped = [record.get("skipped_updates") for record in self.records()]
            return waited > 5.0 and not any(self.folder.glob("nan_*")) and len(set(skipped)) == 1 < len(skipped)
        return waited > {"disk_full": FULL_SECONDS, "actor": 3.0}.get(fault.kind, 0.0)

    def _checkpoints(self) -> list[Path]:
        return sorted((self.folder / "run" / "checkpoints").glob("ckpt-*"))

    def _newest_good(self) -> int:
        """Return the step of the newest checkpoint from which the run can resume; 0 if there is none."""
        steps = [int(path.name[5:17]) for path in self._checkpoints() if path.name not in self._damaged()]
        return max(steps, default=0)

    def _damaged(self) -> set[str]:
        path = self.folder / "damaged"
        return set(path.read_text().split()) if path.exists() else set()

    # ---- faults

    def run(self, seconds: float, least: int) -> None:
        """Train for `seconds`, and until at least `least` faults were injected."""
        self.start()
        due, kind = self.rng.uniform(*self.every), self._next_kind()
        while time.monotonic() - self.started < seconds or len(self.faults) < least:
            time.sleep(0.5)
            self.watch()
            if time.monotonic() - self.started >= due and self._ready(kind):
                self.inject(kind)
                due, kind = time.monotonic() - self.started + self.rng.uniform(*self.every), self._next_kind()
        self._settle()

    def _ready(self, kind: str) -> bool:
        """Return whether this process is training, so that a fault disturbs it, and has checkpoints to damage if needed."""
        trains = self.first_step is not None and self.step() > self.first_step
        return trains and (kind != "corrupt" or len(self._checkpoints()) > 1)

    def inject(self, kind: str) -> None:
        fault = Fault(kind, time.monotonic() - self.started, self.step())
        self.faults.append(fault)
        print(f"{fault.second:6.0f} s  {kind:<10} at step {fault.at_step:,}", file=sys.stderr, flush=True)
        match kind:
            case "kill":
                self.process.kill()
            case "sigterm":
                self.process.terminate()
            case "corrupt":
                self._flip_a_byte()
                self.process.kill()
            case "actor":
                actors = [
                    child for child in psutil.Process(self.process.pid).children() if "actor" in str(child.cmdline())
                ]
                if actors:
                    self.rng.choice(actors).kill()
            case "hang":
                (self.folder / "hang").touch()
            case "disk_full":
                _, hard = resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE)
                resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (4096, hard))
                until = time.monotonic() + FULL_SECONDS
                while time.monotonic() < until and self.process.poll() is None:
                    time.sleep(0.2)
                if self.process.poll() is None:
                    resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (hard, hard))
            case "nan":
                # A run rolls back at most three times, each time lowering the learning rate.
                self.nans += 1
                (self.folder / ("nan_weights" if self.nans <= 2 else "nan_gradient")).touch()

    def _flip_a_byte(self) -> None:
        newest = self._checkpoints()[-1]
        path = self.rng.choice(sorted(newest.glob("*.safetensors")))
        data = bytearray(path.read_bytes())
        data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
        path.write_bytes(data)
        with (self.folder / "damaged").open("a") as file:
            print(newest.name, file=file)

    def _settle(self) -> None:
        """Wait for the last recovery, then stop training with SIGTERM."""
        until = time.monotonic() + RECOVERY_SECONDS
        while any(fault.recovery_seconds is None for fault in self.faults) and time.monotonic() < until:
            time.sleep(0.5)
            self.watch()
        self.process.terminate()
        try:
            self.last_exit = self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.last_exit = self.process.wait()
        self.log.close()


def redline(words: list[str]) -> dict[str, Any]:
    """Run a Redline command that must succeed and return its JSON result."""
    line = [sys.executable, "-m", "redline", *words]
    done = subprocess.run(line, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"redline {words[0]} failed with {done.returncode}: {done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def command(folder: Path, arguments: argparse.Namespace, *budget: str) -> list[str]:
    """Return the words of the training command, with its run folder in `folder`."""
    words = [
        "train",
        "gym:CartPole-v1",
        "--algo",
        "ppo",
        "--device",
        "cpu",
        "--run-dir",
        str(folder / "run"),
    ]
    words += ["--actors", str(arguments.actors), "--num-envs", str(arguments.num_envs), "--eval-episodes", "0"]
    words += [
        "--env.timeout",
        str(ENV_TIMEOUT),
        "--env.restarts",
        "1000",
        "--checkpoint-minutes",
        f"{CHECKPOINT_SECONDS / 60:.3f}",
    ]
    return [*words, *budget]


def score(folder: Path) -> dict[str, Any]:
    """Return the evaluation of a run."""
    result = redline(["eval", str(folder / "run"), "--episodes", "128", "--device", "cpu", "--json"])
    return {name: result[name] for name in ("env_steps", "score_mean", "score_ci95", "score_min")}


def quiet_run(folder: Path, arguments: argparse.Namespace, steps: int) -> dict[str, Any]:
    """Train without faults for `steps` steps and return the evaluation."""
    folder.mkdir()
    redline(command(folder, arguments, "--steps", str(steps), "--json"))
    return score(folder)


def summary(soak: Soak) -> dict[str, Any]:
    """Return the figures of a soak."""
    kinds: dict[str, dict[str, Any]] = {}
    for kind in soak.kinds:
        those = [fault for fault in soak.faults if fault.kind == kind]
        times = [fault.recovery_seconds for fault in those if fault.recovery_seconds is not None]
        kinds[kind] = {
            "injected": len(those),
            "recovered": len(times),
            "lost_steps_max": max((fault.lost_steps for fault in those), default=0),
            "recovery_seconds_max": round(max(times, default=0.0), 1),
        }
    third = len(soak.memory) // 3
    early, late = ([size for _, _, size in part] for part in (soak.memory[:third], soak.memory[-third:]))
    return {
        "kinds": kinds,
        "injected": len(soak.faults),
        "recovered": sum(fault.recovery_seconds is not None for fault in soak.faults),
        "lost_steps_max": max((fault.lost_steps for fault in soak.faults), default=0),
        "steps": soak.step(),
        "starts": soak.starts,
        "unexpected_exits": soak.exits,
        "last_exit": soak.last_exit,
        "memory_first_third_mb": round(median(early) / 1e6, 1) if third else None,
        "memory_last_third_mb": round(median(late) / 1e6, 1) if third else None,
        "memory_max_mb": round(max((size for _, _, size in soak.memory), default=0) / 1e6, 1),
        "faults": [asdict(fault) | {"lost_steps": fault.lost_steps} for fault in soak.faults],
    }


def report(record: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    result = record["soak"]
    lines = [
        f"# Soak of {record['minutes']:g} minutes",
        "",
        f"{record['hardware']}, commit {record['commit']}, {record['date']}. {result['injected']} faults injected, "
        f"{result['recovered']} recovered; {result['starts']} processes, {result['steps']:,} steps; at most "
        f"{result['lost_steps_max']:,} steps lost (a checkpoint every {CHECKPOINT_SECONDS:g} s).",
        "",
        "| fault | injected | recovered | steps lost at most | seconds to recover at most |",
        "|---|---|---|---|---|",
    ]
    for kind, row in result["kinds"].items():
        lines.append(
            f"| {kind} | {row['injected']} | {row['recovered']} | {row['lost_steps_max']:,} | {row['recovery_seconds_max']} |"
        )
    lines += [
        "",
        f"Memory of the learner, median of the first and the last third: {result['memory_first_third_mb']} MB, "
        f"{result['memory_last_third_mb']} MB; at most {result['memory_max_mb']} MB.",
    ]
    if "score" in record:
        both = ((name, record[name]) for name in ("score", "quiet_score"))
        said = {name: f"{one['score_mean']:.1f} ± {one['score_ci95']:.1f}" for name, one in both}
        lines.append(f"Score with faults {said['score']}, without {said['quiet_score']}, after as many steps.")
    if result["unexpected_exits"]:
        lines.append(f"Processes that ended by themselves: exit codes {result['unexpected_exits']}.")
    return "\n".join(lines)


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, nargs=2, default=(20.0, 40.0), metavar=("LOW", "HIGH"), help="seconds")
    parser.add_argument("--least", type=int, default=1, help="inject at least so many faults, however long it takes")
    parser.add_argument("--kinds", default=",".join(KINDS), help="faults, separated by commas")
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-quiet", action="store_true", help="no run without faults to compare with")
    parser.add_argument("--out", default="")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    """Soak, report and return the exit code."""
    arguments = parse(words)
    kinds = tuple(arguments.kinds.split(","))
    if not set(kinds) <= set(KINDS):
        sys.exit(f"kinds is {arguments.kinds}; expected some of {', '.join(KINDS)}.")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        training = command(folder, arguments, "--minutes", "10000")
        soak = Soak(folder, training, random.Random(arguments.seed), kinds, tuple(arguments.every))
        soak.run(60 * arguments.minutes, arguments.least)
        record = describe_machine("cpu") | {"minutes": arguments.minutes, "soak": summary(soak)}
        if not arguments.no_quiet:
            record["score"] = score(folder)
            record["quiet_score"] = quiet_run(folder / "quiet", arguments, record["soak"]["steps"])
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(record, indent=1) + "\n")
    print(report(record))
    return 0 if record["soak"]["recovered"] == record["soak"]["injected"] > 0 else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    sys.exit(main())
