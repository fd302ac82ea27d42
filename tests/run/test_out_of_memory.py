"""Out of memory: at the start, in mid-training and in the evaluation the run goes on, and says so once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import redline
from redline.core import faults
from redline.core.errors import UserError
from redline.engine import fast
from redline.engine.out_of_memory import is_out_of_memory
from redline.run import final_evaluation
from redline.run.run_folder import read_config

OPTIONS: dict[str, Any] = {
    "num_envs": 32,
    "device": "cpu",
    "compile": False,
    "seed": 1,
    "checkpoint_minutes": 1e-9,  # at every log point
    "eval_episodes": 0,
}
ALGOS: dict[str, dict[str, Any]] = {
    "ppo": {
        "batch_size": 64,
        "steps": 32 * 8 * 6,
        "algo_options": {"rollout_steps": 8, "hidden": (16,), "net": "mlp"},
    },
    "dqn": {
        "batch_size": 64,
        "replay_capacity": 4096,
        "steps": 32 * 40,
        "algo_options": {"hidden": (16,), "net": "mlp", "learning_starts": 64},
    },
}


@pytest.fixture(autouse=True)
def no_faults() -> Any:
    yield
    faults.arm("")


def train(folder: Path, algo: str = "ppo", fault: str = "", **others: Any) -> redline.Run:
    faults.arm(fault)
    try:
        return redline.train("snake", algo=algo, run_dir=str(folder), **OPTIONS | ALGOS[algo] | others)
    finally:
        faults.arm("")


@pytest.fixture(scope="module")
def straight_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, redline.Run]:
    """Return, by algorithm, a run that never ran out of memory."""
    return {algo: train(tmp_path_factory.mktemp("straight") / algo, algo) for algo in ALGOS}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(sorted((folder / "checkpoints").glob("ckpt-*"))[-1] / "model.safetensors")


def assert_same_run(folder: Path, other: Path, tolerance: float) -> None:
    mine, others = weights(folder), weights(other)
    for name, weight in others.items():
        assert torch.allclose(mine[name], weight, rtol=tolerance, atol=tolerance), name


@pytest.mark.fault("E1", "E2")
@pytest.mark.parametrize("algo", ALGOS)
@pytest.mark.parametrize("nth", [1, 7])
def test_a_gradient_that_does_not_fit_is_computed_in_parts(
    algo: str, nth: int, straight_runs: dict[str, redline.Run], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    straight = straight_runs[algo]
    capfd.readouterr()
    broken = train(tmp_path / "broken", algo, f"oom@gradient:{nth},oom@gradient:{nth + 1}")
    said = capfd.readouterr().err
    assert said.count("ran out of memory") == 1
    assert "in 4 parts of 16 samples" in " ".join(said.split())
    for name in ("env_steps", "updates", "samples_trained", "episodes"):
        assert broken.result[name] == straight.result[name]
    assert (straight.result["micro_batches"], broken.result["micro_batches"]) == (1, 4)
    assert read_config(broken.path)["micro_batches"] == 4
    assert json.loads((broken.path / "metrics.jsonl").read_text().splitlines()[-1])["micro_batches"] == 4
    assert_same_run(broken.path, straight.path, 1e-4)


@pytest.mark.fault("E1")
def test_running_out_while_building_is_tried_once_again(
    straight_runs: dict[str, redline.Run], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    straight, broken = straight_runs["ppo"], train(tmp_path / "broken", fault="oom@session:1")
    assert "the run goes on from the start" in " ".join(capfd.readouterr().err.split())
    assert_same_run(broken.path, straight.path, 0)


@pytest.mark.fault("E2")
@pytest.mark.parametrize("resume", ["auto", "never"])
def test_running_out_between_gradients_goes_on_from_the_last_checkpoint(
    resume: str, straight_runs: dict[str, redline.Run], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    straight = straight_runs["ppo"]
    capfd.readouterr()
    broken = train(tmp_path / "broken", fault="oom@iteration:4", resume=resume)
    assert "the run goes on from ckpt-" in " ".join(capfd.readouterr().err.split())
    assert broken.result["env_steps"] == straight.result["env_steps"]
    assert_same_run(broken.path, straight.path, 0)
    steps = [json.loads(line)["env_steps"] for line in (broken.path / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps))


@pytest.mark.fault("E2")
def test_a_run_that_cannot_fit_stops_with_advice(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cpu ran out of memory; use fewer environments") as caught:
        train(tmp_path / "a", fault="oom@gradient")
    assert "saved" not in str(caught.value)
    train(tmp_path / "b", steps=512)
    with pytest.raises(UserError, match="saved in ckpt-000000000512: the same command continues it"):
        train(tmp_path / "b", fault="oom@gradient")
    assert train(tmp_path / "b").result["env_steps"] == ALGOS["ppo"]["steps"]


@pytest.mark.fault("E1")
def test_stop_does_not_try_again(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="ran out of memory"):
        train(tmp_path, fault="oom@gradient:1", oom="stop")


def test_an_evaluation_that_does_not_fit_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(final_evaluation, "evaluate_session", fail)
    run = train(tmp_path, eval_episodes=8)
    assert run.result["env_steps"] == ALGOS["ppo"]["steps"]
    assert "redline eval" in capfd.readouterr().err


def test_peak_memory_is_in_metrics_and_result(tmp_path: Path) -> None:
    run = train(tmp_path)
    assert run.result["peak_memory_bytes"] > 10 * 2**20
    record = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert 0 < record["memory/peak_bytes"] <= run.result["peak_memory_bytes"]


def test_all_forms_of_running_out_are_recognised() -> None:
    def caused() -> Exception:
        try:
            try:
                raise torch.OutOfMemoryError("CUDA out of memory")
            except Exception as error:
                raise RuntimeError("the capture failed") from error
        except RuntimeError as error:
            return error

    cpu = "[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes."
    assert all(map(is_out_of_memory, [torch.OutOfMemoryError("x"), MemoryError(), RuntimeError(cpu), caused()]))
    assert not any(map(is_out_of_memory, [RuntimeError("shape mismatch"), ValueError("x"), None]))
    with pytest.raises((RuntimeError, MemoryError)) as real:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(real.value)


def test_the_compiler_does_not_give_up_when_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    compiler = fast.Compiler(True, messages.append)
    failing = [True]

    def function(x: torch.Tensor) -> torch.Tensor:
        if failing.pop():
            raise torch.OutOfMemoryError("no memory")
        return x

    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    call = compiler(function)
    with pytest.raises(torch.OutOfMemoryError):
        call(torch.ones(1))
    assert compiler.enabled
    assert not messages
