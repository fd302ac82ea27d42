"""Checkpoints that survive a kill at any moment, a full disk and a flipped bit.

    run_dir/checkpoints/
        ckpt-000001234567/     a checkpoint, named by its step (.1, .2 … if that step is saved again)
        LATEST                 name of the newest one, for people and scripts; Redline never reads it
        .tmp-* .trash-*        being written, being deleted: removed at the next start
        .corrupt-*             damaged and quarantined
        aside-1/               checkpoints of an earlier run, see `set_aside`

A checkpoint is written under a name that readers ignore and made durable; then one rename gives the folder its public name. A
folder with a public name is therefore complete, unless it was damaged later, which the digests reveal.
"""

from __future__ import annotations

import errno
import json
import math
import operator
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from redline.core.errors import StorageError, UserError
from redline.core.faults import reach
from redline.core.fsync import sync_folder
from redline.run.atomic_files import Damaged, remove, replace, verify, write_bytes, write_tensors
from redline.run.lock import RunLock
from redline.run.manifest import (
    FOLDER,
    MAX_STATE,
    Checkpoint,
    copy_into,
    make_manifest,
    read,
    read_checkpoint,
    read_manifest,
    strip_prefixes,
)
from redline.run.run_folder import FORMAT_VERSION, Notify, prepare_run_dir, reason, to_stderr
from redline.run.snapshot import RESUME_LEVELS, Snapshot, check_arguments, check_finite, copy_to_host

__all__ = [
    "FORMAT_VERSION",
    "RESUME_LEVELS",
    "Checkpoint",
    "Checkpoints",
    "RunLock",
    "copy_into",
    "prepare_run_dir",
    "read_checkpoint",
    "strip_prefixes",
]


