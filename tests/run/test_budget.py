"""Budget and clock: limits, progress, time left, and what counts as training time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from redline.run import budget
from redline.run.budget import Budget, Clock, next_chunk, seconds_left


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    time = [100.0]
    monkeypatch.setattr(budget, "time", SimpleNamespace(monotonic=lambda: time[0]))
    return time


def test_training_starts_with_the_first_update(now: list[float]) -> None:
    clock = Clock(seconds=50.0, preparation=20.0)
    assert (clock.seconds, clock.training) == (50.0, 30.0)
    now[0] += 7.0
    assert (clock.seconds, clock.preparation, clock.training, clock.this_start) == (57.0, 27.0, 30.0, 7.0)
    clock.first_update()
    now[0] += 5.0
    clock.first_update()
    assert (clock.seconds, clock.preparation, clock.training, clock.this_start) == (62.0, 27.0, 35.0, 12.0)
    clock.stop()
    now[0] += 9.0
    assert (clock.seconds, clock.training, clock.this_start) == (62.0, 35.0, 12.0)


def test_the_first_limit_that_is_reached_counts() -> None:
    limits = Budget(steps=100, episodes=10, minutes=1.0)
    assert limits.reached(99, 9, 59.9) == ""
    assert limits.reached(100, 0, 0.0) == "steps"
    assert limits.reached(0, 10, 0.0) == "episodes"
    assert limits.reached(0, 0, 60.0) == "minutes"
    assert Budget().reached(10**9, 10**9, 1e9) == ""


def test_progress_is_that_of_the_nearest_limit() -> None:
    limits = Budget(steps=100, episodes=10, minutes=1.0)
    assert limits.progress(20, 3, 24.0) == 0.4
    assert limits.progress(50, 3, 24.0) == 0.5
    assert limits.progress(0, 12, 0.0) == 1.2
    assert Budget().progress(5, 5, 5.0) == 0.0


def test_the_limit_of_steps_bounds_the_iterations() -> None:
    assert Budget(steps=100).iterations(8, 60, 16) == 3
    assert Budget(steps=100).iterations(2, 60, 16) == 2
    assert Budget(steps=100).iterations(8, 100, 16) == 1
    assert Budget(minutes=1.0).iterations(8, 60, 16) == 8


def test_time_left_follows_the_pace() -> None:
    assert seconds_left(0.25, 30.0) == 90.0
    assert seconds_left(1.5, 30.0) == 0.0
    assert seconds_left(0.0, 30.0) is None
    assert seconds_left(0.1, 0.5) is None  # the steps so far may be those before training


def test_chunks_grow_towards_a_second() -> None:
    assert next_chunk(1, 0.001) == 4
    assert next_chunk(100, 0.5) == 200
    assert next_chunk(100, 4.0) == 25
    assert next_chunk(1, 60.0) == 1
