"""Run by test_interrupted_runs.py: `redline train` with faults, each in a process of its own. Prints one JSON object a line.

    python fork_runs.py FOLDER < CASES

A case is a JSON object: name; words of the command; fault, a value of REDLINE_FAULT; optional: out, what to do with standard
output (closed, reader_gone, full) and err with standard error (closed, full); notice, a file to create once training runs;
pass_through, for a torch.compile that returns the function as it is, so that the phase `compile` costs nothing.
torch is imported once; each case is a fork.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

from redline import cli
from redline.core import faults
from redline.run import session, train  # noqa: F401 (imported once, for all)

torch.set_num_threads(1)
TIMEOUT = 120.0  # seconds of a case


def native_hang(*_: object) -> None:
    """Stay inside a native function, where Python runs no signal handlers."""
    import hashlib

    hashlib.pbkdf2_hmac("sha256", b"x", b"x", 2**31 - 1)


def redirect(stream: int, how: str, path: Path) -> None:
    if how == "reader_gone":
        reading, target = os.pipe()
        os.close(reading)
    else:
        target = os.open("/dev/full" if how == "full" else path, os.O_WRONLY | os.O_CREAT)
    os.dup2(target, stream)
    os.close(target)
    if how == "closed":
        os.close(stream)


def child(case: dict, folder: Path) -> None:
    os.setsid()
    os.chdir(folder)
    redirect(1, case.get("out", ""), folder / f"{case['name']}.out")
    redirect(2, case.get("err", ""), folder / f"{case['name']}.err")
    sys.stdout = None if case.get("out") == "closed" else open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = None if case.get("err") == "closed" else open(2, "w", closefd=False)  # noqa: SIM115
    faults.arm(case.get("fault", ""))
    if case.get("pass_through"):
        torch.compile = lambda function, **_: function
    if case.get("native_hang"):
        play, count = session.Session._play, [0]

        def hanging(self: session.Session) -> None:
            count[0] += 1
            if count[0] == case["native_hang"]:
                os.kill(os.getpid(), signal.SIGTERM)
                native_hang()
            play(self)

        session.Session._play = hanging
    sys.argv = ["redline", *case["words"]]
    cli.main()


def run(case: dict, folder: Path) -> dict:
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            child(case, folder)
        except SystemExit as end:
            code = end.code
        finally:
            os._exit(code)
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        time.sleep(0.01)
        if time.monotonic() - started > TIMEOUT:
            os.kill(pid, signal.SIGKILL)
        if "notice" in case and (folder / case["name"] / "metrics.jsonl").exists():
            (folder / case["notice"]).touch()
    texts = {name: (folder / f"{case['name']}.{name}") for name in ("out", "err")}
    return {
        "name": case["name"],
        "code": os.waitstatus_to_exitcode(ended[1]),
        "seconds": time.monotonic() - started,
        **{name: path.read_text() if path.exists() else "" for name, path in texts.items()},
    }


if __name__ == "__main__":
    root = Path(sys.argv[1])
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line), root)), flush=True)
