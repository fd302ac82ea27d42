"""Checkpoints that survive a kill at any moment, a full disk and a flipped bit.

    run_dir/checkpoints/ckpt-000001234567/     a folder a checkpoint, named by its step; .1, .2 … if a step is saved again
        model.safetensors optim.safetensors …  one file a group of tensors
        state.json                             what is not tensors
        manifest.json                          written last: versions, hashes, score; bytes and sha256 of every file

Everything is written under a name that no reader looks at and made durable, then the folder gets its public name in one
rename. A folder with that name is therefore whole, or was damaged later, which the digests tell. Nothing is unpickled.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import platform
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redline.core.errors import StorageError, UserError
from redline.core.faults import reach
from redline.run.lock import Notify, RunLock, to_stderr
from redline.run.tensorfile import DTYPES, Damaged, read_bytes, read_tensors, verify, write_bytes, write_tensors

FORMAT_VERSION = 1
RESUME_LEVELS = ("L0", "L1", "L2", "L3")
_FOLDER = re.compile(r"ckpt-(\d{12,18})(?:\.(\d{1,9}))?")
_GROUP = re.compile(r"[a-z][a-z0-9_]{0,63}")
_MAX_MANIFEST = 1 << 20
_MAX_STATE = 256 << 20
_SLACK = 1 << 20  # bytes of headers, folders and manifest, for the question whether a checkpoint fits on the disk
_MANIFEST_TYPES: dict[str, type | tuple[type, ...]] = {
    "format_version": int,
    "step": int,
    "created": str,
    "score": (float, int, type(None)),
    "resume_level": str,
    "config_hash": str,
    "env_hash": str,
    "world_size": int,
    "versions": dict,
    "files": dict,
    "digest": str,  # of all the rest
}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as it was read."""

    path: Path
    step: int
    tensors: dict[str, dict[str, Tensor]]  # group -> name -> CPU tensor
    state: dict[str, Any]  # JSON
    manifest: dict[str, Any]


# From format version v to v + 1. Version 1 is the first, so nothing is older yet.
MIGRATIONS: dict[int, Callable[[Checkpoint], Checkpoint]] = {}


