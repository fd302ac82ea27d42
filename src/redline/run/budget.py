"""The budget of a run: environment steps, episodes or minutes, and the clock that measures the minutes."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass


class Clock:
    """Total seconds and training seconds of a run, summed over all its starts.

    Training time starts at the first update, after compilation and the collection of the first experience. These are repeated
    whenever the run is resumed and do not count against the budget. Nor do updates made while the compiler is still working.
    """

    def __init__(self, seconds: float = 0.0, preparation: float = 0.0) -> None:
        """Continue a run that has taken `seconds` so far, `preparation` of them before the first update of each start."""
        self._resumed_at, self._seconds_before = time.monotonic(), seconds
        self._preparation, self._updated = preparation, False
        self._stopped_at: float | None = None

    @property
    def seconds(self) -> float:
        """Total seconds."""
        return self._seconds_before + self.this_start

    @property
    def this_start(self) -> float:
        """Seconds since the run was started or last resumed."""
        return (self._stopped_at or time.monotonic()) - self._resumed_at

    @property
    def preparation(self) -> float:
        """Seconds before the first update, summed over all starts."""
        return self._preparation + (0.0 if self._updated else self.this_start)

    @property
    def training(self) -> float:
        """Seconds since the first update, summed over all starts."""
        return self.seconds - self.preparation

    def first_update(self) -> None:
        """Start counting training time; later calls do nothing."""
        if not self._updated:
            self._preparation, self._updated = self.preparation, True

    def stop(self) -> None:
        """Stop counting: saving the last checkpoint and the evaluation are not training."""
        self._stopped_at = time.monotonic()


@dataclass(frozen=True)
class Budget:
    """The limits of a run; it stops at the first one reached. None: no such limit."""

    steps: int | None = None
    episodes: int | None = None
    minutes: float | None = None  # of training, see `Clock`

    def reached(self, env_steps: int, episodes: int, training_seconds: float) -> str:
        """Return the name of the limit that has been reached, or an empty string."""
        if self.steps is not None and env_steps >= self.steps:
            return "steps"
        if self.episodes is not None and episodes >= self.episodes:
            return "episodes"
        if self.minutes is not None and training_seconds >= 60 * self.minutes:
            return "minutes"
        return ""

    def progress(self, env_steps: int, episodes: int, training_seconds: float) -> float:
        """Return the used fraction of the limit closest to being reached; above 1 if it is exceeded."""
        return max(
            env_steps / self.steps if self.steps else 0.0,
            episodes / self.episodes if self.episodes else 0.0,
            training_seconds / (60 * self.minutes) if self.minutes else 0.0,
        )

    def iterations(self, chunk: int, env_steps: int, steps_per_iteration: int) -> int:
        """Return the number of iterations to run: `chunk`, or as many as the limit of steps allows, but at least one."""
        if self.steps is None:
            return chunk
        return max(1, min(chunk, math.ceil((self.steps - env_steps) / steps_per_iteration)))


def seconds_left(progress: float, training_seconds: float) -> float | None:
    """Return the expected seconds to the end at the current pace; None in the first second, when it is unreliable."""
    return training_seconds * max(1 / progress - 1, 0) if progress > 0 and training_seconds >= 1 else None


def next_chunk(chunk: int, seconds: float, log_seconds: float = 1.0) -> int:
    """Return how many iterations take about `log_seconds`, given that `chunk` took `seconds`; at most four times as many."""
    return max(1, min(round(chunk * log_seconds / seconds), 4 * chunk))
