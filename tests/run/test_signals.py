"""Signals during training: acknowledged at once, a checkpoint first, a second Ctrl-C ends it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from redline import cli
from redline.run import signals as module
from redline.run.session import Session
from redline.run.signals import StopSignals


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def test_the_first_signal_is_acknowledged_and_recorded() -> None:
    messages: list[str] = []
    with StopSignals(messages.append) as signals:
        send(signal.SIGINT)
        send(signal.SIGINT)  # at the same time: to the process and to its group
        send(signal.SIGTERM)
        assert signals.caught == "SIGINT"
    assert messages == ["SIGINT received: stopping with a checkpoint; press Ctrl-C again to end at once, without it."]


@pytest.mark.fault("B2")
def test_a_second_interrupt_ends_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SAME", 0.0)
    with StopSignals(lambda _: None):
        send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt, match="steps since the last checkpoint are lost"):
            send(signal.SIGINT)


@pytest.mark.fault("B2")
def test_a_second_sigterm_does_not_disturb_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SAME", 0.0)
    messages: list[str] = []
    with StopSignals(messages.append) as signals:
        for _ in range(3):
            send(signal.SIGTERM)
        assert signals.caught == "SIGTERM"
    assert messages == ["SIGTERM received: stopping with a checkpoint."]


def test_an_interrupt_with_nothing_to_save_ends_it_at_once() -> None:
    with StopSignals(lambda _: None) as signals:
        with signals.nothing_to_save(True), pytest.raises(KeyboardInterrupt, match="nothing was trained"):
            send(signal.SIGINT)
        with signals.nothing_to_save(True):
            send(signal.SIGTERM)  # of a scheduler: its exit code matters
        assert signals.caught == "SIGTERM"


WORDS = "train snake --no-compile --device cpu --num-envs 16 --steps 64 --eval-episodes 0 --ppo.hidden 8 --run-dir run"


def train(capsys: Any, *more: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as end:
        cli.main([*WORDS.split(), *more])
    assert isinstance(end.value.code, int)
    return end.value.code, capsys.readouterr().err


def test_ctrl_c_while_the_first_update_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def compile_forever(*_: Any) -> None:
        send(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "iterate", compile_forever)
        code, err = train(capsys)
    assert code == 130
    assert err.endswith("redline: Interrupted before the first update: nothing was trained, nothing is lost.\n")
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert not (tmp_path / "run" / "result.json").exists()
    code, err = train(capsys, "--seed", "1")  # nothing was trained with the old settings: new ones may be used
    assert (code, "cannot be continued" in err) == (0, False)
