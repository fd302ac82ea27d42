"""Where replay is kept and how much of it: chosen, refused before anything is allocated, found again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from redline.core.errors import StorageError, UserError
from redline.engine import hardware
from redline.run import memory as module
from redline.run.resolve import resolve
from redline.run.session import Session
from redline.run.settings import Settings, from_words
from redline.run.train import train

SMALL = {"width": 4, "height": 4}


def plan_of(folder: Path, **chosen: Any) -> module.Plan:
    base = {"env": "snake", "algo": "dqn", "device": "cpu", "compile": False, "run_dir": str(folder), "num_envs": 8}
    return resolve(Settings(**(base | {"env_options": SMALL} | chosen)))


@pytest.mark.parametrize(
    ("replay", "each", "parts"), [("device", 23 * 17 / 16 + 8.5, 2), ("pinned", 32, 3), ("memmap", 32, 2)]
)
def test_auto_takes_a_part_of_what_is_free(
    replay: str, each: float, parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A State of 16 ages, two cells and a hunger of 2 bytes and a heading has 23 bytes."""
    monkeypatch.setattr(hardware, "free_bytes", lambda _: 1_000_000)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1_000_000}))
    plan = plan_of(tmp_path / "not" / "there", replay=replay, replay_capacity="auto")
    assert plan.algo_config.replay_capacity == int(1_000_000 / parts / each)
    assert plan.reasons["replay_capacity"].startswith("from the 0 GB")


def test_a_continued_run_keeps_what_it_began_with(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"algo_options": {"replay_capacity": 777}}))
    assert plan_of(tmp_path, replay_capacity="auto").algo_config.replay_capacity == 777


def test_words() -> None:
    words = {"replay": "pinned", "replay-capacity": "auto", "prioritized": "true"}
    found = from_words("snake", words)
    assert (found.replay, found.replay_capacity, found.prioritized) == ("pinned", "auto", True)
    assert from_words("snake", {"replay-capacity": "20k"}).replay_capacity == 20_000


def test_an_unknown_place_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"no replay kind 'pined'; did you mean 'pinned'\? Replay kinds: device, memmap, pinned"
    ):
        plan_of(tmp_path, replay="pined")


@pytest.mark.fault("E3")
@pytest.mark.parametrize("replay", ["device", "pinned"])
def test_what_cannot_fit_is_refused_before_it_is_allocated(replay: str, tmp_path: Path) -> None:
    """No other kind is advised: neither memory nor disk has so much room."""
    plan = plan_of(tmp_path, replay=replay, replay_capacity=10**12)
    with pytest.raises(UserError, match=r"need about [36]\d,\d+\.\d GB on cpu.* replay_capacity: use a smaller one\.$"):
        Session(plan, pytest.fail)


@pytest.mark.fault("E3", "F5")
def test_a_file_that_cannot_fit_is_refused(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, replay="memmap", replay_capacity=10**12)
    with pytest.raises(StorageError, match=r"needs 32,\d+,\d+,\d+,\d+ bytes"):
        Session(plan, pytest.fail)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fault("B4")
@pytest.mark.parametrize("prioritized", [False, True], ids=["uniform", "priority"])
@pytest.mark.parametrize("replay", ["device", "pinned", "memmap"])
def test_a_run_in_two_parts_is_the_run_in_one(replay: str, prioritized: bool, tmp_path: Path) -> None:
    """Stopped and continued, weights and memory are bit for bit those of the straight run, wherever the memory is."""
    chosen: dict[str, Any] = {
        "env": "snake",
        "algo": "dqn",
        "device": "cpu",
        "compile": False,
        "curriculum": False,
        "num_envs": 16,
        "batch_size": 8,
        "replay": replay,
        "replay_capacity": 16 * 40,
        "prioritized": prioritized,
        "eval_episodes": 0,
        "env_options": SMALL,
        # Nothing follows the progress of a run: these differ in length.
        "algo_options": {
            "hidden": (8,),
            "learning_starts": 100,
            "updates": 2,
            "epsilon_steps": 500,
            "priority_beta": 1.0,
            "learning_rate_end": None,
            "gamma_end": None,
        },
    }
    parts = Settings(**chosen, run_dir=str(tmp_path / "parts"), steps=16 * 60)
    train(parts)
    steps = 16 * 100
    train(Settings(**chosen, run_dir=str(tmp_path / "parts"), resume="must", steps=steps))
    train(Settings(**chosen, run_dir=str(tmp_path / "whole"), steps=steps))
    models = []
    for name in ("parts", "whole"):
        session = Session(resolve(Settings(**chosen, run_dir=str(tmp_path / name), steps=steps)), pytest.fail)
        newest = max((tmp_path / name / "checkpoints").glob("ckpt-*"))
        groups = {file.stem: load_file(file) for file in newest.glob("*.safetensors")}
        counters = json.loads((newest / "state.json").read_text())["session"]
        session.load(groups, counters)
        models.append({f"{g}.{k}": x for g, named in session.tensors().items() for k, x in named.items()})
        if replay == "memmap":
            models[-1]["records"] = session.learner.memory.storage.records.clone()
        session.close()
    for name, tensor in models[1].items():
        assert torch.equal(models[0][name], tensor) or name == "replay.histories", name
    assert int(models[0]["replay.written"]) == 100
