"""Evaluation during training: it changes no weight, repeats, and decides which checkpoint is the best."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import redline
from redline.cli import main
from redline.run import periodic_evaluation
from redline.run.checkpoint import Checkpoint, Checkpoints

STEPS = 16 * 8 * 12
OPTIONS: dict[str, Any] = {
    "algo": "ppo",
    "algo_options": {"rollout_steps": 8, "hidden": (16,), "net": "mlp"},
    "num_envs": 16,
    "batch_size": 64,
    "device": "cpu",
    "compile": False,
    "eval_episodes": 8,
    "log_seconds": 0.05,
    "env_options": {"width": 4, "height": 4},
    "time_limit": 24,
    "steps": STEPS,
}
EVERY = 16 * 8 * 3


def train(folder: Path, **others: Any) -> dict[str, Any]:
    return redline.train("snake", run_dir=str(folder), **OPTIONS | {"eval_every": EVERY} | others).result


def newest(folder: Path) -> Checkpoint:
    checkpoint = Checkpoints(folder).load()
    assert checkpoint
    return checkpoint


def scores(folder: Path) -> dict[int, float]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {record["env_steps"]: record["eval_score"] for record in records if "eval_score" in record}


def exit_code(words: list[str]) -> Any:
    with pytest.raises(SystemExit) as ending:
        main(words)
    return ending.value.code


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluated") / "run"
    train(folder)
    return folder


def test_it_evaluates_on_time_and_changes_no_weight(evaluated: Path, tmp_path: Path) -> None:
    assert list(scores(evaluated)) == list(range(EVERY, STEPS + 1, EVERY))
    train(tmp_path, eval_every=0)
    assert scores(tmp_path) == {}
    with_evaluation, without = newest(evaluated).tensors, newest(tmp_path).tensors
    for group in with_evaluation:
        assert all(torch.equal(x, without[group][name]) for name, x in with_evaluation[group].items())


def test_the_score_is_that_of_redline_eval(evaluated: Path) -> None:
    assert redline.evaluate(evaluated, 8, "cpu")["score_mean"] == scores(evaluated)[STEPS]


def test_a_repeated_run_has_the_same_scores_and_the_same_best(evaluated: Path, tmp_path: Path) -> None:
    """Another length of the log interval, and a checkpoint at every log point: the clock decides nothing."""
    train(tmp_path, log_seconds=0.001, checkpoint_minutes=1e-9)
    assert scores(tmp_path) == scores(evaluated)
    best, again = (Checkpoints(folder).best() for folder in (evaluated, tmp_path))
    assert best
    assert again
    assert best.step == again.step
    highest = max(scores(evaluated).values())
    assert best.manifest["score"] == highest
    assert best.step == max(step for step, score in scores(evaluated).items() if score == highest)


def test_a_signal_interrupts_it_and_the_continued_run_repeats_it(
    evaluated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = periodic_evaluation.PeriodicEvaluation.run

    def signalled(self: Any, interrupted: Any) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGTERM)
        return original(self, interrupted)

    with monkeypatch.context() as patch:
        patch.setattr(periodic_evaluation.PeriodicEvaluation, "run", signalled)
        assert train(tmp_path)["stopped_by"] == "SIGTERM"
    stopped = newest(tmp_path)
    assert (stopped.step, stopped.manifest["score"]) == (EVERY, None)
    train(tmp_path)
    assert scores(tmp_path) == scores(evaluated)


@pytest.mark.fault("A15")
def test_a_score_that_is_no_number_is_not_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    original = periodic_evaluation.evaluate

    class Spoiled:
        def __init__(self, evaluation: Any) -> None:
            self.evaluation = evaluation

        def summary(self) -> dict[str, Any]:
            return self.evaluation.summary() | {"score_mean": math.nan}

    monkeypatch.setattr(periodic_evaluation, "evaluate", lambda *args, **named: Spoiled(original(*args, **named)))
    train(tmp_path)
    assert "does not count as the best" in " ".join(capfd.readouterr().err.split())
    assert all(score is None for score in scores(tmp_path).values())
    with pytest.raises(redline.UserError, match="no checkpoint of this run was evaluated"):
        redline.load(tmp_path, "cpu", checkpoint="best")


def test_checkpoints_are_chosen_by_name(evaluated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = sorted((evaluated / "checkpoints").glob("ckpt-*"))
    steps = [int(folder.name[5:17]) for folder in folders]
    assert redline.load(evaluated, "cpu").env_steps == STEPS
    assert redline.load(evaluated, "cpu", checkpoint=steps[0]).env_steps == steps[0]
    best = redline.load(evaluated, "cpu", checkpoint="best")
    assert scores(evaluated)[best.env_steps] == max(scores(evaluated).values())
    words = ["eval", str(evaluated), "--device", "cpu", "--episodes", "8", "--json", "--checkpoint"]
    assert exit_code([*words, str(steps[0])]) == 0
    assert json.loads(capsys.readouterr().out)["env_steps"] == steps[0]
    for wrong in ("7", "-1", "first", "1e3"):
        assert exit_code([*words, wrong]) == 2
        assert f"expected newest, best or a step that was kept: {steps[0]}" in " ".join(capsys.readouterr().err.split())


def test_it_needs_games(tmp_path: Path) -> None:
    with pytest.raises(redline.UserError, match="eval_every is 384, but eval_episodes is 0"):
        train(tmp_path, eval_episodes=0)
