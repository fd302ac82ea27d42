"""RestartBudget: the number of failures of environments or actors that a run tolerates before it stops."""

from __future__ import annotations

import time

STORM, STORM_SECONDS = 5, 60.0  # this many failures of the same environment or actor within this time stop the run


class RestartBudget:
    """Counts failures; each may be followed by a restart until the budget is spent."""

    def __init__(self, restarts: int, kind: str) -> None:
        """`restarts`: failures tolerated in total. `kind`: noun for messages, "environment" or "actor"."""
        self.restarts, self.kind = restarts, kind
        self.failures = 0
        self._times: dict[int, list[float]] = {}  # times of the latest failures, by index of the environment or actor

    def spend(self, number: int) -> str:
        """Count a failure of environment or actor `number`. Return why the run must stop; empty if a restart is allowed."""
        self.failures += 1
        now = time.monotonic()
        times = [then for then in self._times.get(number, []) if now - then < STORM_SECONDS] + [now]
        self._times[number] = times
        if self.failures > self.restarts:
            return f"The run stops: {self.kind}s failed {self.failures} times, {self.restarts} are allowed (--env.restarts)."
        if len(times) >= STORM:
            return f"The run stops: this {self.kind} failed {STORM} times within {STORM_SECONDS:g} seconds."
        return ""
