"""Resume or restart a run: choose the checkpoint, check the settings, and detect whether the run is already finished."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from redline import replay
from redline.core.errors import UserError
from redline.run.atomic_files import Damaged
from redline.run.budget import Budget
from redline.run.checkpoint import Checkpoint, Checkpoints
from redline.run.divergence import MAX_ROLLBACKS
from redline.run.manifest import check_weights
from redline.run.plan import Plan
from redline.run.run_folder import CONFIG, RECORDS, Notify, read_config, read_result
from redline.run.session import Session


def check_run_folder(plan: Plan) -> list[str]:
    """Raise UserError if the folder holds a different run; return notes about settings changed since it was trained."""
    if plan.settings.resume == "never" or not (plan.run_dir / CONFIG).exists():
        return []
    before = read_config(plan.run_dir)
    for name in ("env", "algo"):
        if before[name] != getattr(plan.settings, name):
            raise UserError(
                f"{plan.run_dir} holds a run of {before['env']} with {before['algo']}, not of {plan.settings.env} with "
                f"{plan.settings.algo}; name another folder with --run-dir."
            )
    if not any((plan.run_dir / "checkpoints").glob("*ckpt-*")):  # damaged ones count; without any, nothing was trained
        return []
    changed = _changed_options(plan, before)
    fixed = {name: change for name, change in changed.items() if name in plan.algo.RESUME_FIXED}
    differences = _changed_identity(plan, before)
    differences += [f"{plan.settings.algo}.{name} was {old!r}, now {new!r}" for name, (old, new) in fixed.items()]
    if differences:
        raise UserError(
            f"{plan.run_dir} cannot be continued with these settings: {'; '.join(differences)}. Give the old ones, name "
            "another folder with --run-dir, or start anew with --resume never."
        )
    notes = []
    if before.get("phases", []) != plan.describe()["phases"]:
        notes.append("Continuing with another curriculum than before, at the phase that is due now.")
    if (backplay := before.get("backplay", plan.backplay)) != plan.backplay:
        notes.append(f"Continuing with backplay {plan.backplay}; it was {backplay}.")
    return notes + [
        f"Continuing with {plan.settings.algo}.{k} {new!r}; it was {old!r}." for k, (old, new) in changed.items()
    ]


def _changed_identity(plan: Plan, before: dict[str, Any]) -> list[str]:
    """Return a clause for each setting that differs although a resumed run must share it."""
    old, new = plan.identity(before), plan.identity()
    differences = []
    for name, value in new.items():
        if isinstance(value, dict) and isinstance(old[name], dict):
            defaults = vars(plan.rules.game.Config())  # for options added since then
            then, now = defaults | (before.get(name) or {}), plan.describe()[name]
            prefix = name.removesuffix("_options")
            keys = [key for key in {**old[name], **value} if old[name].get(key) != value.get(key)]
            differences += [f"{prefix}.{key} was {then.get(key)!r}, now {now.get(key)!r}" for key in keys]
        elif old[name] != value:
            differences.append(f"{name} was {old[name]!r}, now {value!r}")
    return differences


def _changed_options(plan: Plan, before: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the algorithm's options whose values differ: name -> (old, new). Options added since then had their defaults."""
    defaults = {field.name: field.default for field in dataclasses.fields(plan.algo_config)}
    old, new = _as_json(defaults) | before["algo_options"], _as_json(plan.describe()["algo_options"])
    return {name: (old.get(name), value) for name, value in new.items() if old.get(name) != value}


