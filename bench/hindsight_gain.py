"""Measure the gain from hindsight: DQN on examples/hindsight with plain and with hindsight replay, several seeds each.

python bench/hindsight_gain.py --out bench/results/hindsight-cpu.json [--steps 30000] [--seeds 5]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import redline
from redline.tools.bench import describe_machine

FOLDER = Path(__file__).parents[1] / "examples" / "hindsight"
SIZES = ((5, 2), (8, 2))  # columns and height of skylines
LEARNER = {"n_step": 1, "hidden": (128, 128), "learning_starts": 2000, "epsilon_steps": 10_000}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=30_000, help="environment steps of a run")
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    out = options.out and options.out.absolute()
    os.chdir(FOLDER)  # where the game and the replay kind are found
    rows: list[dict[str, Any]] = []
    for width, height in SIZES:
        for kind in ("device", "hindsight"):
            began = time.monotonic()
            rates = [train(width, height, kind, seed, options.steps) for seed in range(options.seeds)]
            seconds = (time.monotonic() - began) / options.seeds
            rows.append({"width": width, "height": height, "replay": kind, "win_rates": rates, "seconds": seconds})
            spread = f"{100 * min(rates):.1f} to {100 * max(rates):.1f} %"
            print(f"{width}x{height} {kind:10} {100 * statistics.mean(rates):5.1f} % won ({spread})", flush=True)
    if out:
        out.write_text(json.dumps(describe_machine("cpu") | {"steps": options.steps, "rows": rows}, indent=1) + "\n")


def train(width: int, height: int, kind: str, seed: int, steps: int) -> float:
    """Return the share of 1,000 games won after training."""
    with tempfile.TemporaryDirectory() as folder:
        run = redline.train(
            "skyline",
            algo="dqn",
            run_dir=f"{folder}/run",
            steps=steps,
            num_envs=32,
            batch_size=128,
            seed=seed,
            device="cpu",
            compile=False,
            threads=1,
            eval_episodes=1000,
            env_options={"width": width, "height": height},
            algo_options=LEARNER | {"replay": kind, "replay_capacity": steps},
        )
    return float(run.result["win_rate"])


if __name__ == "__main__":
    main()
