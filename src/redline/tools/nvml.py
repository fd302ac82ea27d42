"""Access to NVML, NVIDIA's management library, through the optional package `nvidia-ml-py`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def open_gpu(device: torch.device) -> Iterator[tuple[Any, Any]]:
    """Yield the module `pynvml` and its handle of a CUDA device; raise ImportError without the package."""
    pynvml: Any = importlib.import_module("pynvml")
    pynvml.nvmlInit()
    try:
        yield pynvml, pynvml.nvmlDeviceGetHandleByUUID(gpu_uuid(device))
    finally:
        pynvml.nvmlShutdown()


def gpu_uuid(device: torch.device) -> str:
    """Return the UUID of a CUDA device in the format of NVML and nvidia-smi."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return f"GPU-{uuid.removeprefix('GPU-')}"
