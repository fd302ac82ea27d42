"""The page of a run in training: a process of its own, which training starts, forgets and takes along when it ends."""

from __future__ import annotations

import json
import queue
import re
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
import websockets.sync.client as ws

from redline.web.dashboard import Dashboard
from redline.web.serve import listen


def answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.HTTPError:
        return False


def wait_for_end(url: str) -> None:
    end = time.monotonic() + 30
    while answers(url):
        assert time.monotonic() < end, "the server goes on"
        time.sleep(0.05)


def start(folder: Path, port: int | None = 0) -> tuple[Dashboard, str]:
    said: queue.Queue[str] = queue.Queue()
    dashboard = Dashboard(folder, "127.0.0.1", port, said.put)
    return dashboard, said.get(timeout=60)


def test_a_run_that_has_not_begun_has_a_page(tmp_path: Path) -> None:
    dashboard, line = start(tmp_path / "later")
    url = line.removeprefix("Dashboard: ")
    try:
        assert answers(url)
        with ws.connect(url.replace("http", "ws") + "socket") as viewer:
            hello = json.loads(viewer.recv(30))
            assert hello["runs"][0]["name"] == "later"
            (tmp_path / "later").mkdir()
            (tmp_path / "later" / "metrics.jsonl").write_text('{"env_steps": 5, "seconds": 1.0, "score": 2.0}\n')
            while json.loads(message := viewer.recv(30))["type"] != "points":
                pass
            assert json.loads(message)["points"][0][:2] == [5, 1.0]
    finally:
        dashboard.close()
    assert dashboard.process.poll() is not None
    assert not answers(url)


@pytest.mark.fault("H6")
def test_a_busy_port_is_told_and_training_goes_on(tmp_path: Path) -> None:
    with listen("127.0.0.1", 0) as taken:
        dashboard, line = start(tmp_path, taken.getsockname()[1])
        assert line.startswith("No dashboard: The page cannot be served on 127.0.0.1, port")
        dashboard.close()


@pytest.mark.fault("H6")
def test_the_page_ends_with_training_however_that_ends(tmp_path: Path) -> None:
    program = f"""
import time
from pathlib import Path
from redline.web.dashboard import Dashboard
Dashboard(Path({str(tmp_path)!r}), "127.0.0.1", 0, lambda line: print(line, flush=True))
time.sleep(600)
"""
    training = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert training.stdout is not None
    url = training.stdout.readline().strip().removeprefix("Dashboard: ")
    assert answers(url)
    children = psutil.Process(training.pid).children(recursive=True)
    training.kill()
    training.wait()
    wait_for_end(url)
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []


def test_train_prints_the_address_and_the_result_does_not_change(tmp_path: Path) -> None:
    options = ["--minutes", "0.1", "--num-envs", "16", "--no-compile", "--eval-episodes", "0", "--device", "cpu"]
    command = [sys.executable, "-m", "redline", "train", "snake", *options, "--dashboard", "--dashboard-port", "0"]
    output = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=200)
    assert re.search(r"Dashboard: http://127\.0\.0\.1:\d+/", output.stderr)
    assert "--dashboard" in output.stdout.splitlines()[-1]  # the command that continues
    config = json.loads((tmp_path / "runs" / "snake-ppo" / "config.json").read_text())
    assert not any("dashboard" in name for name in config)
    assert not (tmp_path / "runs" / "snake-ppo" / "live.safetensors").exists()  # nobody watched
