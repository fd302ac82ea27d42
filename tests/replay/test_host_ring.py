"""Rings in host memory and in a file: the same transitions as on the device, whatever the pace of the worker."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_ring import RULES, ListReplay, assert_same, play, states
from torch import Tensor

from redline.core import random
from redline.core.errors import StorageError, UserError
from redline.core.records import Batch, Episode, Step, leaves
from redline.replay import host_ring as module
from redline.replay.host_ring import HostReplayRing, Pinned
from redline.replay.memmap import FILE, OnDisk
from redline.replay.row_layout import RowLayout
from redline.replay.transfer import AHEAD, Storage

CPU = torch.device("cpu")
PLACES = ("pinned", "memmap")


def make(
    where: str,
    folder: Path,
    *,
    num_envs: int = 3,
    rows: int = 24,
    n_step: int = 2,
    alpha: float | None = None,
    size: int = 8,
    batches: int = 2,
    threaded: bool = False,
    finals: int | None = 4,
    notify: Any = pytest.fail,
) -> HostReplayRing:
    def storage(entries: int, layout: RowLayout) -> Storage:
        if where == "pinned":
            return Pinned(entries, layout, num_envs, CPU, pytest.fail)
        return OnDisk(folder, entries, layout, num_envs, pytest.fail, block=1)

    return HostReplayRing(
        RULES,
        states([0] * num_envs),
        rows * num_envs,
        n_step,
        0.5,
        random.seed_key(7),
        size,
        batches,
        storage,
        alpha=alpha,
        finals=finals,
        notify=notify,
        threaded=threaded,
    )


class Iterations:
    """Rows are written one an iteration, as training does; after each the batches delivered for it are sampled."""

    def __init__(self, ring: HostReplayRing) -> None:
        self.ring = ring
        self.samples: list[tuple[int, Batch, list[tuple[int, int]]]] = []  # iteration, batch, its places

    def write(self, state: Any, action: Tensor, step: Any) -> None:
        self.ring.before()
        self.ring.write(state, action, step)
        if self.ring.iteration >= AHEAD + self.ring.n_step:
            for number in range(2):
                slot = (self.ring.iteration - AHEAD) % (AHEAD + 1)
                row, env_index = (self.ring.drawn[name][slot, number].tolist() for name in ("row", "env_index"))
                found = self.ring.sample(self.ring.key, self.ring.batch_size, 0.5, torch.tensor(number))
                self.samples.append((self.ring.iteration, found, list(zip(row, env_index, strict=True))))
        self.ring.after()


def endings(rows: int, num_envs: int, pattern: int = 0) -> list[list[int]]:
    return [
        [(0, 0, 0, 1, 0, 2, 0)[(row * (env_index + 2) + pattern) % 7] for env_index in range(num_envs)]
        for row in range(rows)
    ]


@pytest.mark.parametrize("threaded", [False, True], ids=["inline", "thread"])
@pytest.mark.parametrize("alpha", [None, 0.6], ids=["uniform", "priority"])
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("n_step", [1, 3])
def test_what_is_delivered_is_what_was_written(
    where: str, alpha: float | None, threaded: bool, n_step: int, tmp_path: Path
) -> None:
    """Sample by sample against lists of all that happened, before the ring is full and after it has come round."""
    ring = make(where, tmp_path, alpha=alpha, threaded=threaded, n_step=n_step, finals=40)
    naive, player = ListReplay(3, 24, n_step, 0.5, 40), Iterations(ring)
    play(player, naive, endings(70, 3))  # type: ignore[arg-type]
    ring.close()
    assert len(player.samples) == 2 * (70 - AHEAD - n_step)
    for iteration, found, places in player.samples:
        drawn_after = iteration - AHEAD
        assert all(drawn_after - 24 + 4 < row <= drawn_after - n_step for row, _ in places)
        assert_same(found._replace(weight=(found.weight > 0).to(torch.float32)), places, naive)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.integers(9, 20), n_step=st.integers(1, 3), length=st.integers(12, 60), pattern=st.integers(0, 6))
def test_a_thread_changes_nothing(rows: int, n_step: int, length: int, pattern: int, tmp_path: Path) -> None:
    found = []
    for threaded in (False, True):
        ring = make("pinned", tmp_path, rows=rows, n_step=n_step, alpha=0.6, threaded=threaded)
        player = Iterations(ring)
        play(player, ListReplay(3, rows, n_step, 0.5, 4), endings(length, 3, pattern))  # type: ignore[arg-type]
        found.append(player.samples)
        ring.close()
    for (_, ours, _), (_, theirs, _) in zip(*found, strict=True):
        same(ours, theirs)


def same(a: Batch, b: Batch) -> None:
    for name, tensor in leaves(a).items():
        assert torch.equal(tensor, leaves(b)[name]), name


@pytest.mark.parametrize("alpha", [None, 0.6], ids=["uniform", "priority"])
@pytest.mark.parametrize("length", [0, 5, 24, 61], ids=["empty", "partial", "full", "wrapped"])
@pytest.mark.parametrize("where", PLACES)
def test_saved_and_loaded_it_goes_on_as_if_nothing_had_happened(
    where: str, length: int, alpha: float | None, tmp_path: Path
) -> None:
    """The straight run beside one that is saved, opened by another ring, and goes on: every later sample is the same."""
    before, more = endings(length, 3), endings(20, 3, 3)
    straight, first = make(where, tmp_path / "a", alpha=alpha), make(where, tmp_path / "b", alpha=alpha)
    history = [ListReplay(3, 24, 2, 0.5, 4) for _ in range(4)]
    play(Iterations(straight), history[0], before)  # type: ignore[arg-type]
    play(Iterations(first), history[1], before)  # type: ignore[arg-type]
    saved = {name: tensor.clone() for name, tensor in first.tensors().items()}
    first.close()
    second = make(where, tmp_path / "b", alpha=alpha)
    for name, tensor in second.tensors().items():
        tensor.copy_(saved[name])
    second.loaded()
    assert not second.holes.any()
    ours, theirs = Iterations(straight), Iterations(second)
    play(ours, history[2], more)  # type: ignore[arg-type]
    play(theirs, history[3], more)  # type: ignore[arg-type]
    assert len(ours.samples) == len(theirs.samples) > 10
    for (_, one, _), (_, other, _) in zip(ours.samples, theirs.samples, strict=True):
        same(one, other)
    straight.close()
    second.close()


def test_rows_after_the_checkpoint_are_not_learned_from_again(tmp_path: Path) -> None:
    """A run that went on after its checkpoint and was killed: what it overwrote since is lost, and weighs nothing."""
    ring = make("memmap", tmp_path, rows=4096, num_envs=1, n_step=1, finals=1)
    naive = ListReplay(1, 4096, 1, 0.5, 1)
    blocks, each = len(ring.storage.file.generations), ring.storage.block_rows  # type: ignore[attr-defined]
    assert blocks >= 8
    play(Iterations(ring), naive, [[0]] * 5000)  # type: ignore[arg-type]
    saved = {name: tensor.clone() for name, tensor in ring.tensors().items()}
    play(Iterations(ring), naive, [[0]] * (2 * each))  # type: ignore[arg-type]
    ring.transfer.wait(ring.iteration)
    ring.storage._settle()  # type: ignore[attr-defined]
    ring.storage.file.close()  # type: ignore[attr-defined]  # as if killed: nothing more is committed

    said: list[str] = []
    again = make("memmap", tmp_path, rows=4096, num_envs=1, n_step=1, finals=1, notify=said.append)
    for name, tensor in again.tensors().items():
        tensor.copy_(saved[name])
    assert again.loaded()
    assert [text.partition(" of ")[2] for text in said] == [
        "4,096 transitions are no longer in the replay file; they are left out."
    ]
    lost = again.holes.nonzero().flatten().tolist()
    place = 5000 % 4096
    assert 2 * each <= len(lost) <= 5 * each, "two blocks were overwritten, one was under way, one was begun ahead"
    assert set(range(place, place + 2 * each)) <= set(lost)
    play(Iterations(again), ListReplay(1, 4096, 1, 0.5, 1), [[0]] * 4)  # type: ignore[arg-type]
    row = torch.tensor([[5000 - 4096 + each, 5000 - 10 * each]])
    again.drawn["row"][:, :, :2] = row
    again.drawn["env_index"].zero_()
    assert again.sample(again.key, 8).weight[:2].tolist() == [0.0, 1.0]
    again.close()


def test_a_flipped_byte_costs_its_block(tmp_path: Path) -> None:
    ring = make("memmap", tmp_path, rows=4096, num_envs=1, n_step=1, finals=1)
    each, start = ring.storage.block_rows, ring.storage.file._layout.data  # type: ignore[attr-defined]
    play(Iterations(ring), ListReplay(1, 4096, 1, 0.5, 1), [[0]] * 4096)  # type: ignore[arg-type]
    saved = {name: tensor.clone() for name, tensor in ring.tensors().items()}
    ring.close()
    with open(tmp_path / FILE, "r+b") as file:
        file.seek(start + 3 * each * ring.layout.size + 17)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 4]))
    said: list[str] = []
    storage = OnDisk(tmp_path, 4096, ring.layout, 1, said.append, block=1)
    written = int(saved["written"])
    assert storage.lost(written).all(), "of a history nobody vouches for"
    storage.begin_history(saved["histories"], written)
    lost = storage.lost(written)
    assert lost.nonzero().flatten().tolist() == list(range(3 * each, 4 * each))
    assert len(said) == 1
    assert "1 of" in said[0]
    storage.close()


def load(ring: HostReplayRing, saved: dict[str, Tensor]) -> bool:
    for name, tensor in ring.tensors().items():
        tensor.copy_(ring.adapt(saved)[name])
    return ring.loaded()


def save(ring: HostReplayRing) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in ring.tensors().items()}


def killed(ring: HostReplayRing) -> None:
    """As if the process was: nothing more is committed, the lock is gone."""
    ring.transfer.wait(ring.iteration)
    ring.storage._settle()  # type: ignore[attr-defined]
    ring.storage.file.close()  # type: ignore[attr-defined]


class Long:
    """A ring of 4,096 rows of one environment in a file, whose records say which row they are of."""

    def __init__(self, folder: Path) -> None:
        self.said: list[str] = []
        self.ring = make("memmap", folder, rows=4096, num_envs=1, n_step=1, finals=1, notify=self.said.append)

    def write(self, count: int) -> None:

        no, nothing = torch.zeros(1, dtype=torch.bool), torch.zeros(1)
        for _ in range(count):
            row = int(self.ring.written)
            step = Step(torch.full((1,), float(row)), no, no, no, states([row]), Episode(nothing, nothing, nothing))
            self.ring.before()
            self.ring.write(states([row]), torch.zeros(1, dtype=torch.int64), step)
            self.ring.after()

    def wrong(self) -> int:
        """Rows that are said to be there and are not."""
        self.ring.transfer.wait(self.ring.iteration)
        written, place = int(self.ring.written), torch.arange(4096)
        row = written - 1 - (written - 1 - place) % 4096
        reward = self.ring.layout.view(self.ring.storage.records, "step")[:, 0].view(torch.float32)
        return int(((reward != row) & (row >= 0) & ~self.ring.holes).sum())


def test_what_was_lost_stays_lost_when_it_is_continued_again(tmp_path: Path) -> None:
    first = Long(tmp_path)
    first.write(6000)
    saved = save(first.ring)
    first.write(100)
    killed(first.ring)
    second = Long(tmp_path)
    assert load(second.ring, saved)
    assert second.wrong() == 0
    second.write(20)
    saved, holes = save(second.ring), int(second.ring.holes.sum())
    killed(second.ring)
    third = Long(tmp_path)
    assert load(third.ring, saved)
    assert third.wrong() == 0
    assert int(third.ring.holes.sum()) >= holes > 0
    third.ring.close()


def test_what_another_history_left_is_not_taken_for_its_own(tmp_path: Path) -> None:
    """A checkpoint, then the memory is cleared and filled anew; or an earlier checkpoint is continued instead."""
    first = Long(tmp_path / "a")
    first.write(3000)
    saved = save(first.ring)
    first.ring.clear()
    first.write(2500)
    killed(first.ring)
    second = Long(tmp_path / "a")
    assert not load(second.ring, saved), "most of it was overwritten"
    assert (int(second.ring.written), second.wrong()) == (0, 0)
    assert "filled again" in second.said[0]
    killed(second.ring)

    first = Long(tmp_path / "b")
    first.write(2600)
    early = save(first.ring)
    first.write(1000)
    late = save(first.ring)
    first.ring.close()
    second = Long(tmp_path / "b")
    assert load(second.ring, early)
    assert not second.ring.holes.any()
    second.write(500)
    second.ring.close()
    third = Long(tmp_path / "b")
    assert load(third.ring, late)
    assert third.wrong() == 0
    assert 500 <= int(third.ring.holes.sum()) < 1500
    third.ring.close()


def test_without_its_file_a_memory_is_empty_and_says_so(tmp_path: Path) -> None:
    first = Long(tmp_path)
    first.write(2000)
    saved = save(first.ring)
    first.ring.close()
    (tmp_path / FILE).unlink()
    second = Long(tmp_path)
    assert not load(second.ring, saved)
    assert second.said == ["2,000 of 2,000 transitions are no longer in the replay file; it is filled again."]
    second.write(50)
    assert second.wrong() == 0
    second.ring.close()


@pytest.mark.parametrize("alpha", [None, 0.6], ids=["uniform", "priority"])
def test_batches_may_have_another_size_when_it_is_continued(alpha: float | None, tmp_path: Path) -> None:
    ring = make("pinned", tmp_path, alpha=alpha)
    naive = ListReplay(3, 24, 2, 0.5, 4)
    play(Iterations(ring), naive, endings(30, 3))  # type: ignore[arg-type]
    other = make("pinned", tmp_path, alpha=alpha, size=5)
    assert load(other, save(ring))
    other.before()
    found = other.sample(other.key, 5)
    slot = (30 - 1 - AHEAD) % (AHEAD + 1)
    places = list(zip(*(other.drawn[name][slot, 0].tolist() for name in ("row", "env_index")), strict=True))
    assert set(places) <= set(naive.places())
    del found


def test_a_file_of_other_settings_is_refused(tmp_path: Path) -> None:
    make("memmap", tmp_path, rows=32).close()
    with pytest.raises(StorageError, match="other settings"):
        make("memmap", tmp_path, rows=33)
    ring = make("memmap", tmp_path, rows=32)
    with pytest.raises(StorageError, match="in use"):
        make("memmap", tmp_path, rows=32)
    ring.close()


def test_a_failure_of_the_worker_is_raised_where_the_learner_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = make("pinned", tmp_path, threaded=True)

    def broken(row: int) -> None:
        raise OSError(f"no row {row}")

    monkeypatch.setattr(ring.storage, "after_row", broken)
    with pytest.raises(OSError, match="no row 0"):
        play(Iterations(ring), ListReplay(3, 24, 2, 0.5, 4), endings(9, 3))  # type: ignore[arg-type]


def test_without_page_locked_memory_it_says_so_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.zeros

    def zeros(*arguments: Any, **named: Any) -> Tensor:
        if named.get("pin_memory"):
            raise RuntimeError("CUDA error: out of memory\nmore")
        return real(*arguments, **named)

    monkeypatch.setattr(module.torch, "zeros", zeros)
    said: list[str] = []
    found = module.pinned((3, 4), torch.uint8, torch.device("cuda"), said.append)
    assert (found.shape, found.device.type) == ((3, 4), "cpu")
    assert said == [
        "Replay in ordinary host memory, which copies slower: none could be page-locked (CUDA error: out of memory)."
    ]


def test_too_little_capacity_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"replay_capacity is 21.* in host memory need at least 24"):
        make("pinned", tmp_path, rows=7)


def test_clear_forgets_what_is_under_way(tmp_path: Path) -> None:
    ring = make("pinned", tmp_path, threaded=True)
    play(Iterations(ring), ListReplay(3, 24, 2, 0.5, 4), endings(30, 3))  # type: ignore[arg-type]
    ring.clear()
    naive, player = ListReplay(3, 24, 2, 0.5, 4), Iterations(ring)
    play(player, naive, endings(12, 3, 2))  # type: ignore[arg-type]
    _, found, places = player.samples[-1]
    assert_same(found, places, naive)
    ring.close()


def test_the_worker_ends_with_the_ring(tmp_path: Path) -> None:
    ring = make("pinned", tmp_path, threaded=True)
    play(Iterations(ring), ListReplay(3, 24, 2, 0.5, 4), endings(5, 3))  # type: ignore[arg-type]
    assert any(thread.name == "replay" for thread in threading.enumerate())
    ring.close()
    assert not any(thread.name == "replay" for thread in threading.enumerate())


def test_records_hold_every_field_aligned() -> None:
    layout = RowLayout(
        {"a": ((3,), torch.int8), "b": ((), torch.int64), "c": ((2, 2), torch.int16), "d": ((), torch.float32)}
    )
    assert layout.size % 16 == 0
    records = torch.zeros(5, layout.size, dtype=torch.uint8)
    values = {
        "a": torch.arange(15, dtype=torch.int8).view(5, 3),
        "b": torch.arange(5) * 2**40,
        "c": torch.arange(20, dtype=torch.int16).view(5, 2, 2),
        "d": torch.linspace(0, 1, 5),
    }
    for name, value in values.items():
        layout.view(records, name).copy_(value)
    for name, value in values.items():
        assert torch.equal(layout.view(records, name), value), name