def _as_json(options: dict[str, Any]) -> dict[str, Any]:
    """Return options as they would be read back from JSON."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}


_COUNTS = ("episodes", "samples_trained")
_SESSION_COUNTS = ("iterations", "updates", "remembered")


def check_state(checkpoint: Checkpoint) -> None:
    """Raise Damaged for a checkpoint without a run's counts or tensors; only counts are checked if no tensors were read.

    Raise UserError for the intact checkpoint of a packed agent.
    """
    if checkpoint.manifest["resume_level"] == "L0":
        raise UserError(
            f"{checkpoint.path} holds the weights of a packed agent and nothing to continue its training with; train into "
            "another folder with --run-dir."
        )
    state, session = checkpoint.state, checkpoint.state.get("session")
    counts = {name: state.get(name) for name in _COUNTS}
    counts |= {f"session.{name}": session.get(name) if isinstance(session, dict) else None for name in _SESSION_COUNTS}
    wrong = [name for name, count in counts.items() if type(count) is not int or not 0 <= count < 10**18]
    if type(state.get("evaluated_at", 0)) is not int:
        wrong.append("evaluated_at")
    if type(rollbacks := state.get("rollbacks", 0)) is not int or not 0 <= rollbacks <= MAX_ROLLBACKS:
        wrong.append("rollbacks")
    for name in ("seconds", "preparation"):
        seconds = state.get(name)
        if not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
            wrong.append(name)
    if wrong:
        raise Damaged(f"state.json has no valid '{wrong[0]}'")
    if not checkpoint.tensors:
        return
    check_weights(checkpoint)
    if missing := {"rng", "envs"} - checkpoint.tensors.keys():
        raise Damaged(f"it lacks {min(missing)}.safetensors")


def finished_result(plan: Plan, checkpoints: Checkpoints) -> dict[str, Any] | None:
    """Return the result of a run that has used up its budget; None if there is something left to train. Writes nothing."""
    if plan.settings.resume not in ("auto", "must"):
        return None
    checkpoint = checkpoints.load(groups=())  # the counts suffice
    if not checkpoint or not _limit(plan, checkpoint):
        return None
    checkpoint = checkpoints.load()  # verify all tensors: a run with a damaged checkpoint resumes from the one before
    if not checkpoint or not (limit := _limit(plan, checkpoint)):
        return None
    return (read_result(plan.run_dir) or _result_of(plan, checkpoint)) | {"stopped_by": limit}


def _limit(plan: Plan, checkpoint: Checkpoint) -> str:
    """Return the limit that a checkpoint has reached, or an empty string."""
    state = checkpoint.state
    budget = Budget(plan.settings.steps, plan.settings.episodes, plan.minutes)
    return budget.reached(checkpoint.step, state["episodes"], state["seconds"] - state["preparation"])


def _result_of(plan: Plan, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the result of a run without a result.json, as far as its checkpoint contains it."""
    seconds = checkpoint.state["seconds"]
    return {
        "env": plan.settings.env,
        "algo": plan.settings.algo,
        "device": str(plan.device),
        "run": str(plan.run_dir),
        "env_steps": checkpoint.step,
        "updates": checkpoint.state["session"]["updates"],
        "samples_trained": checkpoint.state["samples_trained"],
        "episodes": checkpoint.state["episodes"],
        "seconds": seconds,
        "preparation_seconds": checkpoint.state["preparation"],
        "env_steps_per_second": checkpoint.step / max(seconds, 1e-9),
        "samples_per_second": checkpoint.state["samples_trained"] / max(seconds, 1e-9),
        "seconds_to_first_update": None,
        "settings": plan.describe(),
    }


def open_session(plan: Plan, notify: Notify, report: Notify) -> Session:
    """Return a session for the plan; `notify` and `report` are passed to it.

    A restarted run does not inherit the replay files of the previous one.
    """
    folder = plan.own_folder
    backups = {folder / name: folder / f".old-{name}" for name in replay.run_files()}
    moved = {file: old for file, old in backups.items() if plan.settings.resume == "never" and file.exists()}
    for file, old in moved.items():
        file.rename(old)
    try:
        session = Session(plan, notify, report, may_overlap=True)
    except BaseException:
        for file, old in moved.items():
            file.unlink(missing_ok=True)
            old.rename(file)
        raise
    for old in backups.values():
        old.unlink(missing_ok=True)
    return session


def load_checkpoint(plan: Plan, checkpoints: Checkpoints) -> Checkpoint | None:
    """Return the checkpoint to resume from, according to --resume. Later checkpoints are moved to another folder."""
    resume = plan.settings.resume
    if resume == "never":
        aside = checkpoints.set_aside()
        for name in RECORDS:
            if aside and (plan.run_dir / name).exists():
                (plan.run_dir / name).rename(aside / name)
        return None
    if resume in ("auto", "must"):
        checkpoint = checkpoints.load()
        if checkpoint is None and resume == "must":
            raise UserError(f"resume is 'must', but there is no checkpoint in {plan.run_dir}; train one first.")
        return checkpoint
    if not Path(resume).is_dir():
        raise UserError(f"resume is '{resume}'; expected auto, must, never or the folder of a checkpoint.")
    checkpoint = checkpoints.load_path(resume)
    checkpoints.set_aside(after=checkpoint.step)
    if checkpoint.path.resolve().parent != checkpoints.folder.resolve():
        checkpoints.last_step = None  # this folder has no checkpoint of that step yet
    return checkpoint
