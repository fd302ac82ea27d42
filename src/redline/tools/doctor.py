"""What hardware was found, which settings follow from it, and why."""

from __future__ import annotations

import dataclasses
import platform
from typing import Any

import torch

from redline.run.config import Settings, resolve


def examine(env: str, algo: str, device: str) -> dict[str, Any]:
    """The machine and the settings `redline train` would take on it."""
    plan = resolve(Settings(env=env, algo=algo, device=device))
    chosen = plan.describe()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hardware": dataclasses.asdict(plan.hardware),
        "env": env,
        "algo": plan.settings.algo,
        "settings": {name: {"value": _lookup(chosen, name), "why": why} for name, why in sorted(plan.reasons.items())},
    }


def _lookup(chosen: dict[str, Any], name: str) -> Any:
    """The value of a setting, of the environment's where its name says so, else the run's or the algorithm's."""
    if name.startswith("env."):
        return chosen["env_options"][name.removeprefix("env.")]
    return chosen.get(name, chosen["algo_options"].get(name))


def report(found: dict[str, Any]) -> str:
    machine = found["hardware"]
    lines = [
        f"Python {found['python']}, torch {found['torch']}" + (f", CUDA {found['cuda']}" if found["cuda"] else ""),
        f"Device: {machine['device']}, {machine['name']}, {machine['memory_gb']:.0f} GB; {machine['cores']} CPU cores",
        f"C++ compiler: {machine['compiler'] or 'none found; training on a CPU runs uncompiled and slower'}",
        f"Settings for {found['env']} with {found['algo']}:",
    ]
    for name, choice in found["settings"].items():
        lines.append(f"  {name:<16} {choice['value']!s:<12} {choice['why']}")
    return "\n".join(lines)
