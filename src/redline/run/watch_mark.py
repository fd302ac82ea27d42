"""The mark that somebody watches a run: a file that viewers touch and training looks at. Imports no torch."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

WATCHED = ".watched"
_FRESH = 15.0  # seconds after which a viewer that did not come back is gone


def watch(run_dir: Path) -> None:
    """Say that somebody watches the run; a folder that cannot be written is watched all the same."""
    with suppress(OSError):
        descriptor = os.open(run_dir / WATCHED, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            os.utime(descriptor)
        finally:
            os.close(descriptor)


def is_watched(run_dir: Path) -> bool:
    """Say whether somebody has watched the run within the last seconds."""
    with suppress(OSError):
        return time.time() - os.lstat(run_dir / WATCHED).st_mtime <= _FRESH
    return False
