"""Train RUN of ranks_worker.py by the command line, `ranks_injected.py RUN_DIR`; INJECT="RANK term|kill ITERATION" breaks it.

A rank that torchrun has started again is left alone.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
run_dir = sys.argv[1]

from ranks_worker import RUN  # noqa: E402

from redline import cli  # noqa: E402
from redline.run import session  # noqa: E402

rank, action, number = (os.environ.get("INJECT") or "-1 none 0").split()
iterations = 0


def reach(phase: str) -> None:
    """Count iterations; send the signal before the chosen one."""
    global iterations
    iterations += phase == "iteration"
    if phase == "iteration" and iterations == int(number):
        os.kill(os.getpid(), signal.SIGTERM if action == "term" else signal.SIGKILL)


if os.environ["RANK"] == rank and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    session.reach = reach  # type: ignore[assignment]
options = {f"ppo.{name}": value for name, value in RUN["algo_options"].items()}
options |= {name: value for name, value in RUN.items() if not name.endswith("_options")}
options |= {f"env.{name}": value for name, value in RUN["env_options"].items()} | {"checkpoint_minutes": 0.0001}
words = []
for name, value in options.items():
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        words.append(f"--{flag}" if value else f"--no-{flag}")
    else:
        words += [f"--{flag}", ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
try:
    cli.main(["train", "snake", *words, "--log-seconds", "0.01", "--run-dir", run_dir])
except SystemExit as end:
    Path(f"{run_dir}-code-{os.environ['RANK']}").write_text(str(end.code))
    raise
