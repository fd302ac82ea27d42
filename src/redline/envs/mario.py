"""Super Mario Bros., level 1-1, that of mario:WORLD-STAGE, or several (mario:1-1,1-2).

Several levels are dealt to the environments in turn. In training, each then chooses the level of its next game.

The package gym-super-mario-bros provides the game and the layout of its memory. Version 7.4, the last one for Python before
3.13, was written for old Gym and NumPy 1; its game runs in the emulator of `nes`, which is faster. Version 9 is written for
Gymnasium and has its own emulator and rewards. Rewards, endings and infos are defined here, the same for both.

An episode terminates with the flag or a castle's axe (a win) or with Mario's death, including when the level's clock (300
or 400 counts of 24 frames) runs out. An agent stuck at a wall would spend most of its time waiting for that clock, so an
episode without progress for `patience` frames is truncated. The emulator is deterministic: episodes differ only by their
actions (and thus by `sticky`) and by `noops`.

For backplay (`--backplay`) the emulator keeps one snapshot and replaces it at regular intervals during a whole game. After a
loss, backplay starts from that snapshot, unless the loss cannot be avoided from there.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from redline.core.errors import UserError
from redline.envs import nes
from redline.envs.gym_game import GymConfig, GymGame

_RIGHT, _LEFT, _B, _A = 128, 64, 2, 1  # bits of the controller; A jumps, B runs
_BUTTONS = (0, _RIGHT, _RIGHT | _A, _RIGHT | _B, _RIGHT | _A | _B, _A, _LEFT)  # the package's SIMPLE_MOVEMENT
_SCREEN = (240, 256, 3)
_STRIDE = 5  # most pixels Mario can move in a frame; a longer distance is a pipe or the loop of a maze
_REWARDED = 15.0  # pixels to the right that earn a reward of 1: six frames of running
_DEATH = 15.0  # penalty for dying, in pixels
# Reward for winning, in pixels. A death forfeits what Mario would have earned later, discounted the worth of about 200 pixels.
# At the end of a level there is no later: without a large reward, dying in front of the axe would cost almost nothing.
_WIN = 150.0
_START, _SNAPSHOT = 0, 1  # slots of the emulator for states
_TOO_LATE = 60  # frames from a snapshot to a loss within which the loss counts as unavoidable
_LEVEL = re.compile(r"([1-8])-([1-4])")


@dataclass(frozen=True)
class MarioConfig(GymConfig):
    """Options of a level. A second has 60 frames."""

    patience: int = 1200  # frames without progress after which an episode is truncated; 0: never

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.patience < 0:
            raise UserError(f"env.patience is {self.patience}; expected at least 0.")
        if self.fire:
            raise UserError("env.fire is set, but a level has no action FIRE; remove env.fire.")
        if self.kwargs:
            raise UserError(
                f"env.kwargs is {self.kwargs}, but a level takes no constructor arguments; remove env.kwargs."
            )


class MarioGame(GymGame):
    """Levels of Super Mario Bros. with the interface of a game. The score is Mario's furthest position, in pixels."""

    SPELLING = "mario:W-S"
    SCORE_NAME = "furthest x"
    SCORE = "furthest_x"
    WON = "won"
    VERSION = 2  # winning earns 10 instead of 1
    CAN_RESTORE = True
    Config = MarioConfig

    def __init__(self, name: str) -> None:
        super().__init__(name)
        levels = (name.removeprefix("mario:") if ":" in name else "1-1").split(",")
        for level in levels:
            if not _LEVEL.fullmatch(level):
                raise UserError(
                    f"There is no level 'mario:{level}'; worlds 1 to 8 have stages 1 to 4: mario:1-1 to mario:8-4, or "
                    "several, as in mario:1-1,1-2."
                )
            if levels.count(level) > 1:
                raise UserError(f"{name} names level {level} {levels.count(level)} times; name every level once.")
        self._targets = [(int(level[0]), int(level[2])) for level in levels]
        self.levels = tuple(levels) if len(levels) > 1 else ()

    def open(self, config: Any, render_mode: str | None = None, env_index: int = 0) -> gymnasium.Env[Any, Any]:
        return MarioEnv(self._targets, self.level_index(env_index), config.noops, config.patience, render_mode)

    def check_installed(self) -> None:
        _emulator()


