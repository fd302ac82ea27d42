"""Training that fails: what was learned is saved, one sentence says so, and the same command continues."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import redline
from redline import cli
from redline.core import faults
from redline.core.errors import StorageError, UserError
from redline.run.failure import TrainingFailed
from redline.run.manifest import read_manifest
from redline.run.session import Session

OPTIONS: dict[str, Any] = {"num_envs": 16, "device": "cpu", "compile": False, "eval_episodes": 0, "steps": 640}
ALGOS: dict[str, dict[str, Any]] = {
    "ppo": {"algo_options": {"rollout_steps": 4, "hidden": (8,), "net": "mlp"}},
    "dqn": {"algo_options": {"hidden": (8,), "net": "mlp", "learning_starts": 64}, "replay_capacity": 480},
    "pinned": {"algo_options": {"hidden": (8,), "net": "mlp", "learning_starts": 64, "replay": "pinned"}}
    | {"replay_capacity": 480},
}


@pytest.fixture(autouse=True)
def no_faults() -> Iterator[None]:
    yield
    faults.arm("")


def train(folder: Path, algo: str = "ppo", fault: str = "", **others: Any) -> dict[str, Any]:
    faults.arm(fault)
    try:
        name = "ppo" if algo == "ppo" else "dqn"
        return redline.train("snake", algo=name, run_dir=str(folder), **OPTIONS | ALGOS[algo] | others).result
    finally:
        faults.arm("")


def newest(folder: Path) -> Path:
    return max((folder / "checkpoints").glob("ckpt-*"))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in newest(folder).glob("*.safetensors")}


@pytest.mark.parametrize("algo", ALGOS)
def test_an_exception_between_iterations_loses_nothing(algo: str, tmp_path: Path) -> None:
    with pytest.raises(TrainingFailed) as failed:
        train(tmp_path / "broken", algo, "raise@iteration:6")
    done = 5 * 16 * (4 if algo == "ppo" else 1)
    checkpoint = newest(tmp_path / "broken")
    assert checkpoint.name == f"ckpt-{done:012d}"
    assert str(failed.value) == (
        f"Training failed after {done} steps: InjectedFault: injected fault at iteration. The last good checkpoint is "
        f"{checkpoint}: the same command continues from it. The traceback is in {tmp_path / 'broken' / 'crash.log'}."
    )
    assert failed.value.exit_code == 70
    assert "InjectedFault" in (tmp_path / "broken" / "crash.log").read_text()
    train(tmp_path / "broken", algo)
    train(tmp_path / "straight", algo)
    assert files(tmp_path / "broken") == files(tmp_path / "straight")


@pytest.mark.parametrize("algo", ALGOS)
@pytest.mark.parametrize("where", ["learning", "playing"])
def test_an_exception_within_an_iteration_is_saved_and_continued(
    where: str, algo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "playing":
        play, count = Session._play, [0]

        def broken(self: Session) -> None:
            count[0] += 1
            if count[0] == 8:
                self._collect()  # in the midst of a rollout
                raise ZeroDivisionError("in the rules")
            play(self)

        with monkeypatch.context() as patch:
            patch.setattr(Session, "_play", broken)
            with pytest.raises(TrainingFailed, match="ZeroDivisionError: in the rules"):
                train(tmp_path, algo)
    else:
        with pytest.raises(TrainingFailed, match="InjectedFault: injected fault at gradient"):
            train(tmp_path, algo, "raise@gradient:20")
    saved = read_manifest(newest(tmp_path))["step"]
    assert saved > 0
    result = train(tmp_path, algo)
    assert result["env_steps"] == 640
    weights = torch.cat([x.flatten() for x in redline.load(tmp_path, device="cpu").net.parameters()])
    assert bool(torch.isfinite(weights).all())


def test_a_refused_setting_is_no_failure_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise UserError("This cannot be.")

    monkeypatch.setattr(Session, "iterate", refuse)
    with pytest.raises(UserError) as refused:
        train(tmp_path)
    assert (str(refused.value), refused.value.exit_code) == ("This cannot be.", 2)
    assert not (tmp_path / "checkpoints").exists()


def test_an_exception_is_one_sentence_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    faults.arm("raise@iteration:6")
    line = (
        f"train snake --algo ppo --no-compile --device cpu --num-envs 16 --ppo.hidden 8 --steps 9k --run-dir {tmp_path}"
    )
    with pytest.raises(SystemExit) as end:
        cli.main(line.split())
    assert end.value.code == 70
    err = capsys.readouterr().err
    assert "redline: Training failed after " in err
    assert "Traceback" not in err


def test_weights_that_are_not_finite_are_not_saved_when_training_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    iterate = Session.iterate

    def poisoned(self: Session, count: int, *rest: Any) -> None:
        iterate(self, count, *rest)
        with torch.no_grad():
            next(self.learner.acting_network.parameters()).fill_(float("nan"))
        raise ZeroDivisionError

    monkeypatch.setattr(Session, "iterate", poisoned)
    with pytest.raises(TrainingFailed, match=r"NaN or infinite values.*Nothing was saved yet"):
        train(tmp_path)
    assert not list((tmp_path / "checkpoints").glob("ckpt-*"))


@pytest.mark.fault("A6")
def test_a_full_disk_during_a_save_is_told_with_both_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two saves fail, the third succeeds: training goes on, and the count of failures starts over."""
    usage, free = shutil.disk_usage, iter([1_000_000, 1_000_000])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=next(free, usage(path).free)))
    assert train(tmp_path, checkpoint_minutes=1e-9)["env_steps"] == 640
    err = " ".join(capfd.readouterr().err.split())
    assert "no space left on device: 0.001 GB needed, 0.001 GB free" in err
    assert "Training goes on and tries again at the next save" in err
    assert newest(tmp_path).name == "ckpt-000000000640"


