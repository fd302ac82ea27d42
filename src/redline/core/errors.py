"""Errors that a user can cause. The command line prints the sentence, without a traceback, and exits with the code."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A request that cannot be met. The message says what is wrong, what was expected and what to do."""

    exit_code = 2


class StorageError(UserError):
    """Reading or writing the run folder failed."""

    exit_code = 74


class EnvFailure(UserError):
    """A user's environment raised an exception or returned something its interface does not allow."""


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return `; did you mean 'X'?` for the closest of `choices`, or an empty string."""
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else ""
