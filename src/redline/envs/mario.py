"""Super Mario Bros., level 1-1 or that of mario:WORLD-STAGE.

The package gym-super-mario-bros brings the emulator and the game. Its 7.4, the last one for Python before 3.13, was written for
old Gym and numpy 1; its 9 is of Gymnasium and rewards other things. So only the emulator is theirs here: what is earned, when
an episode is cut short and what is told of it are counted below, the same for both.

An episode ends with the flag, or the axe of a castle, which is to win, and with Mario's death, that by the level's own clock
(300 or 400 counts of 24 frames) among others. An agent that stands before a wall would wait for that clock most of the time:
who gets no further for `patience` frames is cut short. The emulator knows no chance. Episodes differ by the actions alone, and
so by `sticky`, and by `noops`.

For practice (`--backplay`) the emulator keeps one moment, which is all it has room for: of a whole game every so many frames. A
loss leaves it where it was last kept, and that is where practice begins, unless nothing can be saved from there.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from redline.core.errors import UserError
from redline.envs.gym_envs import GymConfig, GymGame

_RIGHT, _LEFT, _B, _A = 128, 64, 2, 1  # bits of the joypad; A jumps, B runs
_BUTTONS = (0, _RIGHT, _RIGHT | _A, _RIGHT | _B, _RIGHT | _A | _B, _A, _LEFT)  # SIMPLE_MOVEMENT of the package
_SCREEN = (240, 256, 3)
_STRIDE = 5  # pixels a frame: none is longer, so that a longer way led through a pipe or back in a maze
_PRIZE = 15.0  # of winning, and the price of dying, in pixels: six frames of running
_TOO_LATE = 60  # frames from a moment to a loss: it could not be helped
_LEVEL = re.compile(r"mario(?::([1-8])-([1-4]))?")


@dataclass(frozen=True)
class MarioConfig(GymConfig):
    """Options of a level. A second has 60 frames."""

    noops: int = 0  # frames that pass before the agent plays, at most: as many as chance has it
    patience: int = 1200  # frames without getting further until an episode is cut short; 0: as many as the clock has

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("noops", "patience"):
            if getattr(self, name) < 0:
                raise UserError(f"env.{name} is {getattr(self, name)}; expected at least 0.")


class MarioGame(GymGame):
    """A level of Super Mario Bros. in the place of a game. The score is how far Mario got, in pixels."""

    SPELLING = "mario:W-S"
    SCORE_NAME = "furthest x"
    SCORE = "furthest_x"
    WON = "won"
    CAN_RESTORE = True
    Config = MarioConfig

    def __init__(self, name: str) -> None:
        super().__init__(name)
        level = _LEVEL.fullmatch(name)
        if level is None:
            raise UserError(f"There is no level '{name}'; worlds 1 to 8 have stages 1 to 4: mario:1-1 to mario:8-4.")
        self.world, self.stage = int(level[1] or 1), int(level[2] or 1)

    def open(self, config: Any, render_mode: str | None = None) -> gymnasium.Env[Any, Any]:
        del render_mode  # the screen is there in any case
        return MarioEnv(self.world, self.stage, config.noops, config.patience)

    def check_installed(self) -> None:
        _emulator()


class MarioEnv(gymnasium.Env[Any, Any]):
    """One level, a frame a step. What is seen is the emulator's own screen: good until the next step.

    A reward of 1 stands for 15 pixels to the right. A count of the clock costs a pixel, death 15, and winning earns 15: with
    four frames a step that is from -1 to 1, or little more.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  (as Gymnasium has it)

    def __init__(self, world: int, stage: int, noops: int = 0, patience: int = 0) -> None:
        self.observation_space = spaces.Box(0, 255, _SCREEN, np.uint8)
        self.action_space = spaces.Discrete(len(_BUTTONS))
        self.noops, self.patience = noops, patience
        self.emulator = _emulator()(target=(world, stage))
        self.every = 0  # frames between moments that are kept
        self.moment: tuple[int, ...] | None = None  # what is counted, at the one that can be gone back to
        self.practice = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        emulator, wanted = self._running(), options or {}
        self.every, self.frames = wanted.get("snapshots", 0), 0
        moment = self.moment if wanted.get("again") else None
        self.practice = moment is not None
        if moment is not None:
            emulator.reset()
            self.x, self.furthest, self.record, self.clock, self.idle = moment
            return emulator.screen, self._told(emulator._get_info()) | {"again": True}
        self.moment = None
        emulator.begin()
        for _ in range(int(self.np_random.integers(self.noops + 1)) if self.noops else 0):
            if emulator.step(0)[2]:  # who waits may be run over
                emulator.begin()
                break
        told = emulator._get_info()
        self.x = self.furthest = self.record = told["x_pos"]
        self.clock, self.idle = told["time"], 0
        return emulator.screen, self._told(told)

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        # 7.4 says `done`, 9 `terminated, truncated`.
        screen, _, over, *_, told = self._running().step(_BUTTONS[action])
        x, clock, won = told["x_pos"], told["time"], told["flag_get"]
        way = x - self.x
        if abs(way) > _STRIDE:
            way, self.record = 0, x
        self.idle = 0 if x > self.record else self.idle + 1
        earned = way + min(clock - self.clock, 0) + (_PRIZE if won else -_PRIZE if over else 0)
        self.x, self.clock = x, clock
        self.record, self.furthest = max(self.record, x), max(self.furthest, x)
        cut = bool(self.patience) and self.idle >= self.patience and not over
        if self.every:
            self._remember(over or cut, over and not won)
        return screen, earned / _PRIZE, over, cut, self._told(told)

    def _remember(self, ends: bool, lost: bool) -> None:
        """Keep a moment of a whole game when it is time to; give up the one there is where it is of no use."""
        self.frames += 1
        if ends:
            if not lost or (self.practice and self.frames < _TOO_LATE):
                self.moment = None
        elif not self.practice and self.frames % self.every == 0:
            self.emulator.keep()
            self.moment = (self.x, self.furthest, self.record, self.clock, self.idle)

    def _told(self, told: Mapping[str, Any]) -> dict[str, Any]:
        return {"x": told["x_pos"], "furthest_x": self.furthest, "clock": told["time"], "won": told["flag_get"]}

    def render(self) -> Any:
        """The screen, (240, 256, 3) uint8."""
        return self._running().screen

    def _running(self) -> Any:
        if self.emulator is None:
            raise RuntimeError("The emulator was closed; make the environment anew.")
        return self.emulator

    def close(self) -> None:
        if self.emulator is not None:  # it would rather not be closed twice
            self.emulator.close()
            self.emulator = None


