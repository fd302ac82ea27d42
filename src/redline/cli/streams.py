"""Standard streams that are closed, full or unable to show a character: none of these changes what a command does."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import TextIO

from redline.core.errors import StorageError


def prepare() -> None:
    """Give the process all three standard streams, and replace characters that a terminal cannot show.

    Where a stream was closed (`2>&-`), the next file opened would get its number, and whatever a library prints to standard
    error would end up in that file.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (until the process ends)
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (until the process ends)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def flush_output() -> None:
    """Write the output of a command that is still buffered. A reader that is gone is no error, a full disk is one."""
    write("")


def write(text: str) -> None:
    """Write the output of a command. A reader that is gone, as in `redline list | head -1`, is no error."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        silence(sys.stdout)
    except OSError as error:
        silence(sys.stdout)
        raise StorageError(f"Standard output could not be written: {error.strerror}.") from error


def finish() -> None:
    """Write what the streams still hold; what cannot be written is dropped, so that the exit code stays the command's."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            silence(stream)


def silence(stream: TextIO) -> None:
    """Send what a stream holds, and everything printed to it from now on, nowhere."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        stream.flush()
