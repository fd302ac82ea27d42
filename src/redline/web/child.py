"""Child processes of the page, which end when their standard input closes."""

from __future__ import annotations

import contextlib
import subprocess
from typing import Any


def end(process: subprocess.Popen[Any]) -> None:
    """Close the process's standard input, which should end it; kill it if it does not end."""
    with contextlib.suppress(OSError):
        if process.stdin:
            process.stdin.close()
    try:
        process.wait(1.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
