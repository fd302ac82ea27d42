"""High scores, kept in the user's data folder: the best ten of each game and board."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

from redline.core.errors import StorageError
from redline.run.run_folder import read_json, write_json

KEPT = 10
_MAX_BOARDS = 200


def scores_file() -> Path:
    """Return the file of high scores: redline/scores.json in XDG_DATA_HOME or ~/.local/share."""
    folder = Path(os.environ.get("XDG_DATA_HOME", ""))
    return (folder if folder.is_absolute() else Path.home() / ".local" / "share") / "redline" / "scores.json"


def read_scores(path: Path, board: str) -> list[dict[str, Any]]:
    """Return the scores of a board, best first; empty if the file is missing or damaged."""
    with suppress(OSError, ValueError, RecursionError):
        record = read_json(path)
        entries = record.get(board, []) if isinstance(record, dict) else []
        return [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("score"), int | float)][
            :KEPT
        ]
    return []


def add_score(path: Path, board: str, score: float, length: int) -> int | None:
    """Add a score and return its rank from 1; None if it is not among the best. On a full disk, only this score is lost."""
    entry = {"score": score, "length": length, "date": date.today().isoformat()}
    entries = read_scores(path, board)
    rank = 1 + len([other for other in entries if other["score"] >= score])
    if rank > KEPT or score <= 0:
        return None
    entries.insert(rank - 1, entry)
    boards: dict[str, Any] = {}
    with suppress(OSError, ValueError, RecursionError):
        record = read_json(path)
        boards = record if isinstance(record, dict) else {}
    boards.pop(board, None)
    kept = dict(list(boards.items())[-_MAX_BOARDS:])
    with suppress(OSError, StorageError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, kept | {board: entries[:KEPT]})
    return rank
