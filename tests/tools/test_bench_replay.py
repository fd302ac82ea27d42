"""`redline bench replay`: every place and way of drawing is measured, and what does not run is no reason to stop."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch

from redline import replay
from redline.core.records import Batch
from redline.tools import bench_replay as module
from redline.tools.bench_options import BenchRequest


def test_every_combination_has_a_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> float:
        raise RuntimeError("no such tree\nmore")

    monkeypatch.setattr(module, "_peers", lambda: {"a peer": lambda *_: 123_000.0, "another": broken})
    out = io.StringIO()
    wanted = BenchRequest(
        seconds=0.01, device="cpu", compile=False, capacity=4000, batch=(16, 32), folder=str(tmp_path)
    )
    record = module.bench_replay(wanted, out)
    combinations = {(row["stored"], row["where"], row["prioritized"]) for row in record["rows"]}
    assert combinations == {(s, kind, p) for s in ("snake", "frames") for kind in replay.names() for p in (False, True)}
    assert all(row[size]["low"] > 0 for row in record["rows"] for size in ("16", "32"))
    assert record["peers"] == {"a peer": {"16": 123_000.0, "32": 123_000.0}}
    text = out.getvalue()
    assert "123 k" in text
    assert "another" in text
    assert "does not run here: no such tree" in text
    assert not any(tmp_path.iterdir()), "files of the benchmark are left"


@pytest.mark.parametrize("kind", replay.names())
def test_the_memory_is_full_and_samples_are_of_what_it_holds(kind: str, tmp_path: Path) -> None:
    """A memory that believes its rows are lost would be sampled almost empty, and look fast."""
    rules, loops = module.frames(), []
    bench = BenchRequest(seconds=0.01, device="cpu", compile=False, capacity=2000, folder=str(tmp_path))

    class Noted(module.Loop):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            loops.append((int(self.memory.written), self.memory.rows, self))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "Loop", Noted)
        module._measure(rules, kind, None, 16, torch.device("cpu"), bench, tmp_path / "replay")
    ((written, rows, loop),) = loops
    assert written == rows >= 50, "not full when the measurement began"
    batch = Batch(*loop.batch)
    assert (batch.weight > 0).all()
    assert batch.obs.any(), "observations of nothing"
    if hasattr(loop.memory, "missing_rows"):
        assert not loop.memory.missing_rows.any()


def test_one_kind_alone(tmp_path: Path) -> None:
    wanted = BenchRequest(
        seconds=0.01, device="cpu", compile=False, capacity=2000, folder=str(tmp_path), replay="memmap"
    )
    record = module.bench_replay(wanted, io.StringIO())
    assert {row["where"] for row in record["rows"]} == {"memmap"}
    assert record["peers"] == {}


def test_sb3_is_measured_where_it_is_installed() -> None:
    pytest.importorskip("stable_baselines3")
    assert module._peers()["SB3 ReplayBuffer"](8, 100, 0.01) > 0
