"""Examine the machine for `redline doctor`: disk, shared memory for actors, throttling, extras."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from redline.collect.actor_memory import ring_bytes, ring_rows, split_envs
from redline.core.records import Spec
from redline.engine import hardware
from redline.run.plan import Plan
from redline.tools.nvml import open_gpu

_CHUNK, _CHUNKS = 1 << 20, 16  # bytes per write and number of writes, at most, to measure a disk
_DISK_SECONDS = 0.5  # limit for measuring a slow disk
_SLOW_DISK, _SLOW_FSYNC = 20e6, 0.2  # bytes per second, seconds
_CGROUP = Path("/sys/fs/cgroup")
# Example of the memory actors need, for runs without actors: images like those of Mario and Atari.
_IMAGES = Spec((4, 84, 84), torch.uint8, (1.0,) * 4, 255, 7, "x", frames=4)
_IMAGE_ENVS, _IMAGE_STEPS, _OUTPUTS = 32, 128, ("value", "logp")


class Extra(NamedTuple):
    """An optional dependency: the module it installs and the feature it enables."""

    module: str
    gives: str


EXTRAS = {
    "tensorboard": Extra("tensorboard", "--tensorboard writes TensorBoard files"),
    "wandb": Extra("wandb", "--wandb logs to Weights & Biases"),
    "nvml": Extra("pynvml", "use, clocks and throttling of the GPU are shown"),
    "sb3": Extra("stable_baselines3", "Redline's games train with Stable-Baselines3, which benchmarks compare with"),
    "report": Extra("matplotlib", "redline report draws learning curves"),
    "web": Extra("starlette", "redline watch, redline play and --dashboard serve a page in the browser"),
    "video": Extra("imageio_ffmpeg", "redline watch --mp4 writes videos"),
    "export": Extra("onnxruntime", "redline export writes ONNX files and int8"),
    "atari": Extra("ale_py", "gym:ALE/… trains on Atari games"),
    "mario": Extra("gym_super_mario_bros", "mario trains on Super Mario Bros."),
}


def find_extras() -> dict[str, dict[str, Any]]:
    """Return for each extra whether it is installed, the feature it enables and its install command."""
    return {
        name: {
            "installed": importlib.util.find_spec(extra.module) is not None,
            "gives": extra.gives,
            "install": f"pip install 'redline[{name}]'",
        }
        for name, extra in EXTRAS.items()
    }


def measure_disk(folder: Path) -> dict[str, Any]:
    """Return the speed of writing, syncing and reading a small file where runs are stored, or the problem."""
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    record: dict[str, Any] = {"folder": str(place), "free_bytes": psutil.disk_usage(str(place)).free}
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            data, written = os.urandom(_CHUNK), 0
            started = time.perf_counter()
            while written < _CHUNKS * _CHUNK and time.perf_counter() - started < _DISK_SECONDS:
                written += file.write(data)
                file.flush()
            os.fsync(file.fileno())
            record["write_bytes_per_second"] = written / (time.perf_counter() - started)
            file.seek(0)
            file.write(b"x")
            file.flush()
            started = time.perf_counter()
            os.fsync(file.fileno())
            record["fsync_seconds"] = time.perf_counter() - started
            if hasattr(os, "posix_fadvise"):  # otherwise the page cache is measured
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            started = time.perf_counter()
            while file.read(_CHUNK):
                pass
            record["read_bytes_per_second"] = written / (time.perf_counter() - started)
    except OSError as error:
        record["problem"] = error.strerror or str(error)
    return record


def shared_memory(plan: Plan) -> dict[str, Any]:
    """Return where the rings of actor processes are stored, the bytes free there and the bytes a run needs.

    They use anonymous memory if the system has it (Linux), which is not limited by the size of /dev/shm, else an unlinked
    temporary file.
    """
    anonymous = hasattr(os, "memfd_create")
    folder = tempfile.gettempdir()
    record: dict[str, Any] = {"place": "anonymous memory" if anonymous else folder}
    free = hardware.free_bytes(torch.device("cpu")) if anonymous else psutil.disk_usage(folder).free
    if plan.actors:
        spec, steps = plan.rules.game.spec(plan.rules.config), getattr(plan.algo_config, "rollout_steps", 1)
        rows = plan.settings.ring_rows or ring_rows(steps)
        groups = split_envs(plan.num_envs, plan.actors, 2 if plan.inference == "central" else 1)
        needs = ring_bytes(spec, plan.algo.POLICY_OUTPUTS, groups, rows)
        example = f"{plan.settings.env}, {plan.num_envs} environments on {plan.actors} actors"
    else:
        groups = split_envs(_IMAGE_ENVS, 1, 1)
        needs = ring_bytes(_IMAGES, _OUTPUTS, groups, ring_rows(_IMAGE_STEPS))
        example = f"{_IMAGE_ENVS} environments of 84x84 images, rollouts of {_IMAGE_STEPS} steps"
    return record | {"free_bytes": free, "needed_bytes": needs, "needed_for": example}


def cpu_state() -> dict[str, Any]:
    """Return load, the container's quota (cores), how often it was throttled, and frequency, as far as they are readable."""
    state: dict[str, Any] = {"cores": hardware.detect(torch.device("cpu")).cores}
    with contextlib.suppress(OSError, AttributeError):
        state["load"] = os.getloadavg()[0]
    with contextlib.suppress(OSError, ValueError):
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        state["quota_cores"] = None if quota == "max" else int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        lines = (line.split() for line in (_CGROUP / "cpu.stat").read_text().splitlines())
        state["throttled_periods"] = {name: int(count) for name, count in lines}.get("nr_throttled", 0)
    with contextlib.suppress(Exception):  # some systems lack the files that psutil reads
        frequency = psutil.cpu_freq()
        if frequency:
            state |= {"mhz": frequency.current, "max_mhz": frequency.max}
    return state


