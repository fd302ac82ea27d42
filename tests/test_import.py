"""The package's front door: lazy, with one version, and known to Gymnasium."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import redline

ROOT = Path(__file__).resolve().parents[1]


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_importing_redline_registers_ids_without_torch() -> None:
    code = """
import sys, redline, gymnasium
print("torch" in sys.modules, sorted(known for known in gymnasium.registry if known.startswith("redline/")))
print(redline.make("snake", 2).reset().shape[0], "torch" in sys.modules)
"""
    first, second = run(code).splitlines()
    assert first.startswith("False ['redline/Snake-v0', 'redline/Tetris-v0'")
    assert second == "2 True"


def test_freed_memory_is_kept_for_a_while_unless_the_user_says_otherwise() -> None:
    code = "import os; os.environ['MIMALLOC_PURGE_DELAY'] = '10'; import redline; print(os.environ['MIMALLOC_PURGE_DELAY'])"
    assert run(code) == "10\n"
    assert run(code.replace("['MIMALLOC_PURGE_DELAY'] = '10'", ".pop('MIMALLOC_PURGE_DELAY', None)")) == "1000\n"


def test_every_public_name_is_there() -> None:
    for name in set(redline.__all__) - {"testing"}:
        assert getattr(redline, name).__module__.startswith("redline")
    assert set(redline.__all__) <= set(dir(redline))
    with pytest.raises(AttributeError, match="has no attribute 'mak'"):
        redline.mak  # type: ignore[attr-defined]  # noqa: B018


def test_the_version_stands_in_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "redline.__version__"}