@dataclass(frozen=True)
class _Snapshot:
    """What `save` was given, in memory that training does not touch."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: bytes
    score: float | None
    resume_level: str

    @property
    def bytes_needed(self) -> int:
        return _SLACK + len(self.state) + sum(t.nbytes for group in self.tensors.values() for t in group.values())


class Checkpoints:
    """The checkpoints of one run folder.

    With the run folder's `lock` it writes, prunes, clears away what a killed save left, and moves damaged checkpoints
    aside. Without it (eval, watch) it only reads, and is safe beside a running trainer. One thread calls it.
    """

    def __init__(
        self,
        run_dir: Path | str,
        *,
        lock: RunLock | None = None,
        keep_last: int = 3,
        config_hash: str = "",
        env_hash: str = "",
        world_size: int = 1,
        notify: Notify = to_stderr,
    ) -> None:
        """`env_hash` covers what a resumed run must share (environment, network), `config_hash` all settings."""
        if keep_last < 1:
            raise UserError(f"keep_last is {keep_last}; expected at least 1.")
        self.folder = Path(run_dir) / "checkpoints"
        self.keep_last = keep_last
        self.skipped = 0  # saves not made because one was still being written
        self.failures = 0  # saves failed in a row
        self.last_error = ""  # what the last failing save said
        self.last_step: int | None = None  # of the newest checkpoint this object wrote or loaded
        self._config_hash, self._env_hash, self._world_size = config_hash, env_hash, world_size
        self._notify = notify
        self._lock = lock
        self._writer: threading.Thread | None = None
        if lock is not None:
            for leftover in (*self.folder.glob(".tmp-*"), *self.folder.glob(".trash-*")):
                _remove(leftover)

    # ---- write

    def save(
        self,
        step: int,
        tensors: Mapping[str, Mapping[str, Tensor]],
        state: Mapping[str, Any],
        *,
        score: float | None = None,
        resume_level: str = "L3",
        background: bool = True,
    ) -> None:
        """Save `tensors` (group -> name -> tensor on any device) and `state` (JSON) as the checkpoint of `step`.

        In the background: returns once the tensors are copied; while the save before is still being written it only
        counts `skipped`; a failure is told through `notify` and counted in `failures`, and training goes on. Otherwise:
        waits for a save in flight, returns with the checkpoint durable, raises StorageError if that failed.
        """
        if self._lock is None or not self._lock.held:
            raise StorageError(f"Checkpoints in {self.folder} are written by the holder of the run folder's lock only.")
        _check_names(step, tensors, resume_level)
        if background and self.busy:
            self.skipped += 1
            return
        self.wait()
        if score is not None and not math.isfinite(score):
            self._notify(f"The score at step {step:,} is {score}: this checkpoint does not count as the best.")
            score = None
        text = json.dumps(dict(state)).encode()  # now, because training changes the state while the thread writes
        try:
            snapshot = _Snapshot(step, self._copy(tensors), text, score, resume_level)
        except (MemoryError, RuntimeError) as error:
            self._failed(step, f"its copy in memory failed: {error}", background)
            return
        if background:
            # Not a daemon: the interpreter waits at its exit for a checkpoint that is nearly there.
            self._writer = threading.Thread(target=self._write, args=(snapshot, True), name="checkpoint")
            self._writer.start()
        else:
            self._write(snapshot, False)

    @property
    def busy(self) -> bool:
        """Whether a save is still being written."""
        return self._writer is not None and self._writer.is_alive()

    def wait(self) -> None:
        """Return when no save is in flight."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def _copy(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Contiguous CPU copies, each with memory of its own. Copies from a GPU run side by side, through pinned memory."""
        streams = set()

        def copy(tensor: Tensor) -> Tensor:
            if tensor.device.type == "cuda":
                with suppress(RuntimeError):  # too little pinnable memory: the slow copy below will do
                    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                    streams.add(torch.cuda.current_stream(tensor.device))
                    return host.copy_(tensor.detach(), non_blocking=True)
            return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())

        copies = {group: {name: copy(tensor) for name, tensor in named.items()} for group, named in tensors.items()}
        for stream in streams:
            stream.synchronize()
        return copies

    def _write(self, snapshot: _Snapshot, background: bool) -> None:
        try:
            reach("save")
            _check_finite(snapshot)
            path = self._store(snapshot)
        except Exception as error:  # whatever it was, training must go on and the user must know
            reason = str(error)
            if isinstance(error, OSError):
                free = _free(self.folder)
                reason = (
                    f"{(error.strerror or reason).lower()}: needed {snapshot.bytes_needed / 1e9:.3f} GB, "
                    + ("unknown" if free is None else f"{free / 1e9:.3f} GB")
                    + " free"
                )
            self._failed(snapshot.step, reason, background)
            return
        self.failures, self.last_error, self.last_step = 0, "", snapshot.step
        try:
            reach("save.latest")
            _replace(self.folder / "LATEST", path.name.encode() + b"\n")
            self._prune(path)
        except Exception as error:  # the checkpoint is durable; what failed only serves comfort and space
            self._notify(f"{path.name} is saved, but tidying up after it failed: {error}.")

    def _failed(self, step: int, reason: str, background: bool) -> None:
        self.failures += 1
        self.last_error = (
            f"The checkpoint of step {step:,} was not written ({reason}); the last good checkpoint in {self.folder} is "
            "untouched."
        )
        if not background:
            raise StorageError(self.last_error)
        self._notify(f"{self.last_error} Training goes on and tries again at the next save.")

    def _store(self, snapshot: _Snapshot) -> Path:
        """Steps 1 to 6 of the protocol: from the snapshot to a durable, verified folder with its public name."""
        self.folder.mkdir(parents=True, exist_ok=True)
        free = _free(self.folder)
        if free is not None and free < snapshot.bytes_needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # before the user's disk is full to the brim
        temporary = self.folder / f".tmp-{snapshot.step}-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            temporary.mkdir()
            files = {}
            for group, named in snapshot.tensors.items():
                name = f"{group}.safetensors"
                files[name] = write_tensors(temporary / name, named, lambda group=group: reach(f"save.{group}"))  # type: ignore[misc]
            reach("save.state")
            files["state.json"] = write_bytes(temporary / "state.json", snapshot.state)
            reach("save.manifest")
            _replace(temporary / "manifest.json", json.dumps(self._manifest(snapshot, files), indent=1).encode())
            reach("save.sync")
            _sync_folder(temporary)
            reach("save.rename")
            path = self._free_name(snapshot.step)
            os.rename(temporary, path)
        except BaseException:
            _remove(temporary)
            raise
        reach("save.sync_parent")
        _sync_folder(self.folder)
        try:
            reach("save.verify")
            for name, entry in _read_manifest(path)["files"].items():
                verify(path / name, entry)
        except Damaged:
            self._trash(path)
            raise
        return path

    def _manifest(self, snapshot: _Snapshot, files: dict[str, Any]) -> dict[str, Any]:
        manifest = {
            "format_version": FORMAT_VERSION,
            "step": snapshot.step,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "score": snapshot.score,
            "resume_level": snapshot.resume_level,
            "config_hash": self._config_hash,
            "env_hash": self._env_hash,
            "world_size": self._world_size,
            "versions": _versions(),
            "files": files,
        }
        return manifest | {"digest": _digest(manifest)}

    def _free_name(self, step: int) -> Path:
        """A second save of one step gets a new name: replacing the first would, for a moment, leave neither."""
        path, revision = self.folder / f"ckpt-{step:012d}", 0
        while path.exists():
            revision += 1
            path = self.folder / f"ckpt-{step:012d}.{revision}"
        return path

    def _prune(self, newest: Path) -> None:
        """Keep what was just written, the last `keep_last` and the best. What cannot be read neither counts nor goes."""
        scores = {path: score for path, score in self._scores().items() if score is not None}
        keep = {newest, *list(scores)[: self.keep_last], *_best_first(scores)[:1]}
        for path in scores:
            if path not in keep:
                self._trash(path)

    def _trash(self, path: Path) -> None:
        """Take the name away first: a half-deleted folder must never look like a checkpoint."""
        trash = self.folder / f".trash-{path.name}-{secrets.token_hex(4)}"
        os.rename(path, trash)
        reach("save.prune")
        _remove(trash)

    # ---- read

    def load(self, groups: Collection[str] | None = None) -> Checkpoint | None:
        """The newest good checkpoint by step, with all groups or those of `groups` it has. None if there never was one.

        Damaged ones are told, moved to `.corrupt-*` by the holder of the lock, and passed over. If all are damaged
        it raises: a run must not start from scratch because its checkpoints did not load.
        """
        return self._first_good(lambda: _newest_first(self.folder), groups)

    def best(self, groups: Collection[str] | None = None) -> Checkpoint | None:
        """The good checkpoint with the highest score, the newest of equals; where none has a score, the newest."""
        return self._first_good(lambda: _best_first(self._scores()), groups)

    def load_path(self, path: Path | str, groups: Collection[str] | None = None) -> Checkpoint:
        """The checkpoint in the folder `path`. If it is damaged this raises; nothing is moved."""
        return self._accept(read_checkpoint(path, groups))

    def set_aside(self, after: int = -1) -> Path | None:
        """Move checkpoints of steps beyond `after`, and damaged ones, out of the way; where to, or None if none was there.

        For a run that starts again (`--resume never`) or from an older checkpoint (`--resume PATH`) in a folder with
        later steps: those would be taken for the newest. Nothing is deleted.
        """
        old = [path for path in _newest_first(self.folder) if _order(path)[0] > after]
        old += self.folder.glob(".corrupt-*")
        if not old:
            return None
        number = 1
        while (aside := self.folder / f"aside-{number}").exists():
            number += 1
        aside.mkdir()
        for path in old:
            path.rename(aside / path.name)
        self._notify(
            f"{len(old)} checkpoints of an earlier run were moved to {aside}; delete them if you do not need them."
        )
        return aside

    def _first_good(self, paths: Callable[[], Iterable[Path]], groups: Collection[str] | None) -> Checkpoint | None:
        for _ in range(5):  # a trainer may prune what this process has just listed; then look again
            vanished, reasons = False, []
            for path in paths():
                try:
                    checkpoint = _read(path, groups)
                except Damaged as error:
                    if not path.exists():
                        vanished = True
                        continue
                    reasons.append(f"{path.name}: {error}")
                    self._quarantine(path, str(error))
                else:
                    return self._accept(checkpoint)
            if not vanished:
                break
        reasons += [f"{path.name}: moved away earlier" for path in self.folder.glob(".corrupt-*") if not reasons]
        if reasons:
            raise StorageError(
                f"No checkpoint in {self.folder} can be read ({reasons[0]}): start again with --resume never, or name a "
                "checkpoint folder with --resume PATH."
            )
        return None

    def _quarantine(self, path: Path, reason: str) -> None:
        message = f"Checkpoint {path.name} is damaged and passed over: {reason}."
        if self._lock is not None and self._lock.held:
            corrupt = path.with_name(f".corrupt-{path.name}-{secrets.token_hex(4)}")
            try:
                os.rename(path, corrupt)
                message += f" It was moved to {corrupt}; delete it if you do not need it."
            except OSError as error:
                message += f" It could not be moved away ({(error.strerror or str(error)).lower()})."
        self._notify(message)

    def _accept(self, checkpoint: Checkpoint) -> Checkpoint:
        name, saved = checkpoint.path.name, checkpoint.manifest
        if self._env_hash and saved["env_hash"] and self._env_hash != saved["env_hash"]:
            raise UserError(
                f"Checkpoint {name} was made with another environment or network ({saved['env_hash']}, now "
                f"{self._env_hash}): use the settings in its run's config.json, another --run-dir, or --resume never."
            )
        if self._config_hash and saved["config_hash"] and self._config_hash != saved["config_hash"]:
            self._notify(f"Checkpoint {name} was made with other settings; it continues with the new ones.")
        self.last_step = checkpoint.step
        return checkpoint

    def _scores(self) -> dict[Path, float | None]:
        """Each checkpoint, newest first, with its score; -inf where it has none, None where its manifest is damaged."""
        scores: dict[Path, float | None] = {}
        for path in _newest_first(self.folder):
            scores[path] = None
            with suppress(Damaged, UserError):
                score = _read_manifest(path)["score"]
                scores[path] = -math.inf if score is None else score
        return scores