_REASONS = {  # bits of NVML that mean lost speed -> meaning
    0x4: "the power limit",
    0x8: "a hardware slowdown",
    0x20: "heat",
    0x40: "heat",
    0x80: "a power brake",
}


def gpu_state(device: torch.device) -> dict[str, Any]:
    """Return clocks, temperature, power and throttling reasons of a GPU; empty if NVML is not available."""
    with contextlib.suppress(Exception), open_gpu(device) as (pynvml, handle):  # no package, no driver, no permission
        bits = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        return {
            "mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
            "max_mhz": pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM),
            "celsius": pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
            "watts": pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "throttled_by": throttle_reasons(bits),
        }
    return {}


def throttle_reasons(bits: int) -> list[str]:
    """Return the meanings of NVML's throttle reasons, except an idle or user-limited clock."""
    return list(dict.fromkeys(text for bit, text in _REASONS.items() if bits & bit))


def find_health_warnings(health: dict[str, Any]) -> list[str]:
    """Return a warning, with a remedy, for each problem in the figures of `examine_health` that slows training down."""
    disk, shared, cpu, gpu = (health[name] for name in ("disk", "shared_memory", "cpu", "gpu"))
    warnings = []
    if "problem" in disk:
        warnings.append(f"{disk['folder']} cannot be written ({disk['problem']}): choose another place with --run-dir.")
    elif disk["write_bytes_per_second"] < _SLOW_DISK or disk["fsync_seconds"] > _SLOW_FSYNC:
        warnings.append(
            f"The disk of {disk['folder']} is slow ({disk['write_bytes_per_second'] / 1e6:.0f} MB/s, "
            f"{1000 * disk['fsync_seconds']:.0f} ms to sync): checkpoints take long, and --replay memmap waits for it. "
            "Choose a local disk with --run-dir, or a larger --checkpoint-minutes."
        )
    if shared["needed_bytes"] > shared["free_bytes"] / 2:
        warnings.append(
            f"Actor processes need {shared['needed_bytes'] / 1e6:,.0f} MB of {shared['place']} "
            f"({shared['needed_for']}), where {shared['free_bytes'] / 1e6:,.0f} MB are free. Use fewer environments or "
            "shorter rollouts."
        )
    quota = cpu.get("quota_cores")
    if quota is not None and quota < cpu["cores"]:
        warnings.append(
            f"The container may use the time of {quota:g} cores, though {cpu['cores']} are visible: more threads than "
            f"that are stopped again and again. Use --threads {max(1, int(quota))}, or raise the limit."
        )
    if cpu.get("load", 0.0) > 0.75 * cpu["cores"]:
        warnings.append(
            f"Other programs keep the CPU busy (load {cpu['load']:.1f} on {cpu['cores']} cores): training and measurements are "
            "slower than they could be. Close them, or use fewer --threads."
        )
    if gpu.get("throttled_by"):
        warnings.append(
            f"The GPU is throttled by {' and '.join(gpu['throttled_by'])} ({gpu['mhz']} of {gpu['max_mhz']} MHz, "
            f"{gpu['celsius']} °C, {gpu['watts']:.0f} W): improve its cooling or raise its power limit."
        )
    return warnings


def describe_health(health: dict[str, Any]) -> list[str]:
    """Return the figures of `examine_health` as lines of the report."""
    disk, shared, cpu, gpu = (health[name] for name in ("disk", "shared_memory", "cpu", "gpu"))
    lines = []
    if "problem" not in disk:
        lines.append(
            f"Disk of {disk['folder']}: {disk['write_bytes_per_second'] / 1e6:,.0f} MB/s written, "
            f"{disk['read_bytes_per_second'] / 1e6:,.0f} MB/s read, {1000 * disk['fsync_seconds']:.1f} ms to sync; "
            f"{disk['free_bytes'] / 1e9:,.0f} GB free"
        )
    lines.append(
        f"Shared memory of actors: {shared['place']}, {shared['free_bytes'] / 1e9:,.1f} GB free; "
        f"{shared['needed_bytes'] / 1e6:,.1f} MB needed for {shared['needed_for']}"
    )
    load = f"load {cpu['load']:.1f}" if "load" in cpu else "load unknown"
    quota = f", a quota of {cpu['quota_cores']:g} cores" if cpu.get("quota_cores") is not None else ""
    clock = f", {cpu['mhz']:,.0f} of {cpu['max_mhz']:,.0f} MHz" if cpu.get("max_mhz") else ""
    lines.append(f"CPU: {cpu['cores']} cores, {load}{quota}{clock}")
    if gpu:
        reasons = f"throttled by {' and '.join(gpu['throttled_by'])}" if gpu["throttled_by"] else "not throttled"
        lines.append(
            f"GPU: {gpu['mhz']:,} of {gpu['max_mhz']:,} MHz, {gpu['celsius']} °C, {gpu['watts']:.0f} W, {reasons}"
        )
    installed = [name for name, extra in health["extras"].items() if extra["installed"]]
    lines.append(f"Extras installed: {', '.join(installed) or 'none'}")
    lines += [
        f"  {name} is missing; with it {extra['gives']}: {extra['install']}"
        for name, extra in health["extras"].items()
        if not extra["installed"]
    ]
    return lines


def examine_health(plan: Plan) -> dict[str, Any]:
    """Return the state of the machine on which a plan would run."""
    return {
        "disk": measure_disk(plan.run_dir),
        "shared_memory": shared_memory(plan),
        "cpu": cpu_state(),
        "gpu": gpu_state(plan.device) if plan.device.type == "cuda" else {},
        "extras": find_extras(),
    }
