"""The server's handle of the player process: start it, send commands, receive messages, report how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from redline.web import child

_MAX_LINE = 16 << 20  # bytes of one message
_MAX_STARTS = 5


class PlayerLink:
    """A player process, restarted a few times if it fails. A thread passes its messages to the event loop."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.process: subprocess.Popen[bytes] | None = None
        self.starts = 0
        self.on_message: Callable[[dict[str, Any], str], None] = lambda message, text: None  # noqa: ARG005
        self.on_end: Callable[[str], None] = lambda reason: None  # noqa: ARG005

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start the process. No event loop is needed, so that it can load torch as early as possible."""
        if self.running or self.starts >= _MAX_STARTS:
            return
        self.starts += 1
        one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        paths = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "redline.web.player", json.dumps(self.job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | one_thread | paths | {"CUDA_VISIBLE_DEVICES": ""},
            start_new_session=True,  # Ctrl-C only reaches the server; the player ends when its standard input closes
        )
        assert self.process.stdin is not None
        os.set_blocking(self.process.stdin.fileno(), False)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start passing the process's messages to the loop."""
        process = self.process
        assert process is not None
        threading.Thread(target=self._read, args=(process, loop), daemon=True).start()

    def _read(self, process: subprocess.Popen[bytes], loop: asyncio.AbstractEventLoop) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        errors: list[bytes] = []

        def drain() -> None:
            assert process.stderr is not None
            for line in iter(lambda: process.stderr.readline(4096), b""):  # type: ignore[union-attr]
                errors[:] = [*errors[-20:], line]

        drainer = threading.Thread(target=drain, daemon=True)
        drainer.start()
        with contextlib.suppress(RuntimeError, ValueError, OSError):  # RuntimeError: the loop has ended
            while line := process.stdout.readline(_MAX_LINE):
                text = line.decode("utf-8", "replace").strip()
                loop.call_soon_threadsafe(self._deliver, text)
            process.wait()
            drainer.join(1.0)
            last = errors[-1].decode("utf-8", "replace").strip() if errors else f"exit status {process.returncode}"
            loop.call_soon_threadsafe(self.on_end, last)

    def _deliver(self, text: str) -> None:
        with contextlib.suppress(ValueError):
            if text.startswith('{"type":"frame"'):  # forwarded unparsed; only the run is read
                head = text[:64].partition('"run":')[2]
                self.on_message({"type": "frame", "run": int(head.partition(",")[0])}, text)
            else:
                self.on_message(json.loads(text), text)

    def command(self, do: str, value: Any = None) -> None:
        """Send a command; it is dropped if the player does not read."""
        if self.process and self.process.stdin:
            line = json.dumps({"do": do, "value": value}).encode() + b"\n"
            with contextlib.suppress(OSError, ValueError):  # BlockingIOError is one
                os.write(self.process.stdin.fileno(), line)

    def close(self) -> None:
        """End the process."""
        if self.process:
            child.end(self.process)
