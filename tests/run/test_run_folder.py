"""Files of a run folder: written atomically, repaired on resume, and never a reason to stop training."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from redline.core.errors import StorageError, UserError
from redline.run.run_folder import read_config, write_json

GOOD = {"format_version": 2, "env": "snake", "algo": "dqn", "env_options": {}, "algo_options": {}}


def nobody(text: str) -> None:
    raise AssertionError(f"told the user: {text}")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_json_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    write_json(path, {"a": 1, "path": tmp_path})
    assert json.loads(path.read_text()) == {"a": 1, "path": str(tmp_path)}

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(StorageError, match=r"config.json could not be written: No space left on device") as error:
        write_json(path, {"a": 2})
    assert error.value.exit_code == 74
    assert json.loads(path.read_text())["a"] == 1


def test_json_into_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"could not be written: No such file"):
        write_json(tmp_path / "missing" / "config.json", {})


def test_config_is_read_back(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", GOOD | {"seed": 3})
    assert read_config(tmp_path) == GOOD | {"seed": 3}


@pytest.mark.parametrize(
    ("version", "sentence"),
    [
        (None, r"was written by an earlier version of Redline \(format 1, .*train it anew or use that version\.$"),
        (1, r"was written by an earlier version of Redline \(format 1, this one reads 2\); train it anew"),
        (3, r"was written by a newer Redline \(format 3, this one reads 2\): upgrade"),
    ],
)
def test_a_run_of_another_version_is_refused(tmp_path: Path, version: int | None, sentence: str) -> None:
    config = {k: v for k, v in GOOD.items() if k != "format_version"} | ({"format_version": version} if version else {})
    write_json(tmp_path / "config.json", config)
    with pytest.raises(UserError, match=sentence) as error:
        read_config(tmp_path)
    assert error.value.exit_code == 2


def test_a_folder_without_config_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not a run folder: there is no config.json in it") as error:
        read_config(tmp_path)
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", '{"env": "sna', "\x00\x01", "[]", "null", '{"env": "snake"}'),
        *(json.dumps(GOOD | wrong) for wrong in ({"env": 3}, {"env_options": None}, {"algo_options": []})),
    ],
)
def test_a_damaged_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(StorageError, match=r"config.json .*restore it or train into another folder") as error:
        read_config(tmp_path)
    assert error.value.exit_code == 74
    assert (tmp_path / "config.json").read_text() == text


def test_a_config_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(StorageError, match=r"could not be read"):
        read_config(tmp_path)