def read_checkpoint(path: Path | str, groups: Collection[str] | None = None) -> Checkpoint:
    """The checkpoint in the folder `path`, verified; StorageError if it is damaged or none."""
    path = Path(path)
    try:
        return _read(path, groups)
    except Damaged as error:
        raise StorageError(
            f"{path} is not a good checkpoint: {error}; expected a folder such as RUN/checkpoints/ckpt-000001234567."
        ) from error


def strip_prefixes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights by the names of the bare network: without torch.compile's `_orig_mod.` and a wrapping DDP's `module.`"""
    names = {name: re.sub(r"(^|(?<=\.))_orig_mod\.", "", name) for name in tensors}
    while names and all(name.startswith("module.") for name in names.values()):
        names = {name: short.removeprefix("module.") for name, short in names.items()}
    if len(set(names.values())) != len(names):
        raise ValueError("two weights have one name once the prefixes '_orig_mod.' and 'module.' are taken off")
    return {names[name]: tensor for name, tensor in tensors.items()}


def copy_into(target: Mapping[str, Tensor], saved: Mapping[str, Tensor], what: str = "model") -> None:
    """Copy `saved` into the static buffers of `target`, all or nothing: the first difference in names or shapes raises."""
    target, saved = strip_prefixes(target), strip_prefixes(saved)
    wrong = [f"'{name}' is missing in the checkpoint" for name in target.keys() - saved.keys()]
    wrong += [f"'{name}' is unknown here" for name in saved.keys() - target.keys()]
    for name in target.keys() & saved.keys():
        here, there = target[name], saved[name]
        if here.shape != there.shape or here.dtype != there.dtype:
            wrong.append(
                f"'{name}' is {_describe(there)} in the checkpoint, {_describe(here)} here",
            )
    if wrong:
        raise UserError(
            f"The {what} does not fit the checkpoint ({len(wrong)} differences, first: {min(wrong)}): use the settings in "
            "its run's config.json, another --run-dir, or --resume never."
        )
    with torch.no_grad():
        for name, tensor in target.items():
            tensor.copy_(saved[name])


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _read(path: Path, groups: Collection[str] | None) -> Checkpoint:
    """The checkpoint in `path`; Damaged if a file that is read is not what was written."""
    manifest = _read_manifest(path)
    files = manifest["files"]
    name = _FOLDER.fullmatch(path.name)
    if name is not None and int(name[1]) != manifest["step"]:
        raise Damaged(f"manifest.json says step {manifest['step']}, the folder's name {int(name[1])}")
    try:
        state = json.loads(read_bytes(path / "state.json", files["state.json"], _MAX_STATE))
    except (ValueError, RecursionError) as error:
        raise Damaged("state.json is not JSON") from error
    if not isinstance(state, dict):
        raise Damaged("state.json is not an object")
    tensors = {
        group: read_tensors(path / f"{group}.safetensors", files[f"{group}.safetensors"])
        for group in (file.removesuffix(".safetensors") for file in files if file != "state.json")
        if groups is None or group in groups
    }
    if "model" in tensors:
        try:
            tensors["model"] = strip_prefixes(tensors["model"])
        except ValueError as error:
            raise Damaged(f"model.safetensors: {error}") from error
    checkpoint = Checkpoint(path, manifest["step"], tensors, state, manifest)
    for version in range(manifest["format_version"], FORMAT_VERSION):
        checkpoint = MIGRATIONS[version](checkpoint)
    return checkpoint


def _read_manifest(path: Path) -> dict[str, Any]:
    """A manifest in which every value has its type; Damaged if it has not, UserError if a newer Redline wrote it."""
    try:
        manifest = json.loads(read_bytes(path / "manifest.json", None, _MAX_MANIFEST))
    except (ValueError, RecursionError) as error:
        raise Damaged("manifest.json is not JSON") from error
    version = manifest.get("format_version") if isinstance(manifest, dict) else None
    if type(version) is not int or version < 1:
        raise Damaged("manifest.json has no format_version")
    if version > FORMAT_VERSION or (version == FORMAT_VERSION and manifest.keys() - _MANIFEST_TYPES.keys()):
        raise UserError(
            f"Checkpoint {path} was written by a newer Redline (format {version}, this one reads up to {FORMAT_VERSION}): "
            "upgrade with pip install -U redline, or choose another --run-dir."
        )
    for key, kind in _MANIFEST_TYPES.items():
        if not isinstance(manifest.get(key), kind) or isinstance(manifest[key], bool):
            raise Damaged(f"manifest.json has no right '{key}'")
    rest = {key: value for key, value in manifest.items() if key != "digest"}
    if manifest["digest"] != _digest(rest):
        raise Damaged("manifest.json does not match its own digest")
    for name, entry in manifest["files"].items():
        stem, dot, suffix = name.partition(".")
        if name != "state.json" and not (_GROUP.fullmatch(stem) and dot + suffix == ".safetensors"):
            raise Damaged(f"manifest.json names a file {name!r}, which no checkpoint has")
        right = isinstance(entry, dict) and type(entry.get("bytes")) is int and isinstance(entry.get("sha256"), str)
        if not right:
            raise Damaged(f"manifest.json describes {name} wrongly")
    if "state.json" not in manifest["files"]:
        raise Damaged("manifest.json does not list state.json")
    return manifest


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _order(path: Path) -> tuple[int, int]:
    """Step and revision from a checkpoint's name. Not the time: clocks jump."""
    match = _FOLDER.fullmatch(path.name)
    return (int(match[1]), int(match[2] or 0)) if match else (-1, 0)


