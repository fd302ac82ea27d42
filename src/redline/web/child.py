"""Child processes of the page, which end when their standard input closes."""

from __future__ import annotations

import contextlib
import subprocess
from typing import Any


def end(process: subprocess.Popen[Any]) -> None:
    """Close the process's standard input, at which it ends; kill it if it does not."""
    with contextlib.suppress(OSError):
        if process.stdin:
            process.stdin.close()
    try:
        process.wait(1.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
