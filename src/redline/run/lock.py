"""The lock on a run folder: one process trains into it at a time."""

from __future__ import annotations

import errno
import json
import os
import socket
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from filelock import FileLock, Timeout

from redline.core.errors import StorageError
from redline.run.run_folder import Notify, explain_os_error, to_stderr

_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # some cluster file systems


class RunLock:
    """A lock held from construction until `close` or the end of the process. A second holder is refused.

    The kernel holds the lock (flock, through `filelock`), not the file `.lock`: a crashed run leaves the file behind but
    no lock, and a forked worker does not inherit it. The file names the holder, for the second holder's error message.
    """

    def __init__(self, run_dir: Path | str, *, notify: Notify = to_stderr) -> None:
        self.run_dir = Path(run_dir)
        self._holder_pid = 0  # 0: not held
        self._path = self.run_dir / ".lock"
        self._lock = FileLock(self._path, thread_local=False, fallback_to_soft=False)
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            raise StorageError(
                f"The run folder {self.run_dir} is in use by {_holder(self._path)}: wait for it, stop it, or choose "
                "another folder with --run-dir."
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise StorageError(
                    f"The run folder {self.run_dir} cannot be locked: {explain_os_error(self._path, error)}; choose "
                    "another with --run-dir."
                ) from error
            # Running without a lock is better than not running, but the user must be told.
            notify(f"The file system of {self.run_dir} has no locks: let no other process train into this folder.")
        self._holder_pid = os.getpid()
        with suppress(OSError):  # only informative: a full disk must not stop a resume that may free space
            self._path.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}) + "\n")

    def close(self) -> None:
        """Release the lock; calling it again does nothing."""
        if self.held:
            with suppress(OSError):
                os.truncate(self._path, 0)
            self._lock.release(force=True)
        self._holder_pid = 0

    @property
    def held(self) -> bool:
        """Whether this process holds the lock: False in a forked worker of the holder."""
        return self._holder_pid == os.getpid()

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _holder(path: Path) -> str:
    with suppress(OSError, ValueError, KeyError, TypeError):
        holder = json.loads(path.read_text())
        return f"process {int(holder['pid'])} on host {holder['host']}"
    return "another process"
