"""C++ compiled on first use, and kept in this user's cache."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

_SECONDS_TO_COMPILE = 120


def find_compiler() -> str:
    """Return the C++ compiler that torch.compile uses on a CPU, or an empty string."""
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
    """Return the folder of what Redline remembers between runs; it may be deleted at any time."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (folder if folder.is_absolute() else Path.home() / ".cache") / "redline"


def compiled_library(source: Path) -> Path:
    """Return the path of the shared library of a C++ file; raise OSError where it cannot be compiled.

    It is compiled again when the source, the compiler's name or the processor changes.
    """
    compiler = find_compiler()
    if not compiler:
        raise OSError("there is no C++ compiler")
    this_processor = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    command = [compiler, "-std=c++17", "-O3", this_processor, "-fPIC", "-shared", str(source)]
    depends_on = "\n".join((source.read_text(), *command, processor_name(), platform.platform()))
    path = cache_folder() / f"{source.stem}-{hashlib.sha256(depends_on.encode()).hexdigest()[:16]}.so"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # several processes may compile at once
        library = Path(folder) / path.name
        try:
            subprocess.run(
                [*command, "-o", str(library)],
                env=os.environ | {"LC_ALL": "C"},
                check=True,
                capture_output=True,
                text=True,
                timeout=_SECONDS_TO_COMPILE,
            )
        except subprocess.SubprocessError as error:
            lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            why = next((line for line in lines if "error:" in line), lines[0])
            raise OSError(f"{compiler} failed: {why}") from error
        os.replace(library, path)
    return path
