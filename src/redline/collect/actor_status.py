"""Progress of an actor in shared memory: written by the actor, read by the supervisor and for metrics."""

from __future__ import annotations

import enum
import os
import time

import numpy as np

from redline.collect.shared_memory import CELL, Array, Memory, SharedLayout

ACTIONS = 32  # latest actions kept of each environment


class ActorState(enum.IntEnum):
    """What an actor is doing."""

    STARTING = 0
    STEPPING = 1
    NEEDS_ACTIONS = 2
    NEEDS_ROOM = 3


class _Number:
    """An int64 of an ActorStatus."""

    def __init__(self, place: int) -> None:
        self.place = place

    def __get__(self, status: ActorStatus, kind: type[ActorStatus]) -> int:
        return int(status.numbers[self.place])

    def __set__(self, status: ActorStatus, value: int) -> None:
        status.numbers[self.place] = value


_BUSY, _WAIT, _STATE, _ENV_INDEX, _CALLS, _MASKED = range(4, 10)  # places of numbers


class ActorStatus:
    """Counters, state and latest actions of one actor. Counters continue when another process takes its place."""

    pid = _Number(0)
    steps = _Number(1)  # summed over environments
    episodes = _Number(2)
    version = _Number(3)  # of the weights in use
    busy_ns = _Number(_BUSY)
    wait_ns = _Number(_WAIT)
    env_index = _Number(_ENV_INDEX)  # environment being stepped, or stepped last
    masked = _Number(_MASKED)  # rewards and observations that were masked

    def __init__(self, memory: Memory, offset: int, num_envs: int) -> None:
        views = self.layout(num_envs).views(memory, offset)
        self.numbers = views["numbers"].data
        self._action_counts, self._actions = views["action_counts"], views["actions"]
        self.activity = self.numbers[_ENV_INDEX : _CALLS + 1]  # for GymEnvs to write, see `env_activity`

    @staticmethod
    def layout(num_envs: int) -> SharedLayout:
        """Return the memory layout for an actor with `num_envs` environments."""
        actions = {"action_counts": ((num_envs,), np.int64), "actions": ((ACTIONS, num_envs), np.int64)}
        return SharedLayout({"numbers": ((CELL,), np.int64), **actions})

    def begin(self) -> None:
        """Enter STARTING as the actor's process, with no actions taken yet."""
        self._action_counts[:] = 0
        self.numbers[_STATE] = time.monotonic_ns() * 4 + ActorState.STARTING
        self.pid = os.getpid()

    def enter(self, state: ActorState) -> None:
        """Record a change of state, or the start of another step. Entering the same waiting state again changes nothing."""
        numbers, now = self.numbers, time.monotonic_ns()
        since, previous = divmod(numbers[_STATE], 4)
        if previous == ActorState.STEPPING:
            numbers[_BUSY] += now - since
        elif previous == state:
            return
        elif previous != ActorState.STARTING:
            numbers[_WAIT] += now - since
        numbers[_STATE] = now * 4 + state  # one number, because the two must be read together

    def record_actions(self, actions: Array, first: int = 0) -> None:
        """Record actions (K,) about to be taken by environments `first` to `first` + K, which always step together."""
        envs = slice(first, first + len(actions))
        count = int(self._action_counts[first])
        self._actions[count % ACTIONS, envs] = actions
        self._action_counts[envs] = count + 1

    @property
    def state(self) -> ActorState:
        return ActorState(self.numbers[_STATE] % 4)

    @property
    def since_ns(self) -> int:
        """Time at which the actor entered its state or began its step, on the clock of `time.monotonic_ns`."""
        return int(self.numbers[_STATE] // 4)

    def last_actions(self, env_index: int) -> list[int]:
        """Return up to ACTIONS latest actions of one of the actor's environments, newest last."""
        count = int(self._action_counts[env_index])
        actions: list[int] = self._actions[np.arange(max(0, count - ACTIONS), count) % ACTIONS, env_index].tolist()
        return actions
