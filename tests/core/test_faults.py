"""Fault injection: rules are read and act, and training reaches every phase that a rule can name."""

from __future__ import annotations

import ast
import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import redline
from redline.collect.actor_supervisor import ActorsLost
from redline.core import faults
from redline.core.errors import UserError
from redline.engine import fast
from redline.run.resolve import resolve
from redline.run.session import Session
from redline.run.settings import Settings

SOURCE = Path(__file__).resolve().parents[2] / "src"


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    faults.arm("")


def test_rules() -> None:
    faults.arm("raise@save.model:2, slow@save:0.05s")
    faults.reach("save.model")
    with pytest.raises(faults.InjectedFault, match=r"save\.model"):
        faults.reach("save.model")
    faults.reach("save.model")
    began = time.monotonic()
    faults.reach("save")
    assert time.monotonic() - began >= 0.05
    assert faults.reached() == {"save.model": 3, "save": 1}
    faults.arm("raise@save")
    for _ in range(2):
        with pytest.raises(faults.InjectedFault):
            faults.reach("save")
    faults.arm("")
    faults.reach("save")


def test_a_rule_that_waits_for_a_file(tmp_path: Path) -> None:
    file = tmp_path / "now"
    faults.arm(f"nan@gradient:{file}")
    assert not faults.reach("gradient")
    file.touch()
    assert [faults.reach("gradient") for _ in range(3)] == [True, False, False]
    assert not file.exists()


def test_actions(capsys: pytest.CaptureFixture[str]) -> None:
    faults.arm("oom@gradient:1,full@log:1,sigusr1@update:1,nan@weights:2")
    with pytest.raises(torch.OutOfMemoryError):
        faults.reach("gradient")
    with pytest.raises(OSError, match="No space") as full:
        faults.reach("log")
    assert full.value.errno == errno.ENOSPC
    caught: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: caught.append(number))
    try:
        faults.reach("update")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert caught == [signal.SIGUSR1]
    assert [faults.reach("weights") for _ in range(3)] == [False, True, False]
    announced = [f"REDLINE_FAULT: {what}" for what in ("oom at gradient", "full at log", "sigusr1 at update")]
    assert capsys.readouterr().err.splitlines() == announced


def test_data_is_spoiled_in_place() -> None:
    weight, count, array = torch.ones(3, requires_grad=True), torch.ones(3, dtype=torch.int64), np.ones(2, np.float32)
    faults.spoil({"a": (weight, [count]), "b": array, "c": None})
    assert weight.isnan().all()
    assert np.isnan(array).all()
    assert (count == 1).all()


@pytest.mark.parametrize(
    "rule",
    [
        "kill",
        "kill@",
        "stop@save",
        "kill@save:0",
        "kill@save:2s",
        "slow@save",
        "slow@save:2",
        "nan@save",
        "hang@save:1s",
        "kill@save:file",
    ],
)
def test_wrong_rules(rule: str) -> None:
    with pytest.raises(UserError, match="REDLINE_FAULT"):
        faults.parse(rule)


def test_an_unknown_phase() -> None:
    with pytest.raises(UserError, match=r"did you mean 'save\.manifest'"):
        faults.parse("kill@save.manifst")


def test_the_variable_is_read() -> None:
    script = "from redline.core.faults import reach; reach('save.verify'); reach('save.rename'); print('alive')"
    env = {**os.environ, "PYTHONPATH": str(SOURCE), "REDLINE_FAULT": "kill@save.rename"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (-9, "")
    del env["REDLINE_FAULT"]
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


def test_every_phase_stands_in_the_source() -> None:
    """Each phase but those named by the groups of a checkpoint has its call, and no call names another."""
    named = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "reach" and node.args:
                named.add(ast.unparse(node.args[0]).strip("'"))
    groups = {f"save.{group}" for group in ("model", "optim", "rng", "envs", "replay")}
    assert named == set(faults.PHASES) - groups


# ---- every phase is reached

SMALL: dict[str, Any] = {"num_envs": 16, "device": "cpu", "checkpoint_minutes": 1e-6, "log_seconds": 0.05}
IN_TRAINING = set(faults.PHASES) - {"capture", "actor", "publish"}


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """How often two trainings reached each phase: a tensor game with a replay file, and a Gymnasium environment."""
    folder = tmp_path_factory.mktemp("reached")
    faults.arm(",".join(f"raise@{phase}:{10**9}" for phase in faults.PHASES))  # counts, and never acts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **_: function)
        redline.train(
            "snake",
            algo="dqn",
            run_dir=str(folder / "snake"),
            steps=16 * 60,
            batch_size=16,
            eval_episodes=2,
            compile=True,
            replay="memmap",
            replay_capacity=1600,
            algo_options={"hidden": (8,), "net": "mlp", "learning_starts": 160},
            **SMALL,
        )
        ppo = {"hidden": (8,), "rollout_steps": 8}
        redline.train(
            "gym:CartPole-v1",
            algo="ppo",
            run_dir=str(folder / "cartpole"),
            steps=512,
            batch_size=64,
            eval_episodes=0,
            actors=0,
            compile=False,
            algo_options=ppo,
            **SMALL,
        )
    reached = faults.reached()
    faults.arm("")
    return reached


@pytest.mark.parametrize("phase", sorted(IN_TRAINING))
def test_training_reaches(phase: str, counts: dict[str, int]) -> None:
    assert counts[phase] > 0


def test_a_capture_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    for name in ("current_stream", "current_device", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda _: None)
    monkeypatch.setattr(fast, "_side_stream", lambda _: None)
    said: list[str] = []
    graph = fast.Graph(lambda: None, True, said.append)
    graph.calls = fast._WARM_UP
    faults.arm("raise@capture")
    graph()
    assert re.fullmatch(r"Running without CUDA graphs: capture failed \(InjectedFault: .* at capture\)\.", said[0])


def test_actors_are_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable reaches actors by their environment; the learner counts its publications."""
    monkeypatch.setenv("REDLINE_FAULT", "kill@actor")
    options = {"hidden": (8,), "rollout_steps": 8, "batch_size": 32}
    env = {"restarts": "0"}
    settings = Settings(
        "gym:CartPole-v1", "ppo", num_envs=4, device="cpu", actors=1, algo_options=options, env_options=env
    )
    session = Session(resolve(settings), lambda _: None)
    faults.arm(f"raise@publish:{10**9}")
    try:
        with pytest.raises(ActorsLost, match="SIGKILL"):
            session.iterate(10)
        session.collector.on_update(0.0)
        assert faults.reached()["publish"] > 0
    finally:
        session.close()
