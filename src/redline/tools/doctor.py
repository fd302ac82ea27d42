"""Report the hardware, the settings chosen for it with source and reason, and warnings about problems that slow training."""

from __future__ import annotations

import dataclasses
import platform
from typing import Any

import torch

from redline.core.records import Hardware, Tier
from redline.engine import hardware
from redline.run import device_choice, thread_choice
from redline.run.plan import DEFAULT_SOURCES, Plan
from redline.run.settings import Settings
from redline.tools.health import describe_health, examine_health, find_health_warnings

TIERS: dict[Tier, str] = {
    "cpu-few": "a CPU of up to 4 cores",
    "cpu-many": "a CPU of more than 4 cores",
    "gpu-small": "a GPU of less than 10 GB",
    "gpu-mid": "a GPU of 10 to 30 GB, or without bfloat16",
    "gpu-large": "a GPU of 30 GB or more",
}
_LOW_MEMORY = 2 * 10**9  # bytes below which games and replay may not fit


def examine(env: str, algo: str, device: str) -> dict[str, Any]:
    """Return the machine and the settings with which `redline train` would start a run."""
    plan = thread_choice.decide(Settings(env=env, algo=algo, device=device, resume="never"))
    health = examine_health(plan)
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hardware": dataclasses.asdict(plan.hardware),
        "class": plan.hardware.tier,
        "also": [dataclasses.asdict(machine) for machine in _other_devices(plan)],
        "env": env,
        "algo": plan.settings.algo,
        "settings": {name: setting.describe() for name, setting in sorted(plan.provenance.items())},
        **health,
        "warnings": find_warnings(plan) + find_health_warnings(health),
    }


def _other_devices(plan: Plan) -> list[Hardware]:
    """Return the devices of this machine that were not chosen."""
    devices = dict.fromkeys((hardware.pick_device("auto"), torch.device("cpu")))
    return [hardware.detect(device) for device in devices if device != plan.device]


def find_warnings(plan: Plan) -> list[str]:
    """Return a warning, with a remedy, for each problem that slows training down on this machine."""
    warnings = []
    if not plan.hardware.compiler:
        warnings.append(
            "There is no C++ compiler, without which torch.compile builds no CPU kernels and often no GPU kernels: training "
            "is several times slower. Install g++ or clang++ (apt install g++, or xcode-select --install)."
        )
    if hardware.has_nvidia_driver() and not torch.cuda.is_available():
        problem = f"this torch ({torch.__version__}) is built without CUDA"
        remedy = "Install one with it, see https://pytorch.org/get-started/locally."
        if torch.version.cuda:
            problem = f"torch, built for CUDA {torch.version.cuda}, cannot use it"
            remedy = (
                "Update the driver, or install a torch for an older CUDA; check that CUDA_VISIBLE_DEVICES hides no GPU."
            )
        warnings.append(f"There is an NVIDIA driver, but {problem}: the GPU is not used. {remedy}")
    for place in dict.fromkeys((plan.device, torch.device("cpu"))):
        free = hardware.free_bytes(place)
        if free < _LOW_MEMORY:
            warnings.append(
                f"Only {free / 1e9:.1f} GB of memory are free on {place}: games and replay may not fit, or be swapped out. "
                "Close other programs, or use a smaller --num-envs and --replay-capacity."
            )
    return warnings


def _describe(machine: dict[str, Any]) -> str:
    return f"{machine['device']}, {machine['name']}, {machine['memory_gb']:.0f} GB"


def report(findings: dict[str, Any]) -> str:
    """Return the findings of `examine` as text: the machine, a table of settings, warnings."""
    machine = findings["hardware"]
    lines = [
        f"Python {findings['python']}, torch {findings['torch']}"
        + (f", CUDA {findings['cuda']}" if findings["cuda"] else ""),
        f"Device: {_describe(machine)}; {machine['cores']} CPU cores",
        *(f"Also here: {_describe(other)}" for other in findings["also"]),
        f"Class: {findings['class']}, {TIERS[findings['class']]}",
        f"C++ compiler: {machine['compiler'] or 'none found'}",
        *describe_health(findings),
        f"Settings for {findings['env']} with {findings['algo']}:",
        *_settings_table(findings["settings"]),
    ]
    if "measurement" in findings["settings"]["device"]["source"]:
        lines.append(f"Measurements are cached in {device_choice.cache_file()}; delete it to measure again.")
    lines += [f"Warning: {text}" for text in findings["warnings"]]
    return "\n".join(lines)


def _settings_table(settings: dict[str, dict[str, Any]]) -> list[str]:
    """Return a row with value, source and reason for each chosen setting, and a line about the others."""
    chosen = {name: record for name, record in settings.items() if record["source"] not in DEFAULT_SOURCES}
    cells = [("setting", "value", "source", "reason")]
    cells += [(name, _text(r["value"]), r["source"], r["reason"]) for name, r in chosen.items()]
    widths = [max(len(row[column]) for row in cells) for column in range(3)]
    rows = [
        "  " + "  ".join([*(f"{c:<{w}}" for c, w in zip(row, widths, strict=False)), row[3]]).rstrip() for row in cells
    ]
    others = len(settings) - len(chosen)
    return [*rows, f"The other {others} options keep the defaults of algorithm and environment; --json lists them."]


def _text(value: Any) -> str:
    """Return a value as written on the command line."""
    return ",".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)
