"""Measure how cost and memory grow with games, board, replay capacity, network width and actor processes.

    python bench/growth.py --out growth.json                      (all parts, on the GPU if there is one)
    python bench/growth.py --only games --only width --device cpu --out growth.json

Every point runs in a separate process. Processes compile in parallel (--jobs), then measure one after another while the others
wait. A point that fails or takes too long is recorded as failed. The file is written after every point; parts that are not
measured keep their rows in the file. bench/plot_growth.py draws the plots.

On a CPU, one thread works and time is the CPU time of the process, which other work on the machine hardly affects. Only actor
processes are measured in wall-clock time.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from redline import recipes, replay
from redline.core import random
from redline.core.records import leaves
from redline.engine import fast, hardware
from redline.envs import batch, make_rules
from redline.replay.contract import ReplayRequest
from redline.run.resolve import resolve
from redline.run.run_folder import to_stderr, write_json
from redline.run.session import Session
from redline.run.settings import Settings
from redline.tools.bench import EnvLoop, describe_machine, rates
from redline.tools.bench_collect import measure_envs, train
from redline.tools.bench_figures import Figure, shown, summarize
from redline.tools.bench_replay import ALPHA, Loop

Point = dict[str, Any]  # part, curve, x; measure: a name in MEASURES; and the inputs of that function
Result = dict[str, Any]  # speed: a Figure, per second; bytes_each: of a game or transition; and more
Measurement = Callable[[float], Result]  # total seconds to measure -> result

PARTS = ("games", "boards", "capacity", "width", "actors")
READY = "ready to measure"
REPEATS = 5
ROWS = 64  # of the replay memory, per game, in training
WARM_UP = 12  # iterations of training, for compilation, the first updates and capture
ACTOR_ENVS = 64  # environments of all actors together
BUSY = "gym:busy_env:Busy-v0"


# ---- the points


def points(part: str, on_gpu: bool) -> Iterator[Point]:
    """Yield the points of a part, fewer and smaller ones on a CPU."""
    if part == "games":
        for power in (0, 3, 6, 9, 12, 15, 18, 20, 22)[: None if on_gpu else 7]:
            yield _alone(part, "Snake alone", 2**power, "snake", {}, 2**power)
        for games in (64, 1024, 16384, 262144)[: None if on_gpu else 3]:
            yield _dqn(part, "Snake with DQN", games, {}, games, 256)
    elif part == "boards":
        games = 65536 if on_gpu else 4096
        for side in (6, 10, 16, 24, 32, 40) if on_gpu else (6, 10, 16, 40):
            yield _alone(part, "Snake alone", side * side, "snake", {"width": side, "height": side}, games)
        for side in (6, 16, 40) if on_gpu else ():
            yield _dqn(part, "Snake with DQN", side * side, {"width": side, "height": side}, 16384, 256)
        for height in (10, 20, 32) if on_gpu else ():
            yield _alone(part, "Tetris alone", 10 * height, "tetris", {"height": height}, games)
    elif part == "capacity":
        for curve, prioritized in (("uniform", False), ("by priority, priorities updated", True)):
            for capacity in (10**5, 10**6, 10**7, 10**8, 5 * 10**8)[: None if on_gpu else 3]:
                point = {"part": part, "curve": curve, "x": capacity, "measure": "replay"}
                yield point | {"size": 65536 if on_gpu else 4096, "prioritized": prioritized}
    elif part == "width":
        for width in (64, 256, 1024, 4096)[: None if on_gpu else 3]:
            yield _dqn(part, "Snake with DQN", width, {}, 16384 if on_gpu else 1024, width)
    elif part == "actors":
        for curve, env in (("CartPole", "gym:CartPole-v1"), ("1 ms a step", BUSY)):
            for actors in (1, 2, 4, 8, 16)[: None if on_gpu else 3]:
                yield {"part": part, "curve": curve, "x": actors, "measure": "actors", "env": env}


def _alone(part: str, curve: str, x: int, env: str, options: dict[str, int], games: int) -> Point:
    return {"part": part, "curve": curve, "x": x, "measure": "alone", "env": env, "options": options, "games": games}


def _dqn(part: str, curve: str, x: int, options: dict[str, int], games: int, width: int) -> Point:
    point = {"part": part, "curve": curve, "x": x, "measure": "dqn", "options": options, "games": games}
    return point | {"width": width}


# ---- measuring, in one process per point: each function prepares everything and returns the function that measures


def alone(point: Point, device: torch.device, compiles: bool) -> Measurement:
    """Return the measurement of games with random actions: steps per second."""
    rules, games = make_rules(point["env"], point["options"]), point["games"]
    compiler = fast.Compiler(compiles, _refuse, device, recipes.compiler_options(rules.game))
    loop = EnvLoop(rules, games, device, compiler, graph=device.type == "cuda")
    rates(loop.call, 0.0, device, 1)
    held = sum(x.nbytes for x in leaves(loop.envs).values()) + loop.obs.nbytes
    return lambda seconds: _per_game(_figure(loop.call, games, seconds, device), games, held)


def dqn(point: Point, device: torch.device, compiles: bool) -> Measurement:
    """Return the measurement of DQN with one gradient sample per step: environment steps per second."""
    games, width = point["games"], point["width"]
    options = {"net": "mlp", "hidden": (width, width), "n_step": 1, "learning_starts": 0, "batch_size": games}
    settings = Settings(
        env="snake",
        algo="dqn",
        num_envs=games,
        device=str(device),
        compile=compiles,
        threads=1,
        curriculum=False,
        env_options={"view": "planes"} | point["options"],
        algo_options=options | {"replay_capacity": ROWS * games},
    )
    session = Session(resolve(settings), _refuse)
    for _ in range(WARM_UP):
        session.iterate(1)
    session.synchronize()
    weights = sum(p.numel() for p in session.learner.acting_network.parameters())

    def measure(seconds: float) -> Result:
        speed = _figure(lambda: session.iterate(1), session.steps_per_iteration, seconds, device)
        return _per_game(speed, games, None) | {"weights": weights}

    return measure


def _per_game(speed: Figure, games: int, held: int | None) -> Result:
    """Return a result with bytes per game: those held between steps and, on a GPU, the peak allocated."""
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None
    return {
        "speed": speed,
        "bytes_each": held and held / games,
        "peak_bytes": peak,
        "peak_bytes_each": peak and peak / games,
    }


def replay_memory(point: Point, device: torch.device, compiles: bool) -> Measurement:
    """Return the measurement of a full memory of Snake 6x6: transitions sampled and written per second."""
    capacity, size = point["x"], point["size"]
    rules = make_rules("snake", {"width": 6, "height": 6})
    num_envs = min(size, capacity // 16)
    request = ReplayRequest(
        rules=rules,
        state=batch.reset(rules, batch.env_keys(0, torch.arange(num_envs, device=device))).game,
        capacity=capacity,
        n_step=1,
        gamma=0.99,
        alpha=ALPHA if point["prioritized"] else None,
        key=random.seed_key(2, device),
        batch_size=size,
        notify=_refuse,
    )
    compiler = fast.Compiler(compiles, _refuse, device, recipes.compiler_options(rules.game))
    memory = replay.load("device").make(request)
    on_gpu = device.type == "cuda"
    loop = Loop(memory, request, compiler, graph=on_gpu)  # fills the memory
    write = fast.Graph(compiler(loop.write), on_gpu, _refuse)
    for call in (loop.call, write):
        rates(call, 0.0, device, 1)

    def measure(seconds: float) -> Result:
        sampled = _figure(loop.call, size, seconds, device)
        written = _figure(write, num_envs, seconds, device)
        held = sum(x.nbytes for x in memory.tensors().values())
        return {"speed": sampled, "written": written, "bytes_each": held / capacity, "rows_of": num_envs}

    return measure


def actors(point: Point, device: torch.device, compiles: bool) -> Measurement:
    """Return the measurement of PPO fed by actor processes: steps per second, and those of the environments alone.

    By construction, the busy environment alone takes one step per millisecond and process.
    """
    del compiles  # a small network: compilation would take longer than the measurement
    steps = 16 if point["env"] == BUSY else 128
    settings = Settings(
        env=point["env"],
        algo="ppo",
        num_envs=ACTOR_ENVS,
        actors=point["x"],
        inference="actors",
        device=str(device),
        compile=False,
        backplay=0.0,
        # One gradient step per rollout of about a second or less, to measure collection rather than the learner.
        algo_options={"rollout_steps": steps, "batch_size": steps * ACTOR_ENVS, "epochs": 1},
    )

    def measure(seconds: float) -> Result:
        trained = {"speed": train(settings, 2 * seconds, REPEATS)["frames"]}
        if point["env"] == BUSY:
            return trained
        return trained | {
            "envs_alone": measure_envs(resolve(settings), point["x"], seconds, REPEATS, preprocessed=False)
        }

    return measure


MEASURES: dict[str, Callable[[Point, torch.device, bool], Measurement]] = {
    "alone": alone,
    "dqn": dqn,
    "replay": replay_memory,
    "actors": actors,
}


def _figure(call: Callable[[], None], each: int, seconds: float, device: torch.device) -> Figure:
    """Return the speed of a call that processes `each` items; on a CPU, in seconds of its only thread."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    return summarize([each * calls for calls in rates(call, seconds, device, REPEATS, warm_up=2, clock=clock)])


