"""The state of the machine that the doctor reports: what is measured, what is warned of, which extras there are."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from redline.collect.actor_collector import ActorCollector
from redline.run.resolve import resolve
from redline.run.session import Session
from redline.run.settings import Settings
from redline.tools import health

GOOD: dict[str, Any] = {
    "disk": {
        "folder": "/runs",
        "free_bytes": 10**10,
        "write_bytes_per_second": 5e8,
        "read_bytes_per_second": 1e9,
        "fsync_seconds": 0.002,
    },
    "shared_memory": {"place": "anonymous memory", "free_bytes": 10**9, "needed_bytes": 10**6, "needed_for": "this"},
    "cpu": {"cores": 4, "load": 0.5, "quota_cores": None},
    "gpu": {"mhz": 1980, "max_mhz": 1980, "celsius": 40, "watts": 300.0, "throttled_by": []},
    "extras": {"wandb": {"installed": False, "gives": "it logs", "install": "pip install 'redline[wandb]'"}},
}


def test_a_disk_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    record = health.measure_disk(tmp_path / "runs" / "snake-ppo")
    assert record["folder"] == str(tmp_path)
    assert all(record[name] > 0 for name in ("write_bytes_per_second", "read_bytes_per_second", "fsync_seconds"))
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_refuses_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> Any:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(health.tempfile, "TemporaryFile", refuse)
    found = GOOD | {"disk": health.measure_disk(tmp_path)}
    (text,) = health.find_health_warnings(found)
    assert "cannot be written (Read-only file system)" in text
    assert not any(line.startswith("Disk") for line in health.describe_health(found))


@pytest.mark.parametrize(
    ("part", "changed", "text"),
    [
        ("disk", {"write_bytes_per_second": 5e6}, "The disk of /runs is slow (5 MB/s, 2 ms to sync)"),
        ("disk", {"fsync_seconds": 0.5}, "500 ms to sync"),
        ("shared_memory", {"needed_bytes": 6 * 10**8}, "Actor processes need 600 MB of anonymous memory"),
        ("cpu", {"quota_cores": 1.5}, "may use the time of 1.5 cores, though 4 are visible"),
        ("cpu", {"load": 3.5}, "load 3.5 on 4 cores"),
        ("gpu", {"throttled_by": ["heat"], "mhz": 900}, "The GPU is throttled by heat (900 of 1980 MHz"),
    ],
)
def test_what_slows_training_down_is_told(part: str, changed: dict[str, Any], text: str) -> None:
    assert health.find_health_warnings(GOOD) == []
    (warning,) = health.find_health_warnings(GOOD | {part: GOOD[part] | changed})
    assert text in warning


def test_the_report_has_every_part() -> None:
    text = "\n".join(health.describe_health(GOOD))
    assert "Disk of /runs: 500 MB/s written, 1,000 MB/s read, 2.0 ms to sync; 10 GB free" in text
    assert "Shared memory of actors: anonymous memory, 1.0 GB free; 1.0 MB needed for this" in text
    assert "CPU: 4 cores, load 0.5" in text
    assert "GPU: 1,980 of 1,980 MHz, 40 °C, 300 W, not throttled" in text
    assert "  wandb is missing; with it it logs: pip install 'redline[wandb]'" in text


def test_the_quota_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_CGROUP", tmp_path)
    assert "quota_cores" not in health.cpu_state()
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "cpu.stat").write_text("usage_usec 5\nnr_throttled 7\n")
    state = health.cpu_state()
    assert (state["quota_cores"], state["throttled_periods"]) == (1.5, 7)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert health.cpu_state()["quota_cores"] is None


def test_throttle_reasons() -> None:
    assert health.throttle_reasons(0x1 | 0x2) == []  # idle, and clocks that the user set
    assert health.throttle_reasons(0x4 | 0x20 | 0x40) == ["the power limit", "heat"]


def test_a_gpu_is_asked_by_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda _: 0x40,
        nvmlDeviceGetClockInfo=lambda *_: 900,
        nvmlDeviceGetMaxClockInfo=lambda *_: 1980,
        nvmlDeviceGetTemperature=lambda *_: 92,
        nvmlDeviceGetPowerUsage=lambda _: 250_000,
        NVML_CLOCK_SM=1,
        NVML_TEMPERATURE_GPU=0,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="123"))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    state = health.gpu_state(torch.device("cuda:0"))
    assert state == {"mhz": 900, "max_mhz": 1980, "celsius": 92, "watts": 250.0, "throttled_by": ["heat"]}
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert health.gpu_state(torch.device("cuda:0")) == {}


def test_rings_need_what_they_allocate() -> None:
    settings = Settings("gym:CartPole-v1", "ppo", num_envs=4, actors=2, device="cpu", compile=False)
    plan = resolve(settings)
    record = health.shared_memory(plan)
    session = Session(plan, pytest.fail)
    try:
        assert isinstance(session.collector, ActorCollector)
        rings = session.collector.shared.rings
        allocated = sum(ring.spec.layout.bytes for ring in rings)
    finally:
        session.close()
    assert record["needed_bytes"] == allocated > 0
    assert record["free_bytes"] > 0
    example = health.shared_memory(resolve(Settings("snake", device="cpu")))
    assert "84x84 images" in example["needed_for"]


def test_every_extra_is_described() -> None:
    path = Path(__file__).parents[2] / "pyproject.toml"
    extras = tomllib.loads(path.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert health.EXTRAS.keys() == extras.keys() - {"test", "docs"}
    found = health.find_extras()
    assert found["tensorboard"]["install"] == "pip install 'redline[tensorboard]'"
    assert all(extra["gives"] for extra in found.values())
