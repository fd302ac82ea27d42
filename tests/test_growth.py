"""bench/growth.py measures every kind of point, records failures and goes on; its plots and page rows come from the record."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from bench_scripts import load_script

ARGUMENTS = Namespace(device="cpu", seconds=0.02, jobs=2, eager=True, limit=120.0)
TINY: dict[str, dict[str, Any]] = {
    "alone": {"env": "snake", "options": {}, "games": 8},
    "dqn": {"options": {"width": 6, "height": 6}, "games": 8, "width": 16},
    "replay": {"size": 16, "prioritized": True},
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("growth")


def point(measure: str, **others: Any) -> dict[str, Any]:
    return {"part": "games", "curve": measure, "x": 1000, "measure": measure} | TINY.get(measure, {}) | others


@pytest.mark.parametrize("measure", TINY)
def test_every_measure_has_a_speed(script: ModuleType, measure: str) -> None:
    result = script.MEASURES[measure](point(measure), torch.device("cpu"), False)(0.02)
    assert result["speed"]["value"] > 0
    assert result["speed"]["repeats"] == script.REPEATS
    if measure != "dqn":
        assert 30 < result["bytes_each"] < 1000
    if measure == "replay":
        assert result["written"]["value"] > 0


def test_points_of_all_parts_can_be_measured(script: ModuleType) -> None:
    for on_gpu in (False, True):
        chosen = [each for part in script.PARTS for each in script.points(part, on_gpu)]
        assert {each["part"] for each in chosen} == set(script.PARTS)
        assert {each["measure"] for each in chosen} <= set(script.MEASURES)
        assert len({(each["part"], each["curve"], each["x"]) for each in chosen}) == len(chosen)


def test_a_failing_and_a_stuck_point_do_not_cost_the_others(
    script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    impossible = point("alone", options={"width": 3})
    failed, measured = script.run([impossible, point("alone")], ARGUMENTS)
    assert "env.width is 3" in failed["error"]
    assert measured["speed"]["value"] > 0
    (stuck,) = script.run([point("alone")], Namespace(**vars(ARGUMENTS) | {"limit": 0.05}))
    assert stuck["error"] == "took too long"
    script.show([failed, measured, stuck])
    assert "failed: took too long" in capsys.readouterr().out


def test_plots_and_rows_come_from_the_record(tmp_path: Path) -> None:
    figure = {"value": 2e6, "low": 1e6, "high": 3e6, "repeats": 5}
    row = {
        "part": "games",
        "curve": "Snake alone",
        "games": 8,
        "speed": figure,
        "bytes_each": 451.0,
        "commit": "0123456",
    }
    rows = [row | {"x": 8}, row | {"x": 64}, {"part": "games", "curve": "Snake alone", "x": 512, "error": "too large"}]
    machine = {"hardware": "NVIDIA H200, 16 CPU cores, x86_64", "commit": "abcdef0", "date": "2026-11-18"}
    (tmp_path / "growth-h200.json").write_text(json.dumps(machine | {"rows": rows}))
    page = load_script("make_benchmarks_page").page(tmp_path)
    assert "| Growth with games: Snake alone, 8, 64 games | 3 M, 3 M env-steps/s | H200 | 0123456 |" in page
    plots = load_script("plot_growth")
    assert plots.draw("games", [machine | {"rows": rows}], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert not plots.draw("width", [machine | {"rows": rows}], tmp_path / "none.png")
