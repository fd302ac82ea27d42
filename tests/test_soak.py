"""The soak: a few faults, survived; and the figures it reports."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bench_scripts import load_script

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    return load_script("soak")


@pytest.mark.fault("B4", "C2")
@pytest.mark.timeout(600)
def test_faults_are_survived(
    soak: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    out = tmp_path / "soak.json"
    words = f"--minutes 0 --least 2 --every 0 1 --kinds kill,actor --actors 1 --num-envs 4 --no-quiet --out {out}"
    assert soak.main(words.split()) == 0
    result = json.loads(out.read_text())["soak"]
    assert (result["injected"], result["recovered"]) == (2, 2)
    assert (result["starts"], result["last_exit"], result["unexpected_exits"]) == (2, 75, [])
    assert {fault["kind"]: fault["exit_code"] for fault in result["faults"]} == {"kill": -9, "actor": None}
    assert "2 faults injected, 2 recovered" in capsys.readouterr().out


def test_the_figures(soak: ModuleType) -> None:
    lost = soak.Fault("kill", 10.0, at_step=500, resumed_step=420, recovery_seconds=3.0, exit_code=-9)
    open_one = soak.Fault("nan", 20.0, at_step=900)
    memory = [(float(second), 1, 100e6 + second) for second in range(9)]
    run: Any = SimpleNamespace(
        kinds=("kill", "nan"),
        faults=[lost, open_one],
        memory=memory,
        starts=2,
        exits=[],
        last_exit=75,
        step=lambda: 1000,
    )
    result = soak.summary(run)
    assert (result["injected"], result["recovered"], result["lost_steps_max"]) == (2, 1, 80)
    assert result["kinds"]["nan"] == {
        "injected": 1, "recovered": 0, "lost_steps_max": 0, "recovery_seconds_max": 0.0,
    }  # fmt: skip
    record = {"hardware": "x", "commit": "y", "date": "z", "minutes": 1.0, "soak": result}
    assert "| kill | 1 | 1 | 80 | 3.0 |" in soak.report(record)
