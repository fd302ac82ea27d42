"""The benchmarks page is what the script makes of the result files, and the script knows every file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from bench_scripts import load_script

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("make_benchmarks_page")


def test_the_page_is_up_to_date(script: ModuleType) -> None:
    assert (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8") == script.page()


def test_every_result_file_has_rows_with_commit_and_date(script: ModuleType) -> None:
    files = {path.stem for path in (ROOT / "bench" / "results").glob("*.json")}
    assert {name for name in files if not name.startswith(tuple(script.SHARED))} == set(script.EXTRACTORS)
    rows = [line for line in script.page().splitlines() if line.endswith(".json) |")]
    assert {re.findall(r"\[([\w-]+)\]", row)[-1] for row in rows} == files
    for row in rows:
        _, what, result, hardware, commit, date, _, _ = (cell.strip() for cell in row.split("|"))
        assert what
        assert re.search(r"\d", result)
        assert hardware in (
            "H200",
            "2 CPU cores (Neoverse-N1)",
            "2 CPU cores (Xeon)",
            "1 CPU core (Xeon)",
            "16 CPU cores",
        )
        assert re.search(r"[0-9a-f]{7}|not recorded", commit)
        assert re.fullmatch(r"2026-\d\d-\d\d", date)


def test_a_changed_figure_changes_the_page(script: ModuleType, tmp_path: Path) -> None:
    for path in (ROOT / "bench" / "results").glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    changed = json.loads((tmp_path / "gpu-train.json").read_text())
    changed["train"]["rows"][0]["graphed"] = 12_345_678
    (tmp_path / "gpu-train.json").write_text(json.dumps(changed))
    assert "| 12.3 M env-steps/s |" in script.page(tmp_path)
    (tmp_path / "unknown.json").write_text("{}")
    with pytest.raises(SystemExit, match=r"unknown\.json has no extractor"):
        script.page(tmp_path)


def test_agents_have_rows_and_curves(script: ModuleType, tmp_path: Path) -> None:
    run = {"seed": 0, "commit": "abcdef0", "date": "2026-11-18", "env_steps": 2e6, "wall_seconds": 61.0}
    run |= {"cpu_seconds": 60.0, "steps_per_win": 812.4, "curve": [{"env_steps": 1}]}
    row = {
        "title": "Snake 10x10, PPO",
        "command": "redline train snake",
        "figure": "win_rate",
        "bar": 0.99,
        "games": 4096,
    }
    row |= {"runs": [run, run, run | {"seed": 1, "wall_seconds": 63.2}, {"seed": 2, "error": "exit code 1"}]}
    row |= {"summary": {"iqm": 0.995, "low": 0.99, "high": 1.0, "reached": 2}}
    record = {"hardware": "NVIDIA H200, 16 CPU cores", "rows": {"no-such-agent": row}}
    (tmp_path / "agents-h200.json").write_text(json.dumps(record))
    page = script.page(tmp_path)
    assert (
        "| Snake 10x10, PPO: `redline train snake`, 3 seeds, 4,096 games each | 99.50 % won (99.00 % to 100.0 %); "
        in page
    )
    assert (
        "2 of 4 reach 99.0 %; 1 failed; 812 steps a win; 2 M env-steps in 61 to 63 s (60 CPU seconds) | H200 |" in page
    )
    (alone,) = script.agents(record | {"rows": {"a": row | {"runs": [run | {"curve": []}]}}})
    assert not alone.picture
    assert alone.what.endswith("one seed, 4,096 games")
    assert alone.result.startswith("99.50 % won; ")  # no interval
    assert "![Learning curves: Snake 10x10, PPO](images/learning-no-such-agent.png)" in page


def test_inference_and_the_ablation_have_rows(script: ModuleType) -> None:
    figures = {"actors": {"frames_per_second": 6400.0}, "central": {"frames_per_second": 7200.0}}
    file = {"env": "mario", "algo": "ppo", "num_envs": 60, "num_actors": 15, "environments_alone": 9000.0}
    results = [row.result for row in script.inference(file | {"inference": figures})]
    assert results == ["9 k frames/s", "6.4 k frames/s", "7.2 k frames/s"]
    run = {"variant": "gamma", "seed": 1, "env_steps": 600_000, "greedy_flags": 0.5, "sampled_flags": 0.75}
    (row,) = script.mario_ablation({"level": "1-1", "rows": [run | {"greedy_x": 2000.0}]})
    assert row.what == "Super Mario Bros. 1-1 with PPO, 600 k decisions, earlier gamma, seed 1"
    assert row.result == "flag in 50.0 % of games, sampled 75.0 %, furthest x 2,000"


def test_tuning_precisions_and_switches_have_rows(script: ModuleType, tmp_path: Path) -> None:
    machine = {"hardware": "NVIDIA H200, 16 CPU cores", "commit": "abcdef0", "date": "2026-11-18"}
    result = {"algo": "ppo", "ratio": 1.5, "seconds": 60.2, "defaults": {"num_envs": 8}, "tuned": {"num_envs": 16}}
    row = {"scores": [1.0, 2.0], "score_mean": 1.5, "score_low": 1.0, "score_high": 2.0}
    row |= {"speed": {"env_steps_per_second": 2.5e7}}
    switch = {"switch": "compile", "off": "off", "on": "on", "ratio": 2.0, "ratio_low": 1.9, "ratio_high": 2.1}
    switches = {"env": "snake", "algo": "ppo", "rows": [switch, {"switch": "threads", "reason": "needs a CPU"}]}
    files = {
        "tune-h200": {"tune": {"snake": result}},
        "precision-h200": {"settings": {"steps": 1e8}, "precisions": {"bf16": row, "fp16": {"speed": {}}}},
        "bench-switches-h200": {"switches": switches},
    }
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(machine | content))
    text = script.page(tmp_path)
    assert "| `redline tune snake`, PPO, 60 s: num_envs 16 | 1.50 times the defaults | H200 |" in text
    assert "| Snake with PPO in bf16, 100 M steps, 2 seeds | 1.50 foods (1.00 to 2.00) | H200 |" in text
    assert "| Snake with PPO in bf16 | 25 M env-steps/s | H200 |" in text
    assert "| `redline bench switches snake`, PPO: compile, off to on | 2.00 (1.90 to 2.10) times | H200 |" in text
    assert "threads" not in text


def test_tables_of_redline_bench_have_rows_with_spread_and_use(script: ModuleType, tmp_path: Path) -> None:
    def figure(value: float, **beside: float) -> dict[str, float]:
        return {"value": value, "low": 0.9 * value, "high": 1.1 * value, "repeats": 3} | beside

    record = {
        "commit": "0123456",
        "date": "2026-11-18",
        "hardware": "NVIDIA H200, 16 CPU cores",
        "env": {"env": "snake", "rows": [{"games": 4096, "eager": figure(1e6), "compiled": None}]},
        "train": {
            "env": "snake",
            "algo": "dqn",
            "rows": [{"games": 4096, "graphed": figure(2e6, gpu_percent=98.0, peak_bytes=2**30)}],
        },
        "replay": {
            "capacity": 1_000_000,
            "rows": [{"stored": "snake", "where": "memmap", "prioritized": True, "2048": figure(3e6)}],
        },
        "collect": {"env": "gym:CartPole-v1", "bare": {"frames": figure(4e6), "of_actors": figure(1.0)}},
    }
    (tmp_path / "bench-h200.json").write_text(json.dumps(record))
    page = script.page(tmp_path)
    for text in (
        "| `redline bench env`: snake alone, eager, 4,096 games | 1 M env-steps/s (900 k to 1.1 M) | H200 | 0123456 |",
        "snake with DQN, graphed, 4,096 games | 2 M env-steps/s (1.8 M to 2.2 M), GPU 98 %, 1 GB |",
        "snake, memmap, 1 M transitions, prioritized, batch 2,048 | 3 M samples/s (2.7 M to 3.3 M) |",
        "gym:CartPole-v1: environments alone, one process per core | 4 M frames/s (3.6 M to 4.4 M) |",
    ):
        assert text in page


def test_a_soak_has_rows(script: ModuleType, tmp_path: Path) -> None:
    figures = {"injected": 9, "recovered": 9, "lost_steps_max": 4096}
    figures |= {"memory_first_third_mb": 340.1, "memory_last_third_mb": 340.4}
    record = {"hardware": "x86_64, 16 CPU cores, x86_64", "commit": "abcdef0", "date": "2026-11-18", "minutes": 30.0}
    record |= {"soak": figures, "score": {"score_mean": 500.0}, "quiet_score": {"score_mean": 499.5}}
    (tmp_path / "soak-cpu.json").write_text(json.dumps(record))
    page = script.page(tmp_path)
    assert "| 30 minutes: faults recovered of those injected | 9 of 9 | 16 CPU cores | abcdef0 |" in page
    assert "| 500.0, 499.5 |" in page
