"""Memory of the host: what this process may use, within its own limits and its container's, and pages for large tables."""

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
_NO_LIMIT = 1 << 60  # version 1 of cgroups writes a number near 2^63 where there is no limit
# Version 2, version 1: names of the limit, of the use, and of the part of it that the kernel can drop (file caches).
_FILES_2 = ("memory.max", "memory.current", "inactive_file")
_FILES_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def total_bytes() -> int:
    """Return the memory of the machine, or of the container if that is less."""
    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _container_limits())])


def free_bytes() -> int:
    """Return the bytes that this process can still take."""
    within = [int(psutil.virtual_memory().available)]
    within += [limit - used for limit, used in _container_limits()]
    memory = psutil.Process().memory_info()
    for kind, used in ((resource.RLIMIT_AS, memory.vms), (resource.RLIMIT_DATA, getattr(memory, "data", 0))):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            within.append(limit - used)
    return max(0, min(within))


def use_huge_pages(tensor: Tensor) -> None:
    """Ask Linux for huge pages behind a contiguous CPU tensor, before anything is written to it.

    Random reads of a large table miss the translation of addresses as often as the caches; huge pages need fewer of them.
    Where the system has none or refuses, the tensor keeps the pages it has.
    """
    first = -(-tensor.data_ptr() // _HUGE) * _HUGE
    size = (tensor.data_ptr() + tensor.nbytes - first) // _HUGE * _HUGE
    if tensor.device.type == "cpu" and size > 0 and hasattr(mmap, "MADV_HUGEPAGE"):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)


def _container_limits() -> list[tuple[int, int]]:
    """Return limit and use, in bytes, of each group of processes that this one belongs to and that has a limit."""
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
    """Return the limit and the use of a group; None if it has no limit, or none that can be read."""
    with suppress(OSError, ValueError):
        most = int((group / limit).read_text(encoding="ascii"))  # "max": no limit
        if most >= _NO_LIMIT:
            return None
        fields = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        return most, max(0, int((group / used).read_text(encoding="ascii")) - int(fields.get(droppable, 0)))
    return None
