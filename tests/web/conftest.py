"""A small trained run for the tests of the page."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from tiny_runs import train_tiny

# `make gpu-test` installs nothing: a machine for it need not have the extra `web`.
if not all(map(find_spec, ("uvicorn", "starlette", "websockets", "httpx"))):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def snake_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tiny(tmp_path_factory.mktemp("runs") / "snake-run")


@pytest.fixture(scope="session")
def tetris_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tiny(tmp_path_factory.mktemp("runs") / "tetris-run", "tetris", "1024")
