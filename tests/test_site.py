"""The documentation as a site: the navigation is complete, links and anchors resolve, the strict build passes."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import redline
from bench_scripts import load_script

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
        there = path.is_file() if page.is_relative_to(DOCS) else path.exists()  # the site has no page for a folder
        if not there or (anchor and anchor not in anchors(path)):
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


@pytest.fixture(scope="module")
def cli_page() -> ModuleType:
    return load_script("make_cli_page")


def test_the_reference_of_the_command_line_is_up_to_date(cli_page: ModuleType) -> None:
    text = cli_page.page()
    assert cli_page.PAGE.read_text(encoding="utf-8") == text, "run `make docs`"
    for part in (
        "## redline train",
        "| `--eval-every N` |",
        "### snake",
        "`--env.width N`",
        "### dqn",
        "`--dqn.gamma X`",
    ):
        assert part in text


def test_the_python_reference_names_the_whole_surface() -> None:
    page = (DOCS / "reference" / "python.md").read_text(encoding="utf-8")
    assert [name for name in redline.__all__ if f"::: redline.{name}\n" not in page] == []


def fixed_texts() -> list[str]:
    """Return the fixed parts of every string in the source, in the order of the source, with … for values."""
    texts = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts


def test_the_messages_of_troubleshooting_are_printed() -> None:
    """Every quoted message occurs in the source, `…` standing for values."""
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    messages = [
        line
        for block in re.findall(r"^```text\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
        for line in block.splitlines()
    ]
    assert len(messages) > 10
    source = "\n".join(fixed_texts())
    missing = [
        part
        for message in messages
        for part in message.split("…")
        if len(part.strip()) > 3 and part.strip() not in source
    ]
    assert missing == []
