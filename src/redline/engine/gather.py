"""Gather rows of a table on a CPU with a C++ loop that prefetches the next rows into the cache.

Reading a row at a random place waits for memory, and a core looks ahead only two or three rows of some hundred bytes.
Prefetching keeps more reads in flight. Torch's compiler builds the loop and caches it on disk, like its own code; if that
fails, torch copies the rows, after a message to the user.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from redline.engine.fast import first_line

_SOURCE = """
#include <cstdint>
#include <cstring>

constexpr int64_t AHEAD = 4;  // rows; 2 to 32 are equally fast
constexpr int64_t LINE = 64;  // bytes of a cache line

// Copies rows of `size` bytes. Returns the first index that is none of the table, or -1.
extern "C" int64_t gather_rows(const char* table, int64_t entries, int64_t size, const int64_t* index, int64_t count,
                               char* rows, int64_t threads) {
    for (int64_t i = 0; i < count; i++)
        if (index[i] < 0 || index[i] >= entries) return i;
    #pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < count; i++) {
        const char* next = table + index[i + AHEAD < count ? i + AHEAD : count - 1] * size;
        for (int64_t byte = 0; byte < size; byte += LINE) __builtin_prefetch(next + byte);
        __builtin_prefetch(next + size - 1);
        memcpy(rows + i * size, table + index[i] * size, size);
    }
    return -1;
}
"""
_BYTES_PER_THREAD = 1 << 16  # copying less takes less time than waking up a thread
_LEAST_BYTES = 1 << 17  # with less, the call costs more than the loop saves

_copy: Callable[..., int] | None = None  # the loop, once built
_broken = False  # the loop could not be built
_notify: Callable[[str], None] = print


def prepare(notify: Callable[[str], None]) -> None:
    """Set `notify`, which receives a message if the loop cannot be built."""
    global _notify
    _notify = notify


def pays(table: Tensor, index: Tensor) -> bool:
    """Return whether the loop is faster than indexing with torch, for rows of a table (M, W) by index (…)."""
    return index.numel() * table.shape[1] * table.element_size() >= _LEAST_BYTES


def gather_rows(table: Tensor, index: Tensor) -> Tensor:
    """Return rows (B, W) of a contiguous CPU table (M, W) by index (B,) int64, from 0 to M - 1."""
    rows: Tensor = torch.ops.redline.gather_rows.default(table, index)
    return rows


def copy_rows(table: Tensor, index: Tensor, rows: Tensor) -> None:
    """Copy rows of a contiguous CPU table (M, W), by index (B,) int64, to contiguous `rows` (B, W)."""
    if not _build():
        torch.index_select(table, 0, index, out=rows)
        return
    assert _copy is not None
    index = index.contiguous()
    threads = max(1, min(torch.get_num_threads(), rows.nbytes // _BYTES_PER_THREAD))
    size = table.shape[1] * table.element_size()
    wrong = _copy(table.data_ptr(), len(table), size, index.data_ptr(), len(index), rows.data_ptr(), threads)
    if wrong >= 0:
        raise IndexError(f"index {index[wrong]} at {wrong} is out of bounds for a table of {len(table)} rows")


def _gather_rows(table: Tensor, index: Tensor) -> Tensor:
    rows = _empty_rows(table, index)
    copy_rows(table, index, rows)
    return rows


def _empty_rows(table: Tensor, index: Tensor) -> Tensor:
    return table.new_empty(index.shape[0], table.shape[1])


def _build() -> bool:
    """Build the loop unless that was already tried; return whether it can be called."""
    global _copy, _broken
    if _copy is None and not _broken:
        try:
            from torch._inductor.codecache import CppCodeCache

            copy = CppCodeCache.load(_SOURCE).gather_rows
            number, pointer = ctypes.c_int64, ctypes.c_void_p
            copy.argtypes, copy.restype = [pointer, number, number, pointer, number, pointer, number], number
            _copy = copy
        except Exception as error:
            _broken = True
            _notify(f"Copying rows from replay without prefetching: the loop could not be built ({first_line(error)}).")
    return not _broken


_library = torch.library.Library("redline", "FRAGMENT")
_library.define("gather_rows(Tensor table, Tensor index) -> Tensor")
_library.impl("gather_rows", _gather_rows, "CPU")
torch.library.register_fake("redline::gather_rows", _empty_rows, lib=_library)
