"""ActorStatus: an actor's progress in shared memory, written by the actor, read by the supervisor and for metrics."""

from __future__ import annotations

import enum
import os
import time

import numpy as np

from redline.collect.shared_memory import CELL, Array, Memory, SharedLayout

ACTIONS = 32  # number of latest actions kept per environment


class ActorState(enum.IntEnum):
    """Whether an actor is starting, stepping, or waiting for actions or for room in a ring."""

    STARTING = 0
    STEPPING = 1
    NEEDS_ACTIONS = 2
    NEEDS_ROOM = 3


class _Number:
    """Descriptor of an int64 in an ActorStatus."""

    def __init__(self, place: int) -> None:
        self.place = place

    def __get__(self, status: ActorStatus, kind: type[ActorStatus]) -> int:
        return int(status.numbers[self.place])

    def __set__(self, status: ActorStatus, value: int) -> None:
        status.numbers[self.place] = value


_BUSY, _WAIT, _STATE, _ENV_INDEX, _CALLS, _MASKED = range(4, 10)  # indices into `numbers`


class ActorStatus:
    """Counters, state and latest actions of one actor. Counters continue when another process replaces it."""

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
        """Enter STARTING with this process's id and clear the latest actions."""
        self._action_counts[:] = 0
        self.numbers[_STATE] = time.monotonic_ns() * 4 + ActorState.STARTING
        self.pid = os.getpid()

    def enter(self, state: ActorState) -> None:
        """Record a change of state or the start of another step. Re-entering the same waiting state changes nothing."""
        numbers, now = self.numbers, time.monotonic_ns()
        since, previous = divmod(numbers[_STATE], 4)
        if previous == ActorState.STEPPING:
            numbers[_BUSY] += now - since
        elif previous == state:
            return
        elif previous != ActorState.STARTING:
            numbers[_WAIT] += now - since
        numbers[_STATE] = now * 4 + state  # one number, so that time and state are read together

    def record_actions(self, actions: Array, first: int = 0) -> None:
        """Record the next actions (K,) of environments `first` to `first` + K - 1, which always step together."""
        envs = slice(first, first + len(actions))
        count = int(self._action_counts[first])
        self._actions[count % ACTIONS, envs] = actions
        self._action_counts[envs] = count + 1

    @property
    def state(self) -> ActorState:
        return ActorState(self.numbers[_STATE] % 4)

    @property
    def since_ns(self) -> int:
        """Time when the actor entered its state or began its step, as given by `time.monotonic_ns`."""
        return int(self.numbers[_STATE] // 4)

    def last_actions(self, env_index: int) -> list[int]:
        """Return up to ACTIONS latest actions of one environment, counted within the actor; newest last."""
        count = int(self._action_counts[env_index])
        actions: list[int] = self._actions[np.arange(max(0, count - ACTIONS), count) % ACTIONS, env_index].tolist()
        return actions
