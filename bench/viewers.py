"""Measure what viewers cost a run in training: throughput with four of them on its page, compared with none.

    python bench/viewers.py --out bench/results/viewers-h200.json [--seconds 8] [--pairs 8] [--env snake] [train options]

One run trains with --dashboard. Viewers connect and disconnect in turns, so that both cases see the same machine and the same
stage of training; each pair of neighbouring windows gives a ratio. Viewers read every message and draw nothing: a browser on
the same machine would itself use CPU time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import websockets.exceptions
import websockets.sync.client

from redline.tools.bench import describe_machine

VIEWERS = 4
SETTLE = 2.0  # seconds ignored after a change


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out")
    parser.add_argument("--env", default="snake")
    parser.add_argument("--seconds", type=float, default=8.0, help="length of a window")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--commit", help="named in the file where there is no repository")
    options, train_options = parser.parse_known_args()
    folder = tempfile.mkdtemp(prefix="redline-viewers-")
    try:
        result = measure(options, train_options, Path(folder) / "run")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.out:
        Path(options.out).write_text(json.dumps(result, indent=1) + "\n")
    print(f"{options.env} on {result['device']}, {result['cores']} cores: {VIEWERS} viewers against none")
    for name in ("with", "without"):
        print(f"  {name:<8} {result[name]:>14,.0f} env-steps/s (median of {options.pairs} windows)")
    low, high = result["ratio_low"], result["ratio_high"]
    print(f"  ratio    {100 * result['ratio']:.1f} % (pairs: {100 * low:.1f} to {100 * high:.1f} %)")
    print(f"  frames   {result['frames_per_second']:.1f} per second and viewer")


def measure(options: argparse.Namespace, train_options: list[str], run: Path) -> dict[str, Any]:
    """Train while viewers come and go, and return the throughputs."""
    command = [sys.executable, "-m", "redline", "train", options.env, "--run-dir", str(run), "--dashboard"]
    command += ["--minutes", "60", "--eval-episodes", "0", *train_options]
    # A program stays the leader of its group: ending it ends nothing else.
    training = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        url = find_address(training)
        wait_for_updates(run, training)
        with Crowd(url):  # the player loads torch once, before anything is measured
            time.sleep(8.0)
        rates: dict[str, list[float]] = {"with": [], "without": []}
        frames = 0
        for pair in range(options.pairs):
            for case in ("with", "without") if pair % 2 else ("without", "with"):
                with Crowd(url) if case == "with" else contextlib.nullcontext() as crowd:
                    time.sleep(SETTLE)
                    before = crowd.frames if crowd else 0
                    rates[case].append(throughput(run, options.seconds))
                    frames += crowd.frames - before if crowd else 0
        config = json.loads((run / "config.json").read_text())
    finally:
        training.terminate()
        training.wait(60)
    machine = describe_machine(config["device"])
    machine["commit"] = options.commit or machine["commit"]
    ratios = [a / b for a, b in zip(rates["with"], rates["without"], strict=True)]
    return machine | {
        "env": options.env,
        "device": config["device"],
        "cores": len(os.sched_getaffinity(0)),
        "viewers": VIEWERS,
        "seconds": options.seconds,
        "with": statistics.median(rates["with"]),
        "without": statistics.median(rates["without"]),
        "ratio": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        "ratios": ratios,
        "frames_per_second": frames / (VIEWERS * options.pairs * options.seconds),
    }


def find_address(training: subprocess.Popen[str]) -> str:
    """Return the address printed by training; keep reading its messages afterwards, so that it never blocks."""
    assert training.stderr is not None
    for line in training.stderr:
        if match := re.search(r"Dashboard: (http://\S+)", line):
            threading.Thread(target=training.stderr.read, daemon=True).start()
            return match[1]
        print(line, end="", file=sys.stderr)
    raise SystemExit("training ended before there was a page")


def records(run: Path) -> list[dict[str, Any]]:
    with contextlib.suppress(OSError):
        return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]
    return []


def wait_for_updates(run: Path, training: subprocess.Popen[str]) -> None:
    """Wait until training has reached its usual speed: a few log points after the first update, when all is compiled."""
    while sum(bool(record["updates"]) for record in records(run)) < 5:
        if training.poll() is not None:
            raise SystemExit("training ended early")
        time.sleep(0.5)


def throughput(run: Path, seconds: float) -> float:
    """Return the environment steps per second of the log points written within the next `seconds`."""
    first = records(run)[-1]
    time.sleep(seconds)
    last = records(run)[-1]
    return float((last["env_steps"] - first["env_steps"]) / (last["seconds"] - first["seconds"]))


class Crowd:
    """Viewers that read all messages."""

    def __init__(self, url: str) -> None:
        address = url.replace("http://", "ws://") + "socket"
        self.frames = 0
        self.sockets = [websockets.sync.client.connect(address, max_size=None).__enter__() for _ in range(VIEWERS)]
        for socket in self.sockets:
            threading.Thread(target=self._read, args=(socket,), daemon=True).start()

    def _read(self, socket: websockets.sync.client.ClientConnection) -> None:
        with contextlib.suppress(websockets.exceptions.ConnectionClosed):
            for message in socket:
                self.frames += str(message).startswith('{"type":"frame"')

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *_: object) -> None:
        for socket in self.sockets:
            socket.close()


if __name__ == "__main__":
    main()
