"""Block files: rows F1 to F5 of faults.md, and the state that a crash or a power cut leaves at any point."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from redline.core import faults
from redline.core.errors import StorageError
from redline.replay import block_file as file_module
from redline.replay.block_file import BlockFile

BLOCKS, BLOCK_BYTES = 3, 5000  # a block is more than a page and no multiple of one
SHAPE: dict[str, Any] = {"blocks": BLOCKS, "block_bytes": BLOCK_BYTES, "schema": {"game": "x", "fields": {"a": [1, 2]}}}
TABLE, DATA, STRIDE, SIZE = 4096, 8192, 8192, 8192 + 3 * 8192


def content(block: int, generation: int) -> Tensor:
    """(block_bytes,) uint8 that no other block and generation has."""
    return ((torch.arange(BLOCK_BYTES) * (2 * generation + 1) + 7 * block) % 251).to(torch.uint8)


def put(file: BlockFile, block: int, generation: int) -> None:
    file.begin(block)
    file.data[block] = content(block, generation)
    file.commit(block, generation)


def make(path: Path, generations: list[int]) -> Path:
    """A file, closed, with these generations committed."""
    with BlockFile.create(path, **SHAPE) as file:
        for block, generation in enumerate(generations):
            if generation:
                put(file, block, generation)
    return path


def held(path: Path, **options: Any) -> list[int]:
    """Generations of a file in which nothing is damaged, every valid block as it was written."""
    with BlockFile.open(path, **SHAPE, **options) as file:
        assert file.damaged == []
        for block, generation in enumerate(file.generations):
            if generation:
                assert torch.equal(file.data[block], content(block, generation))
        return list(file.generations)


@pytest.fixture(autouse=True)
def no_faults_left() -> Iterator[None]:
    yield
    faults.arm("")


# Round trip


def test_a_new_file_is_empty_allocated_and_mapped(tmp_path: Path) -> None:
    with BlockFile.create(tmp_path / "replay", **SHAPE) as file:
        assert file.path == tmp_path / "replay"
        assert file.generations == [0, 0, 0]
        assert file.damaged == []
        assert file.data.shape == (BLOCKS, BLOCK_BYTES)
        assert file.data.dtype == torch.uint8
        assert file.data[1].is_contiguous()
        assert file.data.data_ptr() % 4096 == file.data[1].data_ptr() % 4096 == 0
        status = os.stat(file.path)
        assert status.st_size == SIZE
        assert status.st_blocks * 512 >= SIZE
        file.data[2, 7] = 99  # the mapping itself, no copy
        assert file.path.read_bytes()[DATA + 2 * STRIDE + 7] == 99
    assert os.listdir(tmp_path) == ["replay"]


def test_round_trip(tmp_path: Path) -> None:
    path = make(tmp_path / "replay", [4, 0, 2**40])
    assert held(path) == [4, 0, 2**40]
    with BlockFile.open(path, **SHAPE) as file:
        put(file, 0, 5)
        put(file, 1, 6)
        assert file.generations == [5, 6, 2**40]
    assert held(path) == held(path, verify=False) == [5, 6, 2**40]


def test_a_block_begun_is_empty(tmp_path: Path) -> None:
    path = make(tmp_path / "replay", [1, 2, 3])
    with BlockFile.open(path, **SHAPE) as file:
        file.begin(1)
        assert file.generations == [1, 0, 3]
        file.data[1, :100] = 17
    assert held(path) == [1, 0, 3]


def test_progress_counts_all_blocks(tmp_path: Path) -> None:
    path, told = make(tmp_path / "replay", [1, 0, 1]), list[int]()
    BlockFile.open(path, **SHAPE, progress=told.append).close()
    assert told == [1, 2, 3]


def test_a_large_block_is_verified_piece_by_piece(tmp_path: Path) -> None:
    shape = {"blocks": 1, "block_bytes": 2 * file_module._PIECE + 12345, "schema": {}}
    with BlockFile.create(tmp_path / "replay", **shape) as file:
        file.data[0] = torch.arange(shape["block_bytes"]) % 251
        file.commit(0, 1)
    with BlockFile.open(tmp_path / "replay", **shape) as file:
        assert file.generations == [1]
        file.data[0, -1] += 1
    with BlockFile.open(tmp_path / "replay", **shape) as file:
        assert file.damaged == [0]


def test_close_twice_and_tensors_that_stay(tmp_path: Path) -> None:
    path = make(tmp_path / "replay", [1, 0, 0])
    file = BlockFile.open(path, **SHAPE)
    row = file.data[0]
    file.close()
    file.close()
    assert file.data.shape == (0, BLOCK_BYTES)
    for use, arguments in (("check", ()), ("begin", (0,)), ("commit", (0, 1))):
        with pytest.raises(ValueError, match="closed"):
            getattr(file, use)(*arguments)
    assert torch.equal(row, content(0, 1))
    assert held(path) == [1, 0, 0]  # the lock does not stay with the tensor
    del row, file
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_wrong_arguments(tmp_path: Path) -> None:
    for wrong in (
        {"blocks": 0},
        {"block_bytes": 0},
        {"schema": {"x": "y" * (1 << 20)}},
        {"schema": {"x": float("nan")}},
    ):
        with pytest.raises(ValueError, match=r"expected|JSON"):
            BlockFile.create(tmp_path / "replay", **{**SHAPE, **wrong})
    assert os.listdir(tmp_path) == []
    with BlockFile.create(tmp_path / "replay", **SHAPE) as file:
        for block in (-1, BLOCKS):
            with pytest.raises(IndexError):
                file.begin(block)
            with pytest.raises(IndexError):
                file.commit(block, 1)
        with pytest.raises(ValueError, match="generation is 0; expected 1 or more"):
            file.commit(0, 0)
    assert held(tmp_path / "replay") == [0, 0, 0]


# Damage


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return make(tmp_path_factory.mktemp("whole") / "replay", [3, 5, 4]).read_bytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("flipped")


def flipped(folder: Path, data: bytes, place: int, mask: int) -> Path:
    (folder / "replay").write_bytes(data[:place] + bytes([data[place] ^ mask]) + data[place + 1 :])
    return folder / "replay"


masks = st.integers(1, 255)


@pytest.mark.fault("F1")
@given(st.integers(0, TABLE - 1), masks)
def test_a_flipped_byte_of_the_header_is_refused(whole: bytes, folder: Path, place: int, mask: int) -> None:
    with pytest.raises(StorageError, match=r"not a replay file|damaged|format version"):
        BlockFile.open(flipped(folder, whole, place, mask), **SHAPE)


@pytest.mark.fault("F1")
@given(st.integers(TABLE + 16 * BLOCKS, DATA - 1), masks)
def test_a_flipped_byte_behind_the_table_is_refused(whole: bytes, folder: Path, place: int, mask: int) -> None:
    with pytest.raises(StorageError, match=r"table of the replay file .* is damaged"):
        BlockFile.open(flipped(folder, whole, place, mask), **SHAPE)


@pytest.mark.fault("F4")
@given(st.integers(0, BLOCKS - 1), st.integers(0, 15), masks, st.booleans())
def test_a_flipped_byte_of_an_entry_empties_the_block(
    whole: bytes, folder: Path, block: int, byte: int, mask: int, verify: bool
) -> None:
    assert_emptied(flipped(folder, whole, TABLE + 16 * block + byte, mask), block, verify)


@pytest.mark.fault("F4")
@given(st.integers(0, BLOCKS - 1), st.integers(0, BLOCK_BYTES - 1), masks)
def test_a_flipped_byte_of_a_block_empties_it(whole: bytes, folder: Path, block: int, byte: int, mask: int) -> None:
    assert_emptied(flipped(folder, whole, DATA + STRIDE * block + byte, mask), block, verify=True)


def assert_emptied(path: Path, block: int, verify: bool) -> None:
    expected = [3, 5, 4]
    expected[block] = 0
    with BlockFile.open(path, **SHAPE, verify=verify) as file:
        assert file.damaged == [block]
        assert file.generations == expected
    assert held(path) == held(path, verify=False) == expected  # and on disk


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_an_entry_of_noise_is_empty(whole: bytes, folder: Path, generation: int, crc: int, check: int) -> None:
    entry = file_module._ENTRY.pack(generation, crc, check)
    (folder / "replay").write_bytes(whole[:TABLE] + entry + whole[TABLE + 16 :])
    with BlockFile.open(folder / "replay", **SHAPE) as file:
        assert file.generations == [0, 5, 4]


def test_an_entry_in_the_place_of_another_is_empty(whole: bytes, folder: Path) -> None:
    entries = whole[TABLE + 16 : TABLE + 32] + whole[TABLE : TABLE + 16]
    (folder / "replay").write_bytes(whole[:TABLE] + entries + whole[TABLE + 32 :])
    with BlockFile.open(folder / "replay", **SHAPE, verify=False) as file:
        assert file.damaged == [0, 1]
        assert file.generations == [0, 0, 4]


# Files that are not what they should be


@pytest.mark.fault("F1")
@pytest.mark.parametrize("size", [0, 1, 7, 8, 47, 48, 4095, 4096, DATA, SIZE - 1, SIZE + 1, 2 * SIZE])
def test_a_file_of_another_size_is_refused(tmp_path: Path, size: int) -> None:
    path = make(tmp_path / "replay", [1, 1, 1])
    os.truncate(path, size)
    expected = "not a replay file" if size < 48 else "damaged" if size < 4096 else f"has {size:,} bytes, expected"
    with pytest.raises(StorageError, match=expected):
        BlockFile.open(path, **SHAPE)
    assert os.stat(path).st_size == size


@pytest.mark.fault("F1")
def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, reason in (("none", "no such file"), ("folder", "is a directory"), ("pipe", "illegal seek")):
        with pytest.raises(StorageError, match=f"{name} cannot be opened: {reason}.*choose another folder"):
            BlockFile.open(tmp_path / name, **SHAPE)
    with pytest.raises(StorageError, match=r"missing/replay cannot be created: no such file"):
        BlockFile.create(tmp_path / "missing" / "replay", **SHAPE)


@pytest.mark.fault("F1")
@pytest.mark.parametrize("data", [b"", b"hello", bytes(SIZE), b"RLBLOCKT" + bytes(SIZE - 8)])
def test_a_foreign_file_is_refused_and_left_alone(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "replay").write_bytes(data)
    with pytest.raises(StorageError, match="is not a replay file"):
        BlockFile.open(tmp_path / "replay", **SHAPE)
    with pytest.raises(StorageError, match="exists: open it, delete it, or choose another folder"):
        BlockFile.create(tmp_path / "replay", **SHAPE)
    assert (tmp_path / "replay").read_bytes() == data
    assert os.listdir(tmp_path) == ["replay"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"blocks": 4}, r"\(blocks is 3, expected 4\)"),
        ({"block_bytes": 5001}, r"\(block_bytes is 5000, expected 5001\)"),
        ({"schema": {"game": "y", "fields": {"a": [1, 2]}}}, r"\(schema\.game is \"x\", expected \"y\"\)"),
        (
            {"schema": {"game": "x", "fields": {"a": [1, 3]}}},
            r"\(schema\.fields\.a is \[1,2\], expected \[1,3\]\)",
        ),
        ({"schema": {"game": "x", "fields": {}}}, r"schema\.fields\.a is \[1,2\], expected none"),
        ({"schema": {"game": "x", "fields": {"a": [1, 2]}, "b": True}}, r"\(schema\.b is missing, expected true\)"),
        ({"schema": {"a": 1, "b": 2, "c": 3}}, r"and 2 more\)"),
    ],
)
def test_other_settings_are_refused(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    path = make(tmp_path / "replay", [1, 1, 1])
    with pytest.raises(
        StorageError, match=said + ".*: use the same settings, delete the file, or choose another folder"
    ):
        BlockFile.open(path, **{**SHAPE, **changed})
    assert held(path) == [1, 1, 1]


def test_the_order_of_a_schema_does_not_matter(tmp_path: Path) -> None:
    path = make(tmp_path / "replay", [1, 0, 0])
    shape = {**SHAPE, "schema": {"fields": {"a": (1, 2)}, "game": "x"}}
    BlockFile.open(path, **shape).close()


def test_a_newer_format_asks_for_an_upgrade(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(file_module, "FORMAT_VERSION", 2)
        path = make(tmp_path / "replay", [1, 0, 0])
    with pytest.raises(StorageError, match="has format version 2, newer than 1: upgrade redline"):
        BlockFile.open(path, **SHAPE)


def test_a_copy_with_holes_gets_its_space_back(tmp_path: Path, whole: bytes) -> None:
    with open(tmp_path / "replay", "wb") as copy:
        copy.write(whole[:TABLE])
        copy.truncate(SIZE)
    assert os.stat(tmp_path / "replay").st_blocks * 512 < SIZE, "this file system has no holes"
    BlockFile.open(tmp_path / "replay", **SHAPE).close()
    assert os.stat(tmp_path / "replay").st_blocks * 512 >= SIZE


# Faults of the disk


def fail(number: int) -> Any:
    def failing(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    return failing


@pytest.mark.fault("F5")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_too_little_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    path = make(tmp_path / "old", [1, 0, 0])
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", fail(number))
        with pytest.raises(
            StorageError, match=rf"needs {SIZE:,} bytes and [\d,]+ are free \(.*reduce the replay capacity"
        ):
            BlockFile.create(tmp_path / "replay", **SHAPE)
        assert held(path) == [1, 0, 0]  # which has its space
    assert os.listdir(tmp_path) == ["old"]
    make(tmp_path / "replay", [1, 0, 0])


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fsync", "rename"])
def test_a_creation_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail(errno.EIO))
        with pytest.raises(StorageError, match="replay cannot be created: input/output error; check"):
            BlockFile.create(tmp_path / "replay", **SHAPE)
    assert os.listdir(tmp_path) == []
    assert held(make(tmp_path / "replay", [1, 0, 0])) == [1, 0, 0]


def test_a_new_name_is_synced_after_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, fsync = list[tuple[bool, bool]](), os.fsync

    def recording(fd: int) -> None:
        synced.append((os.path.samestat(os.fstat(fd), os.stat(tmp_path)), (tmp_path / "replay").exists()))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", recording)
    BlockFile.create(tmp_path / "replay", **SHAPE).close()
    assert synced == [(False, False), (True, True)]


def test_a_failing_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path / "replay", [1, 2, 0])
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail(errno.EIO))
        with pytest.raises(StorageError, match="cannot be opened: input/output error"):
            BlockFile.open(path, **SHAPE)
    with BlockFile.open(path, **SHAPE) as file:  # the failed opening holds no lock
        file.begin(0)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", fail(errno.EIO))
            with pytest.raises(StorageError, match="cannot be written: input/output error"):
                file.commit(0, 3)
        assert file.generations == [0, 2, 0]
    assert held(path) == [0, 2, 0]


@pytest.mark.fault("F2")
def test_a_truncation_while_mapped_is_found(tmp_path: Path) -> None:
    with BlockFile.create(tmp_path / "replay", **SHAPE) as file:
        put(file, 0, 1)
        file.check()
        os.truncate(file.path, DATA)  # from here on a touch of the mapping would end this process
        for use in (file.check, lambda: file.begin(0), lambda: file.commit(0, 2)):
            with pytest.raises(StorageError, match=rf"has {DATA:,} bytes, expected {SIZE:,}"):
                use()
        assert os.stat(file.path).st_size == DATA


@pytest.mark.fault("F2")
def test_a_file_deleted_or_replaced_while_in_use_is_found(tmp_path: Path) -> None:
    with BlockFile.create(tmp_path / "replay", **SHAPE) as file:
        file.path.unlink()
        with pytest.raises(StorageError, match="cannot be found: no such file"):
            file.check()
        make(tmp_path / "replay", [1, 0, 0])
        with pytest.raises(StorageError, match="was replaced"):
            file.commit(0, 1)
    assert held(tmp_path / "replay") == [1, 0, 0]


# Locks


def test_a_file_is_held_once_in_a_process(tmp_path: Path) -> None:
    with BlockFile.create(tmp_path / "replay", **SHAPE) as file:
        with pytest.raises(StorageError, match=r"^The replay file \S+replay is in use: .*another folder\.$"):
            BlockFile.open(file.path, **SHAPE)
        put(file, 0, 1)
    with BlockFile.open(tmp_path / "replay", **SHAPE), pytest.raises(StorageError, match="in use"):
        BlockFile.open(tmp_path / "replay", **SHAPE)
    assert held(tmp_path / "replay") == [1, 0, 0]


def test_a_name_is_made_once_at_a_time(tmp_path: Path) -> None:
    with open(tmp_path / ".tmp-replay", "wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(StorageError, match="in use"):
            BlockFile.create(tmp_path / "replay", **SHAPE)
    assert os.listdir(tmp_path) == [".tmp-replay"]
    make(tmp_path / "replay", [1, 0, 0])
    assert os.listdir(tmp_path) == ["replay"]


def test_a_refused_file_is_not_held(tmp_path: Path) -> None:
    path = make(tmp_path / "replay", [1, 0, 0])
    with pytest.raises(StorageError, match="other settings"):
        BlockFile.open(path, **{**SHAPE, "blocks": 9})
    assert held(path) == [1, 0, 0]


# Crashes

# Forks a process for every crash, so that torch is imported once. Tells what happened in one line of JSON.
CRASHES = """
import json, os, resource, signal, sys
sys.path.insert(0, os.path.dirname(sys.argv[1]))
from pathlib import Path
from test_block_file import BlockFile, SHAPE, StorageError, content, faults, file_module, make, put, torch

