"""The plans that recipes must produce: cases, machines and the form in which `plans.json` stores them.

A plan is stored as its differences from the defaults, which are stored once per environment and algorithm.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from redline.core.records import Hardware

STORED = Path(__file__).with_name("plans.json")
STEP_SECONDS = 1e-3  # of every CPU environment, so that actors play
MACHINES = {
    machine.tier: machine
    for machine in (
        Hardware("cpu", "test", 2, 8.0, bf16=False, compiler="g++"),
        Hardware("cpu", "test", 24, 32.0, bf16=False, compiler="g++"),
        Hardware("cuda:0", "test", 4, 8.0, True, "g++", (8, 6)),
        Hardware("cuda:0", "test", 8, 15.0, False, "g++", (7, 5)),
        Hardware("cuda:0", "test", 16, 139.0, True, "g++", (9, 0)),
    )
}
ENVS = ("snake", "tetris", "mario", "gym:CartPole-v1", "gym:ToyScreen-v0")
VARIANTS: list[dict[str, Any]] = [
    {"env": "snake", "env_options": {"width": 6, "height": 6}},
    {"env": "snake", "algo": "pqn", "env_options": {"width": 6, "height": 6}},
    {"env": "snake", "algo": "dqn", "env_options": {"width": 6, "height": 6}},
    {"env": "snake", "env_options": {"width": 20, "height": 20}},
    {"env": "snake", "env_options": {"view": "planes"}},
    {"env": "snake", "env_options": {"sight": 3}},
    {"env": "snake", "algo": "dqn", "preset": "rainbow"},
    {"env": "snake", "algo": "ppo", "algo_options": {"net": "mlp"}},
    {"env": "snake", "algo": "ppo", "algo_options": {"gamma": 0.9}},
    {"env": "snake", "num_envs": 100},
    {"env": "snake", "curriculum": False},
    {"env": "snake", "n_step": 3},
    {"env": "tetris", "env_options": {"actions": "keys"}},
    {"env": "tetris", "env_options": {"view": "planes"}},
    {"env": "tetris", "env_options": {"view": "boards"}},
    {"env": "tetris", "algo": "dqn", "env_options": {"view": "boards"}},
    {"env": "tetris", "env_options": {"height": 12, "reward_hole": -1.0}},
    {"env": "mario:1-2", "env_options": {"frame_skip": 2}},
    {"env": "mario", "actors": 0},
    {"env": "gym:CartPole-v1", "replay": "pinned"},
    {"env": "gym:ToyScreen-v0", "env_options": {"frame_skip": 1}},
    {"env": "gym:ToyScreen-v0", "algo_options": {"net": "cnn"}, "algo": "dqn"},
    {"env": "gym:ToyStacked-v0"},
    {"env": "gym:ToySkipping-v0"},
]


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """(label, arguments of Settings) of every case: each environment with each algorithm, then the variants."""
    for env in ENVS:
        yield env, {"env": env}
        for algo in ("dqn", "ppo", "pqn"):
            yield f"{env} {algo}", {"env": env, "algo": algo}
    for variant in VARIANTS:
        yield json.dumps(variant), variant


def summary(plan: Any) -> dict[str, Any]:
    """Everything a recipe decides, as JSON knows it: lists for tuples."""
    record = plan.describe()
    names = ("algo", "num_envs", "backplay", "backplay_steps", "actors", "inference")
    names += ("compile", "graph", "precision", "phases")
    groups = {"env": plan.rules.config, "algo": plan.algo_config}
    values = {name: record[name] for name in names}
    for group, config in groups.items():
        default, chosen = (dataclasses.asdict(x) for x in (type(config)(), config))
        values |= {f"{group}.{name}": value for name, value in chosen.items() if value != default[name]}
    loaded: dict[str, Any] = json.loads(json.dumps(values))
    return loaded


def defaults(plan: Any) -> dict[str, Any]:
    """The defaults of the environment's and the algorithm's options."""
    values = {"env": type(plan.rules.config)(), "algo": type(plan.algo_config)()}
    loaded: dict[str, Any] = json.loads(json.dumps({k: dataclasses.asdict(v) for k, v in values.items()}))
    return loaded
