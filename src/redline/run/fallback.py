"""The last resort for a run whose folder cannot be written any more: a checkpoint in another folder, on another disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from redline.core.errors import StorageError
from redline.run.checkpoint import Checkpoints, RunLock, prepare_run_dir
from redline.run.plan import Plan
from redline.run.run_folder import Notify, write_config


def save_elsewhere(plan: Plan, config: dict[str, Any], save: Callable[[Checkpoints], None], notify: Notify) -> str:
    """Save the run into a folder of its name in --fallback-dir, with its `config`; return a sentence about it.

    save: writes the checkpoint into the folder it is given, or raises StorageError.
    """
    if plan.settings.fallback_dir is None:
        return "Free or repair the disk and give the same command again; with --fallback-dir it is saved elsewhere."
    folder = Path(plan.settings.fallback_dir) / plan.run_dir.name
    try:
        prepare_run_dir(folder)
        with RunLock(folder, notify=notify) as lock:
            identity = plan.identity_hash
            save(
                Checkpoints(
                    folder,
                    lock=lock,
                    config_hash=identity,
                    env_hash=identity,
                    world_size=plan.ranks.size,
                    notify=notify,
                )
            )
            write_config(folder, config)
    except StorageError as error:
        return f"It could not be saved in {folder} either: {error}"
    return f"The run is saved in {folder}: continue it with --run-dir {folder}."
