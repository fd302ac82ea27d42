"""Environments that go wrong. Each counts: (episode, step, luck) is seen; an episode has five steps.

The variable FAULTY says how: raise, exit, kill, segfault, hang, helper, reset, differ, nan; in step FAULTY_AT. FAULTY_FLAG
names a file: only the first environment to make it goes wrong; where it is not given, all do.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Faulty(gymnasium.Env[Any, Any]):
    def __init__(self) -> None:
        size = 4 if os.environ.get("FAULTY") == "differ" and os.getppid() == int(os.environ["FAULTY_PARENT"]) else 3
        self.observation_space = spaces.Box(-np.inf, np.inf, (size,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.episode, self.steps = -1, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if self.steps and os.environ.get("FAULTY") == "reset":
            self._fail("raise")
        backplay = bool(options and options.get("backplay"))  # it begins in the middle then
        self.episode, self.time, self.luck = self.episode + 1, 3 * backplay, float(self.np_random.random())
        return self._seen(), {"backplay": backplay}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.time, self.steps = self.time + 1, self.steps + 1
        how = os.environ.get("FAULTY", "")
        if how not in ("", "reset", "differ") and self.steps == int(os.environ.get("FAULTY_AT", "23")):
            self._fail(how)
        if slow := os.environ.get("FAULTY_SLOW"):
            time.sleep(float(slow))
        return self._seen(), float(action), self.time >= 5, False, {}

    def _fail(self, how: str) -> None:
        flag = os.environ.get("FAULTY_FLAG")
        if flag:
            try:
                os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
        if how == "raise":
            raise ArithmeticError("the emulator is on fire")
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
        if how == "nan":
            self.luck = float("nan")

    def close(self) -> None:
        if path := os.environ.get("FAULTY_CLOSED"):
            with Path(path).open("a") as file:
                print("closed", file=file)

    def _seen(self) -> Any:
        seen = np.zeros(self.observation_space.shape, np.float32)
        seen[:3] = self.episode, self.time, self.luck
        return seen


if "Faulty-v0" not in gymnasium.registry:
    gymnasium.register("Faulty-v0", Faulty)
