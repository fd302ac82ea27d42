"""Errors that a user can cause. The command line prints the message without a traceback and exits with `exit_code`."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable
from pathlib import Path


class UserError(Exception):
    """A request that cannot be met. The message states the problem, the expected input and the remedy."""

    exit_code = 2


class StorageError(UserError):
    """Reading or writing the run folder failed."""

    exit_code = 74


class EnvFailure(UserError):
    """A user's environment raised an exception or returned a value that its interface does not allow."""


class InvalidStep(EnvFailure):
    """An environment returned a value that its interface or spaces do not allow. Replacing it would not help."""


class EnvsLost(UserError):
    """Environments failed too often, or a restart would not help. Training stops with a checkpoint."""

    exit_code = 70


def nearest(word: str, choices: Iterable[str], prefix: str = "") -> str:
    """Return `; did you mean 'X'?` with the closest of `choices`, shown after `prefix`; empty if none is close."""
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f"; did you mean '{prefix}{close[0]}'?" if close else ""


def instead_of_file(name: str) -> str:
    """Return `; give the import name instead of a file: X.` if `name` names a Python file, else an empty string."""
    path = Path(name)
    if path.suffix != ".py":
        return ""
    folder = "" if path.parent == Path() else f", from the folder {path.parent}"
    return f"; give the import name instead of a file{folder}: {path.stem}."


def code_place(error: BaseException, file: str | None) -> str:
    """Return ` (FILE, line N)` for the innermost line of `file` in an exception's traceback; empty if there is none."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if file and frame.filename == file]
    return f" ({Path(file).name}, line {lines[-1]})" if file and lines else ""
