"""The run folder: config.json, metrics.jsonl, TensorBoard files, evaluations. Checkpoints have their own module."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from redline.core.errors import StorageError, UserError


def write_json(path: Path, record: Any) -> None:
    """Whole or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(json.dumps(record, indent=2, default=str) + "\n")
        os.replace(part, path)
    except OSError as error:
        raise StorageError(
            f"{path} could not be written: {error.strerror}. Free or mend the disk and try again."
        ) from error


def read_config(run_dir: Path) -> dict[str, Any]:
    """The config.json of a run; a folder without one is not a run."""
    path = run_dir / "config.json"
    try:
        record = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(
            f"{run_dir} is not a run folder: there is no config.json in it. Train one with redline train."
        ) from None
    except (OSError, ValueError) as error:
        raise StorageError(f"{path} could not be read ({error}); restore it or train into another folder.") from error
    kinds = {"env": str, "algo": str, "env_options": dict, "algo_options": dict}
    if not isinstance(record, dict) or not all(isinstance(record.get(key), kind) for key, kind in kinds.items()):
        raise StorageError(f"{path} is not a run's config.json; restore it or train into another folder.")
    return record


class Metrics:
    """metrics.jsonl, one record a line, and TensorBoard where asked for. A failing log never stops training."""

    def __init__(self, run_dir: Path, env_steps: int, tensorboard: bool, notify: Callable[[str], None]) -> None:
        """Continues after `env_steps`: later or garbled lines, written after the checkpoint resumed from, are dropped."""
        self.path, self.notify, self.broken = run_dir / "metrics.jsonl", notify, False
        try:
            if self.path.exists():
                kept = [line for line in self.path.read_text(errors="replace").splitlines() if _up_to(line, env_steps)]
                part = self.path.with_name(".metrics.jsonl.part")
                part.write_text("".join(line + "\n" for line in kept))
                os.replace(part, self.path)
        except OSError as error:  # now nothing is trained yet
            raise StorageError(f"{self.path} could not be mended: {error.strerror}; move it away.") from error
        self.writer: Any = None
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise UserError(
                    "TensorBoard is not installed; install it with pip install 'redline[tensorboard]'."
                ) from None
            self.writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=env_steps or None)

    def write(self, record: dict[str, Any]) -> None:
        try:
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")
            if self.writer:
                for name, value in record.items():
                    if isinstance(value, (int, float)):
                        self.writer.add_scalar(name, value, record["env_steps"])
        except OSError as error:
            if not self.broken:
                self.notify(f"Metrics are not written any more: {error}. Training goes on.")
            self.broken = True

    def close(self) -> None:
        if self.writer:
            self.writer.close()


def _up_to(line: str, env_steps: int) -> bool:
    try:
        return bool(json.loads(line)["env_steps"] <= env_steps)
    except (ValueError, KeyError, TypeError):
        return False
