"""What faults.md promises of checkpoints and storage, row by row."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import pickle
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from safetensors.torch import save as library_save

from redline.core import faults
from redline.core.errors import StorageError, UserError
from redline.run import atomic_files, manifest, run_folder
from redline.run import checkpoint as checkpoint_module
from redline.run.checkpoint import Checkpoint, Checkpoints, RunLock, copy_into, prepare_run_dir, strip_prefixes

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"
Run = namedtuple("Run", "path checkpoints notes")


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    faults.arm("")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A run folder, its checkpoints with the lock held, and what the user was told."""
    path, notes = prepare_run_dir(tmp_path / "run"), []
    with RunLock(path) as held:
        checkpoints = Checkpoints(path, lock=held, notify=notes.append)
        yield Run(path, checkpoints, notes)
        checkpoints.wait()


def content(step: int) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"w": torch.full((64,), float(step))}, "optim": {"m": torch.arange(step, step + 9)}}


def save(checkpoints: Checkpoints, *steps: int, **options: Any) -> None:
    for step in steps:
        checkpoints.save(step, content(step), {"step": step}, background=False, **options)


def assert_is(checkpoint: Checkpoint | None, step: int) -> None:
    assert checkpoint is not None
    assert checkpoint.step == step
    assert checkpoint.state == {"step": step}
    for group, named in content(step).items():
        for name, tensor in named.items():
            assert torch.equal(checkpoint.tensors[group][name], tensor)


def names(run: Run) -> list[str]:
    return sorted(os.listdir(run.path / "checkpoints"))


def folder(run: Run, step: int) -> Path:
    return run.path / "checkpoints" / f"ckpt-{step:012d}"


def edit_manifest(path: Path, seal: bool = True, **changes: Any) -> None:
    """Change a manifest as an attacker would, who also knows how to seal it."""
    content = json.loads((path / "manifest.json").read_text()) | changes
    if seal:
        content["digest"] = manifest.digest({key: value for key, value in content.items() if key != "digest"})
    (path / "manifest.json").write_text(json.dumps(content))


def replace_file(path: Path, name: str, data: bytes) -> None:
    """Put `data` into a checkpoint's file with a manifest that agrees."""
    (path / name).unlink(missing_ok=True)
    entry = atomic_files.write_bytes(path / name, data)
    edit_manifest(path, files=json.loads((path / "manifest.json").read_text())["files"] | {name: entry})


# ---- round trip


def test_every_dtype_and_layout_round_trips(run: Run) -> None:
    base = torch.arange(24, dtype=torch.float32).view(4, 6)
    model = {
        "bool": torch.tensor([True, False, True]),
        "int8": torch.tensor([-128, 127], dtype=torch.int8),
        "int16": torch.tensor([[-(2**15)], [2**15 - 1]], dtype=torch.int16),
        "int32": torch.tensor([-(2**31), 2**31 - 1], dtype=torch.int32),
        "int64": torch.tensor([-(2**63), 2**63 - 1]),
        "uint8": torch.arange(256, dtype=torch.uint8),
        "float16": torch.tensor([65504.0], dtype=torch.float16),
        "bfloat16": torch.tensor([1e38, -0.0], dtype=torch.bfloat16),
        "float32": torch.tensor([1e-45, 3.4e38]),
        "float64": torch.tensor([5e-324], dtype=torch.float64),
        "zero_dim": torch.tensor(7),
        "zero_dim_bool": torch.tensor(True),
        "empty": torch.empty(0, 3),
        "transposed": base.t(),
        "strided": base[:, ::2],
        "expanded": torch.tensor([1.0]).expand(5),
        "alias_1": base,
        "alias_2": base,
        "overlapping": base[1:],
        "parameter": torch.nn.Parameter(torch.ones(2)),
        'ünïcode "name" / ..': torch.zeros(1),
    }
    run.checkpoints.save(5, {"model": model, "replay": {}}, {"a": [1, None, "ü"], "nan": math.nan}, background=False)
    loaded = run.checkpoints.load()
    assert loaded is not None
    assert loaded.tensors["replay"] == {}
    assert loaded.state["a"] == [1, None, "ü"]
    assert math.isnan(loaded.state["nan"])
    assert loaded.tensors["model"].keys() == model.keys()
    for name, tensor in model.items():
        back = loaded.tensors["model"][name]
        assert (back.dtype, back.shape, back.device.type) == (tensor.dtype, tensor.shape, "cpu"), name
        assert back.is_contiguous(), name
        assert torch.equal(back, tensor), name
    loaded.tensors["model"]["alias_1"].zero_()
    assert torch.equal(loaded.tensors["model"]["alias_2"], base)


def test_files_are_safetensors_for_the_library_and_back(run: Run) -> None:
    tensors = {"b": torch.tensor([True]), "x": torch.randn(3, 5), "n": torch.tensor(3), "h": torch.ones(2).bfloat16()}
    run.checkpoints.save(1, {"model": tensors, "empty": {}}, {}, background=False)
    read = load_file(folder(run, 1) / "model.safetensors")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    with safe_open(folder(run, 1) / "empty.safetensors", framework="pt") as file:
        assert list(file.keys()) == []
    # and a file by the library, with metadata of its own, is read here
    replace_file(folder(run, 1), "model.safetensors", library_save(tensors, metadata={"format": "pt"}))
    back = run.checkpoints.load().tensors["model"]
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


