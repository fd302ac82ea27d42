"""Memory: how much a plan needs, whether it fits, and the replay capacity that fills the memory that is free."""

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
from redline.core.errors import UserError
from redline.core.records import leaves
from redline.engine import hardware
from redline.envs import Rules, batch
from redline.replay.contract import Location, ReplayKind, UsesReplay
from redline.run.plan import REQUESTED, Plan


def state_bytes(rules: Rules) -> int:
    """Return the bytes of one State, without fields that observations never read."""
    state = batch.reset(rules, batch.env_keys(0, torch.arange(1))).game
    return sum(x.nbytes for name, x in state._asdict().items() if name not in rules.game.HIDDEN)


def fit_replay(config: Any, rules: Rules, device: torch.device, run_dir: Path) -> tuple[Any, str]:
    """Return `config` with a replay capacity for half of the memory, or disk, that is free where it is stored.

    A resumed run keeps its capacity.
    """
    with suppress(OSError, ValueError, KeyError):
        before = int(json.loads((run_dir / "config.json").read_text())["algo_options"]["replay_capacity"])
        return dataclasses.replace(config, replay_capacity=before), "as the run began"
    kind = replay.load(config.replay)
    free, place = _free_for(kind, device, run_dir)
    capacity = kind.largest_capacity(free, state_bytes(rules))
    return dataclasses.replace(config, replay_capacity=capacity), f"from the {free / 1e9:,.0f} GB {place} that are free"


def _free_for(kind: ReplayKind, device: torch.device, run_dir: Path) -> tuple[int, str]:
    """Return the free bytes where a replay kind stores transitions, and the name of that place."""
    if kind.location == Location.DISK:
        folder = next(path for path in (run_dir.absolute(), *run_dir.absolute().parents) if path.exists())
        return shutil.disk_usage(folder).free, "disk"
    place = device if kind.location == Location.DEVICE else torch.device("cpu")
    return hardware.free_bytes(place), f"memory of {place}"


def check_memory(plan: Plan) -> None:
    """Raise UserError if the plan cannot fit, with the bytes it needs and the option to change, before allocating anything."""
    for place, needs in _estimate(plan).items():
        total, free = sum(needs.values()), hardware.free_bytes(place)
        if total > free:
            name = _option_to_blame(plan, needs)
            raise UserError(
                f"These settings need about {total / 1e9:,.1f} GB on {place}, where {free / 1e9:,.1f} GB are free; "
                f"most of it is for {name}: use a smaller one{_other_replay(plan) if name == 'replay_capacity' else ''}."
            )


def _estimate(plan: Plan) -> dict[torch.device, dict[str, int]]:
    """Return the estimated bytes on each device, by the option that decides them."""
    one = batch.reset(plan.rules, batch.env_keys(0, torch.arange(1)))
    game = sum(x.numel() * x.element_size() for x in leaves(one).values())
    spec = plan.rules.game.spec(plan.rules.config)
    inputs = 4 * math.prod(spec.obs_shape)
    needs = {"num_envs": plan.num_envs * (3 * game + inputs)}  # the games, their successors, the network's input
    needs |= plan.algo.memory_bytes(plan.algo_config, spec, state_bytes(plan.rules), plan.num_envs)
    if not isinstance(plan.algo_config, UsesReplay):
        return {plan.device: needs}
    memory = replay.load(plan.algo_config.replay).memory_bytes(
        plan.algo_config.replay_capacity, state_bytes(plan.rules), plan.algo_config.prioritized
    )
    on_host = int(memory.host + (memory.snapshot if plan.settings.save_replay else 0))
    if on_host and plan.device.type == "cuda":
        return {plan.device: needs, torch.device("cpu"): {"replay_capacity": on_host}}
    needs["replay_capacity"] = needs.get("replay_capacity", 0) + on_host
    return {plan.device: needs}


def _option_to_blame(plan: Plan, needs: dict[str, int]) -> str:
    """Return the option that needs most memory; a value derived from a requested one is not to blame."""

    def source(name: str) -> str:
        return plan.provenance[name].source if name in plan.provenance else ""

    sizable = [name for name in needs if needs[name] > 0.05 * sum(needs.values())]
    requested = [name for name in sizable if source(name) == REQUESTED]
    largest = max(sizable, key=lambda name: needs[name])
    return max(requested, key=lambda name: needs[name]) if requested and source(largest) != REQUESTED else largest


def _other_replay(plan: Plan) -> str:
    """Return advice on other kinds of replay memory in which the requested capacity would fit."""
    capacity, each = plan.algo_config.replay_capacity, state_bytes(plan.rules)
    kinds = [replay.load(name) for name in replay.alternatives(plan.algo_config.replay)]
    roomy = [k.name for k in kinds if k.largest_capacity(_free_for(k, plan.device, plan.run_dir)[0], each) >= capacity]
    return f", or --replay {' or '.join(roomy)}" if roomy else ""
