"""Start commands in processes of their own without importing torch each time: a server imports it once, and forks.

`start("train", "snake", ...)` returns the process of `python -m redline train snake ...`. The server is `python forked.py`; it
ends with the test process, and its commands with it.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[1] / "src"


class Process:
    """A command that runs, with the methods of subprocess.Popen that tests need."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.folder = tempfile.TemporaryDirectory()
        for name in ("out", "err"):
            (Path(self.folder.name) / name).touch()
        self.returncode: int | None = None
        self.pid: int = _ask(job | {"folder": self.folder.name})

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while it runs."""
        if self.returncode is None:
            self.returncode = _ask({"poll": self.pid})
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for the end; return standard output and standard error. Kill it after so many seconds."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                os.killpg(self.pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired("redline", timeout, *self._texts())
            time.sleep(0.02)
        return self._texts()

    def _texts(self) -> tuple[str, str]:
        out, err = ((Path(self.folder.name) / name).read_text(errors="replace") for name in ("out", "err"))
        return out, err


def start(*words: str, cwd: Path | str = ".", path: tuple[str, ...] = (), **environment: str) -> Process:
    """Start a command line. path: further folders to import from. environment: further variables."""
    return Process({"words": words, "cwd": str(cwd), "path": path, "environment": dict(os.environ) | environment})


def run(*words: str, cwd: Path | str = ".", timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Run a command line to its end."""
    return _completed(start(*words, cwd=cwd), timeout)


def run_code(code: str, cwd: Path | str = ".", timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Run Python code to its end, as `python -c` would."""
    return _completed(Process({"code": code, "cwd": str(cwd), "environment": dict(os.environ)}), timeout)


def _completed(process: Process, timeout: float) -> subprocess.CompletedProcess[str]:
    out, err = process.communicate(timeout)
    return subprocess.CompletedProcess((), process.returncode or 0, out, err)


@functools.cache
def _server() -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "REDLINE_FAULT"}
    return subprocess.Popen(
        [sys.executable, __file__],
        env=environment | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _ask(job: dict[str, Any]) -> Any:
    server = _server()
    assert server.stdin
    assert server.stdout
    print(json.dumps(job), file=server.stdin, flush=True)
    return json.loads(server.stdout.readline())


# ---- the server


def _serve() -> None:
    from redline.run import train  # noqa: F401 (imported once, for all)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    for line in sys.stdin:
        job = json.loads(line)
        if "poll" in job:
            ended, status = os.waitpid(job["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if ended else None
        else:
            answer = os.fork()
            if answer == 0:
                _run(job)
        print(json.dumps(answer), flush=True)


def _run(job: dict[str, Any]) -> None:
    """Be the command: in a session of its own, with its own folder, variables and streams."""
    code = 1
    try:
        _prepare(job)
        if "code" in job:
            exec(compile(job["code"], "<string>", "exec"), {"__name__": "__main__"})
        else:
            from redline import cli

            cli.main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _prepare(job: dict[str, Any]) -> None:
    from redline.collect.child_process import die_with_parent
    from redline.core import faults

    os.setsid()
    die_with_parent(os.getppid())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(job["folder"]) / name, os.O_WRONLY | os.O_CREAT), stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["cwd"])
    sys.path[:1] = [os.getcwd(), *job.get("path", ())]  # in place of the folder of this file
    sys.argv = ["redline", *job.get("words", ())]
    faults.arm(os.environ.get("REDLINE_FAULT", ""))


if __name__ == "__main__":
    _serve()
