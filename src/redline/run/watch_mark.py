"""The watch mark of a run: a file that viewers touch and training checks. Imports no torch."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

WATCHED = ".watched"
_FRESH = 15.0  # seconds without a touch after which a viewer is considered gone


def watch(run_dir: Path) -> None:
    """Mark the run as watched; do nothing if its folder cannot be written."""
    with suppress(OSError):
        descriptor = os.open(run_dir / WATCHED, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            os.utime(descriptor)
        finally:
            os.close(descriptor)


def is_watched(run_dir: Path) -> bool:
    """Return whether a viewer has watched the run in the last few seconds."""
    with suppress(OSError):
        return time.time() - os.lstat(run_dir / WATCHED).st_mtime <= _FRESH
    return False
