"""Send messages to viewers through bounded outboxes: a slow viewer misses frames but costs no memory or waiting."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

MAX_VIEWERS = 16
MAX_MESSAGE = 1024  # bytes from a viewer
MAX_WAITING = 64  # messages in an outbox besides frames
_MESSAGES_PER_SECOND = 60.0
_BURST = 120.0  # messages at once
_SEND_SECONDS = 30.0  # after which a viewer that receives nothing is disconnected


class Outbox:
    """Messages for one viewer: the newest frame of each run, and other messages in order."""

    def __init__(self) -> None:
        self._frames: dict[Any, str] = {}
        self._messages: deque[str] = deque()
        self._ready = asyncio.Event()
        self.dropped = 0  # frames replaced before they were sent
        self.lost = False  # too many messages: the viewer has to reconnect

    def put(self, text: str, frame_of: Any = None) -> None:
        """Add a message; a frame replaces an unsent one of the same run, `frame_of`."""
        if frame_of is not None:
            self.dropped += frame_of in self._frames
            self._frames.pop(frame_of, None)
            self._frames[frame_of] = text
        elif len(self._messages) < MAX_WAITING:
            self._messages.append(text)
        else:
            self.lost = True
        self._ready.set()

    async def get(self) -> str:
        """Return the next message; frames come last."""
        while not self._messages and not self._frames:
            self._ready.clear()
            await self._ready.wait()
        if self._messages:
            return self._messages.popleft()
        return self._frames.pop(next(iter(self._frames)))


class Hub:
    """All viewers of a server."""

    def __init__(self, greet: Callable[[], list[str]], obey: Callable[[dict[str, Any]], None]) -> None:
        """greet: returns messages for a new viewer. obey: called with every valid command from a viewer."""
        self.outboxes: set[Outbox] = set()
        self.on_change: Callable[[], None] = lambda: None  # called when the number of viewers changes
        self._greet, self._obey = greet, obey

    def send(self, message: dict[str, Any] | str, frame_of: Any = None) -> None:
        """Queue a message for all viewers, without waiting."""
        text = message if isinstance(message, str) else json.dumps(message, separators=(",", ":"))
        for outbox in self.outboxes:
            outbox.put(text, frame_of)

    async def serve(self, socket: WebSocket) -> None:
        """Serve one viewer until it disconnects, misbehaves or stops receiving."""
        if len(self.outboxes) >= MAX_VIEWERS:
            await socket.accept()
            await socket.close(1013, "Too many viewers; close another one first.")
            return
        await socket.accept()
        outbox = Outbox()
        for text in self._greet():
            outbox.put(text)
        self.outboxes.add(outbox)
        self.on_change()
        tasks = [asyncio.ensure_future(self._write(socket, outbox)), asyncio.ensure_future(self._read(socket))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.outboxes.discard(outbox)
            self.on_change()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _write(self, socket: WebSocket, outbox: Outbox) -> None:
        while not outbox.lost:
            await asyncio.wait_for(socket.send_text(await outbox.get()), _SEND_SECONDS)
        await socket.close(1013, "Too slow.")

    async def _read(self, socket: WebSocket) -> None:
        allowance, last = _BURST, time.monotonic()
        while True:
            try:
                text = await socket.receive_text()
            except (WebSocketDisconnect, KeyError):  # KeyError: bytes
                return
            now = time.monotonic()
            allowance, last = min(_BURST, allowance + (now - last) * _MESSAGES_PER_SECOND) - 1, now
            if allowance < 0:
                await socket.close(1008, "Too many messages.")
                return
            command = parse_command(text)
            if command is None:
                await socket.close(1003, "This is no command.")
                return
            self._obey(command)


def parse_command(text: str) -> dict[str, Any] | None:
    """Return a viewer's command, `do` with a short string, a number or None as `value`; None if it is invalid."""
    try:
        command = json.loads(text) if len(text) <= MAX_MESSAGE else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(command, dict) or not isinstance(command.get("do"), str) or set(command) - {"do", "value"}:
        return None
    value = command.get("value")
    if isinstance(value, float) and value != value:
        return None
    return command if value is None or isinstance(value, bool | int | float | str) else None
