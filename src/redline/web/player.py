"""The player: a process that plays games for viewers and writes one message per line to standard output.

It reads commands from standard input, one JSON object per line, and ends when that closes. It stays within its granted share of
the CPU, pauses while there are no viewers, and waits if its messages are not read.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

Send = Callable[[dict[str, Any]], None]

REFRESH_SECONDS = 4.0  # between two checks for newer weights
_LONGEST_PAUSE = 1.0  # maximum seconds between two frames, however small the CPU share
MAX_SPEED = 60.0  # steps per second


class Throttle:
    """Keep a loop at its pace, and its CPU time below a share of one core."""

    def __init__(self) -> None:
        self.share = 1.0
        self._used, self._due = time.process_time(), time.monotonic()

    def pause(self, interval: float) -> float:
        """Return the seconds to wait so that `interval` passes between two calls, or longer if the share is used up."""
        now, used = time.monotonic(), time.process_time()
        rest = max(interval, min((used - self._used) / max(self.share, 1e-3), _LONGEST_PAUSE))
        self._used, self._due = used, max(self._due + rest, now)
        return self._due - now


class Commands:
    """Commands from a stream, read by a thread. The process ends when the stream closes."""

    def __init__(self, stream: TextIO) -> None:
        self._queue: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(stream,), daemon=True).start()

    def _read(self, stream: TextIO) -> None:
        for line in stream:
            with contextlib.suppress(ValueError):
                self._queue.put(json.loads(line))
        os._exit(0)

    def wait(self, seconds: float) -> list[dict[str, Any]]:
        """Return the commands that arrive within `seconds`; return immediately if there are any."""
        commands = []
        with contextlib.suppress(queue.Empty):
            commands.append(self._queue.get(timeout=max(seconds, 0.001)))
            while True:
                commands.append(self._queue.get_nowait())
        return commands


class WatchedRun:
    """One run on the wall: its games and its newest published weights."""

    def __init__(self, number: int, path: Path, games: int, trust: bool, seed: int) -> None:
        self.number, self.path, self.games, self.trust, self.seed = number, path, games, trust, seed
        self.wall: Any = None
        self.problem = ""
        self._version: tuple[str, float] = ("", 0.0)
        self._look_at = 0.0

    def refresh(self, send: Send) -> None:
        """Load newer weights if a check is due; send a note if the run cannot be shown."""
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + REFRESH_SECONDS
        from redline.core.errors import UserError
        from redline.web.wall import make_wall

        try:
            if not (self.path / "config.json").exists():
                raise UserError("The run is starting.")
            if (agent := self._newest()) is None:
                return
            if self.wall is None:
                self.wall = make_wall(agent, self.games, self.seed)
                send({"type": "stage", "run": self.number, **self.wall.stage()})
            self.wall.agent = agent
            self.problem = ""
            send({"type": "weights", "run": self.number, "env_steps": agent.env_steps})
        except UserError as error:
            if str(error) != self.problem:
                self.problem = str(error)
                send({"type": "problem", "run": self.number, "text": self.problem})

    def _newest(self) -> Any:
        """Return the agent with the newest weights; None if they are already loaded."""
        from redline.run import live_weights
        from redline.run.agent import build_agent, load_agent, open_run

        checkpoints = sorted((self.path / "checkpoints").glob("ckpt-*/manifest.json"))
        saved_at = max((path.stat().st_mtime for path in checkpoints), default=0.0)
        live_at = live_weights.published_at(self.path)
        version = ("live", live_at) if live_at > saved_at else ("checkpoint", saved_at)
        if version == self._version and self.wall:
            return None
        agent = None
        if version[0] == "live":
            with contextlib.suppress(OSError, ValueError):  # damaged: use the checkpoint
                config, rules = open_run(self.path, self.trust)
                import torch

                agent = build_agent(self.path, config, rules, *live_weights.read(self.path), torch.device("cpu"))
        agent = agent or load_agent(self.path, "cpu", self.trust)
        self._version = version
        return agent

    def send_frame(self, send: Send) -> None:
        send({"type": "frame", "run": self.number, "games": self.wall.frame()})


class Watching:
    """Play the walls of several runs at the same pace."""

    def __init__(self, runs: list[WatchedRun], send: Send) -> None:
        self.runs, self.send = runs, send
        self.viewers, self.paused, self.steps, self.speed = 0, False, 0, 8.0
        self.throttle = Throttle()

    def obey(self, command: dict[str, Any]) -> None:
        """Handle a command: number of viewers, share of the CPU, pause, speed, or a single step."""
        do, value = command.get("do"), command.get("value")
        if do == "viewers":
            self.viewers = int(value or 0)
        elif do == "share":
            self.throttle.share = float(value or 0)
        elif do == "pause":
            self.paused = bool(value)
        elif do == "step":
            self.steps, self.paused = min(self.steps + 1, 60), True
        elif do == "speed":
            self.speed = min(max(float(value or 1), 0.2), MAX_SPEED)

    def run(self, commands: Commands) -> None:
        """Play until the command stream ends."""
        for run in self.runs:  # the first frame of each, before there are viewers
            run.refresh(self.send)
            if run.wall:
                run.send_frame(self.send)
        wait = 0.0
        while True:
            for command in commands.wait(wait):
                self.obey(command)
            if not self.viewers or (self.paused and not self.steps):
                wait = 0.5
                continue
            self.steps = max(self.steps - 1, 0)
            for run in self.runs:
                run.refresh(self.send)
                if run.wall:
                    run.wall.step()
                    run.send_frame(self.send)
            wait = self.throttle.pause(1 / self.speed)


def lower_priority() -> None:
    """Give this process the lowest CPU priority."""
    with contextlib.suppress(OSError, AttributeError):
        os.nice(19)


def message_stream() -> TextIO:
    """Return standard output, reserved for messages; anything libraries print goes to standard error from now on."""
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return stream


def main() -> None:
    """Play the job described by the first argument, a JSON object."""
    job = json.loads(sys.argv[1])
    out = message_stream()

    def send(message: dict[str, Any]) -> None:
        out.write(json.dumps(message, separators=(",", ":")) + "\n")
        out.flush()

    commands = Commands(sys.stdin)
    import torch

    torch.set_num_threads(1)
    if job["kind"] == "watch":
        lower_priority()
        runs = [
            WatchedRun(number, Path(path), job["games"], job["trust"], job["seed"])
            for number, path in enumerate(job["runs"])
        ]
        Watching(runs, send).run(commands)
    else:
        from redline.web.arena import Arena

        Arena(job, send).run(commands)


if __name__ == "__main__":
    main()