def _newest_first(folder: Path) -> list[Path]:
    return sorted((path for path in folder.glob("ckpt-*") if _FOLDER.fullmatch(path.name)), key=_order, reverse=True)


def _best_first(scores: Mapping[Path, float | None]) -> list[Path]:
    def key(path: Path) -> tuple[float, tuple[int, int]]:
        score = scores[path]
        return (-math.inf if score is None else score, _order(path))

    return sorted(scores, key=key, reverse=True)


def _check_names(step: int, tensors: Mapping[str, Mapping[str, Tensor]], resume_level: str) -> None:
    """Mistakes of the caller, raised at once instead of in a thread."""
    if not 0 <= step < 10**18:
        raise ValueError(f"step is {step}; expected 0 to 10**18 - 1")
    if resume_level not in RESUME_LEVELS:
        raise ValueError(f"resume_level is {resume_level!r}; expected one of {', '.join(RESUME_LEVELS)}")
    for group, named in tensors.items():
        if not _GROUP.fullmatch(group):
            raise ValueError(f"the group name {group!r} is not a lower-case word of letters, digits and underscores")
        for name, tensor in named.items():
            if name == "__metadata__":
                raise ValueError(f"group {group} has a tensor named __metadata__, which safetensors keeps for itself")
            if tensor.dtype not in DTYPES or tensor.layout is not torch.strided:
                raise ValueError(f"'{name}' of group {group} is {tensor.dtype}, {tensor.layout}: it cannot be stored")


def _check_finite(snapshot: _Snapshot) -> None:
    for name, tensor in snapshot.tensors.get("model", {}).items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"the weight '{name}' has NaN or infinite values")


@cache
def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for package in ("gymnasium", "redline"):
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def _free(folder: Path) -> int | None:
    with suppress(OSError):
        return shutil.disk_usage(folder).free
    return None


def _replace(path: Path, data: bytes) -> None:
    """Write `path` so that a reader sees the old content or the new, never a part."""
    temporary = path.with_name(f".tmp-{path.name}-{secrets.token_hex(4)}")
    try:
        write_bytes(temporary, data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot, and need not, sync a folder
            raise
    finally:
        os.close(fd)


def _remove(path: Path) -> None:
    """Delete a file or folder as far as possible; what stays has a name nobody reads and goes at the next start."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
