"""The run folder: made and tried before training starts, and held by one process at a time."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from redline.core.errors import StorageError

Notify = Callable[[str], None]


def to_stderr(message: str) -> None:
    """The default way to tell the user: one line on standard error."""
    with suppress(OSError, ValueError):  # a closed terminal is no reason to stop
        print(message, file=sys.stderr, flush=True)


def prepare_run_dir(path: Path | str) -> Path:
    """Make the run folder and really write to it, so that a full or forbidden disk is found before any training."""
    path = Path(path)
    probe = path / f".probe-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        with open(probe, "xb") as file:
            file.write(b"redline")
            file.flush()
            os.fsync(file.fileno())
    except (OSError, ValueError) as error:
        raise StorageError(
            f"The run folder {path} cannot be written: {_why_not(path, error)}; choose another with --run-dir."
        ) from error
    finally:
        with suppress(OSError, ValueError):
            probe.unlink()
    return path


def why(error: Exception) -> str:
    """The system's reason alone, as part of a sentence: without number and file name."""
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return reason[:1].lower() + reason[1:]


def _why_not(path: Path, error: Exception) -> str:
    if isinstance(error, NotADirectoryError | FileExistsError):
        blocker = next((place for place in (path, *path.parents) if place.is_file()), path)
        return f"{blocker} is a file, not a folder"
    return why(error)


class RunLock:
    """Held from construction to `close`, or to the end of the process however it ends. A second holder is refused.

    The lock is the kernel's (flock), not the file: a crashed run leaves the file `.lock` behind but no lock.
    """

    def __init__(self, run_dir: Path | str, *, notify: Notify = to_stderr) -> None:
        self.run_dir = Path(run_dir)
        self._fd: int | None = None
        path = self.run_dir / ".lock"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StorageError(
                f"The lock file {path} cannot be opened: {_why_not(path, error)}; choose another --run-dir."
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(fd)
            os.close(fd)
            raise StorageError(
                f"The run folder {self.run_dir} is in use by {holder}: wait for it, stop it, or choose another folder "
                "with --run-dir."
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
                os.close(fd)
                raise StorageError(
                    f"The run folder {self.run_dir} cannot be locked: {_why_not(path, error)}."
                ) from error
            # Some cluster file systems have no locks. A run there is better than none, but the user must know.
            notify(f"The file system of {self.run_dir} has no locks: let no other process train into this folder.")
        self._fd = fd
        with suppress(OSError):  # the text is for people; a full disk must not stop a resume that may free space
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode() + b"\n", 0)
        _held.add(self)

    def close(self) -> None:
        """Release the lock; calling again does nothing."""
        if self._fd is not None:
            with suppress(OSError):
                os.ftruncate(self._fd, 0)
            with suppress(OSError):
                fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = None
            _held.discard(self)

    @property
    def held(self) -> bool:
        """Whether this process holds the lock."""
        return self._fd is not None

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _holder(fd: int) -> str:
    with suppress(OSError, ValueError, KeyError, TypeError):
        holder = json.loads(os.pread(fd, 4096, 0))
        return f"process {int(holder['pid'])} on host {holder['host']}"
    return "another process"


_held: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _forget_in_child() -> None:
    # A forked worker shares the lock and would keep it after the trainer was killed, so it lets go of its copy.
    for lock in list(_held):
        if lock._fd is not None:
            os.close(lock._fd)
            lock._fd = None
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)
