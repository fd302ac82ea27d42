"""Memory: how much a plan needs, whether it fits, and a replay capacity chosen from the free memory."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from redline import replay
from redline.algos.learner import MAX_MICRO_BATCHES
from redline.core.errors import UserError
from redline.core.records import leaves
from redline.engine import hardware
from redline.envs import Rules, batch
from redline.replay.contract import Location, ReplayKind, UsesReplay
from redline.run.memory_probe import Probe, measure_plan
from redline.run.plan import REQUESTED, Plan

_PLENTY = 1 << 20  # bytes
_GPU_WORKSPACES = 64 << 20  # of cuBLAS, for the two streams of a session
_FP32_CONVOLUTIONS = 1.12  # factor for the gradient's bytes: workspaces of cuDNN, which are small in bf16
_COMPILED = 0.8  # fraction of a gradient's counted bytes that remains after a GPU's compiler fuses operations
_ACTOR_BYTES = 250 << 20  # per actor process: Python with torch takes 230 MiB, environments the rest


def state_bytes(rules: Rules) -> int:
    """Return the bytes of one State, without fields that observations never read."""
    state = batch.reset(rules, batch.env_keys(0, torch.arange(1))).game
    return sum(x.nbytes for name, x in state._asdict().items() if name not in rules.game.HIDDEN)


def fit_replay(config: Any, rules: Rules, device: torch.device, run_dir: Path) -> tuple[Any, str]:
    """Return `config` with a replay capacity that uses half of the free memory or disk space, and the reason.

    A resumed run keeps its capacity.
    """
    with suppress(OSError, ValueError, KeyError):
        before = int(
            json.loads((run_dir / "config.json").read_text(encoding="utf-8"))["algo_options"]["replay_capacity"]
        )
        return dataclasses.replace(config, replay_capacity=before), "as the run began"
    kind = replay.load(config.replay)
    free, place = _free_for(kind, device, run_dir)
    capacity = kind.largest_capacity(free, state_bytes(rules))
    return dataclasses.replace(config, replay_capacity=capacity), f"from the {free / 1e9:,.0f} GB {place} that are free"


def _free_for(kind: ReplayKind, device: torch.device, run_dir: Path) -> tuple[int, str]:
    """Return the free bytes on the device or disk where a replay kind stores transitions, and its name."""
    if kind.location == Location.DISK:
        folder = next(path for path in (run_dir.absolute(), *run_dir.absolute().parents) if path.exists())
        return shutil.disk_usage(folder).free, "disk"
    place = device if kind.location == Location.DEVICE else torch.device("cpu")
    return hardware.free_bytes(place), f"memory of {place}"


def check_memory(plan: Plan) -> int:
    """Return the number of micro-batches with which the plan fits into memory; 1 if it fits unsplit.

    Call it before allocating anything. Raises UserError if the plan cannot fit, with its bytes and the option to change.
    """
    parts, probe = 1, None if _is_small(plan) else probe_plan(plan)
    most_parts = min(plan.algo_config.batch_size, MAX_MICRO_BATCHES) if plan.settings.oom == "backoff" else 1
    for place, needs in estimate(plan, probe).items():
        free = hardware.free_bytes(place)
        while sum(needs.values()) > free and place == plan.device and 2 * parts <= most_parts:
            parts *= 2
            needs = estimate(plan, probe, parts)[place]
        if sum(needs.values()) > free:
            name = _option_to_blame(plan, needs)
            raise UserError(
                f"These settings need about {sum(needs.values()) / 1e9:,.1f} GB on {place}, where {free / 1e9:,.1f} GB are "
                f"free; most of it is for {name}: use a smaller one{_other_replay(plan) if name == 'replay_capacity' else ''}."
            )
    return parts


def fits_twice(plan: Plan) -> bool:
    """Return whether another process with the same plan fits as well, judging by games and experience.

    On a GPU the learner must be small too: sharing memory with the other process, it would have to split its batches, and
    batches stay split.
    """
    if plan.device.type == "cuda" and not _is_small(plan):
        return False
    return 4 * sum(estimate(plan, None)[plan.device].values()) < hardware.free_bytes(plan.device)


def estimate(plan: Plan, probe: Probe | None, micro_batches: int = 1) -> dict[torch.device, dict[str, int]]:
    """Return the estimated bytes on each device at the peak of training, keyed by the option that determines them.

    probe: measured for the plan; None leaves out networks and temporaries.
    """
    one = batch.reset(plan.rules, batch.env_keys(0, torch.arange(1)))
    game = sum(x.numel() * x.element_size() for x in leaves(one).values())
    spec = plan.rules.game.spec(plan.rules.config)
    needs = {"num_envs": plan.num_envs * 2 * game}  # the games, and the example of their State that learners hold
    needs |= plan.algo.memory_bytes(plan.algo_config, spec, state_bytes(plan.rules), plan.num_envs)
    stage, peak = _largest_stage(plan, probe, game, micro_batches)
    needs[stage] = needs.get(stage, 0) + peak
    if plan.actors and plan.device.type != "cuda":
        needs["actors"] = plan.actors * _ACTOR_BYTES
    on_host = {"actors": plan.actors * _ACTOR_BYTES} if plan.actors and plan.device.type == "cuda" else {}
    if isinstance(plan.algo_config, UsesReplay):
        memory = replay.load(plan.algo_config.replay).memory_bytes(
            plan.algo_config.replay_capacity, state_bytes(plan.rules), plan.algo_config.prioritized
        )
        stored = int(memory.host + (memory.snapshot if plan.settings.save_replay else 0))
        where = on_host if plan.device.type == "cuda" else needs
        where["replay_capacity"] = where.get("replay_capacity", 0) + stored
    return {plan.device: needs} | ({torch.device("cpu"): on_host} if any(on_host.values()) else {})


def _largest_stage(plan: Plan, probe: Probe | None, game: int, micro_batches: int) -> tuple[str, int]:
    """Return the bytes of the iteration's largest stage, preceded by the option that determines them."""
    inputs, batch_size = _input_bytes(plan), plan.algo_config.batch_size
    if probe is None:
        return "num_envs", plan.num_envs * (game + inputs)
    sampled = 2 * batch_size * inputs if micro_batches > 1 and isinstance(plan.algo_config, UsesReplay) else 0
    learning = probe.gradient.at(-(-batch_size // micro_batches)) + sampled
    if probe.convolutions and plan.device.type == "cuda" and plan.precision == "fp32":
        learning = round(_FP32_CONVOLUTIONS * learning)
    if plan.compile and plan.device.type == "cuda":
        learning = round(_COMPILED * learning)
    states = plan.algo.Learner.states_evaluated(plan.rules, plan.algo_config, plan.num_envs)
    stages = {
        "num_envs": max(probe.collect.at(plan.num_envs), probe.evaluate.at(states)),
        "batch_size": max(learning, probe.step),
    }
    option = max(stages, key=lambda name: stages[name])
    return option, probe.weights + stages[option] + (_GPU_WORKSPACES if plan.device.type == "cuda" else 0)


def probe_plan(plan: Plan) -> Probe | None:
    """Return the measured needs of the plan's learner; None if it cannot be measured."""
    try:
        return measure_plan(plan)
    except Exception:  # an external learner may expect other options, or memory is too small even for a few samples
        return None


def _input_bytes(plan: Plan) -> int:
    """Return the bytes of one observation as the input of a network."""
    return 4 * math.prod(plan.rules.game.spec(plan.rules.config).obs_shape)


def _is_small(plan: Plan) -> bool:
    """Return whether the learner certainly fits, so that it need not be measured: a megabyte per sample is plenty."""
    most = (plan.algo_config.batch_size + plan.num_envs) * (_PLENTY + 64 * _input_bytes(plan))
    return bool(most < hardware.free_bytes(plan.device) / 4)


def _option_to_blame(plan: Plan, needs: dict[str, int]) -> str:
    """Return the option that needs the most memory; if it was not requested, the largest requested option, if any."""

    def source(name: str) -> str:
        return plan.provenance[name].source if name in plan.provenance else ""

    sizable = [name for name in needs if needs[name] > 0.05 * sum(needs.values())]
    requested = [name for name in sizable if source(name) == REQUESTED]
    largest = max(sizable, key=lambda name: needs[name])
    return max(requested, key=lambda name: needs[name]) if requested and source(largest) != REQUESTED else largest


def _other_replay(plan: Plan) -> str:
    """Return a clause that suggests other kinds of replay memory with room for the requested capacity, or ""."""
    capacity, each = plan.algo_config.replay_capacity, state_bytes(plan.rules)
    kinds = [replay.load(name) for name in replay.alternatives(plan.algo_config.replay)]
    roomy = [k.name for k in kinds if k.largest_capacity(_free_for(k, plan.device, plan.run_dir)[0], each) >= capacity]
    return f", or --replay {' or '.join(roomy)}" if roomy else ""
