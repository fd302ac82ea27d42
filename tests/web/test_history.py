"""Curves: read as the file grows, bounded however long a run trains, and robust against whatever lies in the folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from redline.web import history as history_module
from redline.web.history import MAX_POINTS, SERIES, History, MetricsReader
from redline.web.run_view import RunView, bottleneck, settings_table

SCORE = 2 + SERIES.index("score")


def record(number: int, **values: Any) -> dict[str, Any]:
    return {"env_steps": 100 * number, "seconds": float(number), "score": float(number)} | values


def append(path: Path, *records: dict[str, Any] | str) -> None:
    with path.open("a") as file:
        file.writelines((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in records)


def read_all(reader: MetricsReader) -> None:
    while reader.read():
        pass


@pytest.mark.fault("H6")
def test_a_long_history_stays_bounded_and_keeps_its_shape() -> None:
    """A week of log points: a bounded number of points, each the mean of its neighbours, from the first to the last."""
    history = History()
    for number in range(100_000):
        history.add(record(number))
    assert MAX_POINTS / 2 <= len(history.points) <= MAX_POINTS
    assert history.revision > 5
    stride = history.stride
    for place, point in enumerate(history.points):
        first = place * stride
        assert point[0] == 100 * (first + stride - 1)
        assert point[SCORE] == pytest.approx(first + (stride - 1) / 2, rel=1e-4)
    assert history.points[-1][0] > 100 * 100_000 * 0.95


def test_only_finite_numbers_are_shown() -> None:
    history = History()
    for value in (float("nan"), float("inf"), "a", None, True, [1]):
        history.add(record(1, score=value))
    assert [point[SCORE] for point in history.points] == [None] * 6
    history.add({"score": 1.0})  # without steps
    assert len(history.points) == 6
    json.dumps(history.points, allow_nan=False)


def test_the_reader_follows_appends_and_partial_lines(tmp_path: Path) -> None:
    reader, path = MetricsReader(tmp_path), tmp_path / "metrics.jsonl"
    assert not reader.read()
    append(path, record(1), record(2))
    with path.open("a") as file:
        file.write('{"env_steps": 300, "sec')
    read_all(reader)
    assert len(reader.history.points) == 2
    with path.open("a") as file:
        file.write('onds": 3, "score": 7}\n')
    append(path, "garbled", "[1]", record(4))
    read_all(reader)
    assert [point[SCORE] for point in reader.history.points] == [1, 2, 7, 4]
    assert reader.last["score"] == 4


def test_a_rewritten_file_starts_the_curves_over(tmp_path: Path) -> None:
    """A resumed run drops the records after its checkpoint and replaces the file."""
    reader, path = MetricsReader(tmp_path), tmp_path / "metrics.jsonl"
    append(path, *map(record, range(1, 6)))
    read_all(reader)
    revision = reader.history.revision
    append(tmp_path / "part", record(1), record(9))
    os.replace(tmp_path / "part", path)
    read_all(reader)
    assert reader.history.revision > revision
    assert [point[SCORE] for point in reader.history.points] == [1, 9]
    path.unlink()
    reader.read()
    assert reader.history.points == []


@pytest.mark.fault("H6")
def test_links_pipes_and_long_lines_are_left_alone(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    append(secret, record(1))
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").symlink_to(secret)
    reader = MetricsReader(run)
    reader.read()
    assert reader.history.points == []
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")
    reader.read()  # returns at once
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").write_bytes(b"x" * (3 << 20))
    read_all(reader)
    assert len(reader._rest) <= history_module._MAX_LINE


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "no measurement"),
        ({"learner_wait": 0.5, "queue": 0.1}, "environments: the learner waits for actors 50 %"),
        ({"learner_wait": 0.0, "queue": 0.9}, "learner: the actors' queues are 90 % full"),
        ({"learner_wait": 0.1, "queue": 0.3}, "balanced"),
        ({"gpu_percent": 97}, "The GPU, as it should be: it is 97 % busy"),
        ({"gpu_percent": 30}, "Not the GPU, which is 30 % busy"),
        ({"cpu_percent": 190.0}, "1.9 cores busy"),
        ({"cpu_percent": "many"}, "0.0 cores"),
    ],
)
def test_the_bottleneck_in_words(values: dict[str, Any], words: str) -> None:
    assert words in bottleneck(values)


def test_settings_have_reasons_and_bounds(snake_run: Path) -> None:
    run = RunView(0, snake_run)
    assert run.read_config()
    assert not run.read_config()
    rows = run.describe()["settings"]
    assert any(row["reason"] and row["source"] for row in rows)
    assert {"num_envs", "learning_rate"} <= {row["name"] for row in rows}
    long = settings_table({"provenance": {str(n): {"value": "v" * 10_000, "reason": None} for n in range(5000)}})
    assert len(long) == 300
    assert max(len(row["value"]) for row in long) <= 600
    assert settings_table({"provenance": [1]}) == []


def test_states_of_a_run(tmp_path: Path, snake_run: Path) -> None:
    finished = RunView(0, snake_run)
    read_all(finished.reader)
    assert finished.status()["state"] == "finished"
    run = RunView(0, tmp_path)
    assert run.status()["state"] == "starting"
    append(tmp_path / "metrics.jsonl", record(3))
    run.reader.read()
    assert run.status()["state"] == "training"
    os.utime(tmp_path / "metrics.jsonl", (1, 1))
    run.reader.read()
    assert run.status()["state"] == "stopped"
    (tmp_path / "result.json").write_text('{"stopped_by": "SIGINT", "env_steps": 300}')
    assert run.status()["state"] == "stopped"
    (tmp_path / "result.json").write_text('{"stopped_by": "diverged", "env_steps": 300}')
    assert run.status()["state"] == "diverged"