folder, found = Path(sys.argv[2]), {}
torch.set_num_threads(1)  # nothing but this thread is forked

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def forked(work):
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def refused(name, work):
    try:
        work()
    except StorageError as error:
        (folder / f"{name}.said").write_text(str(error))
        os._exit(0)

def overwrite(name, point):
    with BlockFile.open(folder / name, **SHAPE) as file:
        put(file, 2, 7)
        if point in faults.BLOCK_PHASES:
            faults.arm(f"kill@{point}")
        file.begin(1)
        if point == "begun":
            die()
        file.data[1, :2500] = content(1, 8)[:2500]
        if point == "half written":
            die()
        file.data[1] = content(1, 8)
        file.commit(1, 8)
        if point == "committed":
            die()

for point in (*faults.BLOCK_PHASES[1:], "begun", "half written", "committed"):
    make(folder / point, [3, 5, 4])
    found[point] = forked(lambda: overwrite(point, point))

def create():
    faults.arm("kill@blocks.create")
    make(folder / "created", [0, 0, 0])

found["created"] = forked(create)

def limited():
    resource.setrlimit(resource.RLIMIT_FSIZE, (20000, resource.RLIM_INFINITY))
    refused("limited", lambda: make(folder / "limited", [0, 0, 0]))

found["limited"] = forked(limited)

