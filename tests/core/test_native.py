"""C++ compiled on first use: once per source and machine, with an error that says what the compiler said."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from redline.core import native

needs_compiler = pytest.mark.skipif(not native.find_compiler(), reason="there is no C++ compiler")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return native.cache_folder()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "sum.cpp"
    path.write_text('extern "C" int sum(int a, int b) { return a + b; }')
    return path


@needs_compiler
def test_a_library_is_compiled_once_for_each_source(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = native.compiled_library(source)
    assert first.parent == cache
    assert ctypes.CDLL(str(first)).sum(2, 3) == 5
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it is there already"))
        assert native.compiled_library(source) == first
    source.write_text('extern "C" int sum(int a, int b) { return a - b; }')
    second = native.compiled_library(source)
    assert ctypes.CDLL(str(second)).sum(2, 3) == -1
    assert sorted(path.name for path in cache.iterdir()) == sorted((first.name, second.name)), "nothing else is left"


@needs_compiler
def test_what_cannot_be_compiled_says_why(source: Path, cache: Path) -> None:
    source.write_text('extern "C" int sum(int a) { return b; }')
    with pytest.raises(OSError, match=r"failed: .*sum\.cpp.*error: .*b"):
        native.compiled_library(source)
    assert list(cache.iterdir()) == []


def test_without_a_compiler_it_says_so(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "find_compiler", lambda: "")
    with pytest.raises(OSError, match=r"there is no C\+\+ compiler"):
        native.compiled_library(source)


@needs_compiler
def test_a_cache_that_cannot_be_written_is_an_error_of_the_system(
    source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(OSError, match="file"):
        native.compiled_library(source)


@pytest.mark.parametrize(
    ("cxx", "there", "expected"),
    [
        ("", ("g++", "clang++"), "g++"),
        ("", ("clang++",), "clang++"),
        ("", (), ""),
        ("my-c++", ("my-c++", "g++"), "my-c++"),
        ("gone-c++", ("clang++",), "clang++"),
    ],
)
def test_compiler(cxx: str, there: tuple[str, ...], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", cxx)
    monkeypatch.setattr(native.shutil, "which", lambda name: f"/usr/bin/{name}" if name in there else None)
    assert native.find_compiler() == expected
