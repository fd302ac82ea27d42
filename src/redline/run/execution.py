"""How a run is executed: device, precision, compilation, CUDA graphs, threads and actors, each with its source and reason."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch

from redline.core.errors import UserError
from redline.core.records import Hardware
from redline.engine import fast, hardware
from redline.envs import Rules, env_activity
from redline.envs.gym_game import WORTH_A_PROCESS
from redline.recipes import Setting
from redline.run.plan import HARDWARE, MEASURED, REQUESTED
from redline.run.run_folder import ENV_ACTIVITY
from redline.run.settings import Settings

_MANY_CORES = 8  # with at least this many, parallel processes pay off for shorter steps too
_SMALL_INPUTS = 4_096  # with observations up to this size, a network is too small for several threads


def choose_device(settings: Settings) -> tuple[torch.device, Setting]:
    device = hardware.pick_device(settings.device)
    if settings.device != "auto":
        return device, Setting(str(device), "", REQUESTED)
    reason = "there is only a CPU: no CUDA device was found" if device.type == "cpu" else "a CUDA device was found"
    return device, Setting(str(device), reason, HARDWARE)


def choose_precision(requested: str, machine: Hardware) -> Setting:
    precision, reason = fast.pick_precision(requested, machine)
    return Setting(precision, reason, HARDWARE) if requested == "auto" else Setting(precision, "", REQUESTED)


def choose_threads(requested: int | None, machine: Hardware, rules: Rules) -> Setting:
    """Return the number of torch's CPU threads from a fixed rule; 0 leaves the choice to torch.

    `thread_choice` replaces it with a measured number.
    """
    if requested is not None:
        return Setting(requested, "", REQUESTED)
    if machine.kind != "cpu":
        return Setting(0, "the GPU does the work: as torch chooses", HARDWARE)
    small = math.prod(rules.game.spec(rules.config).obs_shape) <= _SMALL_INPUTS
    if small and machine.tier == "cpu-few":
        return Setting(
            1, "small networks: on a few cores more threads are no faster, and far slower if others are busy", HARDWARE
        )
    if small and rules.game.ON_CPU:
        return Setting(1, "small batches and networks: threads would wait for each other", HARDWARE)
    return Setting(hardware.most_threads(machine.cores), "one per core, no more than OMP_NUM_THREADS", HARDWARE)


def choose_actors(settings: Settings, rules: Rules, machine: Hardware, num_envs: int, run_dir: Path) -> Setting:
    """Return the number of actor processes; 0 if a step costs less than transferring it between processes."""
    actors = _count_actors(settings, rules, machine, num_envs, run_dir)
    needs_actors = {
        "inference": settings.inference != "auto",
        "publish": bool(settings.publish),
        "ring_rows": bool(settings.ring_rows),
        "staged_rows": bool(settings.staged_rows),
        "drop_oldest": settings.drop_oldest,
    }
    for name, given in needs_actors.items():
        if given and not actors.value:
            raise UserError(
                f"{name} is set, but there are no actors ({actors.reason or 'requested'}); drop it or set --actors."
            )
    return actors


def _count_actors(settings: Settings, rules: Rules, machine: Hardware, num_envs: int, run_dir: Path) -> Setting:
    requested = settings.actors
    if not rules.game.ON_CPU:
        if requested:
            raise UserError(f"actors is {requested}, but {settings.env} is played on the device; drop --actors.")
        return Setting(0, "the game is played on the device", "derived from env")
    if requested is not None:
        if requested and settings.deterministic:
            raise UserError("deterministic is on, but play of actors cannot be repeated exactly; use --actors 0.")
        if not 0 <= requested <= num_envs:
            raise UserError(f"actors is {requested}; expected 0 to {num_envs}, the number of environments.")
        return Setting(requested, "", REQUESTED)
    if settings.deterministic:
        return Setting(0, "play of actors cannot be repeated exactly", "derived from deterministic")
    source = MEASURED
    if (env_index := env_activity.ended_in(run_dir / ENV_ACTIVITY)) is not None:
        which = (
            "an environment was made" if env_index == env_activity.MAKING else f"environment {env_index} was stepped"
        )
        why = f"the process that trained this run before ended or hung while {which}"
    else:
        seconds = rules.game.step_seconds(rules.config)  # type: ignore[attr-defined]
        if seconds < (WORTH_A_PROCESS if machine.cores < _MANY_CORES else WORTH_A_PROCESS / 4):
            return Setting(0, f"a step takes {1e6 * seconds:,.0f} µs, less than handing it to another process", source)
        why = f"a step takes {1e3 * seconds:,.1f} ms"
    if machine.tier == "cpu-few":
        return Setting(min(machine.cores, num_envs), f"{why}: every core plays while the learner waits", source)
    return Setting(min(max(1, machine.cores - 1), num_envs), f"{why}: all cores but one play", source)


def choose_inference(
    settings: Settings, machine: Hardware, actors: Setting, recommended: Mapping[str, Setting]
) -> Setting:
    if settings.inference != "auto":
        return Setting(settings.inference, "", REQUESTED)
    if "inference" in recommended:
        return recommended["inference"]
    if machine.kind == "cpu" and actors.value >= machine.cores:
        return Setting("actors", "actors and learner share the cores: no actor waits for an answer", HARDWARE)
    return Setting("central", "leaves the actors' cores to the environments", HARDWARE)


def choose_compile(requested: bool | None, machine: Hardware, on_cpu: bool) -> Setting:
    if requested is not None:
        return Setting(requested, "", REQUESTED)
    if on_cpu and machine.kind == "cpu":
        return Setting(False, "compiling takes longer than it saves for small networks and CPU environments", HARDWARE)
    if machine.kind == "mps":
        return Setting(False, "torch.compile does not pay on this device", HARDWARE)
    if (0, 0) < machine.capability < (7, 0):
        return Setting(False, "torch.compile needs a GPU of compute capability 7.0 or more", HARDWARE)
    if machine.kind == "cpu" and not machine.compiler:
        return Setting(False, "no C++ compiler (g++ or clang++) was found; install one to train faster", HARDWARE)
    return Setting(True, "fuses each stage into a few kernels", HARDWARE)


def choose_graph(requested: bool | None, machine: Hardware) -> Setting:
    if requested and machine.kind != "cuda":
        raise UserError(f"graph needs a CUDA device; {machine.device} has no CUDA graphs. Drop --graph.")
    if requested is not None:
        return Setting(requested, "", REQUESTED)
    if machine.kind != "cuda":
        return Setting(False, "CUDA graphs need a CUDA device", HARDWARE)
    return Setting(True, "replays a whole iteration without launches from the host", HARDWARE)
