"""Compile C++ on first use, and cache the libraries in the user's cache folder.

For single-threaded loops, which environment processes can load without torch's compiler. A loop that shares torch's threads
is built by torch's compiler instead, see `engine.gather`.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

_SECONDS_TO_COMPILE = 120


def find_compiler() -> str:
    """Return the C++ compiler that torch.compile uses on a CPU; empty if there is none."""
    for name in (os.environ.get("CXX", ""), "g++", "clang++"):
        if name and shutil.which(name):
            return name
    return ""


def processor_name() -> str:
    """Return the name of this machine's processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cache_folder() -> Path:
    """Return Redline's cache folder, which may be deleted at any time."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (folder if folder.is_absolute() else Path.home() / ".cache") / "redline"


def load_library(source: Path) -> ctypes.CDLL:
    """Return the compiled shared library of a C++ file, cached; raise OSError if it cannot be compiled or loaded.

    It is recompiled when the source, the compiler or the system changes.
    """
    compiler = find_compiler()
    if not compiler:
        raise OSError("there is no C++ compiler")
    command = [compiler, "-std=c++17", "-O3", "-fPIC", "-shared", str(source)]
    depends_on = "\n".join((source.read_text(), *command, platform.platform(), platform.machine()))
    try:
        path = cache_folder() / f"{source.stem}-{hashlib.sha256(depends_on.encode()).hexdigest()[:16]}.so"
    except RuntimeError as error:  # there is no home folder
        raise OSError(str(error)) from error
    if path.exists():
        with contextlib.suppress(OSError):  # the file may be damaged: compile again
            return ctypes.CDLL(str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # several processes may compile at once
        made = Path(folder) / path.name
        _compile([*command, "-o", str(made)])
        library = ctypes.CDLL(str(made))  # cache only libraries that can be loaded
        os.replace(made, path)
    return library


def _compile(command: list[str]) -> None:
    environment = os.environ | {"LC_ALL": "C"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=_SECONDS_TO_COMPILE)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{command[0]} took longer than {_SECONDS_TO_COMPILE} s") from error
    if done.returncode:
        lines = done.stderr.decode(errors="replace").split("\n")
        why = next((line for line in lines if "error" in line), f"exit code {done.returncode}")
        raise OSError(f"{command[0]} failed: {why.strip()}")