def test_background_save_holds_the_values_at_the_call(run: Run) -> None:
    tensors, state = content(1), {"step": 1}
    faults.arm("slow@save:0.2s")
    run.checkpoints.save(1, tensors, state)
    tensors["model"]["w"].fill_(-1.0)
    tensors["optim"]["m"].zero_()
    state["step"] = 99
    run.checkpoints.wait()
    assert_is(run.checkpoints.load(), 1)


def test_some_groups_only_and_only_their_files_are_read(run: Run) -> None:
    save(run.checkpoints, 1)
    (folder(run, 1) / "optim.safetensors").write_bytes(b"damaged")
    loaded = run.checkpoints.load(["model", "replay"])
    assert loaded is not None
    assert set(loaded.tensors) == {"model"}
    with pytest.raises(StorageError):
        run.checkpoints.load()


def test_manifest_says_what_was_saved(tmp_path: Path) -> None:
    path = prepare_run_dir(tmp_path)
    with RunLock(path) as held:
        checkpoints = Checkpoints(path, lock=held, config_hash="c", env_hash="e", world_size=2)
        save(checkpoints, 3, score=1.5, resume_level="L1")
        found = checkpoints.load().manifest
    assert found["format_version"] == 2
    assert (found["config_hash"], found["env_hash"], found["world_size"]) == ("c", "e", 2)
    assert (found["score"], found["resume_level"]) == (1.5, "L1")
    assert found["versions"]["torch"] == str(torch.__version__)
    assert set(found["files"]) == {"model.safetensors", "optim.safetensors", "state.json"}
    assert (path / "checkpoints" / "LATEST").read_text() == "ckpt-000000000003\n"


# ---- A1, A6, A14: killed anywhere, disk full


@pytest.fixture(scope="module")
def crashes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    root = tmp_path_factory.mktemp("crashes")
    done = subprocess.run(
        [sys.executable, str(HERE / "crash_saves.py"), str(root)],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return {line["phase"]: line for line in map(json.loads, done.stdout.splitlines())}


@pytest.mark.fault("A1")
@pytest.mark.parametrize("phase", faults.SAVE_PHASES)
def test_killed_at(phase: str, crashes: dict[str, dict[str, Any]]) -> None:
    found = crashes[phase]
    assert found["signal"] == 9  # it was the kill, at this phase
    visible = faults.SAVE_PHASES.index(phase) > faults.SAVE_PHASES.index("save.rename")
    assert found["step"] == (2 if visible else 1)
    assert found["right"]
    assert not [name for name in found["names"] if name.startswith(".")]
    assert found["notes"] == []  # nothing was damaged, so nothing is said to be
    if phase == "save.prune":
        assert any(name.startswith(".trash-") for name in found["left"])
        assert found["names"] == ["LATEST", "ckpt-000000000002"]
    elif phase != "save" and not visible:
        assert any(name.startswith(".tmp-2-") for name in found["left"])


@pytest.mark.fault("A6")
def test_full_disk_leaves_the_last_checkpoint_and_recovers(crashes: dict[str, dict[str, Any]]) -> None:
    found = crashes["full disk"]
    assert found["failures"] == [1, 2, 0]
    assert found["step_while_full"] == 1
    assert found["names_while_full"] == ["LATEST", "ckpt-000000000001"]
    assert "GB free" in found["raised"]
    assert "step 3" in found["raised"]
    assert len(found["notes"]) == 1
    assert "0.001 GB needed" in found["notes"][0]
    assert found["step"] == 4
    assert found["right"]


@pytest.mark.fault("A6")
def test_disk_too_full_is_seen_before_writing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    save(run.checkpoints, 1)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(checkpoint_module.shutil, "disk_usage", lambda _: usage(10**9, 10**9, 2000))
    monkeypatch.setattr(checkpoint_module, "write_tensors", lambda *_: pytest.fail("written to a full disk"))
    run.checkpoints.save(2, content(2), {})
    run.checkpoints.wait()
    assert run.checkpoints.failures == 1
    assert run.checkpoints.last_error
    assert "no space left on device: 0.001 GB needed, 0.000 GB free" in run.notes[0]
    assert names(run) == ["LATEST", "ckpt-000000000001"]


@pytest.mark.fault("A6")
def test_failing_write_removes_its_folder_and_raises_only_in_the_foreground(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run.checkpoints, 1)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(atomic_files.os, "fsync", full)
        run.checkpoints.save(2, content(2), {})
        run.checkpoints.wait()
        assert run.checkpoints.failures == 1
        with pytest.raises(StorageError, match="step 3 was not written") as raised:
            save(run.checkpoints, 3)
        assert raised.value.exit_code == 74
    assert run.checkpoints.failures == 2
    assert names(run) == ["LATEST", "ckpt-000000000001"]
    assert_is(run.checkpoints.load(), 1)
    save(run.checkpoints, 4)
    assert run.checkpoints.failures == 0
    assert_is(run.checkpoints.load(), 4)


@pytest.mark.fault("A2")
def test_a_write_that_does_not_reach_the_disk_whole_is_found_and_deleted(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run.checkpoints, 1)
    rename = os.rename

    def lossy(source: Path, target: Path) -> None:
        if Path(target).name.startswith("ckpt-"):
            os.truncate(Path(source) / "model.safetensors", 100)
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module.os, "rename", lossy)
        with pytest.raises(StorageError, match=r"model\.safetensors has 100 bytes"):
            save(run.checkpoints, 2)
    assert names(run) == ["LATEST", "ckpt-000000000001"]
    assert_is(run.checkpoints.load(), 1)


