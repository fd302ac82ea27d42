"""Publish the current weights of a run in training, a few times a minute while there are viewers.

A viewer touches a mark in the run folder (`watch_mark.py`); training then writes `live.safetensors` next to it at log points,
at most every few seconds. Training never waits for a viewer, and without viewers nothing is written.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from redline.run.watch_mark import is_watched

LIVE = "live.safetensors"
_STEP = "live.env_steps"  # a tensor in the file
_EVERY = 5.0  # seconds between two publications
_MAX_BYTES = 1 << 30


class LiveWeights:
    """The publishing side, in the training loop."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self._next = run_dir, 0.0

    def publish(self, model: Callable[[], Mapping[str, Tensor]], env_steps: int) -> None:
        """Write the weights if there are viewers and enough time has passed; failures are ignored."""
        now = time.monotonic()
        if now < self._next:
            return
        with suppress(OSError):
            if not is_watched(self.run_dir):
                return
            self._next = now + _EVERY
            tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in model().items()}
            part = self.run_dir / f".{LIVE}.{os.getpid()}"
            part.write_bytes(safetensors.torch.save(tensors | {_STEP: torch.tensor(env_steps)}))
            os.replace(part, self.run_dir / LIVE)


def published_at(run_dir: Path) -> float:
    """Return the time of the newest publication; 0 if there is none."""
    with suppress(OSError):
        return os.lstat(run_dir / LIVE).st_mtime
    return 0.0


def read(run_dir: Path) -> tuple[dict[str, Tensor], int]:
    """Return the published weights and their environment steps; raise OSError or ValueError if they are unusable."""
    with open(os.open(run_dir / LIVE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if os.fstat(file.fileno()).st_size > _MAX_BYTES:
            raise OSError(errno.EFBIG, "it is larger than the weights of a network")
        content = file.read(_MAX_BYTES)
    try:
        tensors = safetensors.torch.load(content)
    except safetensors.SafetensorError as error:
        raise ValueError("it is no safetensors file") from error
    step = tensors.pop(_STEP, None)
    if step is None or not tensors:
        raise ValueError("it holds no published weights")
    return tensors, int(step)
