"""W&B on request: one sentence where it cannot be used, a thread where it can, and no failure that stops training."""

from __future__ import annotations

import importlib.machinery
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from redline.run.metrics_log import Metrics
from redline.run.wandb_log import WandbLog, open_wandb


class FakeWandb(ModuleType):
    """A module `wandb` that keeps what it is given."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
        self.arguments: dict[str, Any] = {}
        self.logged: list[dict[str, float]] = []
        self.finished = False
        self.Settings = SimpleNamespace
        self.run = SimpleNamespace(define_metric=self.define, log=self.logged.append, finish=self.finish)

    def init(self, **arguments: Any) -> Any:
        self.arguments = arguments
        return self.run

    def define(self, name: str, step_metric: str) -> None:
        self.defined = name, step_metric

    def finish(self) -> None:
        self.finished = True


@pytest.fixture(autouse=True)
def no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_PROJECT", "NETRC"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_without_the_package_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    messages: list[str] = []
    metrics = Metrics(tmp_path, 0, False, messages.append, wandb={})
    metrics.write({"env_steps": 16})
    metrics.close()
    assert messages == [
        "W&B is not installed, so nothing is logged there; install it with pip install 'redline[wandb]'."
    ]


@pytest.mark.fault("H3")
@pytest.mark.parametrize(("mode", "sentence"), [("", "There is no W&B account"), ("disabled", "W&B is disabled")])
def test_without_an_account_one_sentence_and_no_login(
    mode: str, sentence: str, fake: FakeWandb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", mode)
    messages: list[str] = []
    assert open_wandb(tmp_path, {}, messages.append) is None
    assert len(messages) == 1
    assert messages[0].startswith(sentence)
    assert not fake.arguments, "wandb.init was called: it would ask for a login"


@pytest.mark.parametrize("account", ["key", "netrc", "offline"])
def test_records_are_logged_by_their_names_there(
    account: str, fake: FakeWandb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if account == "key":
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    elif account == "offline":
        monkeypatch.setenv("WANDB_MODE", "offline")
    else:
        (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password secret\n")
        (tmp_path / ".netrc").chmod(0o600)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    for steps in (16, 32):  # a run and its continuation
        metrics = Metrics(run_dir, 0, False, pytest.fail, wandb={"algo": "ppo"})
        metrics.write({"env_steps": steps, "entropy": 1.5, "phase": "easy"})
        metrics.close()
    assert fake.logged == [{"time/total_timesteps": steps, "train/entropy_loss": -1.5} for steps in (16, 32)]
    assert fake.finished
    assert fake.defined == ("*", "time/total_timesteps")
    assert (fake.arguments["name"], fake.arguments["config"]) == ("run", {"algo": "ppo"})
    assert fake.arguments["resume"] == "allow"
    assert fake.arguments["id"] == (run_dir / "wandb-id").read_text()
    assert "mode" not in fake.arguments  # WANDB_MODE decides


@pytest.mark.fault("H3")
def test_a_server_that_does_not_answer_holds_nothing_up(fake: FakeWandb, tmp_path: Path) -> None:
    """Training goes on while `init` waits; when it fails, that is said once."""
    answered, messages = threading.Event(), list[str]()

    def init(**_: Any) -> Any:
        answered.wait(10)
        raise ConnectionError("the server does not answer\nmore")

    fake.init = init  # type: ignore[method-assign]
    log = WandbLog(tmp_path, {}, messages.append)
    for _ in range(3):
        log.write({"train/loss": 1.0})
    assert messages == []
    answered.set()
    log.close()
    assert messages == ["Nothing is logged to W&B any more: the server does not answer. Training goes on."]
