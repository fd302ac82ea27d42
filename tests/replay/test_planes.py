"""Observations made from stored fields: where, by which numbers, and what happens without Triton."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from redline.core import random
from redline.engine import triton_use
from redline.envs import batch, make_rules
from redline.envs.batch import Rules, env_keys
from redline.replay import device, planes
from redline.replay.contract import ReplayRequest
from redline.replay.device import DeviceReplay
from triton_interpreter import interpret, needs_triton

BOARDS = [(4, 4), (4, 5), (6, 6), (10, 10), (16, 16), (20, 20)]


class OnGpu:
    """A table that says it is on a GPU."""

    device = torch.device("cuda")

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def __getitem__(self, rows: slice) -> Tensor:
        return self.table[rows]


def rules_of(width: int, height: int, view: str = "planes") -> Rules:
    return make_rules("snake", {"width": width, "height": height, "view": view, "start": "random", "starvation": 3})


def suited(rules: Rules, messages: list[str]) -> bool:
    state = batch.reset(rules, env_keys(0, torch.arange(3))).game
    tables: Any = {name: OnGpu(x) for name, x in state._asdict().items()}
    return planes.suits(rules, tables, messages.append)


@pytest.fixture
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replay makes observations from stored fields on the CPU, too, by plain operations."""
    monkeypatch.setattr(device, "suits", lambda *_: True)
    monkeypatch.setattr(triton_use, "_broken", {"observations from replay"})


@pytest.mark.parametrize(
    ("width", "height", "view", "answer"),
    [
        (10, 10, "planes", True),
        (20, 20, "planes", True),
        (5, 5, "planes", False),  # 25 bytes are no number of words
        (12, 12, "planes", False),  # ages of 16 bits, shown in 8
        (10, 10, "centred", False),
        (10, 10, "wrapped", False),
    ],
)
def test_which_observations_the_kernel_makes(
    monkeypatch: pytest.MonkeyPatch, width: int, height: int, view: str, answer: bool
) -> None:
    messages: list[str] = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: object())
    assert suited(rules_of(width, height, view), messages) is answer
    assert messages == []


def test_other_games_and_cpus_read_states() -> None:
    assert not suited(make_rules("tetris", {"view": "planes"}), [])
    rules = rules_of(10, 10)
    state = batch.reset(rules, env_keys(0, torch.arange(3))).game
    assert not planes.suits(rules, state._asdict(), pytest.fail)


def test_a_gpu_without_triton_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    assert not suited(rules_of(10, 10), messages)
    assert len(messages) == 1
    assert "Triton" in messages[0]


@pytest.mark.usefixtures("_plain")
@pytest.mark.parametrize("board", BOARDS)
@pytest.mark.parametrize("n_step", [1, 3])
def test_samples_are_those_of_states(board: tuple[int, int], n_step: int) -> None:
    """With truncated episodes, whose final States are stored behind the others."""
    rules = rules_of(*board)
    envs = batch.reset(rules, env_keys(0, torch.arange(6)))
    ours, theirs = (DeviceReplay(ReplayRequest(rules, envs.game, 6 * 20, n_step, 0.9)) for _ in range(2))
    theirs._planes = None
    for number in range(30):
        action = random.below(random.bits(random.seed_key(number), torch.arange(6)), 4)
        following, step = batch.step(rules, envs, action)
        for memory in (ours, theirs):
            memory.write(envs.game, action, step)
        envs = following
    assert ours.finals.truncations.sum() > 5
    found, expected = (memory.sample(random.seed_key(1), 200) for memory in (ours, theirs))
    assert found.obs.unique().numel() > 2
    assert found.next_legal is None
    for name, x in expected._asdict().items():
        assert x is None or torch.equal(getattr(found, name), x), name


def test_plain_operations_take_over_where_triton_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("Failed to find C compiler.\nSee the documentation.")

    messages: list[str] = []
    monkeypatch.setattr(planes, "_launch", fail)
    monkeypatch.setattr(triton_use, "_broken", set())
    monkeypatch.setattr(planes, "_notify", messages.append)
    board = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]], dtype=torch.uint8).view(torch.int32)
    cells = torch.tensor([0, -1], dtype=torch.int16), torch.tensor([3, 2], dtype=torch.int16)
    for _ in range(2):
        found = planes._observe(board, *cells, torch.tensor([1, 0]), [3, 2, 2], torch.uint8)
        assert found.flatten(2).tolist() == [
            [[5, 6, 7, 8], [0, 0, 0, 0], [0, 0, 1, 0]],
            [[1, 2, 3, 4], [1, 0, 0, 0], [0, 0, 0, 1]],
        ]
    assert messages == [
        "Running observations from replay without their kernel, which failed (RuntimeError: Failed to find C compiler.)."
    ]


INTERPRETED = """
import torch
from check_planes import check
for entries, count, board, dtype, cells in (
    (50, 70, (10, 10), torch.uint8, torch.int16),
    (9, 1, (4, 4), torch.uint8, torch.int32),
    (7, 33, (20, 20), torch.int16, torch.int16),
    (3, 9, (3, 5), torch.int32, torch.int64),
    (4, 5, (40, 40), torch.int16, torch.int16),
):
    check(entries, count, board, dtype, cells, "cpu")
"""


@needs_triton
def test_the_kernel_equals_plain_operations_by_the_interpreter() -> None:
    interpret(INTERPRETED)
