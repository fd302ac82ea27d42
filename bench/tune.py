"""Compare tuned settings with the defaults: `python bench/tune.py [--envs snake,tetris] [--seconds 40] [--out FILE]`.

For each environment, `redline tune` searches for at most --seconds; the ratio to the defaults comes from its last round, in
which both train in turns as in real training. It is 1 if the defaults win.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from redline.run.settings import Settings
from redline.tools.bench import describe_machine
from redline.tools.tune import tune


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--envs", default="snake,tetris,gym:CartPole-v1")
    parser.add_argument("--algo", default="auto")
    parser.add_argument("--seconds", type=float, default=40.0, help="for each environment")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--out", default="")
    arguments = parser.parse_args()
    record = describe_machine(arguments.device) | {"tune": {}}
    for env in arguments.envs.split(","):
        settings = Settings(
            env, algo=arguments.algo, device=arguments.device, compile=False if arguments.no_compile else None
        )
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            result = tune(settings, arguments.seconds, Path(folder) / "tuned.toml", sys.stdout, sys.stderr)
        record["tune"][env] = result | {"wall_seconds": time.perf_counter() - started}
        print(flush=True)
        if arguments.out:
            Path(arguments.out).write_text(json.dumps(record, indent=1) + "\n")
    print(f"{'environment':<20}{'ratio':>8}{'seconds':>9}{'largest batch':>15}  changed")
    for env, result in record["tune"].items():
        changed = {k: v for k, v in result["tuned"].items() if v != result["defaults"][k]}
        words = ", ".join(f"{name} {value}" for name, value in changed.items()) or "nothing"
        print(
            f"{env:<20}{result['ratio']:>7.2f}x{result['wall_seconds']:>9.0f}{result['largest_batch']:>15,}  {words}",
            flush=True,
        )


if __name__ == "__main__":
    main()
