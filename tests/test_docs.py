"""The documentation is true: Python snippets run, the README stays short."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
# Shortens the trainings of the snippets: the calls stay the same, their budgets shrink.
SHORTER = (("steps=200_000", "steps=2_000, num_envs=64, compile=False, eval_episodes=4"), ("episodes=64", "episodes=8"))


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(page.read_text(encoding="utf-8")) if kind == language]


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
    assert len(text.splitlines()) <= 130
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
