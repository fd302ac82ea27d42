"""The page of a run in training, served by a separate process that training never waits for.

    python -m redline.web.dashboard '{"run": "runs/a", "host": "127.0.0.1", "port": null}'

It prints its address, or why there is none, as the first line, and ends when its standard input closes, and so whenever the
process that started it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from redline.core.errors import UserError
from redline.web import child

_NICE = 10  # lower priority than training; the player's is lower still


class Dashboard:
    """The training process's handle: starts and ends the server process."""

    def __init__(self, run_dir: Path, host: str, port: int | None, say: Callable[[str], None]) -> None:
        """say: called with the address once the server listens, or with the reason why it does not."""
        job = {"run": str(run_dir), "host": host, "port": port}
        paths = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "redline.web.dashboard", json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | paths,
            start_new_session=True,  # Ctrl-C only reaches training, which closes the page when it ends
        )
        threading.Thread(target=self._report, args=(say,), daemon=True).start()

    def _report(self, say: Callable[[str], None]) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        say(line or "The dashboard did not start; training goes on without it.")

    def close(self) -> None:
        """End the server."""
        child.end(self.process)


def main() -> None:
    """Serve the page of one run until standard input closes."""
    job: dict[str, Any] = json.loads(sys.argv[1])
    with contextlib.suppress(OSError, AttributeError):
        os.nice(_NICE)

    def end_with_parent() -> None:
        sys.stdin.read()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_parent, daemon=True).start()
    from redline.web.serve import serve
    from redline.web.watch_page import WatchPage

    page = WatchPage([Path(job["run"])], lazy=True)
    try:
        serve(page, job["host"], job["port"], lambda address: print(f"Dashboard: {address}", flush=True))
    except UserError as error:
        print(f"No dashboard: {error}", flush=True)
    finally:
        page.close()


if __name__ == "__main__":
    main()
