"""The lines printed when training starts, or when there is nothing left to train."""

from __future__ import annotations

from typing import Any

import torch

from redline.run.plan import Plan, share_of


def opening_lines(plan: Plan) -> list[str]:
    """Return the lines that describe the run, its device, and choices that a user may want to change."""
    lines = [
        f"Training {plan.settings.env} with {plan.settings.algo} on {plan.hardware.name} ({plan.device}): "
        f"{plan.num_envs:,} games at once, batch {plan.algo_config.batch_size:,}, {plan.precision}"
        f"{', compiled' if plan.compile else ''}{', CUDA graphs' if plan.graph else ''}."
    ]
    if plan.ranks.size > 1:
        lines.append(_describe_ranks(plan))
    if sources := plan.name_sources():
        lines.append(sources)
    if plan.settings.device == "auto" and torch.cuda.is_available():
        lines.append(f"Device {plan.device}: {plan.reasons['device']}.")
    if plan.actors and "ended or hung" in plan.reasons.get("actors", ""):
        lines.append(
            f"Playing in {plan.actors} actors: {plan.reasons['actors']}. --actors 0 plays in this process again."
        )
    if not plan.compile and plan.settings.compile is None:
        lines.append(f"Running without compilation: {plan.reasons['compile']}.")
    if plan.curriculum:
        phases = ", ".join(f"{x.name} {100 * x.start:.0f}-{100 * x.end:.0f} %" for x in plan.curriculum.phases)
        lines.append(f"Curriculum: {phases}; evaluation uses the run's own options.")
    elif plan.recipe.curriculum(plan.rules.config) and plan.settings.curriculum is None:
        lines.append(f"Training without a curriculum: {plan.reasons['curriculum']}")
    if plan.compile:
        begun = "One update comes before." if plan.shares_compilation else "Learning begins uncompiled meanwhile."
        meanwhile = f" {begun}" if plan.starts_uncompiled else ""
        lines.append(
            "Compiling: usually 20 to 90 seconds, longest the first time on a machine; they do not count as training."
            f"{meanwhile}"
        )
    return lines


def _describe_ranks(plan: Plan) -> str:
    """Return a sentence about how the work is shared between ranks."""
    ranks, own = plan.ranks, share_of(plan)
    shared = ""
    if ranks.shares_device:
        shared = " Ranks share a GPU, which helps to test but not to train: NCCL needs one GPU for each."
    split = "" if ranks.captures or not plan.graph else " Gradients pass through the host, outside of CUDA graphs."
    return (
        f"{ranks.size} ranks ({ranks.backend}): {plan.num_envs:,} environments, {own.num_envs:,} a rank; batch "
        f"{plan.algo_config.batch_size:,}, {own.algo_config.batch_size:,} a rank.{shared}{split}"
    )


def finished_line(plan: Plan, result: dict[str, Any]) -> str:
    """Return advice for a run that has used up its budget."""
    limit = result["stopped_by"]
    value = plan.minutes if limit == "minutes" else getattr(plan.settings, limit)
    return (
        f"This run is finished: it has reached its {value:,} {limit}. Nothing was changed. Train on with a higher "
        f"--{limit}, evaluate it with redline eval {plan.run_dir}, or start anew with --resume never."
    )
