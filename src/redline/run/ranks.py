"""Runs with several ranks: their shares, joint decisions, and the checkpoint they write and read together.

Numbers in a Plan are totals over all ranks. Rank r of W steps the environments r * N / W to (r + 1) * N / W - 1, with the same
random streams as in a single process, learns from an equal part of every batch, and keeps the replay memory of its own
environments. Only rank 0 accesses the run folder, except for replay files.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redline.core.errors import UserError
from redline.engine.distributed import Ranks, ReportedByLeader
from redline.recipes import Setting
from redline.run import thread_choice
from redline.run.checkpoint import Checkpoint, Checkpoints
from redline.run.plan import HARDWARE, Plan, share_of
from redline.run.resolve import resolve
from redline.run.run_folder import Notify
from redline.run.settings import Settings

# Settings that may differ between ranks, since they depend on each rank's machine and GPU.
_OWN = ("device", "threads", "compile", "graph", "actors", "inference", "provenance", "run_dir", "resume")
_SHARD = "replay_"  # group of a rank's replay memory in a checkpoint: replay_0, replay_1, …


def decide(settings: Settings, ranks: Ranks) -> Plan:
    """Return the plan of `settings`, the same on all ranks except for each rank's device and threads."""
    if not ranks.active:
        return thread_choice.decide(settings)
    if "auto" in (settings.replay_capacity, settings.algo_options.get("replay_capacity")):
        raise UserError(
            "replay_capacity is 'auto'; with several ranks give a number, of transitions on all ranks together."
        )
    ranks.lead(lambda: _resolve(settings, ranks))  # an impossible request is reported once
    plan = _resolve(settings, ranks)
    settings = dataclasses.replace(plan.settings, device=settings.device, num_envs=settings.num_envs)
    plan = dataclasses.replace(plan, settings=settings, ranks=ranks)
    if settings.threads is None and plan.threads:
        threads = max(1, min(plan.threads, plan.hardware.cores // ranks.local_size))
        chosen = Setting(threads, f"{ranks.local_size} ranks share the cores", HARDWARE)
        plan = dataclasses.replace(plan, threads=threads, provenance=plan.provenance | {"threads": chosen})
    shared = {name: value for name, value in plan.describe().items() if name not in _OWN}
    check_same(ranks, _flat(shared) | {"torch": torch.__version__})
    ranks.lead(lambda: share_of(plan))  # refuses numbers that cannot be shared equally
    return plan


def _resolve(settings: Settings, ranks: Ranks) -> Plan:
    """Return the plan of `settings` on this rank's device, with a multiple of the ranks as num_envs unless requested."""
    settings = dataclasses.replace(settings, device=str(ranks.device))
    plan = resolve(settings)
    if settings.num_envs is not None or plan.num_envs % ranks.size == 0:
        return plan
    return resolve(dataclasses.replace(settings, num_envs=max(plan.num_envs // ranks.size, 1) * ranks.size))


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with nested dictionaries flattened."""
    flat: dict[str, Any] = {}
    for name, value in record.items():
        flat |= {f"{name}.{key}": x for key, x in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def check_same(ranks: Ranks, record: Mapping[str, Any]) -> None:
    """Raise UserError on every rank if a value of `record` differs between ranks, with its name and values."""
    records = ranks.gather(record)
    for name, expected in records[0].items():
        for rank, other in enumerate(records):
            if other.get(name) != expected:
                message = (
                    f"The ranks of this run differ in {name}: rank 0 has {expected!r}, rank {rank} {other.get(name)!r}. "
                    "Start all of them with the same command, code and versions."
                )
                raise UserError(message) if ranks.leads else ReportedByLeader(message, UserError.exit_code)


def check_weights(ranks: Ranks, groups: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Raise UserError on every rank unless all ranks have the same weights, optimizer state and random streams."""
    if ranks.active:
        common = {group: _digest(tensors) for group, tensors in groups.items() if group in ("model", "optim", "rng")}
        check_same(ranks, {f"the tensors of {group}": digest for group, digest in common.items()})


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


# ---- at log points


@dataclass(frozen=True)
class Decision:
    """The training loop's next action."""

    stopped_by: str  # reason to stop; empty: continue
    save: bool  # write a checkpoint
    chunk: int  # iterations until the next log point, at most
    progress: float  # fraction of training done, which schedules and the curriculum follow


def agree(ranks: Ranks, own: Decision) -> Decision:
    """Return the same decision on all ranks: stop or save if any rank wants to; the rest is rank 0's, whose clock counts."""
    if not ranks.active:
        return own
    decisions = [Decision(**record) for record in ranks.gather(dataclasses.asdict(own))]
    stopped_by = next((decision.stopped_by for decision in decisions if decision.stopped_by), "")
    return dataclasses.replace(decisions[0], stopped_by=stopped_by, save=any(d.save for d in decisions))


def merge_episode_stats(ranks: Ranks, own: dict[str, float]) -> dict[str, float]:
    """Return the statistics of the episodes that ended on all ranks, see EpisodeStats."""
    if not ranks.active:
        return own
    parts = [part for part in ranks.gather(own) if part["episodes"]]
    if not parts:
        return {"episodes": 0}
    names = list(dict.fromkeys(name for part in parts for name in part))
    merged = {}
    for name in names:
        of, _, figure = name.rpartition("/")  # `level/1-1/score`: a mean over the episodes of that level
        counts = [(part[name], part[f"{of}/episodes" if of else "episodes"]) for part in parts if name in part]
        total = sum(count for _, count in counts)
        merged[name] = total if figure == "episodes" else sum(value * count for value, count in counts) / total
    return merged | {"score_max": max(part["score_max"] for part in parts)}


# ---- checkpoints


def save(
    ranks: Ranks,
    checkpoints: Checkpoints,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    **how: Any,
) -> None:
    """Save like Checkpoints.save; every rank calls it with its own tensors, and rank 0 writes them all.

    Groups that all ranks share are written once, and refused if they differ. The environments of all ranks are concatenated in
    order, as in a single process. Each rank's replay memory is a separate group.
    """
    if not ranks.active:
        checkpoints.save(step, tensors, state, **how)
        return
    check_weights(ranks, tensors)
    gathered = {
        group: {name: ranks.gather_tensor(x) for name, x in tensors[group].items()}
        for group in ("envs", "replay")
        if group in tensors
    }
    whole = {group: dict(named) for group, named in tensors.items() if group not in gathered}
    if ranks.leads:
        whole["envs"] = {name: torch.cat(parts) for name, parts in gathered["envs"].items()}
        for rank in range(ranks.size if "replay" in gathered else 0):
            whole[f"{_SHARD}{rank}"] = {name: parts[rank] for name, parts in gathered["replay"].items()}
    ranks.lead(lambda: checkpoints.save(step, whole, state, **how))  # a failure is raised on all ranks


def load_shared(ranks: Ranks, load: Callable[[], Checkpoint | None], notify: Notify) -> Checkpoint | None:
    """Return the checkpoint that load() finds on rank 0, with only this rank's part of the groups `envs` and `replay`."""
    if not ranks.active:
        checkpoint = load()
        return checkpoint and dataclasses.replace(checkpoint, tensors=_own_groups(ranks, checkpoint, notify))
    found: list[Checkpoint | None] = []

    def describe() -> dict[str, Any] | None:
        found.append(checkpoint := load())
        if checkpoint is None:
            return None
        layout = {
            group: {name: [str(x.dtype).removeprefix("torch."), list(x.shape)] for name, x in named.items()}
            for group, named in checkpoint.tensors.items()
        }
        return {
            "path": str(checkpoint.path),
            "step": checkpoint.step,
            "state": checkpoint.state,
            "manifest": checkpoint.manifest,
            "layout": layout,
        }

    record = ranks.lead(describe)
    if record is None:
        return None
    source = found[0].tensors if found and found[0] else None
    tensors = {
        group: {
            name: _receive(ranks, group, source[group][name] if source else None, *spec) for name, spec in named.items()
        }
        for group, named in record["layout"].items()
    }
    present = {g: {k: x for k, x in named.items() if x is not None} for g, named in tensors.items()}
    checkpoint = Checkpoint(Path(record["path"]), record["step"], present, record["state"], record["manifest"])
    return dataclasses.replace(checkpoint, tensors=_own_groups(ranks, checkpoint, notify))


def _receive(ranks: Ranks, group: str, tensor: Tensor | None, dtype: str, shape: Sequence[int]) -> Tensor | None:
    """Return a tensor of a checkpoint that rank 0 has read; None if it belongs to another rank."""
    kind = getattr(torch, dtype)
    if not group.startswith(_SHARD):
        return ranks.broadcast_tensor(tensor, shape, kind)
    rank = int(group.removeprefix(_SHARD))
    return ranks.pass_tensor(tensor, rank, shape, kind) if rank < ranks.size else None


def _own_groups(ranks: Ranks, checkpoint: Checkpoint, notify: Notify) -> dict[str, dict[str, Tensor]]:
    """Return a checkpoint's groups with only this rank's environments and replay memory."""
    groups = {name: named for name, named in checkpoint.tensors.items() if not name.startswith(_SHARD)}
    envs = groups.get("envs", {})
    groups["envs"] = {name: x.chunk(ranks.size)[ranks.rank].contiguous() for name, x in envs.items()}
    before = checkpoint.manifest["world_size"]
    if before == ranks.size:
        if before > 1 and f"{_SHARD}{ranks.rank}" in checkpoint.tensors:
            groups["replay"] = checkpoint.tensors[f"{_SHARD}{ranks.rank}"]
        return groups
    had_replay = groups.pop("replay", None) or any(name.startswith(_SHARD) for name in checkpoint.tensors)
    lost = (
        " The replay memory cannot be divided anew: it is filled again before learning goes on." if had_replay else ""
    )
    notify(
        f"This run was saved by {_count(before)} and continues with {_count(ranks.size)}; games and weights go on.{lost}"
    )
    return groups


def _count(ranks: int) -> str:
    return "one process" if ranks == 1 else f"{ranks} ranks"