def test_failing_tidying_does_not_fail_the_save(run: Run) -> None:
    faults.arm("raise@save.latest")
    save(run.checkpoints, 1)
    assert run.checkpoints.failures == 0
    assert run.checkpoints.last_step == 1
    assert "tidying" in run.notes[0]
    assert_is(run.checkpoints.load(), 1)


@pytest.mark.fault("A1", "A14")
def test_leftovers_are_cleared_by_the_holder_of_the_lock_only(run: Run) -> None:
    save(run.checkpoints, 1)
    parent = run.path / "checkpoints"
    for name in (".tmp-2-77-abcd", ".trash-ckpt-000000000000-abcd"):
        (parent / name).mkdir()
        (parent / name / "model.safetensors").write_bytes(b"part")
    (parent / ".tmp-LATEST-abcd").write_bytes(b"part")
    Checkpoints(run.path)
    assert len(names(run)) == 5
    Checkpoints(run.path, lock=run.checkpoints._lock)
    assert names(run) == ["LATEST", "ckpt-000000000001"]


# ---- A2 to A5: damaged checkpoints


@pytest.mark.fault("A2", "A4")
@pytest.mark.parametrize("name", ["model.safetensors", "optim.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["truncated", "empty", "missing", "longer", "folder", "link", "pipe"])
def test_damaged_file_is_named_and_the_checkpoint_before_loads(run: Run, name: str, damage: str) -> None:
    save(run.checkpoints, 1, 2)
    path = folder(run, 2) / name
    original = path.read_bytes()
    if damage == "truncated":
        os.truncate(path, len(original) - 1)
    elif damage == "empty":
        os.truncate(path, 0)
    elif damage == "longer":
        path.write_bytes(original + b"\0")
    else:
        path.unlink()
    if damage == "folder":
        path.mkdir()
    elif damage == "link":
        (run.path / "elsewhere").write_bytes(original)
        path.symlink_to(run.path / "elsewhere")
    elif damage == "pipe":
        os.mkfifo(path)
    assert_is(run.checkpoints.load(), 1)
    assert len(run.notes) == 1
    assert "ckpt-000000000002" in run.notes[0]
    assert name in run.notes[0]
    assert [found for found in names(run) if found.startswith(".corrupt-ckpt-000000000002-")]
    assert not folder(run, 2).exists()
    assert_is(run.checkpoints.load(), 1)  # told once
    assert len(run.notes) == 1


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = prepare_run_dir(tmp_path_factory.mktemp("saved"))
    with RunLock(path) as held:
        save(Checkpoints(path, lock=held), 1, score=1.0)
    return path / "checkpoints" / "ckpt-000000000001"


@pytest.mark.fault("A3")
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(["model.safetensors", "optim.safetensors", "state.json"]),
    where=st.floats(0, 1, exclude_max=True),
    flip=st.integers(1, 255),
)
def test_flipped_bits_are_found(saved: Path, name: str, where: float, flip: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        copy = Path(shutil.copytree(saved, Path(place) / saved.name))
        data = bytearray((copy / name).read_bytes())
        data[int(where * len(data))] ^= flip
        (copy / name).write_bytes(data)
        with pytest.raises(StorageError, match=name.replace(".", r"\.")):
            manifest.read_checkpoint(copy)


@pytest.mark.fault("A3", "A4")
@settings(max_examples=60, deadline=None, derandomize=True)
@given(where=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_flipped_bits_in_the_manifest_change_nothing_unseen(saved: Path, where: float, flip: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        copy = Path(shutil.copytree(saved, Path(place) / saved.name))
        data = bytearray((copy / "manifest.json").read_bytes())
        data[int(where * len(data))] ^= flip
        (copy / "manifest.json").write_bytes(data)
        try:
            found, refused = manifest.read_checkpoint(copy), ""
        except UserError as error:
            found, refused = None, str(error)
        if found is None:  # the digit of format_version may become a newer one
            assert "manifest.json" in refused or "newer Redline" in refused
        else:  # a blank between words was hit
            assert found.manifest == json.loads((saved / "manifest.json").read_text())


BROKEN = ["", "{", "null", "[]", "3", '"x"', "{}", "\xff\xfe", "[" * 100_000, "0" * 5000, " " * (1 << 20) + "{}"]
BROKEN += [f'{{"format_version": {value}}}' for value in ('"1"', "true", "0", "-1", "1.0", '1, "files": []')]


@pytest.mark.fault("A4")
@pytest.mark.parametrize("text", BROKEN, ids=lambda text: text[:24])
def test_broken_manifest_is_passed_over(run: Run, text: str) -> None:
    save(run.checkpoints, 1, 2)
    (folder(run, 2) / "manifest.json").write_text(text, encoding="latin-1")
    assert_is(run.checkpoints.load(), 1)
    assert "manifest.json" in run.notes[0]


@pytest.mark.fault("A4")
@pytest.mark.parametrize("key", sorted(set(manifest._MANIFEST_TYPES) - {"digest", "format_version"}))
@pytest.mark.parametrize("value", [True, [1], "gone"], ids=str)
def test_wrong_types_in_a_sealed_manifest(saved: Path, tmp_path: Path, key: str, value: Any) -> None:
    copy = Path(shutil.copytree(saved, tmp_path / saved.name))
    if value == "gone":
        found = json.loads((copy / "manifest.json").read_text())
        del found[key]
        (copy / "manifest.json").write_text(json.dumps(found))
        edit_manifest(copy)
    else:
        edit_manifest(copy, **{key: value})
    with pytest.raises(StorageError, match=r"manifest\.json"):
        manifest.read_checkpoint(copy)


@pytest.mark.fault("A5")
def test_all_damaged_is_an_error_and_stays_one(run: Run) -> None:
    save(run.checkpoints, 1, 2)
    for step in (1, 2):
        (folder(run, step) / "manifest.json").unlink()
    for _ in range(2):  # the second start finds no checkpoint at all, and must not start from scratch either
        with pytest.raises(StorageError, match="--resume never") as raised:
            Checkpoints(run.path, lock=run.checkpoints._lock, notify=run.notes.append).load()
        assert raised.value.exit_code == 74
    assert len(run.notes) == 2
    assert run.checkpoints.set_aside() is not None
    assert run.checkpoints.load() is None  # after a deliberate fresh start


def test_no_checkpoint_is_none(run: Run) -> None:
    assert run.checkpoints.load() is None
    assert run.checkpoints.best() is None
    assert Checkpoints(run.path / "nowhere").load() is None


@pytest.mark.fault("A5")
def test_unreadable_folder_is_an_error_not_a_fresh_start(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    save(run.checkpoints, 1)

    def refused(_: Any) -> list[str]:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(checkpoint_module.os, "listdir", refused)
    with pytest.raises(StorageError, match="permission denied"):
        run.checkpoints.load()


def test_trouble_of_the_machine_is_not_called_damage(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    save(run.checkpoints, 1)

    def refused(*_: Any, **__: Any) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(atomic_files.os, "open", refused)
        with pytest.raises(StorageError, match="too many open files"):
            run.checkpoints.load()
    assert_is(run.checkpoints.load(), 1)


def test_a_reader_moves_nothing(run: Run) -> None:
    save(run.checkpoints, 1, 2)
    (folder(run, 2) / "state.json").write_bytes(b"x")
    before = names(run)
    reader = Checkpoints(run.path, notify=run.notes.append)
    assert_is(reader.load(), 1)
    assert names(run) == before
    assert "state.json" in run.notes[0]
    with pytest.raises(StorageError, match="lock"):
        save(reader, 3)
    with pytest.raises(StorageError, match="lock"):
        reader.set_aside()


def test_a_reader_looks_again_when_a_checkpoint_was_pruned_under_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    save(run.checkpoints, 1)
    real = checkpoint_module.read

    def racing(path: Path, groups: Any) -> Checkpoint:
        if path.name.endswith("1"):
            save(run.checkpoints, 2)
            shutil.rmtree(folder(run, 1))
        return real(path, groups)

    monkeypatch.setattr(checkpoint_module, "read", racing)
    assert_is(Checkpoints(run.path, notify=run.notes.append).load(), 2)
    assert run.notes == []


def test_load_path(run: Run, tmp_path: Path) -> None:
    save(run.checkpoints, 1, 2)
    assert_is(run.checkpoints.load_path(folder(run, 1)), 1)
    with pytest.raises(StorageError, match=r"manifest\.json cannot be read"):
        run.checkpoints.load_path(tmp_path)
    os.truncate(folder(run, 2) / "optim.safetensors", 7)
    with pytest.raises(StorageError, match=r"optim\.safetensors"):
        run.checkpoints.load_path(folder(run, 2))
    assert folder(run, 2).exists()


# ---- A8, A9: run folder and lock


@pytest.mark.fault("A8")
def test_run_folder_under_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(
            StorageError, match=r"file is a file, not a folder; choose another with --run-dir"
        ) as raised:
            prepare_run_dir(path)
        assert raised.value.exit_code == 74
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


@pytest.mark.fault("A8")
def test_run_folder_without_permission(tmp_path: Path) -> None:
    was = os.geteuid()
    tmp_path.chmod(0o500)
    try:
        if was == 0:  # root may write everywhere, so be somebody else for a moment
            os.seteuid(65534)
        for path in (tmp_path, tmp_path / "run"):
            with pytest.raises(StorageError, match="cannot be written: permission denied; choose another") as raised:
                prepare_run_dir(path)
            assert raised.value.exit_code == 74
    finally:
        os.seteuid(was)
        tmp_path.chmod(0o700)


@pytest.mark.fault("A8")
def test_run_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(_: int) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(run_folder.os, "fsync", read_only)
        with pytest.raises(StorageError, match="read-only file system"):
            prepare_run_dir(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StorageError, match="null"):
        prepare_run_dir("a\0b")
    assert prepare_run_dir(tmp_path / "ü b" / "c").is_dir()


@pytest.mark.fault("A9")
def test_two_processes_on_one_folder(tmp_path: Path) -> None:
    # lock.py needs no torch, so these processes start fast
    hold = (
        "import sys; from redline.run.lock import RunLock\n"
        "held = RunLock(sys.argv[1]); print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(
            StorageError, match=rf"in use by process {holder.pid} on host {os.uname().nodename}"
        ) as raised:
            RunLock(tmp_path)
        assert raised.value.exit_code == 74
        holder.kill()
        holder.wait(10)
        assert str(holder.pid) in (tmp_path / ".lock").read_text()  # the stale text of a crash …
        with RunLock(tmp_path) as taken:  # … keeps nobody out
            assert taken.held
            assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
            with pytest.raises(StorageError, match=str(os.getpid())):
                RunLock(tmp_path)
        assert not taken.held
        RunLock(tmp_path).close()
    finally:
        holder.kill()
        holder.communicate()


@pytest.mark.fault("A9")
def test_a_forked_worker_does_not_keep_the_lock(tmp_path: Path) -> None:
    script = (
        "import os, sys, time; from redline.run.lock import RunLock\n"
        "held = RunLock(sys.argv[1])\n"
        "if os.fork() == 0: print(os.getpid(), held.held, flush=True); time.sleep(60)\n"
        "os.wait()"
    )
    trainer = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stdout=subprocess.PIPE,
        text=True,
    )
    worker, held = trainer.stdout.readline().split()
    try:
        assert held == "False"
        with pytest.raises(StorageError, match=str(trainer.pid)):
            RunLock(tmp_path)
        trainer.kill()
        trainer.wait(10)
        os.kill(int(worker), 0)  # it lives on
        RunLock(tmp_path).close()
    finally:
        os.kill(int(worker), 9)
        trainer.stdout.close()


@pytest.mark.fault("A9")
def test_file_system_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    notes: list[str] = []
    with RunLock(tmp_path, notify=notes.append) as held:
        assert held.held
    assert "no locks" in notes[0]


def test_a_closed_lock_writes_no_more(tmp_path: Path) -> None:
    held = RunLock(tmp_path)
    checkpoints = Checkpoints(tmp_path, lock=held)
    held.close()
    held.close()
    with pytest.raises(StorageError, match="lock"):
        save(checkpoints, 1)


# ---- A10, A11: versions and settings


@pytest.mark.fault("A10")
def test_golden_v1_is_refused_with_one_sentence(tmp_path: Path) -> None:
    """Format 1 used other names for options and tensors. Nothing is moved or called damaged."""
    sentence = r"was written by an earlier version of Redline \(format 1, this one reads 2\); train it anew or use that"
    golden = HERE / "golden" / "v1" / "ckpt-000000000042"
    with pytest.raises(UserError, match=sentence) as raised:
        manifest.read_checkpoint(golden)
    assert raised.value.exit_code == 2
    shutil.copytree(golden, tmp_path / "checkpoints" / golden.name)
    with RunLock(tmp_path) as held, pytest.raises(UserError, match=sentence):
        Checkpoints(tmp_path, lock=held).load()
    assert os.listdir(tmp_path / "checkpoints") == [golden.name]


@pytest.mark.fault("A10")
def test_golden_v2_loads() -> None:
    found = manifest.read_checkpoint(HERE / "golden" / "v2" / "ckpt-000000000042")
    assert found.step == 42
    assert found.state == {"updates": 7, "epsilon": 0.125, "stage": "small"}
    assert found.manifest["score"] == 12.5
    assert found.manifest["resume_level"] == "L2"
    assert (found.manifest["config_hash"], found.manifest["env_hash"]) == ("c0ffee", "5eed")
    expected = {
        "model": {
            "fc.weight": torch.tensor([[1.5, -2.0], [0.25, 3.0]]),
            "fc.bias": torch.tensor([0.5, -0.5], dtype=torch.bfloat16),
        },
        "optim": {"step": torch.tensor(7)},
        "rng": {"torch": torch.tensor([1, 2, 255], dtype=torch.uint8)},
        "envs": {"alive": torch.tensor([True, False]), "board": torch.tensor([[-1, 3]], dtype=torch.int8)},
        "replay": {},
    }
    assert {group: set(named) for group, named in found.tensors.items()} == {g: set(n) for g, n in expected.items()}
    for group, named in expected.items():
        for name, tensor in named.items():
            back = found.tensors[group][name]
            assert back.dtype == tensor.dtype
            assert torch.equal(back, tensor)


@pytest.mark.fault("A10")
@pytest.mark.parametrize("changes", [{"format_version": 3}, {"invented_later": 1}])
def test_newer_format_is_refused_and_kept(run: Run, changes: dict[str, Any]) -> None:
    save(run.checkpoints, 1, 2)
    edit_manifest(folder(run, 2), **changes)
    before = names(run)
    for load in (run.checkpoints.load, run.checkpoints.best, lambda: run.checkpoints.load_path(folder(run, 2))):
        with pytest.raises(UserError, match=r"newer Redline.*upgrade") as raised:
            load()
        assert raised.value.exit_code == 2
    assert names(run) == before
    run.checkpoints.keep_last = 1
    save(run.checkpoints, 3)
    assert folder(run, 2).exists()  # pruning leaves alone what it cannot read


@pytest.mark.fault("A10")
def test_older_format_is_migrated(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def migrate(old: Checkpoint) -> Checkpoint:
        return Checkpoint(old.path, old.step, old.tensors, old.state | {"migrated": True}, old.manifest)

    monkeypatch.setattr(manifest, "FORMAT_VERSION", 3)
    monkeypatch.setitem(manifest.MIGRATIONS, 2, migrate)
    assert manifest.read_checkpoint(saved).state == {"step": 1, "migrated": True}


@pytest.mark.fault("A11")
def test_other_environment_is_refused_other_settings_are_told(run: Run) -> None:
    held = run.checkpoints._lock
    save(Checkpoints(run.path, lock=held, env_hash="snake10", config_hash="lr1"), 1)
    with pytest.raises(UserError, match="snake10, now snake12"):
        Checkpoints(run.path, lock=held, env_hash="snake12").load()
    same_env = Checkpoints(run.path, lock=held, env_hash="snake10", config_hash="lr2", notify=run.notes.append)
    assert_is(same_env.load(), 1)
    assert "other settings" in run.notes[0]
    assert_is(Checkpoints(run.path).load(), 1)  # eval and watch ask for nothing


@pytest.mark.fault("A11")
def test_weights_that_do_not_fit_are_named_and_nothing_is_copied() -> None:
    target = {"a": torch.zeros(2), "b": torch.zeros(3)}
    for saved, said in (
        ({"a": torch.ones(2)}, "'b' is missing"),
        ({"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(1)}, "'c' is unknown"),
        ({"a": torch.ones(2), "b": torch.ones(4)}, r"'b' is float32\[4\] in the checkpoint, float32\[3\] here"),
        ({"a": torch.ones(2), "b": torch.ones(3).half()}, "float16"),
    ):
        with pytest.raises(UserError, match=said):
            copy_into(target, saved)
        assert not target["a"].any()
    pointer = target["a"].data_ptr()
    copy_into(target, {"_orig_mod.a": torch.ones(2), "_orig_mod.b": torch.ones(3)})
    assert target["a"].data_ptr() == pointer  # in place: CUDA graphs keep reading there
    assert target["a"].all()
    assert target["b"].all()


@pytest.mark.parametrize(("height", "width"), [(10, 10), (5, 5), (12, 12), (13, 13)])
def test_boards_of_a_snake_that_were_saved_cell_by_cell(height: int, width: int) -> None:
    """Older checkpoints hold an int8 or, above 127 cells, an int16 for each cell; other sizes of the board do not fit."""
    dtype, each = (torch.int8, 4) if height * width <= 127 else (torch.int16, 2)
    saved = torch.arange(3 * height * width).view(3, height, width).to(dtype) % 100
    words = torch.zeros(3, -(-height * width // each), dtype=torch.int32)
    copy_into({"ages": words}, {"ages": saved})
    cells = words.view(dtype)[:, : height * width]
    assert torch.equal(cells, saved.flatten(1))
    with pytest.raises(UserError, match="'ages' is int"):
        copy_into({"ages": words}, {"ages": torch.zeros(3, height + 1, width, dtype=dtype)})


# ---- A12: hostile files


class _Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("unpickled",))


def _file(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


HOSTILE = {
    "pickle": pickle.dumps(_Payload()),
    "short": b"1234567",
    "huge header": struct.pack("<Q", 2**63) + b"{}",
    "header over the end": struct.pack("<Q", 100) + b"{}",
    "not JSON": _file(b"{'a'}"),
    "deep": _file(b"[" * 200_000),
    "list": _file([]),
    "no entry": _file({"x": 3}),
    "unknown dtype": _file(_entry(dtype="PICKLE"), bytes(8)),
    "dtype list": _file(_entry(dtype=["F32"]), bytes(8)),
    "negative": _file(_entry(shape=[-2, -1]), bytes(8)),
    "float shape": _file(_entry(shape=[2.0]), bytes(8)),
    "bool shape": _file(_entry(shape=[True, 2]), bytes(8)),
    "terabytes": _file(_entry(shape=[1 << 40], offsets=[0, 1 << 42]), bytes(8)),
    "overflow": _file(_entry(shape=[1 << 32, 1 << 32, 1 << 32]), bytes(8)),
    "shape and offsets disagree": _file(_entry(shape=[1]), bytes(8)),
    "beyond the end": _file(_entry(offsets=[8, 16]), bytes(16)),
    "overlap": _file(_entry() | {"y": _entry()["x"]}, bytes(8)),
    "unnamed rest": _file(_entry(), bytes(9)),
    "many dimensions": _file(_entry(shape=[1] * 1000, offsets=[0, 4]), bytes(4)),
}


@pytest.mark.fault("A12")
@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_tensor_file(saved: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, lambda *_, **__: pytest.fail("unpickled"))
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("torch.load"))
    monkeypatch.setattr(
        atomic_files.torch, "empty", lambda *_, **__: pytest.fail("allocated before the sizes were checked")
    )
    copy = Path(shutil.copytree(saved, tmp_path / saved.name))
    replace_file(copy, "model.safetensors", HOSTILE[kind])
    with pytest.raises(StorageError, match=r"model\.safetensors"):
        manifest.read_checkpoint(copy, ["model"])


@pytest.mark.fault("A12")
def test_a_file_larger_than_memory_is_not_read(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = Path(shutil.copytree(saved, tmp_path / saved.name))
    monkeypatch.setattr(atomic_files, "_MEMORY", 100)
    with pytest.raises(StorageError, match="more than the memory"):
        manifest.read_checkpoint(copy)


@pytest.mark.fault("A12")
@pytest.mark.parametrize("name", ["../../evil", "/etc/passwd", "..", "model", "a/b.safetensors", "Model.safetensors"])
def test_hostile_names_in_the_manifest(saved: Path, tmp_path: Path, name: str) -> None:
    copy = Path(shutil.copytree(saved, tmp_path / saved.name))
    entry = {"bytes": 0, "sha256": ""}
    edit_manifest(copy, files=json.loads((copy / "manifest.json").read_text())["files"] | {name: entry})
    with pytest.raises(StorageError, match="which no checkpoint has"):
        manifest.read_checkpoint(copy)


@pytest.mark.fault("A12")
@pytest.mark.parametrize("group", ["", "..", "../x", "a/b", "a.b", "Model", "a\0", "é", "a\n", "x" * 65])
def test_hostile_group_names(run: Run, group: str) -> None:
    with pytest.raises(ValueError, match="group name"):
        run.checkpoints.save(1, {group: {}}, {})
    assert not (run.path / "checkpoints").exists()


def test_mistakes_of_the_caller_raise_at_once(run: Run) -> None:
    for tensors, options, said in (
        ({"model": {"__metadata__": torch.ones(1)}}, {}, "__metadata__"),
        ({"model": {"c": torch.ones(1, dtype=torch.complex64)}}, {}, "complex64"),
        ({"model": {"s": torch.ones(1).to_sparse()}}, {}, "sparse"),
        ({}, {"resume_level": "L9"}, "L9"),
        ({}, {"step": -1}, "step is -1"),
    ):
        with pytest.raises(ValueError, match=said):
            run.checkpoints.save(**({"step": 1, "tensors": tensors, "state": {}} | options))
    with pytest.raises(TypeError):
        run.checkpoints.save(1, {}, {"x": object()})
    with pytest.raises(UserError, match="keep_last"):
        Checkpoints(run.path, keep_last=0)
    assert run.checkpoints.failures == 0


def test_step_of_name_and_manifest_must_agree(run: Run) -> None:
    save(run.checkpoints, 1, 2)
    folder(run, 2).rename(folder(run, 9))
    assert_is(run.checkpoints.load(), 1)
    assert "says step 2, the folder's name 9" in run.notes[0]


# ---- A13 to A15: order, pruning, best


@pytest.mark.fault("A13")
def test_order_is_by_step_not_by_time(run: Run) -> None:
    save(run.checkpoints, 10, 200, 3000)
    for age, step in enumerate((200, 3000, 10)):
        os.utime(folder(run, step), (age, age))
    assert_is(run.checkpoints.load(), 3000)
    shutil.rmtree(folder(run, 3000))
    assert_is(run.checkpoints.load(), 200)
    (run.path / "checkpoints" / "ckpt-junk").mkdir()
    (run.path / "checkpoints" / "LATEST").write_text("ckpt-000000000010\n")  # advisory
    assert_is(run.checkpoints.load(), 200)
    run.checkpoints.save(10**13, {}, {}, background=False)  # more digits than the name is padded to
    assert run.checkpoints.load().step == 10**13


@pytest.mark.fault("A13")
def test_a_step_saved_again_replaces_nothing_and_counts_as_newer(run: Run) -> None:
    for version in range(12):
        run.checkpoints.save(7, {"model": {"w": torch.tensor(float(version))}}, {}, background=False)
        assert run.checkpoints.load().tensors["model"]["w"] == version
    assert names(run) == ["LATEST", "ckpt-000000000007.10", "ckpt-000000000007.11", "ckpt-000000000007.9"]


def test_pruning_keeps_the_last_and_the_best(run: Run) -> None:
    for step, score in ((1, 5.0), (2, 9.0), (3, 9.0), (4, None), (5, 1.0), (6, 8.0), (7, 2.0)):
        save(run.checkpoints, step, score=score)
    assert names(run) == ["LATEST"] + [f"ckpt-{step:012d}" for step in (3, 5, 6, 7)]
    assert_is(run.checkpoints.best(), 3)  # the newest of the two best
    assert_is(run.checkpoints.load(), 7)
    (folder(run, 3) / "model.safetensors").unlink()
    assert_is(run.checkpoints.best(), 6)
    assert "ckpt-000000000003" in run.notes[-1]


def test_best_without_scores_is_the_newest(run: Run) -> None:
    save(run.checkpoints, 1, 2)
    assert_is(run.checkpoints.best(), 2)
    save(run.checkpoints, 3, score=-100.0)
    save(run.checkpoints, 4)
    assert_is(run.checkpoints.best(), 3)


@pytest.mark.fault("A15")
@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_no_number_is_never_the_best(run: Run, score: float) -> None:
    save(run.checkpoints, 1, score=3.0)
    save(run.checkpoints, 2, score=score)
    assert "does not count as the best" in run.notes[0]
    assert_is(run.checkpoints.best(), 1)
    edit_manifest(folder(run, 2), score=score)
    assert_is(run.checkpoints.best(), 1)


def test_damaged_ones_do_not_crowd_out_good_ones(run: Run) -> None:
    save(run.checkpoints, 1, 2, 3)
    for step in (2, 3):
        (folder(run, step) / "manifest.json").unlink()
    save(run.checkpoints, 4)
    assert folder(run, 1).exists()
    run.checkpoints.keep_last = 1
    (folder(run, 4) / "manifest.json").unlink()
    save(run.checkpoints, 5)
    assert_is(run.checkpoints.load(), 5)


@pytest.mark.fault("A14")
def test_what_was_just_written_is_never_pruned(run: Run) -> None:
    save(run.checkpoints, 10, 20, 30)
    save(run.checkpoints, 5)  # resumed from an older checkpoint
    assert folder(run, 5).exists()


def test_a_fresh_start_sets_later_steps_aside(run: Run) -> None:
    save(run.checkpoints, 10, 20, 30)
    aside = run.checkpoints.set_aside(after=10)
    assert sorted(path.name for path in aside.iterdir()) == ["ckpt-000000000020", "ckpt-000000000030"]
    assert_is(run.checkpoints.load(), 10)
    assert str(aside) in run.notes[0]
    assert run.checkpoints.set_aside(after=10) is None
    assert run.checkpoints.set_aside().name == "aside-2"
    assert run.checkpoints.load() is None
    assert_is(run.checkpoints.load_path(aside / "ckpt-000000000030"), 30)


@pytest.mark.fault("A14")
def test_interrupted_pruning_goes_on_at_the_next_save(run: Run) -> None:
    save(run.checkpoints, 1, 2, 3)
    faults.arm("raise@save.prune")
    save(run.checkpoints, 4)
    assert "tidying" in run.notes[0]
    assert not folder(run, 1).exists()
    assert [name for name in names(run) if name.startswith(".trash-")]
    assert_is(run.checkpoints.load(), 4)
    faults.arm("")
    Checkpoints(run.path, lock=run.checkpoints._lock)
    assert names(run) == ["LATEST"] + [f"ckpt-{step:012d}" for step in (2, 3, 4)]


# ---- A16, A17, D5


@pytest.mark.fault("A16")
def test_prefixes_of_compiled_and_wrapped_networks() -> None:
    network = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.compile(torch.nn.Linear(2, 2), backend="eager"))
    wrapped = torch.nn.ModuleDict({"module": torch.compile(network, backend="eager")})  # names as DDP makes them
    assert "module._orig_mod.1._orig_mod.weight" in wrapped.state_dict()
    assert set(strip_prefixes(wrapped.state_dict())) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    one = torch.ones(1)
    assert set(strip_prefixes({"module.a": one, "b": one})) == {"module.a", "b"}  # a part that is called module
    assert set(strip_prefixes({"my_orig_mod.a": one})) == {"my_orig_mod.a"}
    assert strip_prefixes({}) == {}
    with pytest.raises(ValueError, match="one name"):
        strip_prefixes({"_orig_mod.a": one, "a": one})


@pytest.mark.fault("A16")
def test_prefixed_weights_load_into_the_bare_network(run: Run) -> None:
    bare = torch.nn.Linear(3, 2)
    compiled = torch.compile(torch.nn.Linear(3, 2), backend="eager")
    run.checkpoints.save(1, {"model": compiled.state_dict()}, {}, background=False)
    bare.load_state_dict(run.checkpoints.load().tensors["model"])
    assert torch.equal(bare.weight, compiled.weight)


@pytest.mark.fault("A17")
def test_slow_saves_are_skipped_not_queued(run: Run) -> None:
    faults.arm("slow@save.manifest:1s")
    for step in range(1, 6):
        run.checkpoints.save(step, content(step), {"step": step})
    assert run.checkpoints.busy
    assert run.checkpoints.skipped == 4
    run.checkpoints.wait()
    assert not run.checkpoints.busy
    assert names(run) == ["LATEST", "ckpt-000000000001"]
    faults.arm("slow@save.manifest:0.1s")
    run.checkpoints.save(6, content(6), {"step": 6})
    save(run.checkpoints, 7)  # in the foreground: waits for the one in flight, skips nothing
    assert run.checkpoints.skipped == 4
    assert names(run) == ["LATEST"] + [f"ckpt-{step:012d}" for step in (1, 6, 7)]


@pytest.mark.fault("D5")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_no_numbers_are_not_saved(run: Run, bad: float) -> None:
    save(run.checkpoints, 1)
    poisoned = {"model": {"good": torch.ones(3), "w": torch.tensor([0.0, bad])}, "optim": {"m": torch.ones(1)}}
    run.checkpoints.save(2, poisoned, {})
    run.checkpoints.wait()
    assert run.checkpoints.failures == 1
    assert "the weight 'w' has NaN or infinite values" in run.notes[0]
    assert names(run) == ["LATEST", "ckpt-000000000001"]
    with pytest.raises(StorageError, match="'w' has NaN"):
        run.checkpoints.save(2, poisoned, {}, background=False)
    poisoned["model"]["w"][1] = 0.0
    poisoned["optim"]["m"][0] = bad
    with pytest.raises(StorageError, match="'m' has NaN"):
        run.checkpoints.save(2, poisoned, {}, background=False)
    poisoned["optim"]["m"][0] = 1.0
    run.checkpoints.save(2, poisoned, {}, background=False)
    assert run.checkpoints.failures == 0


def test_no_memory_for_the_copy_is_a_failed_save(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(checkpoint_module, "copy_to_host", no_memory)
    run.checkpoints.save(1, content(1), {})
    assert run.checkpoints.failures == 1
    assert "can't allocate memory" in run.notes[0]
    with pytest.raises(StorageError, match="can't allocate"):
        save(run.checkpoints, 1)


@pytest.mark.gpu
def test_gpu_tensors_are_copied_before_they_change(run: Run) -> None:
    big = torch.full((64 << 20,), 1.0, device="cuda")
    graphless = {"model": {"w": big, "half": big[::2].to(torch.bfloat16), "flag": torch.tensor(True, device="cuda")}}
    run.checkpoints.save(1, graphless, {})
    big.fill_(2.0)
    run.checkpoints.wait()
    model = run.checkpoints.load().tensors["model"]
    assert model["w"].device.type == "cpu"
    assert bool((model["w"] == 1).all())
    assert bool((model["half"] == 1).all())
    assert bool(model["flag"])