make(folder / "locked", [3, 5, 4])
with BlockFile.open(folder / "locked", **SHAPE):
    found["locked"] = forked(lambda: refused("locked", lambda: BlockFile.open(folder / "locked", **SHAPE)))

def orphan():
    file = BlockFile.open(folder / "locked", **SHAPE)
    started, begin = os.pipe()
    if os.fork() == 0:
        os.write(begin, b"1")  # its copy of the file's descriptor is closed
        os.close(end)
        os.read(start, 1)  # the worker stays until the test is over
        os._exit(0)
    os.read(started, 1)
    die()

start, end = os.pipe()
found["orphan"] = forked(orphan)
BlockFile.open(folder / "locked", **SHAPE).close()
found["opened beside the orphan"] = 0
os.close(end)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    """The folder the crashes left, and how each process ended."""
    folder = tmp_path_factory.mktemp("crashed")
    command = [sys.executable, "-c", CRASHES, __file__, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout)


@pytest.mark.fault("F3")
@pytest.mark.parametrize(
    ("point", "left"),
    [
        ("blocks.begin", 5),
        ("begun", 0),
        ("half written", 0),
        ("blocks.data", 0),
        ("blocks.entry", 0),
        ("committed", 8),
    ],
)
@pytest.mark.parametrize("verify", [True, False])
def test_killed_at(crashed: tuple[Path, dict[str, int]], point: str, left: int, verify: bool) -> None:
    folder, ended = crashed
    assert ended[point] == -9  # it was the kill
    assert held(folder / point, verify=verify) == [3, left, 7]


