"""An exception that ends training: one sentence for the user, the traceback in the run folder."""

from __future__ import annotations

import traceback
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from redline.core.errors import UserError
from redline.engine.fast import first_line

CRASH_LOG = "crash.log"


class TrainingFailed(UserError):
    """Training ended by an exception that is no mistake of the user's, as far as is known. Its cause is the exception."""

    exit_code = 70


def training_failed(run_dir: Path, error: Exception, env_steps: int, saved: str) -> UserError:
    """Return the error to raise in place of `error`, after `env_steps`. saved: the sentence about the checkpoint.

    A UserError keeps its type, and with it the exit code.
    """
    if isinstance(error, UserError):
        error.args = (f"{error} {saved}".rstrip(),)
        return error
    what = f"Training failed after {env_steps:,} steps: {first_line(error).rstrip('.')}."
    where = _write_traceback(run_dir / CRASH_LOG, error)
    return TrainingFailed(" ".join(filter(None, (what, saved, where))))


def _write_traceback(path: Path, error: Exception) -> str:
    """Append the traceback to a file and return `The traceback is in FILE.`; an empty string if that is impossible."""
    with suppress(OSError):
        with open(path, "a", encoding="utf-8", errors="replace") as file:
            file.write(f"{datetime.now().isoformat(timespec='seconds')}\n")
            file.write("".join(traceback.format_exception(error)) + "\n")
        return f"The traceback is in {path}."
    return ""
