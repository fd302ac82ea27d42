"""Host memory: the amount available to this process within its own and its container's limits, and huge pages."""

from __future__ import annotations

import ctypes
import mmap
import resource
from contextlib import suppress
from pathlib import Path

import psutil
from torch import Tensor

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_HUGE = 1 << 21  # bytes of a huge page
_NO_LIMIT = 1 << 60  # cgroups version 1 reports a number near 2^63 if there is no limit
# Files of cgroups version 2 and 1: the limit, the usage, and the part of it that the kernel can drop (file caches).
_FILES_2 = ("memory.max", "memory.current", "inactive_file")
_FILES_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def total_bytes() -> int:
    """Return the total memory of the machine, or of the container if that is less."""
    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _container_limits())])


def free_bytes() -> int:
    """Return the bytes that this process can still allocate."""
    within = [int(psutil.virtual_memory().available)]
    within += [limit - used for limit, used in _container_limits()]
    memory = psutil.Process().memory_info()
    for kind, used in ((resource.RLIMIT_AS, memory.vms), (resource.RLIMIT_DATA, getattr(memory, "data", 0))):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            within.append(limit - used)
    return max(0, min(within))


def use_huge_pages(tensor: Tensor) -> None:
    """Ask Linux to back a contiguous CPU tensor with huge pages; call it before the tensor is written to.

    Random reads of a large table miss the TLB as often as the caches; huge pages need fewer address translations. If the
    system has none or refuses, the tensor keeps its pages.
    """
    first = -(-tensor.data_ptr() // _HUGE) * _HUGE
    size = (tensor.data_ptr() + tensor.nbytes - first) // _HUGE * _HUGE
    if tensor.device.type == "cpu" and size > 0 and hasattr(mmap, "MADV_HUGEPAGE"):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)


def _container_limits() -> list[tuple[int, int]]:
    """Return (limit, usage) in bytes of every cgroup that this process belongs to and that has a limit."""
    limits = []
    with suppress(OSError, ValueError):
        for line in _OWN.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                root, names = _ROOT, _FILES_2
            elif "memory" in controllers.split(","):
                root, names = _ROOT / "memory", _FILES_1
            else:
                continue
            group = root / path.lstrip("/")
            for place in (group, *group.parents):
                if place.is_relative_to(root) and (found := _read_limit(place, *names)):
                    limits.append(found)
    return limits


def _read_limit(group: Path, limit: str, used: str, droppable: str) -> tuple[int, int] | None:
    """Return (limit, usage) of a cgroup; None if it has no limit or it cannot be read."""
    with suppress(OSError, ValueError):
        most = int((group / limit).read_text(encoding="ascii"))  # "max": no limit
        if most >= _NO_LIMIT:
            return None
        fields = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        return most, max(0, int((group / used).read_text(encoding="ascii")) - int(fields.get(droppable, 0)))
    return None
