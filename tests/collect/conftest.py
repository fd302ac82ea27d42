"""Fixtures of the tests in which environments and actors fail."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from faulty_runs import HERE, Sessions


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the environment of faulty.py known, and let it do nothing wrong."""
    monkeypatch.syspath_prepend(HERE)
    for name in [name for name in os.environ if name.startswith("FAULTY")]:
        monkeypatch.delenv(name)


@pytest.fixture
def sessions(faulty: None) -> Iterator[Sessions]:
    """Return a function that makes sessions, which are closed at the end."""
    del faulty
    made = Sessions()
    yield made
    made.close()
