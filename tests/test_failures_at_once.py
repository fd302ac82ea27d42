"""Tests that fail are named while others still run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FILE = """
def test_good(): pass
def test_bad(): assert 1 == 2, "a reason"
def test_later():
    import os
    os._exit(9)  # as if the run were stopped: there is no summary
"""


def test_a_run_that_is_stopped_has_named_its_failures(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(FILE)
    (tmp_path / "conftest.py").write_text(
        "from failures_at_once import FailuresAtOnce\n"
        "def pytest_configure(config): config.pluginmanager.register(FailuresAtOnce(config))\n"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "--rootdir",
        str(tmp_path),
    ]
    ended = subprocess.run(
        [*command, "-o", f"pythonpath={Path(__file__).parent}", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 9
    named = [line for line in ended.stdout.splitlines() if line.startswith("FAILED")]
    assert len(named) == 1
    assert "test_bad (call): AssertionError: a reason" in named[0]
