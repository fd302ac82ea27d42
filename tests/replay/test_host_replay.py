"""Replay off the device: the same transitions as on the device, whatever the pace of the worker thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from list_replay import RULES, ListReplay, assert_same, play, states
from torch import Tensor

from redline.core import random
from redline.core.records import Batch, leaves
from redline.engine import gather
from redline.replay import transfer
from redline.replay.contract import ReplayRequest
from redline.replay.host_replay import HostReplay
from redline.replay.memmap import FileRecords
from redline.replay.pinned import PinnedRecords
from redline.replay.record_storage import RecordStorage
from redline.replay.row_layout import RowLayout
from redline.replay.transfer import AHEAD

Storage = Callable[[ReplayRequest, int, RowLayout], RecordStorage]


def small_blocks(request: ReplayRequest, entries: int, layout: RowLayout) -> RecordStorage:
    return FileRecords(request, entries, layout, block_bytes=1)


def make(
    storage: Storage = PinnedRecords,
    *,
    num_envs: int = 3,
    rows: int = 24,
    n_step: int = 2,
    alpha: float | None = None,
    batch_size: int = 8,
    threaded: bool = False,
    finals: int | None = 4,
    folder: Path = Path("nowhere"),
    notify: Any = pytest.fail,
) -> HostReplay:
    request = ReplayRequest(
        rules=RULES,
        state=states([0] * num_envs),
        capacity=rows * num_envs,
        n_step=n_step,
        gamma=0.5,
        alpha=alpha,
        key=random.seed_key(7),
        batch_size=batch_size,
        batches_per_iteration=2,
        folder=folder,
        notify=notify,
    )
    return HostReplay(request, lambda entries, layout: storage(request, entries, layout), finals, threaded)


class Iterations:
    """Writes one row per iteration, as training does, and samples the batches delivered for it."""

    def __init__(self, memory: HostReplay) -> None:
        self.memory = memory
        self.samples: list[tuple[int, Batch, list[tuple[int, int]]]] = []  # iteration, batch, its rows and environments

    def write(self, state: Any, action: Tensor, step: Any) -> None:
        memory = self.memory
        memory.before_iteration()
        memory.write(state, action, step)
        if memory.iteration >= AHEAD + memory.n_step:
            for number in range(2):
                slot = (memory.iteration - AHEAD) % (AHEAD + 1)
                row, env_index = (memory.drawn[name][slot, number].tolist() for name in ("row", "env_index"))
                sample = memory.sample(memory.key, memory.batch_size, 0.5, torch.tensor(number))
                self.samples.append((memory.iteration, sample, list(zip(row, env_index, strict=True))))
        memory.after_iteration()


def endings(rows: int, num_envs: int, pattern: int = 0) -> list[list[int]]:
    return [
        [(0, 0, 0, 1, 0, 2, 0)[(row * (env_index + 2) + pattern) % 7] for env_index in range(num_envs)]
        for row in range(rows)
    ]


def save(memory: HostReplay) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in memory.tensors().items()}


def load(memory: HostReplay, saved: dict[str, Tensor]) -> bool:
    adapted = memory.adapt(saved)
    for name, tensor in memory.tensors().items():
        tensor.copy_(adapted[name])
    return memory.loaded()


def test_records_of_an_earlier_layout() -> None:
    """Where a field has become words, so that others have moved, every field still holds its own bytes."""
    entries = 5
    step: dict[str, Any] = {"step": ((2,), torch.int32)}
    earlier = RowLayout({"states.ages": ((3, 3), torch.int8), "states.head": ((), torch.int16)} | step)
    layout = RowLayout({"states.ages": ((3,), torch.int32), "states.head": ((), torch.int16)} | step)
    records = torch.zeros(entries, earlier.size, dtype=torch.uint8)
    number = torch.arange(entries)
    earlier.view(records, "states.ages").copy_(number.view(-1, 1, 1) + torch.arange(9).view(3, 3))
    earlier.view(records, "states.head").copy_(300 * number)
    earlier.view(records, "step").copy_(torch.stack([number, -number], 1))
    converted = layout.convert(records, earlier)
    ages = layout.view(converted, "states.ages").contiguous().view(torch.int8)
    assert torch.equal(ages[:, :9].long(), number.view(-1, 1) + torch.arange(9))
    assert not ages[:, 9:].any()
    assert layout.view(converted, "states.head").tolist() == (300 * number).tolist()
    assert torch.equal(layout.view(converted, "step").long(), torch.stack([number, -number], 1))
    assert layout.convert(converted, layout) is converted
    assert earlier.convert(converted, layout) is converted, "a field would lose bytes"


@pytest.mark.parametrize("alpha", [None, 0.6], ids=["uniform", "prioritized"])
@pytest.mark.parametrize("storage", [PinnedRecords, small_blocks], ids=["memory", "file"])
@pytest.mark.parametrize("prefetching", [False, True], ids=["index_select", "prefetching"])
def test_a_thread_delivers_the_rows_that_were_drawn(
    storage: Storage, alpha: float | None, prefetching: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sample by sample against the lists, while the ring fills and after it has wrapped; no weight is lost."""
    copied: list[int] = []

    def copy_rows(table: Tensor, index: Tensor, rows: Tensor) -> None:
        copied.append(len(index))
        gather.copy_rows(table, index, rows)

    monkeypatch.setattr(transfer, "copy_rows", copy_rows)
    monkeypatch.setattr(gather, "_LEAST_BYTES", 0 if prefetching else 1 << 30)
    memory = make(storage, alpha=alpha, threaded=True, n_step=3, finals=40, folder=tmp_path)
    naive, player = ListReplay(3, 24, 3, 0.5, 40), Iterations(memory)
    play(player, naive, endings(60, 3))
    memory.close()
    assert bool(copied) == prefetching
    assert len(player.samples) == 2 * (60 - AHEAD - 3)
    for iteration, sample, places in player.samples:
        drawn_after = iteration - AHEAD
        assert all(drawn_after - 24 + 4 < row <= drawn_after - 3 for row, _ in places)
        assert_same(sample._replace(weight=(sample.weight > 0).to(torch.float32)), places, naive)


