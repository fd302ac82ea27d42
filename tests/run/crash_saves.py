"""Run by test_checkpoint.py: kills a save at every phase, and fills the disk under one. Prints one JSON object a line.

    python crash_saves.py FOLDER

torch is imported once; each victim is a fork. A fork that is not killed exits with 99, which no test expects.
"""

import json
import os
import resource
import signal
import sys
from pathlib import Path

import torch

from redline.core import faults
from redline.core.errors import StorageError
from redline.run.checkpoint import Checkpoints, RunLock, prepare_run_dir

torch.set_num_threads(1)
GROUPS = ("model", "optim", "rng", "envs", "replay")


def tensors(step: int) -> dict[str, dict[str, torch.Tensor]]:
    return {group: {"x": torch.full((300,), step, dtype=torch.float32)} for group in GROUPS}


def resumed(run_dir: Path, notes: list[str]) -> dict:
    """What the next start finds: it takes over the lock, clears up, loads, and checks each number."""
    with RunLock(run_dir) as lock:
        checkpoint = Checkpoints(run_dir, lock=lock, notify=notes.append).load()
        assert checkpoint is not None
        right = all(bool((checkpoint.tensors[group]["x"] == checkpoint.step).all()) for group in GROUPS)
        return {
            "step": checkpoint.step,
            "right": right and checkpoint.state == {"step": checkpoint.step},
            "names": sorted(os.listdir(run_dir / "checkpoints")),
            "notes": notes,
        }


def killed_at(phase: str, run_dir: Path, background: bool) -> dict:
    prepare_run_dir(run_dir)
    child = os.fork()
    if child == 0:
        try:
            checkpoints = Checkpoints(run_dir, lock=RunLock(run_dir), keep_last=1)
            checkpoints.save(1, tensors(1), {"step": 1}, background=False)
            faults.arm(f"kill@{phase}")
            checkpoints.save(2, tensors(2), {"step": 2}, background=background)
            checkpoints.wait()
        finally:
            os._exit(99)
    status = os.waitpid(child, 0)[1]
    left = sorted(os.listdir(run_dir / "checkpoints"))
    return {"phase": phase, "signal": os.WTERMSIG(status), "left": left, **resumed(run_dir, [])}


def full_disk(run_dir: Path) -> dict:
    """A limit on the size of files stands in for the full disk: the kernel refuses the write half-way."""
    prepare_run_dir(run_dir)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    notes: list[str] = []
    with RunLock(run_dir) as lock:
        checkpoints = Checkpoints(run_dir, lock=lock, notify=notes.append)
        checkpoints.save(1, tensors(1), {"step": 1}, background=False)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        checkpoints.save(2, tensors(2), {"step": 2})
        checkpoints.wait()
        failures = [checkpoints.failures]
        try:
            checkpoints.save(3, tensors(3), {"step": 3}, background=False)
            raised = ""
        except StorageError as error:
            raised = str(error)
        failures.append(checkpoints.failures)
        step_while_full = checkpoints.load().step
        names_while_full = sorted(os.listdir(run_dir / "checkpoints"))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        checkpoints.save(4, tensors(4), {"step": 4})
        checkpoints.wait()
        failures.append(checkpoints.failures)
    return {
        "phase": "full disk",
        "raised": raised,
        "failures": failures,
        "step_while_full": step_while_full,
        "names_while_full": names_while_full,
        **resumed(run_dir, notes),
    }


if __name__ == "__main__":
    root = Path(sys.argv[1])
    for index, phase in enumerate(faults.SAVE_PHASES):
        print(json.dumps(killed_at(phase, root / f"kill-{index}", background=index % 2 == 0)), flush=True)
    print(json.dumps(full_disk(root / "full")), flush=True)
