"""Child processes that play environments: environment variables, lifetime and exit statuses."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

START_SECONDS = 120.0  # allowed for making environments, in addition to the time a step may take
GRACE_SECONDS = 2.0  # allowed for a child to exit before it is killed
_PR_SET_PDEATHSIG = 1
# Exit statuses of actors, chosen to differ from those of environments: an exception was raised; the environment cannot be
# made here; its spec differs here; it returned a value that no learner can use.
EXIT_RAISED, EXIT_CANNOT_START, EXIT_SPEC_MISMATCH, EXIT_INVALID_STEP = range(112, 116)


class CannotStart(Exception):
    """The environments cannot be made in child processes."""


def child_environment() -> dict[str, str]:
    """Return a child's environment variables: this process's, with one thread and its module search path."""
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return os.environ | one_thread | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def ignore_interrupts() -> None:
    """Ignore signals that a terminal sends to the whole process group: the parent handles them and stops its children."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when `parent` ends, even if an environment is stuck in a step (Linux only)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def describe_exit(status: int) -> str:
    """Return how a process with this return code ended, as a predicate: `was ended by SIGKILL`."""
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-status).name}"
        return f"was ended by signal {-status}"
    known = {EXIT_RAISED: "raised an exception", EXIT_CANNOT_START: "could not make its environments"}
    known |= {EXIT_INVALID_STEP: "stopped"}
    return known.get(status, f"ended with exit status {status}")
