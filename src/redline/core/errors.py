"""Errors that a user can cause. The command line prints the sentence, without a traceback, and exits with the code."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable
from pathlib import Path


class UserError(Exception):
    """A request that cannot be met. The message says what is wrong, what was expected and what to do."""

    exit_code = 2


class StorageError(UserError):
    """Reading or writing the run folder failed."""

    exit_code = 74


class EnvFailure(UserError):
    """A user's environment raised an exception or returned something its interface does not allow."""


class InvalidStep(EnvFailure):
    """An environment returned something its interface or its spaces do not allow. Making it anew would not help."""


class EnvsLost(UserError):
    """Environments failed too often, or in a way that no restart cures. Training stops with a checkpoint."""

    exit_code = 70


def nearest(word: str, choices: Iterable[str], prefix: str = "") -> str:
    """Return `; did you mean 'X'?` for the closest of `choices`, shown after `prefix`, or an empty string."""
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f"; did you mean '{prefix}{close[0]}'?" if close else ""


def instead_of_file(name: str) -> str:
    """Return `; give the import name instead of a file: X.` if `name` is that of a Python file, or an empty string."""
    path = Path(name)
    if path.suffix != ".py":
        return ""
    folder = "" if path.parent == Path() else f", from the folder {path.parent}"
    return f"; give the import name instead of a file{folder}: {path.stem}."


def code_place(error: BaseException, file: str | None) -> str:
    """Return ` (FILE, line N)` for the innermost line of `file` that an exception passed through, or an empty string."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if file and frame.filename == file]
    return f" ({Path(file).name}, line {lines[-1]})" if file and lines else ""
