"""Fixtures of the tests that need a GPU."""

from __future__ import annotations

import pytest

from redline.run import plan


@pytest.fixture(autouse=True)
def compile_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tests run at a time: a second compiling process for each would take their cores."""
    monkeypatch.setattr(plan, "_CORES_TO_SHARE", 10_000)
