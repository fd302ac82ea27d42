"""Compare estimated memory with the measured peak: 12 configurations, one after another in one process.

    python bench/memory_estimates.py --out bench/results/memory_estimates.json     # on a GPU
    python bench/memory_estimates.py --quick                                       # on the CPU, small sizes

On a GPU the peak is torch.cuda.max_memory_allocated; on a CPU it is read from the records of torch's profiler.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from redline.run.memory import estimate, probe_plan
from redline.run.resolve import resolve
from redline.run.session import Session
from redline.run.settings import Settings

ITERATIONS = 6  # three to warm up a graph, one to capture it
# name -> environment, algorithm, environments, batch, settings, options of the environment, options of the algorithm
CASES: dict[str, tuple[str, str, int, int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "snake ppo mlp bf16": ("snake", "ppo", 65536, 524288, {}, {}, {"net": "mlp", "rollout_steps": 16}),
    "snake ppo cnn bf16": ("snake", "ppo", 32768, 262144, {}, {}, {"net": "cnn", "rollout_steps": 16}),
    "snake ppo cnn fp32": (
        "snake",
        "ppo",
        16384,
        131072,
        {"precision": "fp32"},
        {},
        {"net": "cnn", "rollout_steps": 16},
    ),
    "snake ppo cnn compiled": (
        "snake",
        "ppo",
        32768,
        262144,
        {"compile": True},
        {},
        {"net": "cnn", "rollout_steps": 16},
    ),
    "snake 20x20 ppo cnn": (
        "snake",
        "ppo",
        8192,
        65536,
        {},
        {"width": 20, "height": 20},
        {"net": "cnn", "rollout_steps": 16},
    ),
    "snake pqn resnet": ("snake", "pqn", 16384, 65536, {}, {}, {"net": "resnet", "rollout_steps": 16}),
    "snake pqn compiled": ("snake", "pqn", 65536, 524288, {"compile": True}, {}, {"rollout_steps": 16}),
    "snake dqn device replay": ("snake", "dqn", 16384, 65536, {"replay_capacity": 8_000_000}, {}, {"net": "cnn"}),
    "snake c51 prioritized": (
        "snake",
        "dqn",
        4096,
        65536,
        {"replay_capacity": 2_000_000, "prioritized": True},
        {},
        {"distribution": "categorical", "noisy": True},
    ),
    "snake qr compiled": (
        "snake",
        "dqn",
        4096,
        65536,
        {"replay_capacity": 2_000_000, "compile": True},
        {},
        {"distribution": "quantile"},
    ),
    "tetris ppo afterstates": ("tetris", "ppo", 16384, 65536, {}, {}, {"rollout_steps": 16}),
    "tetris dqn afterstates fp32": (
        "tetris",
        "dqn",
        8192,
        65536,
        {"replay_capacity": 4_000_000, "precision": "fp32"},
        {},
        {},
    ),
}
_SHRINK = 32  # factor by which sizes are smaller on a CPU


def plan_of(name: str, device: str, quick: bool, folder: str) -> Any:
    env, algo, num_envs, batch_size, settings, env_options, algo_options = CASES[name]
    shrink = _SHRINK if quick else 1
    settings = {"compile": False} | settings
    if "replay_capacity" in settings:
        settings["replay_capacity"] //= shrink
    if quick:
        settings.pop("precision", None)
    if algo == "dqn":
        algo_options = algo_options | {"learning_starts": 0}
    return resolve(
        Settings(
            env,
            algo,
            num_envs=num_envs // shrink,
            batch_size=batch_size // shrink,
            device=device,
            run_dir=folder,
            env_options=env_options,
            algo_options=algo_options,
            **settings,
        )
    )


def peak_on_gpu(plan: Any) -> int:
    torch._C._cuda_clearCublasWorkspaces()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    session = Session(plan, print)
    session.iterate(ITERATIONS + getattr(plan.algo_config, "n_step", 0))
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    session.close()
    return peak


def peak_on_cpu(plan: Any) -> int:
    """Return the peak of all tensor allocations, by any code."""
    if plan.compile:  # compile before recording: the compiler computes with tensors too
        warm = Session(plan, print)
        warm.iterate(2 + getattr(plan.algo_config, "n_step", 0))
        warm.close()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        session = Session(plan, print)
        session.iterate(2 + getattr(plan.algo_config, "n_step", 0))
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    session.close()
    return peak


def measure(name: str, quick: bool) -> dict[str, Any]:
    device = "cpu" if quick else "cuda"
    with tempfile.TemporaryDirectory() as folder:
        plan = plan_of(name, device, quick, folder)
        started = time.perf_counter()
        needs = estimate(plan, probe_plan(plan))[plan.device]
        took = time.perf_counter() - started
        peak = peak_on_cpu(plan) if quick else peak_on_gpu(plan)
    gc.collect()
    return {
        "name": name,
        "precision": plan.precision,
        "compile": plan.compile,
        "estimate_bytes": sum(needs.values()),
        "measured_bytes": peak,
        "ratio": sum(needs.values()) / peak,
        "by_option": needs,
        "estimate_seconds": took,
        "seconds": time.perf_counter() - started,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--commit", default="-", help="named in the file where there is no repository")
    parser.add_argument("--quick", action="store_true", help="small sizes, on the CPU")
    parser.add_argument("--only", nargs="*", default=list(CASES), help="names of configurations")
    options = parser.parse_args()
    rows = []
    for name in options.only:
        try:
            rows.append(measure(name, options.quick))
        except Exception as error:
            rows.append({"name": name, "error": f"{type(error).__name__}: {str(error)[:300]}"})
        print(json.dumps(rows[-1]), flush=True)
    hardware = "CPU" if options.quick else torch.cuda.get_device_name()
    if options.out:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout
        record = {"commit": commit.strip() or options.commit, "date": f"{datetime.date.today()}", "hardware": hardware}
        record |= {"torch": torch.__version__, "rows": rows}
        options.out.write_text(json.dumps(record, indent=2) + "\n")
    print(f"\n{'configuration':30} {'estimate':>10} {'measured':>10} {'ratio':>6}")
    for row in rows:
        if "error" in row:
            print(f"{row['name']:30} {row['error']}")
        else:
            sizes = f"{row['estimate_bytes'] / 2**20:>7,.0f} MB {row['measured_bytes'] / 2**20:>7,.0f} MB"
            print(f"{row['name']:30} {sizes} {row['ratio']:6.2f}")


if __name__ == "__main__":
    main()