@settings(max_examples=8)
@given(rows=st.integers(9, 20), n_step=st.integers(1, 3), length=st.integers(12, 40), pattern=st.integers(0, 6))
def test_a_thread_changes_nothing(rows: int, n_step: int, length: int, pattern: int) -> None:
    runs = []
    for threaded in (False, True):
        memory = make(rows=rows, n_step=n_step, alpha=0.6, threaded=threaded)
        player = Iterations(memory)
        play(player, ListReplay(3, rows, n_step, 0.5, 4), endings(length, 3, pattern))
        runs.append(player.samples)
        memory.close()
    for (_, ours, _), (_, theirs, _) in zip(*runs, strict=True):
        for name, tensor in leaves(ours).items():
            assert torch.equal(tensor, leaves(theirs)[name]), name


@pytest.mark.parametrize("alpha", [None, 0.6], ids=["uniform", "prioritized"])
def test_batches_may_have_another_size_when_it_is_continued(alpha: float | None) -> None:
    memory = make(alpha=alpha, finals=40)
    naive = ListReplay(3, 24, 2, 0.5, 40)
    play(Iterations(memory), naive, [*endings(29, 3), [2, 2, 2]])  # new episodes follow
    other = make(alpha=alpha, batch_size=5, finals=40)
    assert load(other, save(memory))
    player = Iterations(other)
    play(player, naive, endings(AHEAD + 2, 3, 1), first=5000)
    assert len(player.samples) == 2 * (AHEAD + 2)
    for _, sample, places in player.samples:
        assert_same(sample._replace(weight=(sample.weight > 0).to(torch.float32)), places, naive)


def test_a_failure_of_the_worker_is_raised_where_the_learner_is(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = make(threaded=True)

    def broken(row: int) -> None:
        raise OSError(f"no row {row}")

    monkeypatch.setattr(memory.storage, "after_row", broken)
    with pytest.raises(OSError, match="no row 0"):
        play(Iterations(memory), ListReplay(3, 24, 2, 0.5, 4), endings(9, 3))
    memory.transfer.close()


@pytest.mark.fault("E4")
def test_without_page_locked_memory_it_says_so_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.zeros

    def zeros(*arguments: Any, **named: Any) -> Tensor:
        if named.get("pin_memory"):
            raise RuntimeError("CUDA error: out of memory\nmore")
        return real(*arguments, **named)

    monkeypatch.setattr(transfer.torch, "zeros", zeros)
    messages: list[str] = []
    tensor = transfer.page_locked_zeros((3, 4), torch.uint8, torch.device("cuda"), messages.append)
    assert (tensor.shape, tensor.device.type) == ((3, 4), "cpu")
    assert messages == [
        "Replay uses ordinary host memory, which is slower: no memory could be page-locked (CUDA error: out of memory)."
    ]


def test_clear_forgets_what_is_under_way() -> None:
    memory = make(threaded=True)
    play(Iterations(memory), ListReplay(3, 24, 2, 0.5, 4), endings(30, 3))
    memory.clear()
    naive, player = ListReplay(3, 24, 2, 0.5, 4), Iterations(memory)
    play(player, naive, endings(12, 3, 2))
    _, sample, places = player.samples[-1]
    assert_same(sample, places, naive)
    memory.close()


def test_the_worker_ends_with_the_memory() -> None:
    before = set(threading.enumerate())
    memory = make(threaded=True)
    play(Iterations(memory), ListReplay(3, 24, 2, 0.5, 4), endings(5, 3))
    workers = {thread for thread in threading.enumerate() if thread.name == "replay"} - before
    assert len(workers) == 1
    memory.close()
    assert not workers & set(threading.enumerate())


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


FIELDS = st.dictionaries(
    st.sampled_from("abcdef"),
    st.tuples(
        st.lists(st.integers(1, 7), max_size=3).map(tuple),
        st.sampled_from([torch.bool, torch.uint8, torch.bfloat16, torch.int32, torch.float32, torch.int64]),
    ),
    min_size=1,
)


@given(FIELDS)
@settings(deadline=None, max_examples=50)
def test_fields_as_words_are_the_same_bytes(fields: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
    layout = RowLayout(fields)
    records = torch.zeros(5, layout.size, dtype=torch.uint8)
    values = {name: (torch.rand(5, *shape) * 9).to(dtype) for name, (shape, dtype) in fields.items()}
    for name, value in values.items():
        layout.words(records, name).copy_(layout.to_words(value, name))
    for name, value in values.items():
        assert torch.equal(layout.view(records, name), value), name
        assert torch.equal(layout.from_words(layout.words(records, name), name), value), name


def test_fields_of_single_words_are_read_by_compiled_code() -> None:
    layout = RowLayout({"vector": ((2,), torch.float32), "number": ((), torch.int32)})
    records = torch.arange(6 * layout.size, dtype=torch.uint8).view(6, layout.size)
    index, condition = torch.tensor([4, 0, 5]), torch.tensor([[True], [False], [True]])

    def read(records: Tensor) -> list[Tensor]:
        words = [layout.words(records, name) for name in layout.shapes]
        chosen = [torch.where(condition, field[index], field[:3]) for field in words]
        return [layout.from_words(field, name) for field, name in zip(chosen, layout.shapes, strict=True)]

    for found, expected in zip(torch.compile(read)(records), read(records), strict=True):
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