def _refuse(message: str) -> None:
    """Exit with `message`: a point that fell back to another execution mode does not belong to its curve."""
    raise SystemExit(message)


def work(arguments: argparse.Namespace) -> None:
    """Prepare one point, print READY, wait until standard input is closed, measure, and print the result as JSON."""
    point = json.loads(arguments.point)
    torch.set_num_threads(1)
    measure = MEASURES[point["measure"]](point, torch.device(arguments.device), not arguments.eager)
    print(f"\n{READY}", flush=True)
    sys.stdin.read()
    print("\n" + json.dumps(measure(arguments.seconds)), flush=True)


# ---- running the points


class Worker:
    """The process of one point."""

    def __init__(self, point: Point, arguments: argparse.Namespace) -> None:
        self.point, self.began, self.limit = point, time.perf_counter(), arguments.limit
        self.messages = tempfile.TemporaryFile("w+")  # noqa: SIM115
        options = [f"--device={arguments.device}", f"--seconds={arguments.seconds}", *["--eager"] * arguments.eager]
        threads = {} if arguments.jobs == 1 else {"TORCHINDUCTOR_COMPILE_THREADS": "2"}  # there are enough processes
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--point", json.dumps(point), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.messages,
            text=True,
            env=os.environ | threads,
        )

    def prepare(self) -> None:
        """Wait until the process is ready to measure, or has failed."""
        self._read(READY)
        self.prepared = time.perf_counter() - self.began

    def measure(self) -> Result:
        """Let the process measure and return its result, or its error."""
        assert self.process.stdin
        self.process.stdin.close()
        lines, code = self._read(), self.process.wait()
        self.messages.seek(0)
        errors = self.messages.read().strip().splitlines()
        self.messages.close()
        if code == 0:
            return {"prepared_seconds": round(self.prepared, 1)} | dict(json.loads(lines[-1]))
        return {
            "error": "took too long" if code == -signal.SIGKILL else errors[-1][:300] if errors else f"exit code {code}"
        }

    def _read(self, last: str | None = None) -> list[str]:
        """Return the lines that the process prints up to `last` or its end; kill it if that takes too long."""
        assert self.process.stdout
        timer = threading.Timer(self.limit, self.process.kill)
        timer.start()
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if line.strip() == last:
                break
        timer.cancel()
        return lines


