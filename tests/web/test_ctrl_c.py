"""Ctrl-C at a page in a terminal: exit code 0, one sentence, and no process left behind."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from websockets.sync.client import connect

SECONDS = 120  # a loaded machine takes long to import torch


def serve(*words: str) -> tuple[subprocess.Popen[str], str, int]:
    """Start a page in a process group of its own, as a terminal does; return it with its address and port."""
    process = subprocess.Popen(
        [sys.executable, "-m", "redline", *words, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], SECONDS)[0], "the page did not start"
    line = process.stdout.readline()
    match = re.search(r"http://127\.0\.0\.1:(\d+)/", line)
    if match is None:
        process.kill()
        pytest.fail(f"{line} {process.communicate()[1]}")
    return process, match[0], int(match[1])


def children_of(process: subprocess.Popen[str], at_least: int) -> list[psutil.Process]:
    """Wait until the page has its children and return them."""
    ends = time.monotonic() + SECONDS
    while time.monotonic() < ends:
        children = psutil.Process(process.pid).children(recursive=True)
        if len(children) >= at_least:
            return children
        time.sleep(0.2)
    pytest.fail("the page started no process for its games")


@pytest.mark.parametrize(
    ("kind", "reaches"),
    [("watch", "the group"), ("watch", "the page"), ("play", "the group"), ("play against", "the page")],
)
def test_ctrl_c_ends_the_page_and_its_children(snake_run: Path, kind: str, reaches: str) -> None:
    """A terminal signals the whole group; `kill -INT` and some IDEs signal the page alone."""
    words = {
        "watch": ["watch", str(snake_run)],
        "play": ["play", "snake"],
        "play against": ["play", "snake", "--against", str(snake_run)],
    }[kind]
    process, address, port = serve(*words)
    children: list[psutil.Process] = []
    try:
        with connect(f"ws://127.0.0.1:{port}/socket", origin=address.rstrip("/")):  # somebody watches
            children = children_of(process, at_least=1)
            (os.killpg if reaches == "the group" else os.kill)(process.pid, signal.SIGINT)
            _, err = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, err
        assert err.splitlines()[-1:] == ["The page is closed."]
        assert "Traceback" not in err
        _, alive = psutil.wait_procs(children, timeout=SECONDS)
        assert alive == []
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0  # nobody listens any more
    finally:
        for left in (process, *children):
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                left.kill()
