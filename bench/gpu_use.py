"""Measure how busy the GPU is in steady training: Snake and Tetris with PPO, PQN and DQN.

    python bench/gpu_use.py --out bench/results/gpu-use-h200.json

Each case runs in a separate process with the default settings. All compile at the same time; then each trains alone for some
seconds, while NVML reports the GPU's use, clock and power.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from redline.core.errors import UserError
from redline.engine import hardware
from redline.run.run_folder import write_json
from redline.run.settings import Settings
from redline.tools.bench import describe_machine
from redline.tools.profile_counters import GpuSampler
from redline.tools.trial import ChildTrial

CASES = [(env, algo) for env in ("snake", "tetris") for algo in ("ppo", "pqn", "dqn")]


def measure(trial: ChildTrial, seconds: float, device: Any) -> dict[str, Any]:
    """Return the speed of a warmed-up trial, and how busy the GPU was."""
    trial.measure(1.0)  # let clocks and caches settle
    with GpuSampler(device) as sampler:
        rate = trial.measure(seconds)
    return {"env_steps_per_second": rate.env_steps, "gpu": sampler.means()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--num-envs", type=int)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--ready-seconds", type=float, default=150.0, help="what is not compiled by then is left out")
    parser.add_argument("--commit", help="named in the file where there is no repository")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device, started = hardware.pick_device(arguments.device), time.perf_counter()
    compile = False if arguments.no_compile else None
    common: dict[str, Any] = {"device": arguments.device, "num_envs": arguments.num_envs, "steps": 10**12}
    trials = {case: ChildTrial(Settings(*case, compile=compile, **common)) for case in CASES}
    record: dict[str, Any] = describe_machine(arguments.device) | {"rows": []}
    record["commit"] = arguments.commit or record["commit"]
    lines, ready = [], []
    for case, trial in trials.items():  # measure only after all have compiled and captured
        try:
            trial.wait_ready(started + arguments.ready_seconds - time.perf_counter())
            ready.append(case)
        except UserError as error:
            lines.append(f"{' '.join(case)}: {error}")
            trial.close()
    for case in ready:
        row = dict(zip(("env", "algo"), case, strict=True)) | measure(trials[case], arguments.seconds, device)
        trials[case].close()
        use = f"{row['gpu']['use_percent']:.1f} %" if row["gpu"] else "-"
        lines.append(f"{' '.join(case):12} {row['env_steps_per_second']:>10.3g} steps/s  GPU use {use}")
        record["rows"].append(row)
        if arguments.out:
            write_json(arguments.out, record)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
