"""Detect devices, memory, cores and compilers, and share cores with actor processes."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import sys
from pathlib import Path

import torch

from redline.core.errors import UserError, nearest
from redline.core.native import find_compiler, processor_name
from redline.core.records import Hardware
from redline.engine import host_memory


def pick_device(wanted: str) -> torch.device:
    """Return the requested device; `auto` is the current CUDA device, else the CPU. Raise UserError if it does not exist."""
    if wanted == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")
    kinds = ("auto", "cpu", "cuda", "mps")
    kind, colon, number = wanted.partition(":")
    if kind not in kinds or (colon and not (kind == "cuda" and number.isascii() and number.isdigit())):
        hint = nearest("cuda" if wanted == "gpu" else wanted, kinds) or "."
        raise UserError(f"device is '{wanted}'{hint} Expected auto, cpu, cuda, cuda:N or mps.")
    if kind == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        index = int(number or 0)
        if index >= count:
            have = f"{count} CUDA device{'s' if count != 1 else ''}" if count else "no CUDA device"
            raise UserError(
                f"device is '{wanted}', but torch {torch.__version__} sees {have} here; take --device auto."
            )
        return torch.device("cuda", index)
    if kind == "mps" and not torch.backends.mps.is_available():
        raise UserError("device is 'mps', but there is no Apple GPU here that torch can use; take --device auto.")
    return torch.device(kind)


def detect(device: torch.device) -> Hardware:
    """Return the Hardware of `device`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    compiler = find_compiler()
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return Hardware(
            device=str(device),
            name=properties.name,
            cores=cores,
            memory_gb=properties.total_memory / 2**30,
            bf16=properties.major >= 8,
            compiler=compiler,
            capability=(properties.major, properties.minor),
        )
    memory = host_memory.total_bytes() / 2**30
    return Hardware(str(device), processor_name(), cores, memory, bf16=False, compiler=compiler)


def most_threads(cores: int) -> int:
    """Return the number of threads that torch may use on `cores` cores: at most OMP_NUM_THREADS, if that is set."""
    limit = os.environ.get("OMP_NUM_THREADS", "")
    return min(cores, int(limit)) if limit.isdigit() and int(limit) else cores


def set_interop_threads(count: int) -> str:
    """Set the number of torch's inter-op threads; return the reason if that fails, else an empty string.

    torch allows it once per process, before such threads have started.
    """
    if count == torch.get_num_interop_threads():
        return ""
    try:
        torch.set_num_interop_threads(count)
    except RuntimeError as error:
        return str(error).strip().partition("\n")[0]
    return ""


def free_bytes(device: torch.device) -> int:
    """Return the free memory of the device in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return host_memory.free_bytes()


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory in bytes: of tensors on a GPU, or of this process on the host."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def has_nvidia_driver() -> bool:
    """Return whether an NVIDIA driver is installed, even if torch cannot use it."""
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished all work; do nothing for other devices."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class SharedCores:
    """Splits the cores between this process and `others` single-threaded processes, until `give_back`.

    If there are enough cores, each of them gets its own; else this process uses one core and the others may run on all.
    """

    def __init__(self, others: int) -> None:
        self.threads = torch.get_num_threads()
        every = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []
        self.every, mine = every, max(1, (len(every) or os.cpu_count() or 1) - others)
        alone = others < len(every)
        self.others = [[core] for core in every[mine:]] if alone else [every] * others
        if every:
            self._stay_on(every[:mine])
        torch.set_num_threads(min(mine, self.threads))

    def give_back(self) -> None:
        if self.every:
            self._stay_on(self.every)
        torch.set_num_threads(self.threads)

    @staticmethod
    def _stay_on(cores: list[int]) -> None:
        """Bind all threads of this process, including those of libraries that torch.set_num_threads does not control."""
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # the thread has just ended
                os.sched_setaffinity(int(thread), cores)
