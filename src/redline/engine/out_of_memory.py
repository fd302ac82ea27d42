"""Running out of memory: recognise the error in all its forms, and return cached memory."""

from __future__ import annotations

import errno
import gc

import torch

# In messages of plain RuntimeErrors: of torch's allocator of host memory, of C++, and of torch's shared memory.
_MESSAGES = ("DefaultCPUAllocator:", "std::bad_alloc", "unable to mmap")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one that caused it, says that a device or the host ran out of memory."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(error, RuntimeError) and any(message in str(error) for message in _MESSAGES):
            return True
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def free_caches() -> None:
    """Return memory that no tensor uses any more to the device. Does nothing for the CPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
