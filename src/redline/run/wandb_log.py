"""Send log records to Weights & Biases (`--wandb`) in a separate thread."""

from __future__ import annotations

import importlib
import importlib.util
import netrc
import os
import queue
import secrets
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

RUN_ID = "wandb-id"  # file in the run folder: a resumed run continues its W&B run
_PROJECT = "redline"  # unless WANDB_PROJECT names another
_KEPT = 10_000  # records waiting to be sent: hours of training
_CLOSE_SECONDS = 30.0  # for the records left to send at the end of training
_OFFLINE = ("offline", "dryrun")


def open_wandb(run_dir: Path, config: Mapping[str, Any], notify: Callable[[str], None]) -> WandbLog | None:
    """Return the log of a run; None, with a message, if W&B is not installed, disabled or without an account."""
    mode = os.environ.get("WANDB_MODE", "")
    if importlib.util.find_spec("wandb") is None:
        notify("W&B is not installed, so nothing is logged there; install it with pip install 'redline[wandb]'.")
    elif mode == "disabled":
        notify("W&B is disabled by WANDB_MODE, so nothing is logged there.")
    elif mode not in _OFFLINE and not _has_account():
        notify(
            "There is no W&B account on this machine, so nothing is logged there; run wandb login once, or set "
            "WANDB_MODE=offline to write files for wandb sync."
        )
    else:
        return WandbLog(run_dir, config, notify)
    return None


def _has_account() -> bool:
    """Return whether W&B finds a key without asking for one: in WANDB_API_KEY, or where `wandb login` writes it."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    with suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    return False


class WandbLog:
    """A W&B run. Slow imports and unreachable servers do not delay training, and failures do not stop it."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any], notify: Callable[[str], None]) -> None:
        self.run_dir, self.config, self.notify = run_dir, config, notify
        self._scalars: queue.Queue[dict[str, float] | None] = queue.Queue(_KEPT)  # None: the end
        self._thread = threading.Thread(target=self._send, name="wandb", daemon=True)
        self._thread.start()

    def write(self, scalars: dict[str, float]) -> None:
        """Queue the scalars of a log point; drop them if the server has not answered for hours."""
        if self._thread.is_alive():
            with suppress(queue.Full):
                self._scalars.put_nowait(scalars)

    def close(self) -> None:
        """Send the queued scalars, for at most half a minute."""
        with suppress(queue.Full):
            self._scalars.put_nowait(None)
        self._thread.join(_CLOSE_SECONDS)

    def _send(self) -> None:
        try:
            wandb: Any = importlib.import_module("wandb")
            run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", _PROJECT),
                name=self.run_dir.name,
                id=_run_id(self.run_dir),
                resume="allow",
                dir=str(self.run_dir),
                config=dict(self.config),
                settings=wandb.Settings(silent=True, console="off"),  # the terminal belongs to the progress display
            )
            run.define_metric("*", step_metric="time/total_timesteps")
            while (scalars := self._scalars.get()) is not None:
                run.log(scalars)
            run.finish()
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            self.notify(f"Nothing is logged to W&B any more: {reason}. Training goes on.")


def _run_id(run_dir: Path) -> str:
    """Return the W&B id of a run folder, created on first use."""
    path = run_dir / RUN_ID
    with suppress(OSError):
        return path.read_text().strip()
    path.write_text(secrets.token_hex(4))
    return path.read_text()