def run(chosen: list[Point], arguments: argparse.Namespace) -> Iterator[Point]:
    """Yield each point with its result: --jobs points are prepared at a time, those with actors one at a time."""
    waiting = sorted(chosen, key=lambda point: point["measure"] == "actors")
    while waiting:
        size = 1 if waiting[0]["measure"] == "actors" else arguments.jobs
        wave, waiting = waiting[:size], waiting[size:]
        workers = [Worker(point, arguments) for point in wave]
        try:
            with ThreadPoolExecutor(len(workers)) as pool:
                list(pool.map(Worker.prepare, workers))
            for worker in workers:
                yield worker.point | worker.measure()
        finally:
            for worker in workers:
                worker.process.kill()


def show(rows: list[Point]) -> None:
    """Print the table."""
    print(f"{'part':9} {'curve':32} {'x':>12} {'per second':>16} {'bytes each':>11} {'peak each':>11}  beside")
    for row in rows:
        start = f"{row['part']:9} {row['curve']:32} {row['x']:12,}"
        if "error" in row:
            print(f"{start}  failed: {row['error'][:90]}")
            continue
        sizes = (row.get("bytes_each"), row.get("peak_bytes_each"))
        each = " ".join(f"{size:11,.0f}" if size else f"{'-':>11}" for size in sizes)
        beside = "".join(f"  {name} {shown(row[name])}" for name in ("written", "envs_alone") if name in row)
        print(f"{start} {shown(row['speed']):>16} {each}{beside}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, action="append", help="a part to measure; more than once for more")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=0.75, help=f"of each measurement, in {REPEATS} repeats")
    parser.add_argument("--jobs", type=int, help="points that compile side by side; on a CPU 1")
    parser.add_argument("--limit", type=float, help="seconds a point may take to prepare; on a GPU 120, on a CPU 600")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--point", help="measure one point, as JSON, in this process")
    arguments = parser.parse_args()
    arguments.device = str(hardware.pick_device(arguments.device))
    if arguments.point:
        work(arguments)
        return
    on_gpu = arguments.device != "cpu"
    arguments.jobs = arguments.jobs or (max(1, len(os.sched_getaffinity(0)) - 1) if on_gpu else 1)
    arguments.limit = arguments.limit or (120.0 if on_gpu else 600.0)
    parts = arguments.only or PARTS
    began, rows = time.perf_counter(), list[Point]()
    if arguments.out and arguments.out.exists():
        rows = [row for row in json.loads(arguments.out.read_text())["rows"] if row["part"] not in parts]
    record = describe_machine(arguments.device) | {"load_average": os.getloadavg()[0], "seconds": arguments.seconds}
    for row in run([point for part in parts for point in points(part, on_gpu)], arguments):
        rows.append(row | {"commit": record["commit"]})  # the file's existing rows may have another commit
        to_stderr(f"{time.perf_counter() - began:5.0f} s  {row['part']} {row['curve']} {row['x']:,}")
        if arguments.out:
            write_json(arguments.out, record | {"rows": rows})
    show(rows)


if __name__ == "__main__":
    main()
