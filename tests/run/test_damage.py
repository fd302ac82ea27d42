"""Checkpoints and replay files damaged in thousands of ways: refused with a sentence, or exactly what was saved.

The same script with 10,000 files of each kind gave the figures in docs/benchmarks.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FUZZED = int(os.environ.get("REDLINE_FUZZED_FILES", "300"))  # of each kind


@pytest.mark.fault("A2", "A3", "A4", "A12", "F1", "F4")
def test_damage_is_detected_and_nothing_else_happens(tmp_path: Path) -> None:
    out = tmp_path / "damage.json"
    command = [sys.executable, str(ROOT / "bench" / "damage.py"), "--fuzzed", str(FUZZED), "--out", str(out)]
    done = subprocess.run(
        [*command, "--flips", "60"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=300 + FUZZED,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [row["kind"] for row in rows] == ["checkpoints", "replay files"]
    for row in rows:
        assert row["flips_detected"] == 60
        assert row["fuzzed_refused"] + row["fuzzed_loaded"] == FUZZED
        assert row["fuzzed_loaded"] < FUZZED / 4
        assert row["wrong"] == {}