@pytest.mark.fault("F3")
def test_killed_in_creation(crashed: tuple[Path, dict[str, int]]) -> None:
    folder, ended = crashed
    assert ended["created"] == -9
    assert not (folder / "created").exists()
    left = folder / ".tmp-created"
    os.truncate(left, 3 * SIZE)  # of another capacity, say
    assert held(make(folder / "created", [1, 2, 0])) == [1, 2, 0]
    assert not left.exists()


@pytest.mark.fault("F5")
def test_a_limit_on_the_size_of_files_is_refused_at_once(crashed: tuple[Path, dict[str, int]]) -> None:
    folder, ended = crashed
    assert ended["limited"] == 0
    assert f"needs {SIZE:,} bytes and " in (folder / "limited.said").read_text()
    assert "file too large" in (folder / "limited.said").read_text()
    assert not {"limited", ".tmp-limited"} & {*os.listdir(folder)}


@pytest.mark.fault("F2")
def test_a_second_process_is_refused(crashed: tuple[Path, dict[str, int]]) -> None:
    folder, ended = crashed
    assert ended["locked"] == 0
    assert "locked is in use: wait for the run that uses it" in (folder / "locked.said").read_text()


def test_a_worker_does_not_keep_the_lock_of_a_killed_trainer(crashed: tuple[Path, dict[str, int]]) -> None:
    _, ended = crashed
    assert ended["orphan"] == -9
    assert ended["opened beside the orphan"] == 0


