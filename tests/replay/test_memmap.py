"""Replay in a file: which rows survive a crash, damage, and other courses of the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from list_replay import states
from test_host_replay import load, make, save, small_blocks

from redline.core.errors import StorageError
from redline.core.records import Episode, Step
from redline.replay.host_replay import HostReplay
from redline.replay.memmap import FILE, FileRecords

ROWS, NUM_ENVS = 128, 32
BLOCK = 4  # rows: 32 records of 32 bytes fill a quarter of a page


class FileMemory:
    """A memory of 128 rows in a file of 32 blocks, whose rewards are the numbers of their rows."""

    def __init__(self, folder: Path) -> None:
        self.messages: list[str] = []
        options: dict[str, Any] = {"rows": ROWS, "num_envs": NUM_ENVS, "n_step": 1, "finals": 1}
        self.memory: HostReplay = make(small_blocks, folder=folder, notify=self.messages.append, **options)
        assert isinstance(self.memory.storage, FileRecords)
        self.storage: FileRecords = self.memory.storage
        assert (self.storage.block_rows, len(self.storage.file.generations)) == (BLOCK, ROWS // BLOCK)

    def write(self, count: int) -> None:
        false, zeros = torch.zeros(NUM_ENVS, dtype=torch.bool), torch.zeros(NUM_ENVS)
        for _ in range(count):
            row = int(self.memory.written)
            state = states([row] * NUM_ENVS)
            step = Step(zeros + row, false, false, false, state, Episode(zeros, zeros, zeros))
            self.memory.before_iteration()
            self.memory.write(state, torch.zeros(NUM_ENVS, dtype=torch.int64), step)
            self.memory.after_iteration()

    def wrong_rows(self) -> int:
        """Count rows that are not the expected ones though they are not marked as missing."""
        self.memory.transfer.wait(self.memory.iteration)
        written, place = int(self.memory.written), torch.arange(ROWS)
        row = written - 1 - (written - 1 - place) % ROWS
        reward = self.memory.layout.view(self.storage.records, "step")[:, 0].view(torch.float32).view(ROWS, NUM_ENVS)
        return int(((reward != row.unsqueeze(1)).any(1) & (row >= 0) & ~self.memory.missing_rows).sum())

    def missing(self) -> int:
        return int(self.memory.missing_rows.sum())

    def kill(self) -> None:
        """Stop as if the process was killed: nothing more is committed, the lock is released."""
        self.memory.transfer.wait(self.memory.iteration)
        self.storage._wait_for_commits()
        self.storage.file.close()

    def close(self) -> None:
        self.memory.close()


@pytest.mark.fault("F3")
def test_rows_overwritten_after_the_checkpoint_are_not_sampled(tmp_path: Path) -> None:
    """A run that went on after its checkpoint and was killed: samples of rows it has overwritten get weight 0."""
    first = FileMemory(tmp_path)
    first.write(160)
    saved = save(first.memory)
    first.write(2 * BLOCK)
    first.kill()
    second = FileMemory(tmp_path)
    assert load(second.memory, saved)
    (message,) = second.messages
    assert message.endswith(" of 4,096 transitions are missing from the replay file: they are not sampled.")
    missing = second.memory.missing_rows.nonzero().flatten().tolist()
    assert 2 * BLOCK <= len(missing) <= 5 * BLOCK, "two blocks were overwritten, one was open, one was begun ahead"
    assert set(range(160 % ROWS, 160 % ROWS + 2 * BLOCK)) <= set(missing)
    second.write(4)
    second.memory.drawn["row"][:, :, :2] = torch.tensor([[160 - ROWS + BLOCK, 160 - 10 * BLOCK]])
    second.memory.drawn["env_index"].zero_()
    assert second.memory.sample(second.memory.key, 8).weight[:2].tolist() == [0.0, 1.0]
    second.close()


@pytest.mark.fault("F4")
def test_a_flipped_byte_costs_its_block(tmp_path: Path) -> None:
    first = FileMemory(tmp_path)
    first.write(ROWS)
    saved, start = save(first.memory), first.storage.file._layout.data
    first.close()
    with open(tmp_path / FILE, "r+b") as file:
        file.seek(start + 3 * BLOCK * NUM_ENVS * first.memory.layout.size + 17)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 4]))
    second = FileMemory(tmp_path)
    assert [message.partition(" blocks of ")[0] for message in second.messages] == ["1 of 32"]
    assert second.storage.lost_rows(ROWS).all(), "rows of a history that no checkpoint vouches for"
    second.storage.begin_history(saved["histories"], ROWS)
    assert second.storage.lost_rows(ROWS).nonzero().flatten().tolist() == list(range(3 * BLOCK, 4 * BLOCK))
    second.close()


def test_lost_rows_stay_lost_when_the_run_continues_again(tmp_path: Path) -> None:
    first = FileMemory(tmp_path)
    first.write(188)
    saved = save(first.memory)
    first.write(3)
    first.kill()
    second = FileMemory(tmp_path)
    assert load(second.memory, saved)
    assert second.wrong_rows() == 0
    second.write(1)
    saved, missing = save(second.memory), second.missing()
    second.kill()
    third = FileMemory(tmp_path)
    assert load(third.memory, saved)
    assert third.wrong_rows() == 0
    assert third.missing() >= missing > 0
    third.close()


def test_rows_of_a_memory_filled_again_are_not_taken_for_those_of_the_checkpoint(tmp_path: Path) -> None:
    first = FileMemory(tmp_path)
    first.write(94)
    saved = save(first.memory)
    first.memory.clear()
    first.write(78)
    first.kill()
    second = FileMemory(tmp_path)
    assert not load(second.memory, saved), "most of it was overwritten"
    assert (int(second.memory.written), second.wrong_rows()) == (0, 0)
    assert "starting with an empty memory" in second.messages[0]
    second.kill()


def test_rows_of_another_continuation_are_not_taken_for_those_of_the_checkpoint(tmp_path: Path) -> None:
    """An early checkpoint was continued; then a later one, of the course before, is."""
    first = FileMemory(tmp_path)
    first.write(81)
    early = save(first.memory)
    first.write(31)
    late = save(first.memory)
    first.close()
    second = FileMemory(tmp_path)
    assert load(second.memory, early)
    assert second.missing() == 0
    second.write(16)
    second.close()
    third = FileMemory(tmp_path)
    assert load(third.memory, late)
    assert third.wrong_rows() == 0
    assert 16 <= third.missing() < 48
    third.close()


@pytest.mark.fault("F1")
def test_without_its_file_a_memory_is_empty_and_says_so(tmp_path: Path) -> None:
    first = FileMemory(tmp_path)
    first.write(63)
    saved = save(first.memory)
    first.close()
    (tmp_path / FILE).unlink()
    second = FileMemory(tmp_path)
    assert not load(second.memory, saved)
    assert second.messages == [
        "2,016 of 2,016 transitions are missing from the replay file: starting with an empty memory."
    ]
    second.write(2)
    assert second.wrong_rows() == 0
    second.close()


@pytest.mark.fault("F1")
def test_a_file_of_other_settings_is_refused(tmp_path: Path) -> None:
    make(small_blocks, rows=32, folder=tmp_path).close()
    with pytest.raises(StorageError, match="other settings"):
        make(small_blocks, rows=33, folder=tmp_path)
    memory = make(small_blocks, rows=32, folder=tmp_path)
    with pytest.raises(StorageError, match="in use"):
        make(small_blocks, rows=32, folder=tmp_path)
    memory.close()
