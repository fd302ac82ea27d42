"""bench/prioritized_gain.py: a tiny run of each kind, the step from which games reach a score, and the rows of the page."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench_scripts import load_script


def test_both_kinds_learn_from_as_many_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, out = load_script("prioritized_gain"), tmp_path / "runs.json"
    monkeypatch.setitem(script.TASKS, "tetris", script.TASKS["tetris"]._replace(episodes=2))
    arguments = ["prioritized_gain.py", "--seeds", "0", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [*arguments, "--", "--steps", "8000"])
    script.main()
    script.main()  # nothing is repeated
    record = json.loads(out.read_text())
    uniform, prioritized = record["runs"]
    assert [uniform["prioritized"], prioritized["prioritized"]] == [False, True]
    assert uniform["samples_trained"] == prioritized["samples_trained"] > 0
    rows = list(load_script("make_benchmarks_page").prioritized_gain(record))
    assert [("prioritized" in row.what, "CPU seconds" in row.result) for row in rows] == [(False, True), (True, True)]


def test_a_score_counts_when_enough_games_have_it() -> None:
    script = load_script("prioritized_gain")
    records = [{"env_steps": step, "episodes": games, "score": score} for step, games, score in (
        (1, 99, 50.0), (2, 0, 0.0), (3, 100, 1.0), (4, 60, 12.0), (5, 60, 10.0), (6, 60, 11.0),
    )]  # fmt: skip
    assert script.steps_to_score(records, 10, 100) == 5
    assert script.steps_to_score(records[:3], 10, 100) is None
