"""Trust: whether a run folder may import code from outside Redline and Gymnasium.

A run's config.json names its environment and its algorithm. Either may be a user's module, which is imported when the run is
loaded, so a stranger's folder could run any module on the Python path. Redline therefore signs the names in every run it
trains, with a key that never leaves the user's configuration folder. A folder whose signature does not match was trained
elsewhere or modified: it may use built-in and installed environments, but imports nothing else unless the user passes
`--trust`.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from redline import algos, games
from redline.core.errors import UserError
from redline.envs import CPU_ENVS

SIGNATURE = "signature"  # key in config.json
_KEY_BYTES = 32


def outside_code(config: Mapping[str, Any]) -> list[str]:
    """Return the parts of a run's config that would import outside code, as phrases for a message."""
    env, algo = str(config.get("env", "")), str(config.get("algo", ""))
    parts = []
    kind, _, name = env.partition(":")
    if kind in CPU_ENVS:
        if ":" in name:
            parts.append(f"the module '{name.rpartition(':')[0]}' of {env}")
        elif kwargs := (config.get("env_options") or {}).get("kwargs"):  # a constructor may import modules it is given
            parts.append(f"the constructor arguments {', '.join(map(str, kwargs))} of {env}")
    elif env not in games.names():
        parts.append(f"the game '{env}'")
    if algo not in algos.names():
        parts.append(f"the algorithm '{algo}'")
    return parts


def signed(config: dict[str, Any]) -> dict[str, Any]:
    """Return a run's config, with a signature if it names outside code and this user can store a key."""
    key = _key(create=True) if outside_code(config) else None
    return config if key is None else config | {SIGNATURE: _sign(config, key)}


def check_trust(run_dir: Path, config: Mapping[str, Any], trust: bool) -> None:
    """Raise UserError if a run that was not trained by this user would import outside code, unless `trust`."""
    parts = outside_code(config)
    if trust or not parts:
        return
    key, signature = _key(create=False), config.get(SIGNATURE)
    if key is not None and isinstance(signature, str) and hmac.compare_digest(signature, _sign(config, key)):
        return
    raise UserError(
        f"The run {run_dir} does not carry your signature (it was trained by somebody else, on another machine or by an "
        f"earlier version), and loading it would run {' and '.join(parts)}. If you trust that code, add --trust (in Python: "
        "trust=True)."
    )


def _sign(config: Mapping[str, Any], key: bytes) -> str:
    names = [config.get("env"), config.get("algo"), config.get("env_options")]
    text = json.dumps(names, sort_keys=True, default=str).encode()
    return hmac.new(key, text, hashlib.sha256).hexdigest()


def _key(create: bool) -> bytes | None:
    """Return the user's signing key, created on first use; None if there is none or others could have written it."""
    with suppress(OSError, RuntimeError):  # RuntimeError: no home folder
        folder = Path(os.environ.get("XDG_CONFIG_HOME", ""))
        path = (folder if folder.is_absolute() else Path.home() / ".config") / "redline" / "signing-key"
        if create and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(secrets.token_bytes(_KEY_BYTES))
            try:
                os.link(part, path)  # never replaces a key created by another process
            except FileExistsError:
                pass
            finally:
                part.unlink()
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(file.fileno())
            private = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
            key = file.read(_KEY_BYTES + 1)
            return key if private and len(key) == _KEY_BYTES else None
    return None
