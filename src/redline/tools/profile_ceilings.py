"""Peak performance of this machine: FLOP/s of a large matrix product, bytes/s of copies, and cost of a synchronisation."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch

from redline.engine import hardware

_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SECONDS = 0.15  # per measurement


def measure_ceilings(device: torch.device, precision: str = "fp32") -> dict[str, float]:
    """Return `flops_per_second`, `bytes_per_second` and, with a GPU, the speed of copies and the cost of a synchronisation."""
    on_gpu = device.type == "cuda"
    size = 8192 if on_gpu else 512
    left, right = (torch.randn(size, size, device=device, dtype=_DTYPES[precision]) for _ in range(2))
    out = torch.empty_like(left)
    flops = 2 * size**3 / _fastest(lambda: torch.mm(left, right, out=out), device)
    count = (1 << 28) if on_gpu else (1 << 25)
    source = torch.zeros(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    ceilings = {
        "flops_per_second": flops,
        "bytes_per_second": 2 * count / _fastest(lambda: target.copy_(source), device),  # read and written
    }
    if on_gpu:
        ceilings |= _transfer_ceilings(device)
    return ceilings


def _transfer_ceilings(device: torch.device) -> dict[str, float]:
    """Return the bytes/s of host-device copies from pageable and page-locked memory, and the cost of `.item()`."""
    count = 1 << 26
    target = torch.empty(count, dtype=torch.uint8, device=device)
    pageable = torch.zeros(count, dtype=torch.uint8)
    pinned = torch.zeros(count, dtype=torch.uint8, pin_memory=True)
    value = torch.zeros((), device=device)

    def launch() -> None:
        for _ in range(50):
            value.add_(1)

    def read() -> None:
        for _ in range(50):
            value.add_(1).item()

    return {
        "pageable_bytes_per_second": count / _fastest(lambda: target.copy_(pageable), device),
        "pinned_bytes_per_second": count / _fastest(lambda: target.copy_(pinned, non_blocking=True), device),
        "synchronisation_seconds": max((_fastest(read, device) - _fastest(launch, device)) / 50, 1e-6),
    }


def _fastest(function: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of the fastest of several calls."""
    function()
    hardware.synchronize(device)
    best, ends = float("inf"), time.perf_counter() + _SECONDS
    while time.perf_counter() < ends:
        started = time.perf_counter()
        function()
        hardware.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return best


class FlopCounter:
    """Count FLOPs of matrix products and convolutions in an eager block; `total` is None if that fails."""

    def __init__(self) -> None:
        self.total: float | None = None

    def __enter__(self) -> FlopCounter:
        from torch.utils.flop_counter import FlopCounterMode

        self._stack = contextlib.ExitStack()
        self._stack.enter_context(torch.compiler.set_stance("force_eager"))
        self._mode: Any = self._stack.enter_context(FlopCounterMode(display=False))
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._stack.__exit__(kind, error, trace)
        if error is None:
            self.total = float(self._mode.get_total_flops())
