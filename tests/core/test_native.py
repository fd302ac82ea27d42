"""C++ compiled on first use: once per source and machine, with an error that says what the compiler said."""

from __future__ import annotations

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
    assert native.load_library(source).sum(2, 3) == 5
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it is there already"))
        assert native.load_library(source).sum(2, 3) == 5
    source.write_text('extern "C" int sum(int a, int b) { return a - b; }')
    assert native.load_library(source).sum(2, 3) == -1
    assert [path.suffix for path in cache.iterdir()] == [".so", ".so"], "nothing else is left"


@needs_compiler
def test_a_damaged_library_is_compiled_anew(source: Path, cache: Path) -> None:
    cache.mkdir(parents=True)
    native.load_library(source)
    (kept,) = cache.iterdir()
    kept.unlink()
    kept.write_bytes(b"damaged")
    assert native.load_library(source).sum(2, 3) == 5
    assert kept.stat().st_size > 1000


@needs_compiler
def test_what_cannot_be_compiled_says_why(source: Path, cache: Path) -> None:
    source.write_text('extern "C" int sum(int a) { return b; }')
    with pytest.raises(OSError, match=r"failed: .*sum\.cpp.*error: .*b"):
        native.load_library(source)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo >&2; exit 3", r"failed: exit code 3"),
        (r"printf '\377 error: no\n' >&2; exit 1", r"failed: . error: no"),
        ("echo begun >&2; sleep 60", r"took longer than 1 s"),
        ("exit 0", r"cannot open shared object|no such file|image not found"),
    ],
)
def test_any_failure_of_a_compiler_is_an_error_of_the_system(
    script: str, message: str, source: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(native, "_SECONDS_TO_COMPILE", 1)
    with pytest.raises(OSError, match=message):
        native.load_library(source)
    assert list(cache.iterdir()) == []


@needs_compiler
def test_without_a_home_it_says_so(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> None:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)
    with pytest.raises(OSError, match="home directory"):
        native.load_library(source)


def test_without_a_compiler_it_says_so(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "find_compiler", lambda: "")
    with pytest.raises(OSError, match=r"there is no C\+\+ compiler"):
        native.load_library(source)


@needs_compiler
def test_a_cache_that_cannot_be_written_is_an_error_of_the_system(
    source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(OSError, match="file"):
        native.load_library(source)


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
