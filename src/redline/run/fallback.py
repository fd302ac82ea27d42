"""Save a run whose folder has become unwritable to another folder, on another disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from redline.core.errors import StorageError
from redline.run.checkpoint import Checkpoints, RunLock, prepare_run_dir
from redline.run.plan import Plan
from redline.run.run_folder import Notify, write_config


def save_elsewhere(plan: Plan, config: dict[str, Any], save: Callable[[Checkpoints], None], notify: Notify) -> str:
    """Save the run and its `config` to a folder of the same name in --fallback-dir; return a sentence that reports it.

    save: writes the checkpoint to the given Checkpoints, or raises StorageError.
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
