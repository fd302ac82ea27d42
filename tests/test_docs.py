"""The documentation is true: commands are accepted, Python snippets run, the README stays short."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from redline.cli.command import COMMANDS
from redline.cli.parse import parse

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
# Shortens the trainings of the snippets: the calls stay the same, their budgets shrink.
SHORTER = (("steps=200_000", "steps=2_000, num_envs=64, compile=False, eval_episodes=4"), ("episodes=64", "episodes=8"))


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(page.read_text(encoding="utf-8")) if kind == language]


def commands(page: Path) -> list[str]:
    """Lines of shell blocks that run redline, by torchrun too, without comments."""
    texts = [text.replace("\\\n", " ") for text in blocks(page, "bash")]
    lines = [line.partition("  #")[0].strip() for text in texts for line in text.splitlines()]
    lines = [line.partition(" -m ")[2] if line.startswith("torchrun ") else line for line in lines]
    return [line for line in lines if line.startswith("redline ")]


@pytest.mark.parametrize(
    ("page", "line"), [(page.name, line) for page in PAGES for line in commands(page)], ids=lambda value: value
)
def test_commands_are_accepted(page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser takes every `redline` line of the documentation; nothing is run."""
    del page
    if "my_package" in line or "my-run" in line:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "my_package").mkdir()
        (tmp_path / "my_package" / "twenty48.py").write_text((ROOT / "examples/twenty48/twenty48.py").read_text())
        (tmp_path / "my-run.toml").write_text("steps = 1000\n")
    if "skyline" in line:
        monkeypatch.chdir(ROOT / "examples" / "hindsight")
    _, name, *rest = shlex.split(line)
    parse(name, COMMANDS.load(name), rest)


@pytest.mark.parametrize("page", ["README.md", "docs/guides/library.md", "docs/guides/profiling.md"])
def test_python_snippets_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python blocks of a page, one after the other in one namespace."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    found = blocks(ROOT / page, "python")
    assert found
    for text in found:
        for long, short in SHORTER:
            text = text.replace(long, short)
        exec(compile(text, page, "exec"), namespace)


def test_readme_is_short_and_starts_people() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 160
    assert "make train" in text
    assert "make test" in text
    image = ROOT / re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)[0]
    assert os.path.getsize(image) < 2_000_000


# Spellings of the first version that no reader of the field knows.
STRANGE = re.compile(
    r"\b(lanes?|retry|games of tensors|environments of the host|said aloud|leave it away)\b", re.IGNORECASE
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_use_the_fields_words(page: Path) -> None:
    assert not STRANGE.findall(page.read_text(encoding="utf-8"))
