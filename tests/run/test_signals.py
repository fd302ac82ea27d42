"""Signals during training: acknowledged at once, a checkpoint first, a third one ends it in any case."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from redline import cli
from redline.run import signals as module
from redline.run.session import Session
from redline.run.signals import Stopped, StopSignals, Unsaved


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@contextmanager
def training(messages: list[str] | None = None, **options: Any) -> Iterator[StopSignals]:
    """Signals of a loop that has something to save."""
    with StopSignals([].append if messages is None else messages.append, **options) as signals:
        signals.unsaved = Unsaved.TRAINING
        yield signals


def test_the_first_signal_is_acknowledged_and_recorded() -> None:
    messages: list[str] = []
    with training(messages) as signals:
        send(signal.SIGINT)
        send(signal.SIGINT)  # at the same time: to the process and to its group
        assert signals.caught == "SIGINT"
        assert signals.pending
    assert messages == ["SIGINT received: stopping with a checkpoint; press Ctrl-C again to end at once, without it."]


@pytest.mark.fault("B2")
def test_a_second_interrupt_ends_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SAME", 0.0)
    with training():
        send(signal.SIGINT)
        with pytest.raises(Stopped, match="steps since the last checkpoint are lost") as stopped:
            send(signal.SIGINT)
    assert stopped.value.exit_code == 130


@pytest.mark.fault("B2")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_while_saving_a_second_signal_is_ignored_and_a_third_ends_it(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SAME", 0.0)
    messages: list[str] = []
    with training(messages) as signals:
        send(number)
        signals.loop_is_back()
        send(number)
        with pytest.raises(Stopped) as stopped:
            send(number)
    assert messages[1:] == [
        f"{number.name} received again: the checkpoint is being written; once more ends it at once, without a checkpoint."
    ]
    assert stopped.value.exit_code == (75 if number == signal.SIGTERM else 130)


def test_an_interrupt_with_nothing_to_save_ends_it_at_once() -> None:
    with StopSignals(lambda _: None) as signals:
        signals.unsaved = Unsaved.EXPERIENCE
        with pytest.raises(Stopped, match="nothing was trained"):
            send(signal.SIGINT)
    with StopSignals(lambda _: None) as signals:
        signals.unsaved = Unsaved.EXPERIENCE
        send(signal.SIGTERM)  # of a scheduler: steps that were played are kept
        assert signals.caught == "SIGTERM"
    with StopSignals(lambda _: None) as signals:
        signals.describe_saved = lambda: "The last good checkpoint is X."
        with pytest.raises(Stopped, match="SIGTERM received before") as stopped:
            send(signal.SIGTERM)
    assert stopped.value.exit_code == 75
    assert str(stopped.value).endswith("nothing is lost. The last good checkpoint is X.")


@pytest.mark.fault("B5")
def test_sighup_stops_and_sigusr1_saves() -> None:
    messages: list[str] = []
    with training(messages) as signals:
        send(signal.SIGUSR1)
        assert (signals.caught, signals.save_requested) == ("", True)
        send(signal.SIGHUP)
        assert signals.caught == "SIGHUP"
    assert messages[0] == "SIGUSR1 received: writing a checkpoint, training goes on."
    messages.clear()
    with StopSignals(messages.append) as signals:
        send(signal.SIGUSR1)
        assert not signals.save_requested
    assert messages == ["SIGUSR1 received: everything is saved."]


@pytest.mark.fault("B5")
def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with training() as signals:
            send(signal.SIGHUP)
            assert signals.caught == ""
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.fault("B7")
def test_outside_the_main_thread_signals_are_left_alone_with_a_notice() -> None:
    messages: list[str] = []

    def run() -> None:
        with StopSignals(messages.append) as signals:
            assert not signals.handled

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(messages) == 1
    assert "main thread" in messages[0]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.fault("B8")
def test_the_handler_of_the_host_is_called_and_comes_back() -> None:
    received: list[int] = []

    def host(number: int, frame: Any) -> None:
        del frame
        received.append(number)

    before = {number: signal.signal(number, host) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        with training() as signals:
            send(signal.SIGTERM)
            send(signal.SIGUSR1)
            assert signals.caught == "SIGTERM"
            assert received == [signal.SIGTERM, signal.SIGUSR1]
        assert all(signal.getsignal(number) is host for number in before)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_wakeup_of_the_host_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event loop needs it; the time of grace is then kept by a thread that the handler starts."""
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    try:
        with training(grace=0.05, ends_process=True):
            send(signal.SIGTERM)
            deadline = time.monotonic() + 30
            while not ended and time.monotonic() < deadline:
                time.sleep(0.01)
        assert ended == [75]
    finally:
        assert signal.set_wakeup_fd(-1) == writing
        os.close(reading)
        os.close(writing)


def test_a_forked_process_does_not_take_part() -> None:
    with training() as signals:
        child = os.fork()
        if child == 0:
            send(signal.SIGTERM)  # the default again: ends it
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        time.sleep(0.1)
        assert signals.caught == ""


@pytest.mark.fault("B1")
@pytest.mark.parametrize(
    ("number", "options", "code"),
    [
        (signal.SIGTERM, {}, 75),
        (signal.SIGINT, {"ends_process": True}, 130),
        (signal.SIGINT, {}, None),  # in a notebook
    ],
)
def test_a_loop_that_does_not_come_back_is_ended_after_the_time_of_grace(
    number: signal.Signals, options: dict[str, bool], code: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with training(messages, grace=0.2, **options) as signals:
        signals.describe_saved = lambda: "The last good checkpoint is X."
        send(number)
        deadline = time.monotonic() + (30 if code else 1)
        while not ended and time.monotonic() < deadline:
            time.sleep(0.01)
    assert ended == ([code] if code else [])
    if code:
        assert messages[-1].startswith(f"{number.name} was received 0.2 seconds ago")
        assert messages[-1].endswith("The last good checkpoint is X.")


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
