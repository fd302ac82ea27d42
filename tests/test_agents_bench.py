"""bench/agents.py: its commands exist; one tiny seed, then calls that add another and repeat none; its table of seeds."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest

from bench_scripts import load_script
from redline import cli
from redline.cli.parse import parse
from redline.core.errors import UserError
from redline.run.agent import load_agent


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("agents")


def test_every_row_is_a_command(script: ModuleType) -> None:
    for row in script.ROWS.values():
        parse("train", cli.COMMANDS.load("train"), row.words.split())
        assert row.figure in load_script("make_benchmarks_page").AGENT_UNITS


def test_seeds_are_added_and_the_best_is_kept(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "snake --steps 2000 --num-envs 16 --batch-size 16 --ppo.rollout-steps 16 --ppo.hidden 8 --no-compile"
    words += " --device cpu --threads 1 --env.width 4 --env.height 4"
    monkeypatch.setitem(script.ROWS, "tiny", script.Row(words, "Snake 4x4", "score_mean", -1.0, 4))
    out, train, trained = tmp_path / "runs.json", script.train, []

    def note(name: str, seed: int, options: list[str], folder: Path) -> dict[str, object]:
        trained.append(seed)
        failed = {"seed": seed, "options": options, "wall_seconds": 1.0, "error": "exit code 1"}
        run: dict[str, object] = failed if seed else train(name, seed, options, folder)
        return run

    monkeypatch.setattr(script, "train", note)
    for seeds in ("0", "0,1", "0,1,2"):
        arguments = ["agents.py", "tiny", "--seeds", seeds, "--out", str(out), "--keep", str(tmp_path / "kept")]
        monkeypatch.setattr(sys, "argv", [*arguments, "--", "--ppo.epochs", "1"])
        script.main()
    assert trained == [0, 1, 1, 2]  # a seed that failed is repeated, one that ended is not
    row = json.loads(out.read_text())["rows"]["tiny"]
    first, *failed = row["runs"]
    assert [run["seed"] for run in failed] == [1, 2]
    assert first["env_steps"] >= 2000
    assert first["options"] == ["--ppo.epochs", "1"]
    assert first["episodes"] == 4
    assert first["wall_seconds"] > 0
    assert {"seconds", "env_steps", "score"} <= first["curve"][-1].keys()
    assert script.summary(row) == {
        "iqm": first["score_mean"],
        "low": first["score_mean"],
        "high": first["score_mean"],
        "reached": 1,
    }
    assert "exit code 1" in capsys.readouterr().out
    assert load_agent(tmp_path / "kept" / "tiny").env_steps == first["env_steps"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--", "--ppo.epochs", "2"])
    with pytest.raises(SystemExit, match="with other options"):
        script.main()


def test_runs_together_are_all_under_way_at_once(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = threading.Barrier(4, timeout=60)

    def train(name: str, seed: int, options: list[str], folder: Path) -> dict[str, object]:
        started.wait()
        run: dict[str, object] = {"seed": seed, "options": options, "wall_seconds": 1.0}
        return run | {"error": f"{name} in {folder.name}"}

    monkeypatch.setattr(script, "train", train)
    out = tmp_path / "runs.json"
    rows = ["snake-10x10-ppo", "snake-10x10-dqn"]
    monkeypatch.setattr(sys, "argv", ["agents.py", *rows, "--seeds", "1,0", "--together", "--out", str(out)])
    script.main()
    for name, row in json.loads(out.read_text())["rows"].items():
        assert [run["seed"] for run in row["runs"]] == [0, 1]
        assert {run["error"] for run in row["runs"]} == {f"{name} in {name}-{seed}" for seed in (0, 1)}
        assert {run["note"] for run in row["runs"]} == {"4 runs at the same time"}


def test_a_command_that_fails_raises(script: ModuleType) -> None:
    with pytest.raises(subprocess.CalledProcessError, match="status 2"):
        script.redline_json("list", "--no-such-option")


def test_an_exception_starts_no_more_seeds(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = [], threading.Event()

    def train(name: str, seed: int, options: list[str], folder: Path) -> dict[str, object]:
        del folder
        begun.append(seed)
        if seed:
            go_on.wait(60)
        return {"seed": seed, "options": options, "wall_seconds": 1.0, "error": name}

    def fail(*_: object) -> None:
        threading.Timer(0.2, go_on.set).start()
        raise OSError("disk full")

    monkeypatch.setattr(script, "train", train)
    monkeypatch.setattr(script, "write", fail)
    words = ["agents.py", "snake-10x10-ppo", "--seeds", "0,1,2,3", "--out", str(tmp_path / "runs.json")]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(OSError, match="disk full"):
        script.main()
    assert begun in ([0], [0, 1])


def test_results_that_cannot_be_read_are_an_error_of_the_run(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "redline_json", lambda *_: ({}, 1.0))
    assert "FileNotFoundError" in script.train("snake-10x10-ppo", 0, [], tmp_path / "none")["error"]


def test_an_agent_that_cannot_be_packed_keeps_its_figures(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise UserError("it is too large")

    monkeypatch.setattr(script, "pack", refuse)
    row = {"figure": "win_rate", "runs": []}
    script.add(row, {"seed": 3, "win_rate": 0.5}, tmp_path / "acrobot-3", tmp_path / "kept")
    assert [run["seed"] for run in row["runs"]] == [3]
    assert "acrobot-3 was not kept: it is too large" in capsys.readouterr().err


def test_the_lowest_win_rate_is_that_of_the_worst_level(script: ModuleType) -> None:
    figures = {"episodes": 100, "score_mean": 3000.0, "score_low": 2900.0}
    played = {"1-1": figures | {"win_rate": 0.98}, "1-3": figures | {"win_rate": 0.4}}
    by_level = script.by_level(played)
    assert by_level["lowest_win_rate"] == 0.4
    assert by_level["levels"]["1-1"] == {"episodes": 100, "score_mean": 3000.0, "win_rate": 0.98}
    assert script.by_level({}) == {}


def test_the_curve_weighs_points_by_their_games(script: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    records = [{"env_steps": 10 * i, "seconds": i, "episodes": i, "score": float(i)} for i in (1, 3, 4, 6)]
    path.write_text("".join(json.dumps(record) + "\n" for record in [*records, {"env_steps": 70, "seconds": 7}]))
    assert script.training_curve(path, points=2) == [
        {"seconds": 3, "env_steps": 30, "score": 2.5},
        {"seconds": 6, "env_steps": 60, "score": 5.2},
    ]


def test_seeds_are_summed_up_by_the_mean_of_the_middle(script: ModuleType) -> None:
    runs = [{"win_rate": rate} for rate in (0.5, 0.9, 0.92, 0.94, 1.0)]
    table = script.summary({"figure": "win_rate", "bar": 0.93, "runs": [*runs, {"error": "exit code 1"}]})
    assert table["iqm"] == pytest.approx((0.75 * 0.9 + 0.92 + 0.75 * 0.94) / 2.5)
    assert 0.5 <= table["low"] < table["iqm"] < table["high"] <= 1.0
    assert table["reached"] == 2
    assert "reached" not in script.summary({"figure": "win_rate", "bar": None, "runs": runs})


def test_curves_are_drawn(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(seed: int) -> dict[str, object]:
        points = [{"env_steps": 10 * i, "seconds": i, "score": float(seed + i)} for i in range(1, 5)]
        return {"seed": seed, "score_mean": float(seed), "curve": points}

    row = script.Row("snake", "Snake, `make train`", "score_mean", 0.0, 4)._asdict()
    lost: dict[str, object] = {"seed": 2, "score_mean": 2.0, "curve": []}
    runs = [run(0), run(1), lost, {"seed": 3, "error": "exit code 1"}]
    record = {"rows": {"tiny": row | {"runs": runs}, "lost": row | {"runs": [lost]}}}
    script.write(tmp_path / "runs.json", record)
    monkeypatch.setattr(sys, "argv", ["plot_agents.py", str(tmp_path / "runs.json"), "--folder", str(tmp_path)])
    load_script("plot_agents").main()
    assert (tmp_path / "learning-tiny.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "learning-lost.png").exists()
