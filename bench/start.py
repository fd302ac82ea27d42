"""Measure the seconds from the command `redline train` to the first gradient step, and to the first compiled one.

    python bench/start.py --out start.json
    python bench/start.py --compare ../before/src --out start.json        (beside another tree, in turns)

Cold starts have empty caches of the compiler and of measurements. The first cold start continues until it is compiled and
leaves its caches to the warm ones; later ones end at their first gradient step.
CPU seconds cover the process and its children: on a busy machine they are more meaningful than wall-clock time.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from redline.run.run_folder import to_stderr, write_json
from redline.tools.bench import describe_machine

WAIT = 900.0  # maximum seconds for one start
ROOT = Path(__file__).resolve().parents[1]


def updates(run_dir: Path) -> int:
    """Return the gradient steps of the newest log record; 0 if there is none."""
    try:
        return int(json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])["updates"])
    except (OSError, ValueError, IndexError):
        return 0


def processor_seconds(process: psutil.Process) -> float:
    """Return the CPU seconds of a process and its children, including ended ones."""
    total = 0.0
    for each in (process, *process.children(recursive=True)):
        try:
            times = each.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def start(source: Path, caches: Path, words: list[str], to_the_end: bool) -> dict[str, Any]:
    """Start a run and return its seconds to the first gradient step; with `to_the_end`, also those of its stages."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(source), os.environ.get("PYTHONPATH")))),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "XDG_CACHE_HOME": str(caches / "measurements"),
    }
    with tempfile.TemporaryDirectory() as folder:
        run_dir, log = Path(folder) / "run", Path(folder) / "log"
        command = [
            sys.executable,
            "-m",
            "redline",
            "train",
            *words,
            "--eval-episodes",
            "0",
            "--run-dir",
            str(run_dir),
            "--json",
        ]
        began = time.monotonic()
        with log.open("wb") as messages:
            process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=messages, text=True)
        try:
            while not updates(run_dir):
                if process.poll() is not None or time.monotonic() - began > WAIT:
                    raise SystemExit(f"{log.read_text()}\nThere was no gradient step.")
                time.sleep(0.02)
            record: dict[str, Any] = {"seconds": time.monotonic() - began}
            record["processor_seconds"] = processor_seconds(psutil.Process(process.pid))
            if not to_the_end:
                process.send_signal(signal.SIGTERM)
            result = json.loads(process.communicate(timeout=WAIT)[0].splitlines()[-1])
        finally:
            process.kill()
        if to_the_end:
            stages = record["stages"] = result.get("start_seconds", {})
            overlapped = stages.get("Compiling", 0.0) if "Preparing the first update" in stages else 0.0
            record["compiled_seconds"] = result["seconds_to_first_update"] + overlapped
        return record | {"device": result["device"], "algo": result["algo"]}


def measure(sources: dict[str, Path], repeats: int, words: list[str]) -> list[dict[str, Any]]:
    """Return a row for every tree, cold and warm; the trees take turns, so that other programs affect them equally."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        kept = {tree: Path(folder) / tree for tree in sources}
        for caches in ("cold", "warm"):
            starts: dict[str, list[dict[str, Any]]] = {tree: [] for tree in sources}
            for repeat in range(repeats):
                for tree, source in sources.items():
                    to_the_end = repeat == 0
                    with tempfile.TemporaryDirectory() as fresh:
                        place = kept[tree] if caches == "warm" or to_the_end else Path(fresh)
                        starts[tree].append(start(source, place, words, to_the_end))
                    to_stderr(f"{caches} {tree}: {starts[tree][-1]['seconds']:.1f} s")
            for tree, found in starts.items():
                row = {"tree": tree, "caches": caches} | found[0]
                for name in ("seconds", "processor_seconds"):
                    row[name] = statistics.median(each[name] for each in found)
                rows.append(row | {"repeats": [each["seconds"] for each in found]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="snake")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--compare", type=Path, help="src folder of another tree to measure beside this one")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("options", nargs="*", help="more options of `redline train`, after --")
    arguments = parser.parse_args()
    sources = {"this": ROOT / "src"} | ({"before": arguments.compare.resolve()} if arguments.compare else {})
    load = os.getloadavg()[0]
    rows = measure(sources, arguments.repeats, [arguments.env, "--minutes", "0.02", *arguments.options])
    record = describe_machine("auto") | {"load_average": [load, os.getloadavg()[0]], "env": arguments.env, "rows": rows}
    if arguments.out:
        write_json(arguments.out, record)
    print(f"{'tree':8} {'caches':6} {'first step, s':>14} {'processor, s':>13} {'compiled, s':>12}")
    for row in rows:
        print(
            f"{row['tree']:8} {row['caches']:6} {row['seconds']:14.1f} {row['processor_seconds']:13.1f} "
            f"{row['compiled_seconds']:12.1f}"
        )


if __name__ == "__main__":
    main()
