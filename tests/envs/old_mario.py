"""What gym-super-mario-bros 7.4.0 and nes-py 8.2.1 are to an adapter, without the emulator: a road, a pit and a flag.

As there: `step` gives four things, `reset` one, the memory is an array of bytes whose sums overflow, sizes in the file's header
do so too, the screen is a view of memory that is overwritten, and whoever imports it is told how old it is.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np

from redline.envs import gym_game, mario

PIT, FLAG = range(300, 306), 640
RIGHT, A, B = 128, 1, 2


class ROM:
    """The file of a game: two banks of 16 KB."""

    def __init__(self) -> None:
        self.raw_data = np.array([0x4E, 0x45, 0x53, 0x1A, 2, 1] + [0] * 10, np.uint8)

    @property
    def header(self) -> Any:
        return self.raw_data[:16]

    @property
    def prg_rom_stop(self) -> Any:
        return 16 + 16 * self.header[4] * 2**10


class SuperMarioBrosEnv:
    """One level, of any number."""

    def __init__(self, target: tuple[int, int]) -> None:
        assert ROM().prg_rom_stop == 16 + 32 * 1024
        self.target, self.done, self.closed = target, True, False
        self.memory = np.zeros(0x800, np.uint8)
        self.pixels = np.zeros((240, 256, 4), np.uint8)
        self.screen = self.pixels[:, :, ::-1][:, :, 1:]
        self.ram = self._ram_buffer()
        self._has_backup = False
        self.reset()
        self._skip_start_screen()
        self._backup()

    def _ram_buffer(self) -> Any:
        return self.memory

    @property
    def _x_position(self) -> Any:
        return self.ram[0x6D] * 0x100 + self.ram[0x86]

    @property
    def _time(self) -> int:
        return int("".join(map(str, self.ram[0x07F8:0x07FB])))

    @property
    def _is_dying(self) -> bool:
        return bool(self.ram[0x0E] == 0x0B)

    @property
    def _flag_get(self) -> bool:
        return bool(self.ram[0x16] == 0x31 and self.ram[0x1D] == 3)

    def _get_info(self) -> dict[str, Any]:
        return {"x_pos": self._x_position, "time": self._time, "flag_get": self._flag_get, "life": self.ram[0x075A]}

    def _get_reward(self) -> float:
        return float(self._x_position - 40)

    def _skip_start_screen(self) -> None:
        self.level = (1, 1)
        if self._time == 0:  # else it takes the game for one that is under way
            self.level = self.target
        self._write(40, 400)

    def _backup(self) -> None:
        self.kept, self._has_backup = (self.frames, self.memory.copy(), self.pixels.copy()), True

    def reset(self) -> Any:
        self.done = False
        if self._has_backup:
            self.frames, self.memory[:], self.pixels[:] = self.kept
        else:  # as after a press of the reset button: memory is what it was
            self.frames, self.memory[0x0E], self.memory[0x16], self.memory[0x1D] = 0, 0, 0, 0
        return self.screen

    def _write(self, x: int, clock: int) -> None:
        self.memory[0x6D], self.memory[0x86] = divmod(x, 256)
        self.memory[0x07F8:0x07FB] = [int(digit) for digit in f"{clock:03d}"]
        self.pixels[:] = x % 256

    def step(self, buttons: int) -> tuple[Any, float, bool, dict[str, Any]]:
        if self.done:
            raise ValueError("cannot step in a done environment! call `reset`")
        assert not self.closed
        self.frames += 1
        x = 256 * int(self.memory[0x6D]) + int(self.memory[0x86])
        if buttons & RIGHT:
            x += 3 if buttons & B else 1
        elif buttons:
            x -= 1 if buttons & 64 else 0
        clock = 400 - self.frames // 24
        self._write(x, clock)
        if (x in PIT and not buttons & A) or clock == 0:
            self.memory[0x0E] = 0x0B
        if x >= FLAG:
            self.memory[0x16], self.memory[0x1D] = 0x31, 3
        reward = float(self._get_reward())
        self.done = self._is_dying or self._flag_get
        return self.screen, reward, self.done, self._get_info()

    def close(self) -> None:
        if self.closed:
            raise ValueError("env has already been closed.")
        self.closed = True


NOTE = "Gym has been unmaintained since 2022"


class _Finder:
    """Finds the packages, whose import prints the note."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        del path, target
        if name.partition(".")[0] not in ("gym_super_mario_bros", "nes_py"):
            return None
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> None:
        del spec

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "gym_super_mario_bros":
            print(NOTE, file=sys.stderr)
            module.SuperMarioBrosEnv = SuperMarioBrosEnv  # type: ignore[attr-defined]
        module.ROM = ROM  # type: ignore[attr-defined]


NAMES = ("gym_super_mario_bros", "nes_py", "nes_py._rom")


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """The stand-in is what is installed."""
    real, header, finder = {name: sys.modules.pop(name, None) for name in NAMES}, ROM.header, _Finder()
    caches = (mario._emulator, gym_game._random_play)  # of the real emulator, where another test has used it
    for function in caches:
        function.cache_clear()
    sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
    yield
    sys.meta_path.remove(finder)  # type: ignore[arg-type]
    for function in caches:
        function.cache_clear()
    ROM.header = header  # type: ignore[misc]
    for name, module in real.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module
