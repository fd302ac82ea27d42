"""Out of memory: recognise the error in all its forms, and free cached memory."""

from __future__ import annotations

import errno
import gc

import torch

# Parts of RuntimeError messages, from torch's host memory allocator, C++, and torch's shared memory.
_MESSAGES = ("DefaultCPUAllocator:", "std::bad_alloc", "unable to mmap")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one in its chain of causes, means that a device or the host ran out of memory."""
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
    """Collect garbage, and release GPU memory that torch has cached but no tensor uses."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
