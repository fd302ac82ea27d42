"""The files of the pages: HTML, style sheet and scripts that come with the package."""

from __future__ import annotations

from importlib import resources


def static_files() -> dict[str, bytes]:
    """Return the content of every file by name."""
    folder = resources.files("redline.web") / "static"
    return {entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.is_file()}
