"""Counters for profiles: compilations, host synchronisations, and the GPU's use, clock and power."""

from __future__ import annotations

import contextlib
import linecache
import subprocess
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from redline.tools.nvml import gpu_uuid, open_gpu

_SAMPLE_SECONDS = 0.05
_NVIDIA_SMI = ["nvidia-smi", "--query-gpu=utilization.gpu,clocks.sm,power.draw", "--format=csv,noheader,nounits"]


class CompileCounter:
    """Count compilations by torch.compile, and their seconds, until closed."""

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0
        self._began = 0.0

    def _start(self, *_: Any) -> None:
        self._began = time.perf_counter()
        self.count += 1

    def _end(self, *_: Any) -> None:
        self.seconds += time.perf_counter() - self._began

    def open(self) -> None:
        """Start counting."""
        from torch._dynamo.callback import callback_handler

        callback_handler.register_start_callback(self._start)
        callback_handler.register_end_callback(self._end)

    def close(self) -> None:
        """Stop counting; a second call does nothing."""
        from torch._dynamo.callback import callback_handler

        with contextlib.suppress(ValueError):  # already closed
            callback_handler.remove_start_callback(self._start)
            callback_handler.remove_end_callback(self._end)

    def __enter__(self) -> CompileCounter:
        self.open()
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class SyncCounter:
    """Count operations that make the host wait for the GPU, by source line, until closed."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.lines: Counter[str] = Counter()
        self._caught = warnings.catch_warnings(record=True)

    @property
    def count(self) -> int:
        return sum(self.lines.values())

    def __enter__(self) -> SyncCounter:
        if self.cuda:
            self._records: Any = self._caught.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.cuda:
            return
        torch.cuda.set_sync_debug_mode("default")
        self._caught.__exit__(kind, error, trace)
        for record in self._records:
            if "synchronizing CUDA operation" in str(record.message):
                code = linecache.getline(record.filename, record.lineno).strip()
                self.lines[f"{record.filename}:{record.lineno} {code}".strip()] += 1


def count_synchronisations(function: Callable[[], None], device: torch.device) -> int:
    """Return how often `function` makes the host wait for the GPU; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    with SyncCounter(device) as counter:
        function()
    return counter.count


class GpuSampler:
    """Sample use (percent), clock (MHz) and power (W) of a GPU in a thread.

    Uses NVML (`pip install 'redline[nvml]'`), else `nvidia-smi`; without either there are no samples.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.samples: list[tuple[float, float, float]] = []
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> GpuSampler:
        if self.device.type == "cuda":
            self._thread = threading.Thread(target=self._run, name="gpu-sampler", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def means(self) -> dict[str, float]:
        """Return the means of all samples."""
        if not self.samples:
            return {}
        use, clock, power = (sum(column) / len(self.samples) for column in zip(*self.samples, strict=True))
        return {"use_percent": use, "clock_mhz": clock, "power_watts": power, "samples": float(len(self.samples))}

    def _run(self) -> None:
        with contextlib.suppress(Exception):  # no samples without bindings, driver or permission
            try:
                self._ask_nvml()
            except ImportError:
                self._ask_nvidia_smi()

    def _ask_nvml(self) -> None:
        with open_gpu(self.device) as (pynvml, handle):
            self._done.wait(2 * _SAMPLE_SECONDS)  # NVML reports use over the recent past
            while not self._done.wait(_SAMPLE_SECONDS):
                use = float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
                clock = float(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))
                power = pynvml.nvmlDeviceGetPowerUsage(handle) / 1000
                self.samples.append((use, clock, power))

    def _ask_nvidia_smi(self) -> None:
        command = [*_NVIDIA_SMI, "-i", gpu_uuid(self.device), "-lms", "100"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if self._done.is_set():
                    break
                use, clock, power = (float(word) for word in line.split(","))
                self.samples.append((use, clock, power))
        finally:
            process.kill()
            process.wait()