class MarioEnv(gymnasium.Env[Any, Any]):
    """One of several levels, one frame per step. The observation is a view of the emulator's screen, valid until the next step.

    A reward of 1 is 15 pixels to the right. A jump is rewarded when Mario lands: one into a chasm earns nothing, however far
    it goes. A count of the clock costs one pixel, death costs 15, and winning earns 150.

    While `frame_hidden` is set, frames are not drawn: the observation is None unless the game ends.

    `reset` takes the options `level`, to play another level from now on, `snapshots`, the number of frames between snapshots,
    and `backplay`, to start from the last one.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 60}  # noqa: RUF012  (Gymnasium's own type)

    def __init__(
        self,
        targets: Sequence[tuple[int, int]],
        level: int = 0,
        noops: int = 0,
        patience: int = 0,
        render_mode: str | None = None,
    ) -> None:
        """targets: worlds and stages of the levels. level: index of the first level to play."""
        self.observation_space = spaces.Box(0, 255, _SCREEN, np.uint8)
        self.action_space = spaces.Discrete(len(_BUTTONS))
        self.noops, self.patience, self.render_mode = noops, patience, render_mode
        self.targets, self.emulators = targets, dict[int, Any]()  # a console for each level that was played
        self.frame_hidden = False
        self.snapshot_every = 0  # frames between snapshots; 0: none are taken
        self.snapshot: tuple[int, ...] | None = None  # counters at the snapshot that the emulator holds
        self.backplay = False  # this episode started from a snapshot
        self._enter(level)

    def _enter(self, level: int) -> None:
        """Play `level` from now on; its last snapshot is out of date."""
        if level not in self.emulators:
            self.emulators[level] = _emulator()(target=self.targets[level])
        self.level, self.emulator, self.snapshot = level, self.emulators[level], None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._running()
        requested = options or {}
        if requested.get("level", self.level) != self.level:
            self._enter(requested["level"])
        emulator = self.emulator
        self.snapshot_every, self.frames = requested.get("snapshots", 0), 0
        snapshot = self.snapshot if requested.get("backplay") else None
        self.backplay = snapshot is not None
        if snapshot is not None:
            emulator.reset()
            self.x, self.rewarded, self.furthest, self.record, self.clock, self.idle = snapshot
            return emulator.screen, self._info(emulator._get_info()) | {"backplay": True}
        self.snapshot = None
        emulator.begin()
        for _ in range(int(self.np_random.integers(self.noops + 1)) if self.noops else 0):
            if emulator.step(0)[2]:  # an idle Mario may be run over
                emulator.begin()
                break
        counters = emulator._get_info()
        self.x = self.rewarded = self.furthest = self.record = counters["x_pos"]
        self.clock, self.idle = counters["time"], 0
        return emulator.screen, self._info(counters)

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        emulator = self._running()
        emulator.frame_hidden = self.frame_hidden
        # Version 7.4 returns `done`, version 9 `terminated, truncated`.
        _, _, over, *_, counters = emulator.step(_BUTTONS[action])
        x, clock, won = counters["x_pos"], counters["time"], counters["flag_get"]
        if abs(x - self.x) > _STRIDE:
            self.rewarded = self.record = x
        self.idle = 0 if x > self.record else self.idle + 1
        pixels = min(clock - self.clock, 0) + (_WIN if won else -_DEATH if over else 0)
        if emulator.is_supported():
            pixels += x - self.rewarded
            self.rewarded = x
        self.x, self.clock = x, clock
        self.record, self.furthest = max(self.record, x), max(self.furthest, x)
        truncated = bool(self.patience) and self.idle >= self.patience and not over
        if self.snapshot_every:
            self._update_snapshot(over or truncated, over and not won)
        screen = None if self.frame_hidden and not (over or truncated) else emulator.screen
        return screen, pixels / _REWARDED, over, truncated, self._info(counters)

    def render(self) -> Any:
        """Return a copy of the screen, (240, 256, 3) uint8."""
        return self._running().screen.copy()

    def _update_snapshot(self, ended: bool, lost: bool) -> None:
        """Take a snapshot of a whole game when one is due; drop the current one when it is no longer useful."""
        self.frames += 1
        if ended:
            if not lost or (self.backplay and self.frames < _TOO_LATE):
                self.snapshot = None
        elif not self.backplay and self.frames % self.snapshot_every == 0:
            self.emulator.take_snapshot()
            self.snapshot = (self.x, self.rewarded, self.furthest, self.record, self.clock, self.idle)

    def _info(self, counters: Mapping[str, Any]) -> dict[str, Any]:
        x, clock, won = (counters[name] for name in ("x_pos", "time", "flag_get"))
        return {"x": x, "furthest_x": self.furthest, "clock": clock, "won": won}

    def _running(self) -> Any:
        if self.emulator is None:
            raise RuntimeError("The emulator was closed; make the environment anew.")
        return self.emulator

    def close(self) -> None:
        for emulator in self.emulators.values():
            emulator.close()
        self.emulator, self.emulators = None, {}  # closing an emulator twice is an error


@functools.cache
def _emulator() -> Any:
    """Return the package's environment class with snapshots, and without the package's rewards and infos."""
    try:
        # Old Gym prints a deprecation notice on import.
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            package, rom = (importlib.import_module(name) for name in ("gym_super_mario_bros", "nes_py._rom"))
    except (ImportError, OSError) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "gym_super_mario_bros"
        why = "is not installed" if missing else f"cannot be imported ({error})"
        raise UserError(
            f"mario needs the package gym-super-mario-bros, which {why}; install it: pip install 'redline[mario]'."
        ) from error
    base: Any = package.SuperMarioBrosEnv
    if not issubclass(base, gymnasium.Env):
        # Sizes in the file's header times 1024 overflow a byte, which NumPy 2 reports as an error.
        rom.ROM.header = property(lambda file: file.raw_data[:16].astype(np.int64))
    if hasattr(base, "_controller_buffer"):
        base = _on_console(base)

    class Emulator(base):
        moved = False  # `reset` restores a snapshot instead of the start of the level

        def begin(self) -> None:
            """Start the level from its beginning."""
            if self.moved:
                self.moved = False
                self._return_to_start()
            self.reset()

        def _return_to_start(self) -> None:
            """Make `reset` restore the start of the level again."""
            if hasattr(self, "slot"):
                self.slot = _START
                return
            self._has_backup = False
            # With its old memory the game would take this for a press of the reset button and start at 1-1.
            self.ram[:] = bytes(len(self.ram))
            self.reset()
            self._skip_start_screen()
            self._backup()

        def take_snapshot(self) -> None:
            """Save the state that `reset` restores from now on."""
            if hasattr(self, "slot"):
                self.slot = _SNAPSHOT
            self._backup()
            self.moved = True

        def _ram_buffer(self) -> memoryview:
            return memoryview(super()._ram_buffer())  # items are Python integers; those of a uint8 array would overflow

        @property
        def _is_stage_over(self) -> bool:  # ten times as fast as the package's: called three times per frame
            ram = self.ram  # Mario slides down a flagpole, or Bowser is among the enemies
            return bool(ram[0x1D] == 3 and any(kind in (0x2D, 0x31) for kind in ram[0x16:0x1B]))

        def is_supported(self) -> bool:
            """Return whether Mario stands, climbs, slides down a flagpole or swims, rather than jumps or falls."""
            ram = self.ram
            return ram[0x1D] not in (1, 2) or ram[0x704] != 0

        def _get_reward(self) -> float:
            return 0.0

        def _get_info(self) -> dict[str, Any]:
            return {"x_pos": self._x_position, "time": self._time, "flag_get": self._flag_get}

    return Emulator


def _on_console(base: Any) -> Any:
    """Return version 7.4's environment class on Redline's emulator, or unchanged if that cannot be compiled."""
    try:
        nes.library()
    except OSError as error:
        why = f"Mario plays in nes-py's emulator, which is far slower than Redline's: {error}; install g++ or clang++."
        warnings.warn(why, stacklevel=2)
        return base

    class OnConsole(base):
        """The package's class with every method that uses the emulator overridden.

        Frames are drawn when `screen` is read; `step` draws its frame unless `frame_hidden` is set.
        """

        console: nes.Console
        frame_hidden = False
        slot = _START  # where `_backup` saves a state, and `_restore` finds it

        def _controller_buffer(self, port: int) -> Any:  # the base class's first use of its emulator
            if port == 0:
                self.console = nes.Console(self._rom_path)
            return self.console.pads[port]

        def _screen_buffer(self) -> Any:
            return None  # assigned to `screen`, which is a property here

        @property
        def screen(self) -> Any:
            return self.console.screen

        @screen.setter
        def screen(self, _: Any) -> None: ...

        def _ram_buffer(self) -> Any:
            return self.console.ram

        def _frame_advance(self, buttons: int) -> None:
            self.console.step(buttons, draw=False)

        def _backup(self) -> None:
            self.console.backup(self.slot)
            self._has_backup = True

        def _restore(self) -> None:
            self.console.restore(self.slot)

        def reset(self) -> Any:
            self._will_reset()
            if self._has_backup:
                self._restore()
            else:
                self.console.reset()
            self._did_reset()
            self.done = False
            return self.screen

        def step(self, buttons: int) -> tuple[Any, float, bool, dict[str, Any]]:
            if self.done:
                raise ValueError("The episode has ended; call reset before step.")
            self.console.step(buttons, draw=not self.frame_hidden)
            self.done = bool(self._get_done())
            counters = self._get_info()
            self._did_step(self.done)
            return None if self.frame_hidden else self.screen, 0.0, self.done, counters

        def close(self) -> None:
            super().close()
            self.console.close()

    return OnConsole
