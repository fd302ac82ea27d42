"""Errors that end training, as one sentence for the user that names the last good checkpoint and what to do."""

from __future__ import annotations

import traceback
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from redline.core.errors import UserError
from redline.engine.fast import first_line
from redline.run.manifest import FOLDER
from redline.run.plan import Plan

CRASH_LOG = "crash.log"


class TrainingFailed(UserError):
    """Training ended with an exception that is probably not the user's mistake; `__cause__` is that exception."""

    exit_code = 70


def training_failed(run_dir: Path, error: Exception, env_steps: int, saved: str) -> UserError:
    """Return the error to raise instead of `error`, after `env_steps` steps. saved: a sentence about the checkpoint.

    A UserError keeps its type and exit code.
    """
    if isinstance(error, UserError):
        error.args = (f"{error} {saved}".rstrip(),)
        return error
    what = f"Training failed after {env_steps:,} steps: {first_line(error).rstrip('.')}."
    where = _write_traceback(run_dir / CRASH_LOG, error)
    return TrainingFailed(" ".join(filter(None, (what, saved, where))))


def _write_traceback(path: Path, error: Exception) -> str:
    """Append the traceback to a file and return `The traceback is in FILE.`, or an empty string if that fails."""
    with suppress(OSError):
        with open(path, "a", encoding="utf-8", errors="replace") as file:
            file.write(f"{datetime.now().isoformat(timespec='seconds')}\n")
            file.write("".join(traceback.format_exception(error)) + "\n")
        return f"The traceback is in {path}."
    return ""


def not_deterministic(plan: Plan, error: RuntimeError) -> UserError:
    """Return the error for an operation that is not deterministic."""
    operation = str(error).strip().partition(" ")[0]
    return UserError(
        f"deterministic is on, but {operation} has no deterministic implementation on {plan.device}; drop --deterministic, or "
        "change the options of the network or the algorithm that need it."
    )


def describe_saved(run_dir: Path) -> str:
    """Return a sentence about the last good checkpoint and how to continue."""
    if newest := newest_checkpoint(run_dir):
        return f"The last good checkpoint is {run_dir / 'checkpoints' / newest}: the same command continues from it."
    return "Nothing was saved yet: the same command starts anew."


def newest_checkpoint(run_dir: Path) -> str:
    """Return the name of the newest checkpoint in a run folder; an empty string if there is none."""
    folder = run_dir / "checkpoints"
    names = [path.name for path in folder.iterdir() if FOLDER.fullmatch(path.name)] if folder.is_dir() else []
    return max(names, default="")


def out_of_memory(plan: Plan, checkpoint: str) -> UserError:
    """Return the error for a run that does not fit into memory. checkpoint: its newest one; empty if there is none."""
    saved = f" The run is saved in {checkpoint}: the same command continues it." if checkpoint else ""
    smaller = " or a smaller --replay-capacity" if hasattr(plan.algo_config, "replay_capacity") else ""
    return UserError(
        f"{plan.device} ran out of memory; use fewer environments (--num-envs, now {plan.num_envs:,}), a smaller batch "
        f"(--batch-size, now {plan.algo_config.batch_size:,}){smaller}.{saved}"
    )
