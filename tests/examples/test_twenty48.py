"""examples/twenty48: a game outside the package keeps the contract, equals its oracle, brings its recipe and trains."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import redline
from redline import games, oracles, recipes
from redline.testing import check_game
from redline.tools import bench

FOLDER = Path(__file__).parents[2] / "examples" / "twenty48"


@pytest.fixture(autouse=True)
def _in_the_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(FOLDER)
    yield
    for name in ("twenty48", "twenty48_oracle", "twenty48_recipe"):
        sys.modules.pop(name, None)
    games.registry.refresh()
    oracles.registry.refresh()
    recipes.refresh()


def test_it_keeps_the_contract() -> None:
    lines: list[str] = []
    report = check_game("twenty48", show=lines.append)  # finds the oracle beside the game
    assert report.ok, report
    assert "ok     oracle" in lines
    assert lines + report.closing_lines() == report.lines()


def test_the_oracle_beside_it_is_measured() -> None:
    assert (bench.plain_python("twenty48", 0.01) or 0) > 0


@pytest.mark.parametrize(
    ("row", "after", "points"),
    [
        ([1, 1, 1, 1], [2, 2, 0, 0], 8),
        ([0, 1, 0, 1], [2, 0, 0, 0], 4),
        ([1, 1, 2, 0], [2, 2, 0, 0], 4),
        ([3, 0, 0, 3], [4, 0, 0, 0], 16),
        ([1, 2, 1, 2], [1, 2, 1, 2], 0),
    ],
)
def test_rows_slid_by_hand(row: list[int], after: list[int], points: int) -> None:
    game = games.load("twenty48").module
    board = torch.zeros(1, 4, 4, dtype=torch.int8)
    board[0, 1] = torch.tensor(row)
    boards, scored = game._afterstates(board)
    assert boards[0, 3, 1].tolist() == after  # left
    assert scored[0, 3].item() == points
    turned, _ = game._afterstates(board.transpose(1, 2))
    assert turned[0, 0, :, 1].tolist() == after  # up


def test_it_trains_with_its_recipe(tmp_path: Path) -> None:
    assert recipes.find(games.load("twenty48").name).name == "twenty48_recipe"
    options = {"hidden": (16,), "rollout_steps": 8}
    run = redline.train(
        "twenty48", algo="ppo", steps=1024, num_envs=16, device="cpu", compile=False, run_dir=str(tmp_path / "run"),
        eval_episodes=4, algo_options=options,
    )  # fmt: skip
    assert redline.evaluate(run, episodes=4, max_steps=500)["score_mean"] > 0
