"""The run folder, its config.json and its result.json. Checkpoints and logs have separate modules."""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, get_type_hints

from redline.core.errors import StorageError, UserError, nearest
from redline.run import wandb_log
from redline.run.options import check_value
from redline.run.settings import Settings

# Incremented whenever runs of the previous version become unreadable: files, options or tensors renamed or reshaped.
FORMAT_VERSION = 2
Notify = Callable[[str], None]
CONFIG, RESULT, METRICS = "config.json", "result.json", "metrics.jsonl"
# All files that describe one run, besides its checkpoints.
RECORDS = (CONFIG, METRICS, RESULT, "eval.json", "live.safetensors", wandb_log.RUN_ID)
ENV_ACTIVITY = ".env-activity"  # the environment that the training process is calling, see `envs.env_activity`
_MAX_JSON = 16 << 20  # bytes of config.json or result.json
_CONFIG_TYPES = {"env": str, "algo": str, "env_options": dict, "algo_options": dict}


def to_stderr(message: str) -> None:
    """Print one line on standard error: the default way to notify the user."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):  # a closed terminal must not stop training
            print(message, file=sys.stderr, flush=True)


def check_writable(path: Path) -> None:
    """Raise if a run folder cannot be created or written, as far as that is known without changing anything."""
    place = next(place for place in (path, *path.parents) if os.path.lexists(place))
    if not place.is_dir():
        why = f"{place} is a file, not a folder"
    elif not os.access(place, os.W_OK | os.X_OK):
        why = f"{place} may not be written"
    else:
        return
    raise StorageError(f"The run folder {path} cannot be written: {why}; choose another with --run-dir.")


def prepare_run_dir(path: Path | str) -> Path:
    """Create the run folder and write a probe to it, to detect a full or read-only disk before training.

    Refuse a folder that contains links: writing through one would change a file outside.
    """
    path = Path(path)
    probe = path / f".probe-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        with open(probe, "xb") as file:
            file.write(b"redline")
            file.flush()
            os.fsync(file.fileno())
        linked = sorted(entry.name for entry in os.scandir(path) if _leads_outside(entry))
    except (OSError, ValueError) as error:
        raise StorageError(
            f"The run folder {path} cannot be written: {explain_os_error(path, error)}; choose another with --run-dir."
        ) from error
    finally:
        with suppress(OSError, ValueError):
            probe.unlink()
    if linked:
        raise StorageError(
            f"The run folder {path} has a link in it ({linked[0]}), and training would write to the file behind it; remove "
            "the link or choose another folder with --run-dir."
        )
    return path


def _leads_outside(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry of a folder is a symbolic link, or a file with another hard link."""
    return entry.is_symlink() or (entry.is_file() and entry.stat().st_nlink > 1)


def remove_unused(path: Path) -> None:
    """Remove a run folder that contains nothing but its lock."""
    with suppress(OSError):
        if os.listdir(path) == [".lock"]:
            (path / ".lock").unlink()
        path.rmdir()


def reason(error: Exception) -> str:
    """Return the system's reason for `error` as part of a sentence, without error number and file name."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return text[:1].lower() + text[1:]


def explain_os_error(path: Path, error: Exception) -> str:
    """Return why `path` cannot be used, with the name of the file if there is one in place of a folder."""
    if isinstance(error, NotADirectoryError | FileExistsError):
        blocker = next((place for place in (path, *path.parents) if place.is_file()), path)
        return f"{blocker} is a file, not a folder"
    return reason(error)


def write_json(path: Path, record: Any) -> None:
    """Write `record` atomically: a reader sees the old file or the new one, never a mixture."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(json.dumps(record, indent=2, default=str) + "\n", encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        raise StorageError(
            f"{path} could not be written: {error.strerror}. Free or repair the disk and try again."
        ) from error


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; raise OSError if it is not a regular file or too large, ValueError if not JSON.

    An untrusted run folder may contain a pipe instead of a file, which must not block.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), encoding="utf-8") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        if status.st_size > _MAX_JSON:
            raise OSError(errno.EFBIG, f"it has {status.st_size:,} bytes, more than such a file can have")
        return json.loads(file.read())


def read_config(run_dir: Path) -> dict[str, Any]:
    """Return the config.json of a run; raise UserError for a folder without one."""
    path = run_dir / CONFIG
    if not run_dir.is_dir():
        folders = [str(config.parent) for config in Path("runs").glob(f"*/{CONFIG}")]
        hint = nearest(str(Path("runs") / run_dir.name), folders) or "; train one with redline train."
        raise UserError(f"There is no run folder {run_dir}{hint}")
    try:
        record = read_json(path)
    except FileNotFoundError:
        raise UserError(
            f"{run_dir} is not a run folder: there is no config.json in it. Train one with redline train."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        why = reason(error) if isinstance(error, OSError) else "it is not valid JSON"
        raise StorageError(f"{path} could not be read: {why}; restore it or train into another folder.") from error
    if not isinstance(record, dict) or not all(isinstance(record.get(k), kind) for k, kind in _CONFIG_TYPES.items()):
        raise StorageError(f"{path} is not a run's config.json; restore it or train into another folder.")
    for name, kind in get_type_hints(Settings).items():
        if name in record and not (kind is str and record[name] is None):  # settings that this run does not use
            try:
                check_value(kind, record[name], name)
            except UserError as error:
                raise StorageError(f"{path} is not a run's config.json: {error}") from error
    version = record.get("format_version", 1)
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise newer_version(f"The run in {run_dir}", version)
    if version < FORMAT_VERSION:
        raise earlier_version(f"The run in {run_dir}", version)
    return record


def write_config(run_dir: Path, settings: dict[str, Any]) -> None:
    """Write the settings of a run to its config.json."""
    write_json(run_dir / CONFIG, {"format_version": FORMAT_VERSION} | settings)


def earlier_version(subject: str, version: int) -> UserError:
    """Return the error for a run or checkpoint, the `subject`, that this version can no longer read."""
    return UserError(
        f"{subject} was written by an earlier version of Redline (format {version}, this one reads {FORMAT_VERSION}); "
        "train it anew or use that version."
    )


def newer_version(subject: str, version: Any) -> UserError:
    """Return the error for a run or checkpoint, the `subject`, whose format is too new for this version."""
    return UserError(
        f"{subject} was written by a newer Redline (format {version}, this one reads {FORMAT_VERSION}): upgrade with "
        "pip install -U redline, or choose another --run-dir."
    )


def read_result(run_dir: Path) -> dict[str, Any] | None:
    """Return the result.json of a run; None if it is missing or unreadable."""
    with suppress(OSError, ValueError, RecursionError):
        record = read_json(run_dir / RESULT)
        if isinstance(record, dict):
            return record
    return None
