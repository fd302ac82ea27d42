"""Preemption notices of cloud machines: a file or URL, polled during training and treated as SIGTERM.

--preemption-notice /run/preempt                                                            a file that a script creates
--preemption-notice http://metadata.google.internal/computeMetadata/v1/instance/preempted   Google: TRUE
--preemption-notice http://169.254.169.254/latest/meta-data/spot/instance-action            Amazon: 404 until the notice
"""

from __future__ import annotations

import os
import signal
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path

from redline.core.errors import UserError
from redline.run.signals import StopSignals

_POLL_SECONDS = 1.0  # between two checks
_TIMEOUT = 2.0  # seconds for an answer
_MAX_BODY = 1 << 16
_HEADERS = {"Metadata-Flavor": "Google", "Metadata": "true"}  # required by metadata servers
_NOTHING = (b"", b"FALSE", b"NONE")  # responses without a notice


@contextmanager
def watch_for_notice(place: str | None, signals: StopSignals) -> Iterator[None]:
    """While entered, stop training as on SIGTERM once the file or URL `place` has a notice. None: do not watch."""
    if place is None:
        yield
        return
    if "://" in place and not place.startswith(("http://", "https://")):
        raise UserError(
            f"preemption_notice is '{place}'; expected a file, or a URL that begins with http:// or https://."
        )
    closed = threading.Event()
    threading.Thread(target=_watch, args=(place, signals, closed), name="preemption", daemon=True).start()
    try:
        yield
    finally:
        closed.set()


def _watch(place: str, signals: StopSignals, closed: threading.Event) -> None:
    while not closed.is_set():
        if has_notice(place):
            signals.notify(f"Preemption notice at {place}.")
            if signals.handled:
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                signals.caught = signals.caught or "SIGTERM"
            return
        closed.wait(_POLL_SECONDS)


def has_notice(place: str) -> bool:
    """Return whether the file exists, or the URL responds with anything but FALSE or NONE. Errors are no notice."""
    if not place.startswith(("http://", "https://")):
        return Path(place).exists()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # metadata servers are local: use no proxy
    try:
        with opener.open(urllib.request.Request(place, headers=_HEADERS), timeout=_TIMEOUT) as answer:
            return answer.status == 200 and answer.read(_MAX_BODY).strip().upper() not in _NOTHING
    except (OSError, ValueError, HTTPException):
        return False
