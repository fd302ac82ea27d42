"""bench/mario_ablation.py: its commands exist, and its curve counts games."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from bench_scripts import load_script
from redline import cli
from redline.cli.parse import parse


@pytest.fixture(scope="module")
def ablation() -> ModuleType:
    return load_script("mario_ablation")


def test_every_variant_is_a_command(ablation: ModuleType) -> None:
    for words in ablation.VARIANTS.values():
        parse("train", cli.COMMANDS.load("train"), ["mario:1-1", *words])


def test_a_curve_counts_games(ablation: ModuleType, tmp_path: Path) -> None:
    records = [
        {"env_steps": 10, "episodes": 0},
        {"env_steps": 20, "episodes": 1, "win_rate": 1.0, "score": 300.0},
        {"env_steps": 30, "episodes": 3, "win_rate": 0.0, "score": 100.0},
        {"env_steps": 40, "episodes": 2, "win_rate": 0.5, "score": 200.0},
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert ablation.training_curve(path, points=2) == [
        {"env_steps": 30, "flags": 0.25, "furthest_x": 150.0},
        {"env_steps": 40, "flags": 0.5, "furthest_x": 200.0},
    ]
