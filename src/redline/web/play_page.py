"""The page on which a person plays: it sends keys to the player process and receives boards."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

from redline.web.hub import Hub
from redline.web.player_link import PlayerLink

_COMMANDS = ("key", "new", "pause")


class PlayPage:
    """The page's state, shared by all viewers: they see and play the same match."""

    html = "play.html"

    def __init__(self, job: dict[str, Any]) -> None:
        """job: description of the match, see `redline.web.arena`."""
        self.title, self.against = job["env"], job.get("against")
        self.player = PlayerLink({"kind": "play", **job})
        self.hub = Hub(self.greet, self.obey)
        self._kept: dict[Any, str] = {}
        self.player.start()

    async def run(self) -> None:
        """Forward the player's messages to the viewers until cancelled."""
        self.player.on_message, self.player.on_end = self._from_player, self._player_ended
        self.player.attach(asyncio.get_running_loop())
        await asyncio.Event().wait()

    def close(self) -> None:
        self.player.close()

    def greet(self) -> list[str]:
        """Return the messages for a new viewer."""
        return [json.dumps({"type": "hello", "title": self.title, "against": bool(self.against)}), *self._kept.values()]

    def obey(self, command: dict[str, Any]) -> None:
        """Forward a key, a new match or a pause to the player."""
        if command["do"] in _COMMANDS:
            self.player.command(command["do"], command.get("value"))

    def _from_player(self, message: dict[str, Any], text: str) -> None:
        place = message["type"], message.get("run")
        self._kept[place] = text
        self.hub.send(text, frame_of=place if message["type"] != "stage" else None)

    def _player_ended(self, reason: str) -> None:
        text = reason.rpartition("UserError: ")[2] or reason
        self._kept["problem"] = json.dumps({"type": "problem", "text": text[:500]})
        with contextlib.suppress(RuntimeError):
            self.hub.send(self._kept["problem"])
