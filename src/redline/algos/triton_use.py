"""Whether this process runs Triton kernels, and how it goes on where one cannot be built."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

from redline.engine.fast import first_line
from redline.engine.out_of_memory import is_out_of_memory

HALF = (torch.bfloat16, torch.float16)
INPUTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.float32, *HALF)  # dtypes of observations
_SHARED_MEMORY = 160 * 1024  # bytes of shared memory that a block must be able to use
_SUMMED = 16384  # numbers that a program of `sum_rows` reads

# Whether GPUs of this process run the kernels: `prepare` finds out before anything is compiled, as the compiler cannot ask.
_ready = False
_broken: set[str] = set()  # what Triton could not build
_notify: Callable[[str], None] = print


def prepare(device: torch.device, notify: Callable[[str], None]) -> None:
    """Find out whether `device` runs the kernels. notify: receives a message if only Triton is missing, or fails later."""
    global _ready, _notify
    if device.type != "cuda":
        return
    _notify = notify
    properties = torch.cuda.get_device_properties(device)
    room: int = getattr(properties, "shared_memory_per_block_optin", 0)
    _ready = properties.major >= 8 and room >= _SHARED_MEMORY
    if _ready and importlib.util.find_spec("triton") is None:
        _ready = False
        notify("Running networks layer by layer: Triton, which compiles their kernels, is not installed.")


def ready() -> bool:
    """Return whether GPUs of this process run the kernels."""
    return _ready


def attempt(what: str, launch: Callable[[], None]) -> bool:
    """Launch a kernel; return False, from now on for all of `what`, if Triton cannot build it."""
    if what not in _broken:
        try:
            launch()
        except Exception as error:
            if is_out_of_memory(error):
                raise
            _broken.add(what)
            _notify(f"Running {what} without their kernel: Triton could not build it ({first_line(error)}).")
    return what not in _broken


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number` and 16, the least that tensor cores multiply."""
    return 1 << (max(number, 16) - 1).bit_length()


def sum_rows(partial: Tensor, out: Tensor) -> None:
    """Write the sums of partial (rows, …) float32 over its rows to `out`, rounded to its dtype.

    Torch's own sum over few columns takes three times as long.
    """
    from redline.algos import gradient_kernels

    rows, columns, block = len(partial), out.numel(), power_of_two(len(partial))
    tile = max(8, _SUMMED // block)
    gradient_kernels.sum_kernel[(-(-columns // tile),)](partial, out, rows, columns, block, tile, num_warps=8)
