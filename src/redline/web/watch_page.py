"""The page of one or more runs: games, curves, settings and state."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from pathlib import Path
from typing import Any

import psutil

from redline.run.watch_mark import watch
from redline.web.history import CHARTS
from redline.web.hub import Hub
from redline.web.player_link import PlayerLink
from redline.web.run_view import RunView

POLL_SECONDS = 1.0
_TRAINING_SHARE = 0.01  # fraction of each core that games may take from a run in training
_IDLE_SHARE = 0.3  # fraction of idle cores
_ALONE_SHARE = 0.8  # fraction of one core if no run is in training


class WatchPage:
    """The page's state, shared by all viewers."""

    html = "watch.html"

    def __init__(
        self, paths: list[Path], games: int = 12, trust: bool = False, seed: int = 0, lazy: bool = False
    ) -> None:
        """lazy: start nothing expensive before there is a viewer."""
        self.runs = [RunView(number, path) for number, path in enumerate(paths)]
        job = {"kind": "watch", "runs": [str(path) for path in paths], "games": games, "trust": trust, "seed": seed}
        self.player, self.lazy = PlayerLink(job), lazy
        self.playback = {"paused": False, "speed": 8.0}
        self.hub = Hub(self.greet, self.obey)
        self.hub.on_change = self._count_viewers
        self._stages: dict[Any, str] = {}
        self._frames: dict[Any, str] = {}
        self._notes: dict[Any, str] = {}  # problem or age of each run's weights
        self._status: dict[int, str] = {}
        self._sent: dict[int, tuple[int, int]] = {}  # revision and number of points sent to viewers
        self._share = -1.0
        self._loop: asyncio.AbstractEventLoop | None = None
        if not lazy:
            self.player.start()

    async def run(self) -> None:
        """Follow the run folders until cancelled."""
        self._loop = asyncio.get_running_loop()
        self.player.on_message, self.player.on_end = self._from_player, self._player_ended
        if self.player.process:
            self.player.attach(self._loop)
        while True:
            more = self._poll()
            await asyncio.sleep(0.01 if more else POLL_SECONDS)

    def close(self) -> None:
        self.player.close()

    def _poll(self) -> bool:
        """Read and send new data from the run folders; return whether there is more to read."""
        more = False
        for run in self.runs:
            if run.read_config():
                self.hub.send({"type": "run", **run.describe()})
            more |= run.reader.read()
            history = run.reader.history
            revision, sent = self._sent.get(run.number, (-1, 0))
            if revision != history.revision:
                self.hub.send(self._history(run))
            elif len(history.points) > sent:
                points = history.points[sent:]
                self.hub.send({"type": "points", "run": run.number, "points": points})
            self._sent[run.number] = history.revision, len(history.points)
            status = json.dumps({"type": "status", **run.status()})
            if status != self._status.get(run.number):
                self._status[run.number] = status
                self.hub.send(status)
            if self.hub.outboxes:
                watch(run.path)
        self._grant_share()
        return more

    def _grant_share(self) -> None:
        """Set the player's share of the CPU: small while a run trains and all cores are busy, larger if some are idle."""
        share = _ALONE_SHARE
        if any('"live": true' in status for status in self._status.values()):
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            idle = cores * max(0.0, 1 - psutil.cpu_percent() / 100 - 0.05)
            share = min(max(_TRAINING_SHARE * cores, _IDLE_SHARE * idle), _ALONE_SHARE)
        if abs(share - self._share) > 0.1 * max(self._share, 0.0):
            self._share = share
            self.player.command("share", share)

    @staticmethod
    def _history(run: RunView) -> dict[str, Any]:
        return {"type": "history", "run": run.number, "points": run.reader.history.points}

    def greet(self) -> list[str]:
        """Return the messages for a new viewer."""
        charts = [{"series": series, "title": title, "unit": unit} for series, title, unit in CHARTS]
        hello = {"type": "hello", "charts": charts, "runs": [run.describe() for run in self.runs]}
        messages = [json.dumps(hello | {"playback": self.playback})]
        messages += [json.dumps(self._history(run)) for run in self.runs]
        return [
            *messages,
            *self._status.values(),
            *self._stages.values(),
            *self._notes.values(),
            *self._frames.values(),
        ]

    def obey(self, command: dict[str, Any]) -> None:
        """Pause, step or set the speed, for all viewers."""
        do, value = command["do"], command.get("value")
        if do == "pause" and isinstance(value, bool):
            self.playback["paused"] = value
        elif do == "step":
            self.playback["paused"] = True
        elif do == "speed" and isinstance(value, int | float) and 0.2 <= value <= 60:
            self.playback["speed"] = float(value)
        else:
            return
        self.player.command(do, value)
        self.hub.send({"type": "playback", **self.playback})

    def _count_viewers(self) -> None:
        viewers = len(self.hub.outboxes)
        if viewers and not self.player.running and self._loop:
            self._start_player()
        self.player.command("viewers", viewers)

    def _start_player(self) -> None:
        assert self._loop
        before = self.player.starts
        self.player.start()
        if self.player.starts > before:
            self.player.attach(self._loop)
            self._share = -1.0
            self.player.command("viewers", len(self.hub.outboxes))
            self.player.command("speed", self.playback["speed"])
            self.player.command("pause", self.playback["paused"])

    def _from_player(self, message: dict[str, Any], text: str) -> None:
        run = message.get("run")
        if message["type"] == "frame":
            self._frames[run] = text
            self.hub.send(text, frame_of=run)
            return
        kept = self._stages if message["type"] == "stage" else self._notes
        kept[run] = text
        self.hub.send(text)

    def _player_ended(self, reason: str) -> None:
        """Tell viewers why the games have stopped; a new viewer restarts them."""
        with contextlib.suppress(RuntimeError):
            for run in self.runs:
                text = f"The games have stopped ({reason[:300]}). Load the page again to restart them."
                self._notes[run.number] = json.dumps({"type": "problem", "run": run.number, "text": text})
                self.hub.send(self._notes[run.number])
