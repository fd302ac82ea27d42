"""The documentation as a site: the navigation is complete, links and anchors resolve, the strict build passes."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
FENCE = re.compile(r"^```.*?^```|^ {4}.*?$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")


def text_of(page: Path) -> str:
    """Return a page without its code blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as mkdocs makes them."""
    titles = re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE)
    words = [
        re.sub(r"[^\w\s-]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)).strip().lower() for title in titles
    ]
    return {re.sub(r"[-\s]+", "-", word) for word in words}


def broken_links(page: Path, text: str) -> list[str]:
    """Return the links in a text that lead to no file or no heading, `text` being that of `page`."""
    broken = []
    for target, anchor in LINK.findall(text):
        if re.match(r"\w+:", target):
            continue
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(f"{target}#{anchor}" if anchor else target)
    return broken


def test_every_page_is_in_the_navigation_once() -> None:
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r"- [^:\n]+: (\S+\.md)$", settings.partition("\nnav:\n")[2], re.MULTILINE)
    assert sorted(listed) == [page.relative_to(DOCS).as_posix() for page in PAGES]


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda page: page.name)
def test_links_and_anchors_resolve(page: Path) -> None:
    assert broken_links(page, text_of(page)) == []


def test_broken_links_are_found() -> None:
    text = "[a](missing.md) [b](index.md#nowhere) [c](index.md#i-want-to) [d](https://example.org) [e](#nowhere)"
    assert broken_links(DOCS / "log.md", text) == ["missing.md", "index.md#nowhere", "#nowhere"]


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed")
def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "index.html").exists()
    loaded = r'<(?:script|img|iframe)[^>]*\ssrc="(https?:)?//|<link[^>]*rel="stylesheet"[^>]*href="(https?:)?//|@import'
    for page in (tmp_path / "site").rglob("*.html"):
        assert not re.search(loaded, page.read_text(encoding="utf-8")), page.name
