"""Collector: the interface between the training loop and environments, with its options and episode statistics.

In each step, a collector plays N environments with the learner's behaviour policy and hands the learner their transition.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from redline.algos.learner import Learner
from redline.engine.stages import Stages
from redline.envs.batch import Rules

Prepare = Callable[[Callable[[], None]], Callable[[], None]]
"""Makes a function over static buffers fast: compiles it, captures it as a CUDA graph, or returns it unchanged."""


@dataclass(frozen=True)
class CollectorOptions:
    """How to collect. Tensor games read `backplay` and `backplay_steps` only."""

    env: str  # name of the environment, for actor processes to make their own
    seed: int = 0
    actors: int = 0  # actor processes; 0: play in this process
    central: bool = False  # choose actions in this process for all actors; else each actor has a copy of the policy
    publish: int = 0  # updates between two publications of weights to actors; 0: chosen by the kind of learner
    drop_oldest: bool = False  # overwrite rows that were not read in time; else actors wait for room
    ring_rows: int = 0  # rows of a ring; 0: chosen by the learner's rollout
    staged_rows: int = (
        0  # rows to move from rings to the learner at once, at least; 0: chosen by the number of environments
    )
    pin_memory: bool = True  # page-lock the host memory from which a GPU copies rows
    backplay: float = 0.0  # fraction of episodes that start shortly before the last loss
    backplay_steps: int = 32  # steps before that loss, roughly


class EpisodeStats(Protocol):
    """Statistics of the episodes that ended since they were last read."""

    def read(self) -> dict[str, float]:
        """Return `episodes` and, if there were any, the means `score`, `length`, `reward` (episode return), `win_rate` and
        `truncated` (fraction), and `score_max`; then start over."""
        ...


class Collector(ABC):
    """Plays N environments with a learner's policy and hands it the transitions.

    The training loop calls `start(progress)` before it iterates, `step()` for every transition, `on_update(progress)` after
    every update, `metrics()` and `episode_stats.read()` at log points, `tensors()` for checkpoints, and `close()` at the
    end. After a resume it calls `restart_episodes` before `start`, unless `restores_episodes` is set.
    """

    on_device: ClassVar[bool] = False  # `step` only launches work on the device, so it can be compiled and captured
    restores_episodes: ClassVar[bool] = (
        False  # `tensors` includes the episodes in progress, so that a resumed run continues them
    )

    rules: Rules  # of the environments; a curriculum replaces them between iterations
    learner: Learner
    episode_stats: EpisodeStats

    def start(self, progress: float) -> Collector:
        """Start playing with the learner's current weights, `progress` (0 to 1) into training; later calls do nothing.

        Return the collector to use from now on: this one, or a replacement for one that cannot play on this machine.
        """
        del progress
        return self

    @property
    def stages(self) -> Stages:
        """Parts of `step` that `redline profile` times separately; the rest is timed together, as collection."""
        return {}

    @abstractmethod
    def step(self) -> None:
        """Hand the learner the next transition: one step of all N environments."""

    def on_update(self, progress: float) -> None:  # noqa: B027
        """Called after every update of the learner, `progress` (0 to 1) into training."""

    def metrics(self) -> dict[str, float]:
        """Return metrics of collection since the last call, by name; empty by default."""
        return {}

    def describe_env(self, env_index: int) -> str:
        """Return a description of an environment, with its seed and latest actions where they are known."""
        return f"environment {env_index}"

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors (N, …) to save, by name: the buffers themselves, into which a checkpoint is loaded."""
        return {}

    def adapt(self, saved: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return a checkpoint's tensors under exactly the names of `tensors`, in case a resumed run has changed options."""
        return saved

    @abstractmethod
    def restart_episodes(self, seed: int, number: int) -> None:
        """Abandon all episodes and start new ones; a new `number` gives episodes that were not played before."""

    @abstractmethod
    def close(self) -> None:
        """Release environments, processes and cores; idempotent."""
