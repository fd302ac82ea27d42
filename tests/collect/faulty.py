"""Environments that go wrong. Each counts: (episode, step, luck) is seen; an episode has five steps.

The variable FAULTY says how: raise, sysexit, exit, kill, segfault, hang, helper, nan, infinite, nan_reward, huge_reward,
shape, dtype or spaces in step FAULTY_AT, reset or hang_reset in the reset after that; differ, init, init_kill or init_hang when
it is made by a child of the process FAULTY_PARENT. FAULTY_FLAG names a file: only the first environment to make it goes
wrong; where it is not given, all do. Random play before training goes well. FAULTY_INITS names a file that counts
constructors, of which those listed in FAULTY_INIT_FAILS raise.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from redline.envs import env_activity


class Faulty(gymnasium.Env[Any, Any]):
    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        how = os.environ.get("FAULTY", "")
        in_actor = os.getppid() == int(os.environ.get("FAULTY_PARENT", "0"))
        if how.startswith("init") and in_actor:
            self._fail({"init": "raise", "init_kill": "kill", "init_hang": "hang"}[how])
        self._count_inits()
        size = 4 if how == "differ" and in_actor else 3
        self.wrong = ""
        self.observation_space = spaces.Box(-np.inf, np.inf, (size,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.episode, self.steps = -1, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if self.steps and not in_random_play() and os.environ.get("FAULTY") in ("reset", "hang_reset"):
            self._fail("raise" if os.environ["FAULTY"] == "reset" else "hang")
        backplay = bool(options and options.get("backplay"))  # it begins in the middle then
        self.episode, self.time, self.luck = self.episode + 1, 3 * backplay, float(self.np_random.random())
        return self._seen(), {"backplay": backplay}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.time, self.steps = self.time + 1, self.steps + 1
        how = os.environ.get("FAULTY", "")
        if (
            not in_random_play()
            and how not in ("", "reset", "hang_reset", "differ")
            and not how.startswith("init")
            and self.steps == int(os.environ.get("FAULTY_AT", "23"))
        ):
            self._fail(how)
        if slow := os.environ.get("FAULTY_SLOW"):
            time.sleep(float(slow))
        reward = {"nan_reward": float("nan"), "huge_reward": -1e30}.get(self.wrong, float(action))
        return self._seen(), reward, self.time >= 5, False, {}

    @staticmethod
    def _count_inits() -> None:
        if path := os.environ.get("FAULTY_INITS"):
            with Path(path).open("a") as file:
                file.write("x")
            if str(Path(path).stat().st_size) in os.environ.get("FAULTY_INIT_FAILS", "").split():
                raise ConnectionError("the emulator is not there")

    def _fail(self, how: str) -> None:
        flag = os.environ.get("FAULTY_FLAG")
        if flag:
            try:
                os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
        if how == "raise":
            raise ArithmeticError("the emulator is on fire")
        if how == "sysexit":
            sys.exit("the emulator gives up")
        if how == "exit":
            os._exit(7)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "segfault":
            ctypes.string_at(0)
        if how == "hang":
            time.sleep(1e6)
        if how == "helper":  # that outlives it
            subprocess.Popen(["sleep", "20"], close_fds=False)
            os.kill(os.getpid(), signal.SIGKILL)
        if how in ("nan", "infinite"):
            self.luck = float("nan") if how == "nan" else float("inf")
        if how in ("nan_reward", "huge_reward", "shape", "dtype"):
            self.wrong = how
        if how == "spaces":
            self.observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)

    def render(self) -> Any:
        return np.zeros((8, 8, 3), np.uint8)

    def close(self) -> None:
        if path := os.environ.get("FAULTY_CLOSED"):
            with Path(path).open("a") as file:
                print("closed", file=file)

    def _seen(self) -> Any:
        seen = np.zeros(self.observation_space.shape, np.float32)
        seen[:3] = self.episode, self.time, self.luck
        if self.wrong == "shape":
            return seen[:2]
        return seen.astype(str) if self.wrong == "dtype" else seen


def in_random_play() -> bool:
    """Return whether steps are those by which a recipe gets to know the environment."""
    position = env_activity.position()
    return position is not None and position[1] == env_activity.MAKING


if "Faulty-v0" not in gymnasium.registry:
    gymnasium.register("Faulty-v0", Faulty)
