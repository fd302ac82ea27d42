"""The budget of a run: environment steps, episodes or minutes, and the clock that measures the minutes."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass


class Clock:
    """Seconds of a run over all its continuations: in total, and of training.

    Training starts with the first update: compilation and the collection of the first experience come before it. They are
    repeated by every continuation and count against no budget. Updates while the compiler is at work are a bonus.
    """

    def __init__(self, seconds: float = 0.0, preparation: float = 0.0) -> None:
        """Continue a run that took `seconds` so far, `preparation` of them before first updates."""
        self._resumed_at, self._seconds_before = time.monotonic(), seconds
        self._preparation, self._updated = preparation, False
        self._stopped_at: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds in total."""
        return self._seconds_before + self.this_start

    @property
    def this_start(self) -> float:
        """Seconds since this start or continuation of the run."""
        return (self._stopped_at or time.monotonic()) - self._resumed_at

    @property
    def preparation(self) -> float:
        """Seconds before the first update, of all starts together."""
        return self._preparation + (0.0 if self._updated else self.this_start)

    @property
    def training(self) -> float:
        """Seconds since the first update, of all starts together."""
        return self.seconds - self.preparation

    def first_update(self) -> None:
        """Start to count training time; later calls do nothing."""
        if not self._updated:
            self._preparation, self._updated = self.preparation, True

    def stop(self) -> None:
        """Stop counting: saving the last checkpoint and the evaluation are not training."""
        self._stopped_at = time.monotonic()


@dataclass(frozen=True)
class Budget:
    """The limits of a run, whichever is reached first. None: no such limit."""

    steps: int | None = None
    episodes: int | None = None
    minutes: float | None = None  # of training, see `Clock`

    def reached(self, env_steps: int, episodes: int, training_seconds: float) -> str:
        """The name of the limit that is reached, or an empty string."""
        if self.steps is not None and env_steps >= self.steps:
            return "steps"
        if self.episodes is not None and episodes >= self.episodes:
            return "episodes"
        if self.minutes is not None and training_seconds >= 60 * self.minutes:
            return "minutes"
        return ""

    def progress(self, env_steps: int, episodes: int, training_seconds: float) -> float:
        """The fraction used of the limit that is nearest; above 1 where it is exceeded."""
        return max(
            env_steps / self.steps if self.steps else 0.0,
            episodes / self.episodes if self.episodes else 0.0,
            training_seconds / (60 * self.minutes) if self.minutes else 0.0,
        )

    def iterations(self, chunk: int, env_steps: int, steps_per_iteration: int) -> int:
        """At most `chunk` iterations: no more than the limit of steps allows, and at least one."""
        if self.steps is None:
            return chunk
        return max(1, min(chunk, math.ceil((self.steps - env_steps) / steps_per_iteration)))


def seconds_left(progress: float, training_seconds: float) -> float | None:
    """The expected seconds to the end at the pace so far; None in the first second, when most steps were made before it."""
    return training_seconds * max(1 / progress - 1, 0) if progress > 0 and training_seconds >= 1 else None


def next_chunk(chunk: int, seconds: float, log_seconds: float = 1.0) -> int:
    """The iterations to run in about `log_seconds`, when `chunk` iterations took `seconds`. Grows slowly."""
    return max(1, min(round(chunk * log_seconds / seconds), 4 * chunk))
