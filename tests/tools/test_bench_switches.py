"""The table of switches: which apply, both sides measured in turns, failures as rows."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from redline.cli import run
from redline.core.errors import UserError
from redline.run.resolve import resolve
from redline.run.settings import Settings
from redline.tools import bench_switches as module
from redline.tools.bench_options import BenchRequest
from redline.tools.bench_switches import Switch, bench_switches, switches
from redline.tools.trial import ChildTrial, Rate, Trial

TINY: dict[str, Any] = {"algo": "dqn", "env_options": {"width": 5, "height": 5}}
OPTIONS = {"hidden": (8,), "learning_starts": 0, "batch_size": 8, "replay_capacity": 512}


def tiny(**options: Any) -> Settings:
    base = {"env": "snake", "num_envs": 8, "device": "cpu", "compile": False, "algo_options": OPTIONS}
    return Settings(**base | TINY | options)


def test_every_switch_is_a_setting_or_an_option_and_changes_it() -> None:
    plan = resolve(tiny())
    rows = list(switches(plan))
    assert len({row.name for row in rows}) == len(rows) >= 18
    for row in rows:
        if not row.unless:
            off, on = (resolve(row.settings(tiny(), side)).describe() for side in (False, True))
            assert {k: v for k, v in off.items() if k != "provenance"} != {
                k: v for k, v in on.items() if k != "provenance"
            }, row.name
    unless = {row.name: row.unless for row in rows}
    assert unless["CUDA graphs"] == unless["precision tf32"] == "needs a GPU"
    assert unless["ring rows"] == "there are no actors"
    assert unless["channels last"] == "the network has no convolutions"
    assert not unless["precision fp16"]


def test_a_trial_learns_and_counts() -> None:
    trial = Trial(tiny())
    before = trial.session.updates
    assert before > 0, "it is measured while it learns"
    rate = trial.measure(0.05)
    assert trial.session.updates > before
    assert rate.samples == pytest.approx(rate.env_steps)  # 8 samples per 8 steps
    folder = Path(trial.plan.run_dir)
    assert folder.exists()
    trial.close()
    assert not folder.exists()
    with pytest.raises(UserError, match="num_envs is 0"):
        Trial(tiny(num_envs=0))


def test_a_trial_in_a_process_of_its_own() -> None:
    trial = ChildTrial(tiny())
    try:
        assert trial.wait_ready(120) > 0
        assert trial.measure(0.05).env_steps > 0
    finally:
        trial.close()
    refused = ChildTrial(tiny(num_envs=0))
    with pytest.raises(UserError, match="num_envs is 0; expected at least 1"):
        refused.wait_ready(120)
    refused.close()
    late = ChildTrial(tiny())
    with pytest.raises(UserError, match="not measured: it was not ready in time"):
        late.wait_ready(0.0)
    late.close()


def test_rows_hold_ratios_of_turns_and_failures_do_not_stop_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sides are measured in turns, so that a ratio compares neighbours in time."""
    order: list[bool] = []

    class Fake:
        def __init__(self, settings: Settings) -> None:
            self.on, self.messages = settings.inference_mode, ["fell back"] if settings.accumulate == 2 else []
            if not settings.fused_optimizer:
                raise MemoryError("too much")

        def measure(self, seconds: float) -> Rate:
            del seconds
            order.append(self.on)
            speed = 100.0 + len(order)
            return Rate(2 * speed if self.on else speed, 1.0, 3)

        def close(self) -> None:
            pass

    monkeypatch.setattr(module, "Trial", Fake)
    request = BenchRequest(
        env="snake", device="cpu", only=("inference mode", "fused", "accumulation", "CUDA"), algo="dqn", seconds=0.1
    )
    out = io.StringIO()
    rows = {row["switch"]: row for row in bench_switches(request, out)["rows"]}
    assert order[:10] == [False, True] * 5
    assert 2.0 < rows["inference mode"]["ratio_low"] <= rows["inference mode"]["ratio"] < 2.1
    assert rows["fused optimizer"]["reason"] == "MemoryError: too much"
    assert rows["accumulation"]["reason"] == "fell back"
    assert rows["CUDA graphs"]["reason"] == "needs a GPU"
    assert "3 updates skipped" in out.getvalue()
    with pytest.raises(UserError, match="only is nothing, which is no switch"):
        bench_switches(BenchRequest(env="snake", device="cpu", only=("nothing",), algo="dqn"), out)


def test_spelling() -> None:
    switch = Switch("a", {"accumulate": 1, "compile": True}, {}, {"x": (1, 2)}, {"y": 1})
    assert switch.spell(False) == "1 x on x (1, 2)"
    assert Switch("a", {"graph": False}, {"graph": True}, {"x": 1}, {"x": 1}).spell(True) == "on"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "bench switches snake --algo dqn --num-envs 8 --seconds 0.01 --only log --device cpu --dqn.hidden 8"
    words += f" --dqn.learning-starts 0 --dqn.batch-size 8 --dqn.replay-capacity 512 --out {tmp_path / 'a.json'}"
    assert run(words.split()) == 0
    (row,) = json.loads((tmp_path / "a.json").read_text())["switches"]["rows"]
    assert row["switch"] == "log interval"
    assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
    assert "log interval" in capsys.readouterr().out
    with pytest.raises(UserError, match="takes one ENV"):
        run(["bench", "switches", "snake", "tetris"])
