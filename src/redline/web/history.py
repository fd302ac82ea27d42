"""The history of a run, for its curves: read from metrics.jsonl as it grows, with a bounded number of points."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from pathlib import Path
from typing import Any

from redline.run.run_folder import METRICS

MAX_POINTS = 480  # per curve, an even number; at the limit, neighbours are merged in pairs
_CHUNK = 1 << 20  # bytes read at once
_MAX_LINE = 1 << 16
CHARTS = (  # series -> title and unit; `score` is called by the name of the game's score
    ("score", "Score", ""),
    ("win_rate", "Games won", "share"),
    ("loss", "Loss", ""),
    ("env_steps_per_second", "Environment steps per second", "count"),
    ("samples_per_second", "Gradient samples per second", "count"),
    ("gpu_percent", "GPU use", "percent"),
    ("cpu_percent", "CPU use, 100 % for each core", "percent"),
    ("memory_gb", "Memory", "GB"),
    ("queue", "Fill of the actors' queues", "share"),
    ("learner_wait", "Learner waiting for actors", "share"),
)
SERIES = tuple(name for name, _, _ in CHARTS)
Point = list[float | None]  # environment steps, seconds, then a value for each of SERIES


class History:
    """Points of all series. `revision` changes when existing points were merged or dropped."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.revision, self.stride = 0, 1
        self._pending: list[Point] = []

    def add(self, record: dict[str, Any]) -> None:
        """Add a log record; each point is the mean of `stride` records."""
        steps, seconds = _number(record.get("env_steps")), _number(record.get("seconds"))
        if steps is None or seconds is None:
            return
        self._pending.append([steps, seconds, *(_number(record.get(name)) for name in SERIES)])
        if len(self._pending) >= self.stride:
            self.points.append(_merge(self._pending))
            self._pending = []
        if len(self.points) >= MAX_POINTS:
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [_merge([first, second]) for first, second in pairs]
            self.stride *= 2
            self.revision += 1

    def clear(self) -> None:
        self.points, self._pending, self.stride = [], [], 1
        self.revision += 1


def _number(value: Any) -> float | None:
    """Return a finite number with six digits; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _merge(points: list[Point]) -> Point:
    """Return the mean of points, at the last one's steps and seconds."""
    means = []
    for values in list(zip(*points, strict=True))[2:]:
        known = [value for value in values if value is not None]
        means.append(_number(sum(known) / len(known)) if known else None)
    return [points[-1][0], points[-1][1], *means]


class MetricsReader:
    """Follow a run folder's metrics.jsonl, starting over if training rewrites it."""

    def __init__(self, run_dir: Path) -> None:
        self.path, self.history = run_dir / METRICS, History()
        self.last: dict[str, Any] = {}  # the newest record
        self.modified = 0.0
        self._file: tuple[int, int] | None = None  # device and inode
        self._offset, self._rest = 0, b""

    def read(self) -> bool:
        """Read at most one chunk of new data; return whether there may be more."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno == errno.ENOENT and self._file:
                self._restart(None)
            return False
        with open(descriptor, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                return False
            self.modified = status.st_mtime
            identity = status.st_dev, status.st_ino
            if identity != self._file or status.st_size < self._offset:
                self._restart(identity)
            file.seek(self._offset)
            chunk = file.read(_CHUNK)
        self._offset += len(chunk)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        self._rest = self._rest[-_MAX_LINE:]
        for line in lines:
            self._take(line)
        return len(chunk) == _CHUNK

    def _restart(self, identity: tuple[int, int] | None) -> None:
        if self._file:
            self.history.clear()
        self._file, self._offset, self._rest, self.last = identity, 0, b"", {}

    def _take(self, line: bytes) -> None:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # garbled by a crash
            return
        if isinstance(record, dict):
            self.last = record
            self.history.add(record)
