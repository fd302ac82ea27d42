"""Hooks for mkdocs: add repository files that pages link to, such as examples and results, to the site.

Pages link to files by their path in the repository (`../examples/own_training_loop.py`), which is outside of the site's source.
The site contains a copy of each under `repository/`, as text that browsers display.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(?<=\]\()\.\.?/[^)#\s]+(?=[)#])")


def on_files(files: Any, config: Any) -> Any:
    """Add the linked files of the repository to the site."""
    for page in list(files.documentation_pages()):
        for match in _LINK.finditer(page.content_string):
            uri = _site_uri(page.src_uri, match[0])
            if uri and files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, abs_src_path=str(_target(page.src_uri, match[0]))))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the page with its links to repository files pointing to the copies."""
    folder = os.path.dirname(page.file.src_uri)

    def rewrite(match: re.Match[str]) -> str:
        uri = _site_uri(page.file.src_uri, match[0])
        return os.path.relpath(uri, folder or ".") if uri else match[0]

    return _LINK.sub(rewrite, markdown)


def _target(page_uri: str, link: str) -> Path:
    return (ROOT / "docs" / page_uri).parent.joinpath(link).resolve()


def _site_uri(page_uri: str, link: str) -> str:
    """Return the site's path for a linked file; empty for files in docs/ and files that do not exist."""
    target = _target(page_uri, link)
    if target.is_relative_to(ROOT / "docs") or not target.is_relative_to(ROOT) or not target.is_file():
        return ""
    return f"repository/{target.relative_to(ROOT).as_posix()}{'.txt' if target.suffix in ('.py', '.sh') else ''}"
