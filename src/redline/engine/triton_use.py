"""Whether this process runs Triton kernels, with a fallback if one cannot be built."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch

from redline.engine.fast import first_line
from redline.engine.out_of_memory import is_out_of_memory

HALF = (torch.bfloat16, torch.float16)
INPUTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.float32, *HALF)  # dtypes of observations
_SHARED_MEMORY = 160 * 1024  # bytes of shared memory that a block needs

# Whether this process's GPUs run the kernels: `prepare` determines it in advance, because compiled code cannot.
_ready = False
_broken: set[str] = set()  # values of `what` whose kernel failed
_notify: Callable[[str], None] = print


def prepare(device: torch.device, notify: Callable[[str], None]) -> None:
    """Determine whether `device` runs the kernels. notify: receives a message if only Triton is missing, or fails later."""
    global _ready, _notify
    if device.type != "cuda":
        return
    _notify = notify
    _broken.clear()  # so that this receiver is notified, too
    properties = torch.cuda.get_device_properties(device)
    room: int = getattr(properties, "shared_memory_per_block_optin", 0)
    _ready = properties.major >= 8 and room >= _SHARED_MEMORY
    if _ready and importlib.util.find_spec("triton") is None:
        _ready = False
        notify("Running networks layer by layer: Triton, which compiles their kernels, is not installed.")


def ready() -> bool:
    """Return whether this process's GPUs run the kernels, as determined by `prepare`."""
    return _ready


def attempt(what: str, launch: Callable[[], None], notify: Callable[[str], None] | None = None) -> bool:
    """Launch a kernel and return True; if it fails, return False, now and in all later calls with the same `what`.

    Triton may not be able to build it. notify: receives a message about the failure; None: the receiver of `prepare`.
    """
    if what not in _broken:
        try:
            launch()
        except Exception as error:
            if is_out_of_memory(error):
                raise
            _broken.add(what)
            (notify or _notify)(f"Running {what} without their kernel, which failed ({first_line(error)}).")
    return what not in _broken


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number` and at least 16, the tensor cores' minimum."""
    return 1 << (max(number, 16) - 1).bit_length()