@pytest.mark.fault("A7")
@pytest.mark.parametrize("fallback", [False, True])
def test_a_disk_that_stays_full_ends_training(fallback: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from redline.run.checkpoint import Checkpoints

    store = Checkpoints._store

    def full(self: Checkpoints, snapshot: Any) -> Path:
        if tmp_path / "run" in self.folder.parents:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return store(self, snapshot)

    monkeypatch.setattr(Checkpoints, "_store", full)
    more = {"fallback_dir": str(tmp_path / "spare")} if fallback else {}
    with pytest.raises(StorageError, match="3 checkpoints in a row were not written") as failed:
        train(tmp_path / "run", checkpoint_minutes=1e-9, steps=10**7, **more)
    assert failed.value.exit_code == 74
    if not fallback:
        assert "--fallback-dir" in str(failed.value)
        return
    spare = tmp_path / "spare" / "run"
    assert f"The run is saved in {spare}: continue it with --run-dir {spare}." in str(failed.value)
    step = read_manifest(newest(spare))["step"]
    monkeypatch.undo()
    assert redline.load(spare, device="cpu").env_steps == step
    assert train(spare, steps=step + 64)["env_steps"] == step + 64
    assert json.loads((spare / "metrics.jsonl").read_text().splitlines()[0])["env_steps"] > step


@pytest.mark.fault("A7")
def test_a_last_checkpoint_that_cannot_be_written_goes_to_the_fallback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: SimpleNamespace(free=0) if "spare" not in str(path) else usage(path)
    )
    with pytest.raises(StorageError, match="The run is saved in ") as failed:
        train(tmp_path / "run", fallback_dir=str(tmp_path / "spare"))
    assert "GB needed, 0.000 GB free" in str(failed.value)
    assert newest(tmp_path / "spare" / "run").name == "ckpt-000000000640"


@pytest.mark.fault("A8")
def test_a_folder_that_cannot_be_written_is_refused_before_torch_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("redline.cli.commands.train.show_progress", lambda *_: pytest.fail("torch is loaded"))
    for folder in ("file", "file/run"):
        with pytest.raises(SystemExit) as end:
            cli.main(["train", "snake", "--run-dir", str(tmp_path / folder)])
        assert end.value.code == 74
        assert f"{tmp_path / 'file'} is a file, not a folder" in capsys.readouterr().err
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(SystemExit) as end:
        cli.main(["train", "snake", "--run-dir", str(tmp_path / "run")])
    assert end.value.code == 74
    assert f"{tmp_path} may not be written" in capsys.readouterr().err
