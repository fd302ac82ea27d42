"""Measure the seven learner speeds of docs/benchmarks.md on this GPU: `python bench/learners.py [--only NAME] [--out FILE]`.

Each figure is environment steps per second of training Snake 10x10 with full-board planes, compiled and captured as
CUDA graphs. To compare two trees, run the script once with each on PYTHONPATH, one after the other on the same machine.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch

from redline.run.resolve import resolve
from redline.run.session import Session
from redline.run.settings import Settings
from redline.tools.bench import describe_machine, rate

_ROWS = 64  # of the replay memory, per environment
_WARM_UP = 8  # iterations, for compilation, autotuning and graph capture

LEARNERS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "dqn-mlp-4096": ("dqn", 4096, {"hidden": (256, 256), "batch_size": 4096}),
    "dqn-mlp-65536": ("dqn", 65536, {"hidden": (256, 256), "batch_size": 65536}),
    "ppo-two-mlps-64": (
        "ppo",
        4096,
        {"hidden": (64, 64), "separate": True, "rollout_steps": 128, "epochs": 4, "batch_size": 65536},
    ),
    "ppo-mlp-512": ("ppo", 8192, {"hidden": (512, 512), "rollout_steps": 32, "epochs": 2, "batch_size": 32768}),
    "ppo-cnn-64": (
        "ppo",
        4096,
        {
            "net": "cnn",
            "channels": (64, 64, 64),
            "stride": 1,
            "hidden": (256,),
            "rollout_steps": 32,
            "epochs": 2,
            "batch_size": 16384,
        },
    ),
    "pqn-mlp-256": ("pqn", 65536, {"hidden": (256, 256), "rollout_steps": 16, "epochs": 2, "batch_size": 131072}),
    "pqn-cnn-16": (
        "pqn",
        4096,
        {
            "net": "cnn",
            "channels": (16,),
            "stride": 1,
            "padding": False,
            "hidden": (128,),
            "rollout_steps": 32,
            "epochs": 2,
            "batch_size": 4096,
        },
    ),
}


def make_session(name: str) -> Session:
    algo, num_envs, options = LEARNERS[name]
    options = {"net": "mlp"} | options
    if algo == "dqn":
        options |= {"n_step": 1, "learning_starts": 0, "replay_capacity": _ROWS * num_envs}
    settings = Settings(
        env="snake",
        algo=algo,
        num_envs=num_envs,
        device="cuda",
        compile=True,
        graph=True,
        curriculum=False,
        env_options={"view": "planes"},
        algo_options=options,
    )
    return Session(resolve(settings), print)


def measure(name: str, seconds: float) -> float:
    """Return environment steps per second, the best of three measurements."""
    session = make_session(name)
    rates = [rate(lambda: session.iterate(1), seconds, torch.device("cuda"), warm_up=_WARM_UP) for _ in range(3)]
    session.close()
    return session.steps_per_iteration * max(rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=LEARNERS, action="append")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    record: dict[str, Any] = {**describe_machine("cuda"), "env_steps_per_second": {}}
    for name in arguments.only or LEARNERS:
        record["env_steps_per_second"][name] = speed = measure(name, arguments.seconds)
        print(f"{name:<20} {speed / 1e6:8.2f} M env-steps/s", flush=True)
        if arguments.out:
            with open(arguments.out, "w") as file:
                json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
