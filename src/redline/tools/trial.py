"""Trials: measure short trainings with given settings, run like the training loop, in this process or another.

Run as a module, it serves one trial over standard input and output, as lines of JSON: the parent's process id and settings,
then seconds to measure.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from redline.collect.child_process import die_with_parent, ignore_interrupts
from redline.core.errors import UserError
from redline.engine import fast
from redline.run.budget import next_chunk
from redline.run.plan import Plan
from redline.run.resolve import resolve
from redline.run.session import Session
from redline.run.settings import Settings

# Iterations with an update before the clock starts: one for lazy allocations, more for warm-up and capture of graphs.
_WARM_UPDATES, _WARM_UPDATES_GRAPH = 1, 5
_PATIENCE = 300.0  # seconds within which the clock must start


class Rate(NamedTuple):
    """Throughput of a trial in one measurement."""

    env_steps: float  # per second
    samples: float  # gradient samples per second
    skipped: int = 0  # updates skipped so far, because a gradient was not finite


def warm_updates(plan: Plan) -> int:
    """Return the number of iterations with an update before the clock starts."""
    return _WARM_UPDATES_GRAPH if plan.graph else _WARM_UPDATES


class Trial:
    """A warmed-up session with given settings. The run's files go to a temporary folder."""

    def __init__(self, settings: Settings, patience: float = _PATIENCE) -> None:
        """Build the session and run it until everything is compiled and captured.

        Raise UserError if settings are refused, or if this takes longer than `patience` seconds.
        """
        started = time.perf_counter()
        self._folder = tempfile.TemporaryDirectory(prefix="redline-trial-")
        self.messages: list[str] = []  # such as a fallback to eager mode
        self._own_threads = torch.get_num_threads()
        try:
            self.plan: Plan = resolve(dataclasses.replace(settings, run_dir=self._folder.name, resume="never"))
            self.session = Session(self.plan, self.messages.append)
        except BaseException:
            self._folder.cleanup()
            raise
        try:
            self._warm_up(started + patience)
        except BaseException:
            self.close()
            raise
        self._chunk = 1
        self.preparation = time.perf_counter() - started  # seconds

    def _warm_up(self, ends: float) -> None:
        learned, needed = 0, warm_updates(self.plan)
        while learned < needed:
            before, began = self.session.updates, time.perf_counter()
            self.session.iterate(1)
            learned += self.session.updates > before
            if time.perf_counter() > ends:
                raise UserError("it was not ready in time")
        self._read()
        self.iteration_seconds = time.perf_counter() - began  # of the last

    def _read(self) -> int:
        """Read metrics as at a log point, waiting for the device; return the number of skipped updates."""
        metrics = self.session.read_metrics(max(self.session.updates, 1))
        self.session.collector.episode_stats.read()
        self.session.synchronize()
        return int(metrics.get("skipped_updates", 0))

    def measure(self, seconds: float) -> Rate:
        """Train for about `seconds`, with log points as in training."""
        session, plan = self.session, self.plan
        self._apply_switches()
        started, steps, samples = time.perf_counter(), session.env_steps, session.samples_trained
        while True:
            chunk_started = time.perf_counter()
            session.iterate(self._chunk)
            skipped = self._read()
            now = time.perf_counter()
            chunk, left = (
                next_chunk(self._chunk, now - chunk_started, plan.settings.log_seconds),
                started + seconds - now,
            )
            if left <= 0:
                elapsed = now - started
                return Rate(
                    (session.env_steps - steps) / elapsed, (session.samples_trained - samples) / elapsed, skipped
                )
            self._chunk = max(1, min(chunk, round(self._chunk * left / (now - chunk_started))))

    def _apply_switches(self) -> None:
        """Set the process-wide switches: another trial may have changed them."""
        plan = self.plan
        if plan.threads and not plan.actors:
            torch.set_num_threads(plan.threads)
        fast.set_gpu_switches(plan.device, plan.precision, plan.settings.cudnn_benchmark)

    def close(self) -> None:
        """Release processes, memory and files."""
        self.session.close()
        torch.set_num_threads(self._own_threads)
        device = self.plan.device
        del self.session
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        self._folder.cleanup()


@dataclass
class ChildTrial:
    """A trial in a separate process, for switches that can be set only once per process and work that may take too long."""

    settings: Settings

    def __post_init__(self) -> None:
        self.messages: list[str] = []
        command = [sys.executable, "-m", __name__]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._send({"parent": os.getpid(), "settings": dataclasses.asdict(self.settings)})

    def _send(self, record: Any) -> None:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(record) + "\n")
        self._process.stdin.flush()

    def _receive(self, timeout: float) -> Any:
        """Return the next record; raise UserError if the process failed or took longer than `timeout`."""
        assert self._process.stdout
        ready, _, _ = select.select([self._process.stdout], [], [], max(timeout, 0.0))
        line = self._process.stdout.readline() if ready else ""
        if not line:
            reason = "its process ended" if ready else "it was not ready in time"
            raise UserError(f"not measured: {reason}")
        record = json.loads(line)
        if "error" in record:
            raise UserError(record["error"])
        return record

    def wait_ready(self, timeout: float) -> float:
        """Wait until the trial is warmed up; return the seconds that its preparation took."""
        record = self._receive(timeout)
        self.messages += record["messages"]
        return float(record["preparation"])

    def measure(self, seconds: float, timeout: float = 120.0) -> Rate:
        """Train for about `seconds`."""
        self._send(seconds)
        return Rate(**self._receive(timeout))

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def why_not(error: Exception) -> str:
    """Return why a trial could not be measured, as one line: refused settings, out of memory, or a failure."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    return str(error) if isinstance(error, UserError) else fast.first_line(error)


def _serve() -> None:
    """Serve a ChildTrial."""
    out, sys.stdout = sys.stdout, sys.stderr  # nothing else may write between the records

    def reply(record: dict[str, Any]) -> None:
        print(json.dumps(record), file=out, flush=True)

    job = json.loads(sys.stdin.readline())
    ignore_interrupts()
    die_with_parent(job["parent"])
    try:
        trial = Trial(Settings(**job["settings"]))
        reply({"messages": trial.messages, "preparation": trial.preparation})
        for line in sys.stdin:
            reply(trial.measure(float(line))._asdict())
        trial.close()
    except Exception as error:
        reply({"error": why_not(error)})


if __name__ == "__main__":
    _serve()