@functools.cache
def _emulator() -> Any:
    """The package's environment, with what it counts of its own accord left out."""
    try:
        # Old Gym greets whoever imports it with a note on its age.
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            package, rom = (importlib.import_module(name) for name in ("gym_super_mario_bros", "nes_py._rom"))
    except (ImportError, OSError) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "gym_super_mario_bros"
        why = "is missing here" if missing else f"cannot be imported ({error})"
        raise UserError(
            f"mario needs the package gym-super-mario-bros, which {why}; install it: pip install 'redline[mario]'."
        ) from error
    base: Any = package.SuperMarioBrosEnv
    if not issubclass(base, gymnasium.Env):
        # Sizes in the file's header times 1024 are more than a byte can hold, which numpy 2 no longer overlooks.
        rom.ROM.header = property(lambda file: file.raw_data[:16].astype(np.int64))

    class Emulator(base):
        moved = False  # what `reset` goes back to is no longer the start of the level

        def begin(self) -> None:
            """The level anew."""
            if self.moved:
                self._has_backup = self.moved = False
                # As after a press of the reset button the game would find its clock, and begin at 1-1 whatever the level.
                self.ram[:] = bytes(len(self.ram))
                self.reset()
                self._skip_start_screen()
                self._backup()
            self.reset()

        def keep(self) -> None:
            """What `reset` goes back to from now on."""
            self._backup()
            self.moved = True

        def _ram_buffer(self) -> memoryview:
            return memoryview(super()._ram_buffer())  # gives whole numbers, where an array's bytes overflow

        @property
        def _is_stage_over(self) -> bool:  # as theirs, at a tenth of the time: a frame asks thrice
            ram = self.ram  # Mario slides down, and among what moves is Bowser or a flag
            return bool(ram[0x1D] == 3 and any(kind in (0x2D, 0x31) for kind in ram[0x16:0x1B]))

        def _get_reward(self) -> float:
            return 0.0

        def _get_info(self) -> dict[str, Any]:
            return {"x_pos": self._x_position, "time": self._time, "flag_get": self._flag_get}

    return Emulator
