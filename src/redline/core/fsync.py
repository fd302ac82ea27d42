"""Durability: flush the entries of a folder to disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Flush the entries of a folder to disk, so that a rename survives a power failure."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems neither support nor need it
            raise
    finally:
        os.close(fd)
