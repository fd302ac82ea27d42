"""The emulator in `nes.cpp`, compiled on first use: it plays Super Mario Bros. as nes-py 8 does, ten times as fast."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from redline.core.native import load_library

_SOURCE = Path(__file__).with_name("nes.cpp")
_SHAPE = (240, 256, 4)  # of the screen; each pixel is an integer 0x00RRGGBB
_RAM_BYTES = 0x800


class Console:
    """A NES with a cartridge. `screen`, `ram` and `pads` (its controllers) are views of the emulator's memory."""

    def __init__(self, cartridge: str) -> None:
        """cartridge: path of an iNES file without a mapper."""
        self._library = library()
        self._pointer = self._library.Initialize(os.fsencode(cartridge))
        if not self._pointer:
            raise OSError(f"{cartridge} is not a cartridge without a mapper, or cannot be read")
        pixels = self._view(self._library.Screen(self._pointer), _SHAPE)
        self._pixels: Any = pixels[:, :, 2::-1]  # RGB
        self.ram: Any = memoryview(self._view(self._library.Memory(self._pointer), (_RAM_BYTES,)))
        self.pads: Any = [self._view(self._library.Controller(self._pointer, port), (1,)) for port in range(2)]
        self._buttons: Any = memoryview(self.pads[0])
        self.reset()

    @property
    def screen(self) -> Any:
        """The last frame, (240, 256, 3) uint8 RGB, drawn now if it was not drawn yet; None once closed."""
        if self._pointer:
            self._library.Screen(self._pointer)
        return self._pixels

    def step(self, buttons: int, draw: bool = True) -> None:
        """Play one frame; without `draw` it takes half the time if the screen is not read afterwards."""
        self._buttons[0] = buttons
        self._library.Step(self._pointer, draw)

    def reset(self) -> None:
        """Press the reset button."""
        self._library.Reset(self._pointer)

    def backup(self, slot: int = 0) -> None:
        """Save the current state in `slot`, 0 or 1, replacing the one saved there before."""
        self._library.Backup(self._pointer, slot)

    def restore(self, slot: int = 0) -> None:
        """Restore the state that `backup` saved in `slot`."""
        self._library.Restore(self._pointer, slot)

    def close(self) -> None:
        """Free the memory that `screen`, `ram` and `pads` are views of; idempotent."""
        if self._pointer:
            self._library.Close(self._pointer)
        self._pointer = self._pixels = self.ram = self.pads = self._buttons = None

    @staticmethod
    def _view(address: int, shape: tuple[int, ...]) -> Any:
        buffer = (ctypes.c_ubyte * int(np.prod(shape))).from_address(address)
        return np.frombuffer(memoryview(buffer), np.uint8).reshape(shape)


@functools.cache
def library() -> Any:
    """Return the compiled library; raise OSError if it cannot be compiled or does not support this machine."""
    if sys.byteorder != "little":
        raise OSError("it is written for little-endian machines")
    loaded = load_library(_SOURCE)
    pointer = ctypes.c_void_p
    for name, arguments, result in (
        ("Initialize", [ctypes.c_char_p], pointer),
        ("Controller", [pointer, ctypes.c_int], pointer),
        ("Screen", [pointer], pointer),
        ("Memory", [pointer], pointer),
        ("Step", [pointer, ctypes.c_bool], None),
        *((name, [pointer, ctypes.c_int], None) for name in ("Backup", "Restore")),
        *((name, [pointer], None) for name in ("Reset", "Close")),
    ):
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, result
    return loaded
