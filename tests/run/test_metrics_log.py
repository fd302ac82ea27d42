"""Logs of a run: repaired on resume, and never a reason to stop training."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from redline.core.errors import StorageError, UserError
from redline.run import metrics_log
from redline.run.metrics_log import BackgroundLog, BufferedLog, Metrics


def nobody(text: str) -> None:
    raise AssertionError(f"told the user: {text}")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_metrics_are_one_record_a_line(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, 0, False, nobody)
    records = [{"env_steps": 16, "loss": 0.5}, {"env_steps": 32}]
    for record in records:
        metrics.write(record)
    metrics.close()
    assert lines(tmp_path) == records
    assert not (tmp_path / "tensorboard").exists()


def test_metrics_are_on_the_disk_at_once(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, 0, False, nobody)
    metrics.write({"env_steps": 16})
    assert lines(tmp_path) == [{"env_steps": 16}]  # before close: a killed run keeps what it logged


@pytest.mark.fault("H4")
def test_metrics_continue_after_the_checkpoint(tmp_path: Path) -> None:
    written = ['{"env_steps": 16}', '{"env_steps": 32}', '{"env_steps": 48}', '{"env_steps": 64}', '{"env_st']
    (tmp_path / "metrics.jsonl").write_text("\n".join(written))
    metrics = Metrics(tmp_path, 32, False, nobody)
    metrics.write({"env_steps": 48, "again": True})
    assert lines(tmp_path) == [{"env_steps": 16}, {"env_steps": 32}, {"env_steps": 48, "again": True}]
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


@pytest.mark.fault("H4")
@pytest.mark.parametrize(
    "garbage", [b'{"env_steps": 16', b"\xff\xfe\x00", b"[1, 2]", b'{"env_steps": "16"}', b"{}", b"7"]
)
def test_garbled_lines_are_dropped(tmp_path: Path, garbage: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"env_steps": 16}\n' + garbage)
    Metrics(tmp_path, 64, False, nobody).write({"env_steps": 80})
    assert lines(tmp_path) == [{"env_steps": 16}, {"env_steps": 80}]


@pytest.mark.fault("H3")
def test_a_failing_log_is_told_once_and_its_records_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    metrics = Metrics(tmp_path / "gone", 0, False, told.append)  # the folder vanishes under a running training
    metrics.write({"env_steps": 16})
    metrics.write({"env_steps": 32})
    assert len(told) == 1
    assert told[0].startswith("Writing metrics.jsonl fails: no such file or directory. Training goes on")
    (tmp_path / "gone").mkdir()
    monkeypatch.setattr(metrics_log, "_RETRY_SECONDS", 0.0)
    metrics.write({"env_steps": 48})
    assert [record["env_steps"] for record in lines(tmp_path / "gone")] == [16, 32, 48]
    (tmp_path / "gone").rename(tmp_path / "elsewhere")
    metrics.write({"env_steps": 64})
    metrics.close()
    assert told[1:] == ["1 records could not be written to metrics.jsonl."]


@pytest.mark.fault("H3")
def test_a_full_disk_leaves_no_part_of_a_line(tmp_path: Path) -> None:
    """A limit on the size of files stands in for the full disk: the kernel writes half of the second line."""
    told: list[str] = []
    metrics = Metrics(tmp_path, 0, False, told.append)
    metrics.write({"env_steps": 16})
    size = (tmp_path / "metrics.jsonl").stat().st_size
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, limit[1]))
        metrics.write({"env_steps": 32})
        assert (tmp_path / "metrics.jsonl").stat().st_size == size
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    metrics.close()
    assert [record["env_steps"] for record in lines(tmp_path)] == [16, 32]
    assert len(told) == 1


@pytest.mark.fault("H3")
def test_one_log_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    told: list[str] = []
    (tmp_path / "tensorboard").write_text("in the way")
    metrics = Metrics(tmp_path, 0, True, told.append)
    for steps in (16, 32, 48):
        metrics.write({"env_steps": steps})
    metrics.close()
    assert [record["env_steps"] for record in lines(tmp_path)] == [16, 32, 48]
    assert told[0].startswith("Writing the TensorBoard log fails: ")
    assert told[1:] == ["3 records could not be written to the TensorBoard log."]


@pytest.mark.fault("H3")
def test_a_log_that_blocks_holds_nothing_up() -> None:
    answered, written, told = threading.Event(), list[int](), list[str]()

    def blocked(record: dict[str, Any]) -> None:
        answered.wait(60)
        written.append(record["env_steps"])

    log = BackgroundLog(BufferedLog("The log", blocked, told.append))
    for steps in range(100):
        log.write({"env_steps": steps})
    assert not written  # and yet nothing waited
    answered.set()
    log.close()
    assert (written, told) == (list(range(100)), [])


def test_metrics_that_cannot_be_repaired_are_an_error_of_storage(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(StorageError, match=r"metrics\.jsonl could not be "):
        Metrics(tmp_path, 0, False, nobody)


def test_without_tensorboard_the_install_command_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match=r"pip install 'redline\[tensorboard\]'"):
        Metrics(tmp_path, 0, True, nobody)