class PowerCut(Exception):
    pass


@pytest.mark.fault("F3")
@given(st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=6), st.data())
def test_after_a_power_cut_every_valid_block_is_whole(folder: Path, blocks: list[int], data: st.DataObject) -> None:
    """Of what was not synced any pages reach the disk: no order of writes but that of the syncs may be relied on."""
    path, left = folder / "cut", data.draw(st.integers(0, 5 * len(blocks)), label="moments before the cut")
    path.unlink(missing_ok=True)
    promised = [0] * BLOCKS  # generations of the commits that returned
    allowed = [{0} for _ in range(BLOCKS)]  # generations a block may be found with
    sync = os.fdatasync
    make(path, [0] * BLOCKS)
    synced = path.read_bytes()

    def moment() -> None:
        nonlocal left
        if left == 0:
            raise PowerCut
        left -= 1

    def fdatasync(fd: int) -> None:
        nonlocal synced
        moment()
        sync(fd)
        synced = path.read_bytes()

    with BlockFile.open(path, **SHAPE) as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fdatasync", fdatasync)
        try:
            for generation, block in enumerate(blocks, 1):
                allowed[block] = {promised[block], 0}
                file.begin(block)
                allowed[block] = {0}
                file.data[block, :2500] = content(block, generation)[:2500]
                moment()
                file.data[block] = content(block, generation)
                moment()
                allowed[block] = {0, generation}
                file.commit(block, generation)
                promised[block], allowed[block] = generation, {generation}
        except PowerCut:
            pass
        now = path.read_bytes()
    survived = data.draw(st.lists(st.booleans(), min_size=SIZE // 4096, max_size=SIZE // 4096), label="pages written")
    pages = [(now if new else synced)[n * 4096 : (n + 1) * 4096] for n, new in enumerate(survived)]
    path.write_bytes(b"".join(pages))
    for verify in (False, True):  # the order alone keeps them whole, without the CRC
        for generation, possible in zip(held(path, verify=verify), allowed, strict=True):
            assert generation in possible
