"""Replays: recorded games in one self-contained HTML file with controls, which can be sent to anybody."""

from __future__ import annotations

import html
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from redline.core.errors import StorageError
from redline.run.agent import Agent
from redline.web.static_files import static_files
from redline.web.wall import make_wall


def record_games(agent: Agent, seed: int, games: int, max_steps: int) -> dict[str, Any]:
    """Play held-out games, at most `max_steps` steps of each, and return the data of the page."""
    record: dict[str, Any] = {
        "name": agent.path.resolve().name,
        "env": agent.config["env"],
        "algo": agent.config["algo"],
    }
    record |= {"env_steps": agent.env_steps, "games": []}
    for number in range(games):
        wall = make_wall(agent, 1, seed + number)
        try:
            record["stage"] = wall.stage()
            frames = wall.frame()
            while "ended" not in frames[-1] and len(frames) <= max_steps:
                wall.step()
                frames += wall.frame()
        finally:
            wall.close()
        record["games"].append(frames)
    return record


def write_replay(path: Path, record: dict[str, Any], fps: float) -> None:
    """Write the page of recorded games to `path`, atomically."""
    files = {name: content.decode() for name, content in static_files().items()}
    data = json.dumps(record | {"fps": fps}, separators=(",", ":")).replace("<", "\\u003c")
    page = files["replay.html"]
    for mark, text in (
        ("/*STYLE*/", files["style.css"]),
        ("/*BOARD*/", files["board.js"]),
        ("/*OUTPUTS*/", files["outputs.js"]),
        ("/*REPLAY*/", files["replay.js"]),
        ("TITLE", html.escape(f"{record['name']} · Redline")),
        ('"DATA"', data),
    ):
        page = page.replace(mark, text, 1)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(page, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        raise StorageError(f"Cannot write {path}: {error.strerror or error}. Choose another place.") from error
    finally:
        with suppress(OSError):  # gone after success
            part.unlink()