class Checkpoints:
    """The checkpoints of one run folder.

    With the run folder's `lock` it writes and prunes checkpoints, removes the leftovers of a killed save, and quarantines
    damaged checkpoints. Without it (eval, watch) it only reads, and is safe to use during training. Not thread-safe.
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
        check: Callable[[Checkpoint], None] = lambda checkpoint: None,  # noqa: ARG005
        notify: Notify = to_stderr,
    ) -> None:
        """env_hash: of everything a resumed run must share (environment, network). config_hash: of all settings.

        check: raises Damaged for a checkpoint whose files are intact but whose content is unusable.
        """
        if keep_last < 1:
            raise UserError(f"keep_last is {keep_last}; expected at least 1.")
        self.folder = Path(run_dir) / "checkpoints"
        self.keep_last = keep_last
        self.skipped = 0  # saves dropped because another was still being written
        self.failures = 0  # consecutive failed saves
        self.last_error = ""  # message of the last failed save
        self.last_step: int | None = None  # of the newest checkpoint this object wrote or loaded
        self._config_hash, self._env_hash, self._world_size = config_hash, env_hash, world_size
        self._check, self._notify = check, notify
        self._lock = lock
        self._writer: threading.Thread | None = None
        if lock is not None:
            for leftover in self._listed(".tmp-", ".trash-"):
                remove(leftover)

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

        In the background: return once the tensors are copied; drop the save (and count it in `skipped`) if the previous
        one is still being written; report a failure through `notify`, count it in `failures` and let training continue.
        In the foreground: wait for a save in flight, return once the checkpoint is durable, raise StorageError on failure.
        """
        if not self._writes:
            raise StorageError(f"Checkpoints in {self.folder} are written by the holder of the run folder's lock only.")
        step = operator.index(step)
        check_arguments(step, tensors, resume_level)
        if background and self.busy:
            self.skipped += 1
            return
        self.wait()
        if score is not None and not math.isfinite(score):
            self._notify(f"The score at step {step:,} is {score}: this checkpoint does not count as the best.")
            score = None
        text = json.dumps(dict(state)).encode()  # now: training changes the state while the thread writes
        if len(text) > MAX_STATE:
            raise ValueError(f"the state has {len(text)} bytes of JSON, expected at most {MAX_STATE}: use tensors")
        try:
            copies = copy_to_host(tensors)
            snapshot = Snapshot(step, copies, text, None if score is None else float(score), resume_level)
            if background:
                # Not a daemon: at exit, the interpreter waits for a checkpoint that is almost written.
                writer = threading.Thread(target=self._write, args=(snapshot, True), name="checkpoint")
                writer.start()
                self._writer = writer
        except (MemoryError, RuntimeError) as error:  # no memory for the copies, or no thread
            self._failed(step, f"it could not be copied: {error}", background)
            return
        if not background:
            self._write(snapshot, False)

    @property
    def busy(self) -> bool:
        """Whether a save is still being written."""
        return self._writer is not None and self._writer.is_alive()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until no save is in flight, for at most `timeout` seconds."""
        if (writer := self._writer) is not None:
            writer.join(timeout)
            self._writer = writer if writer.is_alive() else None

    @property
    def _writes(self) -> bool:
        return self._lock is not None and self._lock.held

    def _write(self, snapshot: Snapshot, background: bool) -> None:
        try:
            reach("save")
            check_finite(snapshot)
            path = self._store(snapshot)
        except Exception as error:  # whatever the cause, training must continue and the user must be told
            cause = str(error)
            if isinstance(error, OSError):
                free = _free(self.folder)
                have = "unknown" if free is None else f"{free / 1e9:.3f} GB"
                needed = f"{snapshot.bytes_needed / 1e9:.3f} GB"
                cause = f"{reason(error)}: {needed} needed, {have} free"
            self._failed(snapshot.step, cause, background)
            return
        self.failures, self.last_error, self.last_step = 0, "", snapshot.step
        try:
            reach("save.latest")
            replace(self.folder / "LATEST", path.name.encode() + b"\n")
            self._prune(path)
        except Exception as error:  # the checkpoint is durable; the rest is convenience
            self._notify(f"{path.name} is saved, but tidying up after it failed: {error}.")

    def _failed(self, step: int, cause: str, background: bool) -> None:
        self.failures += 1
        self.last_error = (
            f"The checkpoint of step {step:,} was not written ({cause}); the last good checkpoint in {self.folder} is "
            "untouched."
        )
        if not background:
            raise StorageError(self.last_error)
        self._notify(f"{self.last_error} Training goes on and tries again at the next save.")

    def _store(self, snapshot: Snapshot) -> Path:
        """Write the snapshot to a durable, verified folder, give it its public name and return it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        free = _free(self.folder)
        if free is not None and free < snapshot.bytes_needed:  # refuse before the disk is completely full
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        temporary = self.folder / f".tmp-{snapshot.step}-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            temporary.mkdir()
            files = {}
            for group, named in snapshot.tensors.items():
                name = f"{group}.safetensors"
                files[name] = write_tensors(temporary / name, named, partial(reach, f"save.{group}"))
            reach("save.state")
            files["state.json"] = write_bytes(temporary / "state.json", snapshot.state)
            reach("save.manifest")
            fields = {
                "step": snapshot.step,
                "score": snapshot.score,
                "resume_level": snapshot.resume_level,
                "config_hash": self._config_hash,
                "env_hash": self._env_hash,
                "world_size": self._world_size,
            }
            replace(temporary / "manifest.json", json.dumps(make_manifest(fields, files), indent=1).encode())
            reach("save.sync")
            sync_folder(temporary)
            reach("save.rename")
            path = self._free_name(snapshot.step)
            os.rename(temporary, path)
        except BaseException:
            remove(temporary)
            raise
        reach("save.sync_parent")
        sync_folder(self.folder)
        try:
            reach("save.verify")
            for name, entry in read_manifest(path)["files"].items():
                verify(path / name, entry)
        except Damaged:
            self._trash(path)
            raise
        return path

    def _free_name(self, step: int) -> Path:
        """Return the path for a checkpoint of `step`; a second save gets a revision, as replacing the first is not atomic."""
        revisions = [revision for other, revision in map(_order, self._newest_first()) if other == step]
        return self.folder / (f"ckpt-{step:012d}" + (f".{max(revisions) + 1}" if revisions else ""))

    def _prune(self, newest: Path) -> None:
        """Delete all but the newest, the last `keep_last` and the best. Unreadable checkpoints are not counted or deleted."""
        scores = {path: score for path, score in self._scores().items() if score is not None}
        keep = {newest, *list(scores)[: self.keep_last], *_best_first(scores)[:1]}
        for path in scores:
            if path not in keep:
                self._trash(path)

    def _trash(self, path: Path) -> None:
        """Delete a checkpoint. Rename it first: a half-deleted folder must never look like a checkpoint."""
        trash = self.folder / f".trash-{path.name}-{secrets.token_hex(4)}"
        os.rename(path, trash)
        reach("save.prune")
        remove(trash)

    # ---- read

    def load(self, groups: Collection[str] | None = None) -> Checkpoint | None:
        """Return the newest good checkpoint by step, with all groups or those in `groups`; None if none was ever written.

        Damaged checkpoints are reported and skipped; with the lock, they are moved to `.corrupt-*`. If all are damaged, raise:
        a run must not start from scratch because its checkpoints did not load.
        """
        return self._first_good(self._newest_first, groups)

    def best(self, groups: Collection[str] | None = None) -> Checkpoint | None:
        """Return the good checkpoint with the highest score, the newest if tied; the newest if none has a score."""
        return self._first_good(lambda: _best_first(self._scores()), groups)

    def select(self, which: str, groups: Collection[str] | None = None) -> Checkpoint | None:
        """Return the checkpoint named by `which`: newest, best (by evaluation) or a step. None if none was ever written."""
        if which == "newest":
            return self.load(groups)
        if which == "best":
            checkpoint = self.best(groups)
            if checkpoint and checkpoint.manifest["score"] is None:
                raise UserError(
                    "checkpoint is 'best', but no checkpoint of this run was evaluated; train with --eval-every STEPS, or use "
                    "--checkpoint newest."
                )
            return checkpoint
        paths = self._newest_first()
        steps = sorted({_order(path)[0] for path in paths})
        chosen = [path for path in paths if which.isdecimal() and _order(path)[0] == int(which)]
        if paths and not chosen:
            known = ", ".join(map(str, steps))
            raise UserError(f"checkpoint is '{which}'; expected newest, best or a step that was kept: {known}.")
        return self._first_good(lambda: chosen, groups)

    def load_path(self, path: Path | str, groups: Collection[str] | None = None) -> Checkpoint:
        """Return the checkpoint in the folder `path`. Raises if it is damaged; does not move it."""
        return self._accept(read_checkpoint(path, groups, self._check))

    def set_aside(self, after: int = -1) -> Path | None:
        """Move damaged checkpoints and those of steps beyond `after` to a folder and return it; None if there are none.

        For a run that restarts (`--resume never`) or continues from an older checkpoint (`--resume PATH`): later checkpoints
        in the folder would be mistaken for its newest ones. Nothing is deleted.
        """
        if not self._writes:
            raise StorageError(f"Checkpoints in {self.folder} are moved by the holder of the run folder's lock only.")
        self.wait()
        old = [path for path in self._newest_first() if _order(path)[0] > after] + self._listed(".corrupt-")
        if not old:
            return None
        number = 1
        while (aside := self.folder / f"aside-{number}").exists():
            number += 1
        try:
            aside.mkdir()
            for path in old:
                path.rename(aside / path.name)
        except OSError as error:
            raise StorageError(
                f"Earlier checkpoints could not be moved to {aside}: {reason(error)}; choose "
                "another folder with --run-dir."
            ) from error
        self._notify(f"{len(old)} earlier checkpoints were moved to {aside}; delete them if you do not need them.")
        return aside

    def _first_good(self, paths: Callable[[], Iterable[Path]], groups: Collection[str] | None) -> Checkpoint | None:
        reach("load")
        for _ in range(5):  # a trainer may prune a checkpoint that was just listed; then list again
            vanished = False
            bad = []
            for path in paths():
                try:
                    checkpoint = read(path, groups)
                    self._check(checkpoint)
                except Damaged as error:
                    if path.exists():
                        bad.append(f"{path.name}: {error}")
                        self._quarantine(path, str(error))
                    else:
                        vanished = True
                else:
                    return self._accept(checkpoint)
            if not vanished:
                break
        else:
            bad.append("each was pruned while it was read")
        bad += [f"{path.name}: damaged earlier" for path in self._listed(".corrupt-")]
        if bad:
            raise StorageError(
                f"No checkpoint in {self.folder} can be read ({bad[0]}): start anew with --resume never, or name a "
                "checkpoint folder with --resume PATH."
            )
        return None

    def _quarantine(self, path: Path, damage: str) -> None:
        message = f"Checkpoint {path.name} is damaged and skipped: {damage}."
        if self._writes:
            corrupt = path.with_name(f".corrupt-{path.name}-{secrets.token_hex(4)}")
            try:
                os.rename(path, corrupt)
                message += f" It was moved to {corrupt}; delete it if you do not need it."
            except OSError as error:
                message += f" It could not be moved out of the way ({reason(error)})."
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
        """Return the score of each checkpoint, newest first; -inf if it has none, None if its manifest is damaged."""
        scores: dict[Path, float | None] = {}
        for path in self._newest_first():
            scores[path] = None
            with suppress(Damaged, UserError):
                score = read_manifest(path)["score"]
                scores[path] = -math.inf if score is None else score
        return scores

    def _newest_first(self) -> list[Path]:
        return sorted((p for p in self._listed("ckpt-") if FOLDER.fullmatch(p.name)), key=_order, reverse=True)

    def _listed(self, *prefixes: str) -> list[Path]:
        """Return the entries of the folder with one of the prefixes. Unlike `glob`, fail if the folder is unreadable."""
        try:
            return [self.folder / name for name in os.listdir(self.folder) if name.startswith(prefixes)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError(f"{self.folder} cannot be read: {reason(error)}.") from error


def _order(path: Path) -> tuple[int, int]:
    """Return step and revision from a checkpoint's name, to sort by. Times are not used: clocks jump."""
    match = FOLDER.fullmatch(path.name)
    return (int(match[1]), int(match[2] or 0)) if match else (-1, 0)


def _best_first(scores: Mapping[Path, float | None]) -> list[Path]:
    def key(path: Path) -> tuple[float, tuple[int, int]]:
        score = scores[path]
        return (-math.inf if score is None else score, _order(path))

    return sorted(scores, key=key, reverse=True)


def _free(folder: Path) -> int | None:
    with suppress(OSError):
        return shutil.disk_usage(folder).free
    return None
