"""The benchmark of DQN on Snake: one tiny seed, then a second call that adds another and repeats none."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench_scripts import load_script


def test_seeds_are_added_to_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, out = load_script("dqn_snake"), tmp_path / "runs.json"
    train, trained = script.train, []

    def note(seed: int, episodes: int, options: list[str]) -> dict[str, object]:
        trained.append(seed)
        if seed:
            return {"seed": seed, "wall_seconds": 1.0, "error": "exit code 1"}
        tiny = "--steps 2000 --num-envs 16 --batch-size 16 --dqn.learning-starts 200 --dqn.hidden 8 --no-compile"
        board = "--device cpu --threads 1 --env.width 4 --env.height 4"
        run: dict[str, object] = train(seed, episodes, [*options, *tiny.split(), *board.split()])
        return run

    monkeypatch.setattr(script, "train", note)
    for seeds in ("0", "0,1", "0,1"):
        monkeypatch.setattr(sys, "argv", ["dqn_snake.py", "--seeds", seeds, "--episodes", "4", "--out", str(out)])
        script.main()
    assert trained == [0, 1, 1]  # a seed that failed is repeated, one that ended is not
    first, *_ = json.loads(out.read_text())["runs"]
    assert first["env_steps"] >= 2000
    assert first["eval_episodes"] == 4
    assert 0 <= first["win_rate"] <= 1
    assert first["curve"]
    assert {"seconds", "env_steps", "updates", "score"} <= first["curve"][-1].keys()
    assert "exit code 1" in capsys.readouterr().out
