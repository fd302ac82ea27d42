"""What hardware was found, which settings follow from it, and why; and what slows training down here."""

from __future__ import annotations

import dataclasses
import platform
from typing import Any

import torch

from redline.core.records import Hardware, Tier
from redline.engine import hardware
from redline.run import device_choice
from redline.run.config import Plan, Settings

TIERS: dict[Tier, str] = {
    "cpu-few": "a CPU of up to 4 cores",
    "cpu-many": "a CPU of more than 4 cores",
    "gpu-small": "a GPU of less than 10 GB",
    "gpu-mid": "a GPU of 10 to 30 GB, or without bfloat16",
    "gpu-large": "a GPU of 30 GB or more",
}
_FREE = 2 * 10**9  # bytes of memory below which games and replay may not fit
_SHARED = 256 * 10**6  # bytes of shared memory; containers often come with 64 MB


def examine(env: str, algo: str, device: str) -> dict[str, Any]:
    """The machine and the settings `redline train` would begin a run with on it."""
    plan = device_choice.decide(Settings(env=env, algo=algo, device=device, resume="never"))
    chosen = plan.describe()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hardware": dataclasses.asdict(plan.hardware),
        "class": plan.hardware.tier,
        "also": [dataclasses.asdict(machine) for machine in _others(plan)],
        "env": env,
        "algo": plan.settings.algo,
        "settings": {name: {"value": _lookup(chosen, name), "why": why} for name, why in sorted(plan.reasons.items())},
        "warnings": find_warnings(plan),
    }


def _lookup(chosen: dict[str, Any], name: str) -> Any:
    """The value of a setting, of the environment's where its name says so, else the run's or the algorithm's."""
    if name.startswith("env."):
        return chosen["env_options"][name.removeprefix("env.")]
    return chosen.get(name, chosen["algo_options"].get(name))


def _others(plan: Plan) -> list[Hardware]:
    """What could have been trained on as well."""
    there = dict.fromkeys((hardware.pick_device("auto"), torch.device("cpu")))
    return [hardware.detect(device) for device in there if device != plan.device]


def find_warnings(plan: Plan) -> list[str]:
    """What slows training down on this machine, each with what to do."""
    found = []
    if not plan.hardware.compiler:
        found.append(
            "There is no C++ compiler, without which torch.compile builds no CPU kernels and often no GPU kernels: training "
            "is several times slower. Install g++ or clang++ (apt install g++, or xcode-select --install)."
        )
    if hardware.has_nvidia_driver() and not torch.cuda.is_available():
        what = f"this torch ({torch.__version__}) is built without CUDA"
        todo = "Install one with it, see https://pytorch.org/get-started/locally."
        if torch.version.cuda:
            what = f"torch, built for CUDA {torch.version.cuda}, cannot use it"
            todo = (
                "Update the driver, or install a torch for an older CUDA; see that CUDA_VISIBLE_DEVICES hides no GPU."
            )
        found.append(f"There is an NVIDIA driver, but {what}: the GPU is not used. {todo}")
    for place in dict.fromkeys((plan.device, torch.device("cpu"))):
        free = hardware.free_bytes(place)
        if free < _FREE:
            found.append(
                f"Only {free / 1e9:.1f} GB of memory are free on {place}: games and replay may not fit, or be swapped out. "
                "End other programs, or take a smaller --num-envs and --replay-capacity."
            )
    shared = hardware.shared_memory_bytes()
    if shared is not None and shared < _SHARED:
        found.append(
            f"Shared memory (/dev/shm) has {shared / 1e6:.0f} MB: environments in processes hand their observations over "
            "there. Start the container with --shm-size=1g, or mount -o remount,size=1g /dev/shm."
        )
    return found


def _named(machine: dict[str, Any]) -> str:
    return f"{machine['device']}, {machine['name']}, {machine['memory_gb']:.0f} GB"


def report(found: dict[str, Any]) -> str:
    machine = found["hardware"]
    lines = [
        f"Python {found['python']}, torch {found['torch']}" + (f", CUDA {found['cuda']}" if found["cuda"] else ""),
        f"Device: {_named(machine)}; {machine['cores']} CPU cores",
        *(f"Also here: {_named(other)}" for other in found["also"]),
        f"Class: {found['class']}, {TIERS[found['class']]}",
        f"C++ compiler: {machine['compiler'] or 'none found'}",
        f"Settings for {found['env']} with {found['algo']}:",
    ]
    for name, choice in found["settings"].items():
        lines.append(f"  {name:<16} {choice['value']!s:<12} {choice['why']}")
    if "measured" in found["settings"]["device"]["why"]:
        lines.append(f"What was measured is kept in {device_choice.cache_file()}; delete it to measure again.")
    lines += [f"Warning: {text}" for text in found["warnings"]]
    return "\n".join(lines)
