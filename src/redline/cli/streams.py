"""Keep commands working when standard streams are closed, full or unable to show a character."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import TextIO

from redline.core.errors import StorageError


def prepare() -> None:
    """Open any closed standard stream, and replace characters that a terminal cannot show.

    If a stream was closed (`2>&-`), the next file opened would get its descriptor, and a library's output to standard error
    would end up in that file.
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
    """Flush buffered output. A reader that has exited is not an error; a full disk is."""
    write("")


def write(text: str) -> None:
    """Write a command's output. A reader that has exited, as in `redline list | head -1`, is not an error."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        silence(sys.stdout)
    except OSError as error:
        silence(sys.stdout)
        raise StorageError(f"Standard output could not be written: {error.strerror}.") from error


def finish() -> None:
    """Flush the streams, dropping output that cannot be written, so that the command's exit code is kept."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            silence(stream)


def silence(stream: TextIO) -> None:
    """Discard a stream's buffered output and everything printed to it from now on."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        stream.flush()
