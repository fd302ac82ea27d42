"""Measure the page in a real browser: the time to the first game, and the memory used over an hour.

    python bench/page.py --out bench/results/page-cpu.json [--repeats 5] [--minutes 60]

The first frame is timed from the command `redline watch RUN` to the first game drawn on the wall, in a Chromium that is
already open. For memory, a run trains with --dashboard and one open tab; once a minute, the memory of the training process, the
page's server and the player process, and the tab's heap (after a garbage collection) are read.
"""

from __future__ import annotations

import argparse
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

import playwright.sync_api
import psutil

from redline.tools.bench import describe_machine

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ARGUMENTS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-sync"
DRAWN = "() => document.querySelector('.tile canvas[data-drawn]') !== null"  # a game on the wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out")
    parser.add_argument("--repeats", type=int, default=5, help="how often the first frame is timed")
    parser.add_argument("--minutes", type=float, default=60.0, help="how long a page stays open")
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two readings of the memory")
    options = parser.parse_args()
    result: dict[str, Any] = describe_machine("cpu")
    with tempfile.TemporaryDirectory(prefix="redline-page-") as folder, playwright.sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch_persistent_context(
            f"{folder}/profile", executable_path=BROWSER, headless=True, args=ARGUMENTS.split()
        )
        if options.repeats:
            run = train_for_a_moment(Path(folder) / "short")
            times = [first_frame(browser, run) for _ in range(options.repeats)]
            result |= {"first_frame_seconds": times, "first_frame": statistics.median(times)}
            print("first frame after " + ", ".join(f"{t:.2f}" for t in times) + " s", flush=True)
        if options.minutes:
            result |= memory_over_time(browser, Path(folder) / "long", options.minutes, options.every)
        browser.close()
    if options.out:
        Path(options.out).write_text(json.dumps(result, indent=1) + "\n")


def train_for_a_moment(run: Path) -> Path:
    words = ["--steps", "200k", "--no-compile", "--eval-episodes", "0", "--run-dir", str(run)]
    subprocess.run([sys.executable, "-m", "redline", "train", "snake", *words], check=True, capture_output=True)
    return run


def start(words: list[str]) -> tuple[subprocess.Popen[str], str]:
    """Start a command that serves a page; return the process and the printed address."""
    command = [sys.executable, "-u", "-m", "redline", *words]
    server = subprocess.Popen(command, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    for line in server.stdout:
        if match := re.search(r"(http://127\S+)", line):
            threading.Thread(target=server.stdout.read, daemon=True).start()
            return server, match[1]
    raise SystemExit("the command ended before there was a page")


def first_frame(browser: Any, run: Path) -> float:
    """Return the seconds from the command to the first game on the page."""
    before = time.perf_counter()
    server, url = start(["watch", str(run), "--port", "0"])
    page = browser.new_page()
    try:
        page.goto(url)
        while not page.evaluate(DRAWN):
            page.wait_for_timeout(10)
        return time.perf_counter() - before
    finally:
        page.close()
        server.terminate()
        server.wait(30)


def memory_over_time(browser: Any, run: Path, minutes: float, every: float) -> dict[str, Any]:
    """Train with an open page and return the memory of each process in MB, reading by reading."""
    words = ["--minutes", str(minutes + 5), "--eval-episodes", "0", "--run-dir", str(run)]
    training, url = start(["train", "snake", "--dashboard", *words])
    page = browser.new_page()
    page.goto(url)
    devtools = browser.new_cdp_session(page)
    devtools.send("Performance.enable")
    readings: list[dict[str, float]] = []
    began = time.monotonic()
    try:
        while time.monotonic() - began < 60 * minutes:
            page.wait_for_timeout(1000 * every)
            readings.append({"seconds": time.monotonic() - began} | memory(training.pid) | heap(devtools))
            print("  ".join(f"{name} {value:.1f}" for name, value in readings[-1].items()), flush=True)
    finally:
        page.close()
        training.terminate()
        training.wait(60)
    return {"minutes": minutes, "readings": readings, "cores": len(os.sched_getaffinity(0))}


def memory(pid: int) -> dict[str, float]:
    """Return the resident memory of training and its children in MB; children are named by the last word of their command."""
    parent = psutil.Process(pid)
    found = {"training_mb": parent.memory_info().rss / 1e6}
    for number, child in enumerate(sorted(parent.children(recursive=True), key=lambda child: child.create_time())):
        found[f"child_{number}_mb"] = child.memory_info().rss / 1e6
    return found


def heap(devtools: Any) -> dict[str, float]:
    """Return the tab's JavaScript heap in MB after a garbage collection, and its number of DOM nodes."""
    devtools.send("HeapProfiler.collectGarbage")
    metrics = {entry["name"]: entry["value"] for entry in devtools.send("Performance.getMetrics")["metrics"]}
    return {"heap_mb": metrics["JSHeapUsedSize"] / 1e6, "nodes": metrics["Nodes"]}


if __name__ == "__main__":
    main()
