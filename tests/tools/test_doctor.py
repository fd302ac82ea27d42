"""The doctor reports the settings that training would use, and warns of real problems only."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from redline.core.errors import UserError
from redline.core.records import Tier
from redline.engine import hardware
from redline.run import device_choice
from redline.run.plan import Plan
from redline.run.resolve import resolve
from redline.run.settings import Settings
from redline.run.thread_choice import decide
from redline.tools import health
from redline.tools.doctor import TIERS, examine, find_warnings, report

GB = 10**9


@pytest.fixture(autouse=True)
def healthy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU that has all it needs, and a home of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(hardware, "find_compiler", lambda: "g++")
    monkeypatch.setattr(hardware, "has_nvidia_driver", lambda: False)
    monkeypatch.setattr(health, "cpu_state", lambda: {"cores": 4, "load": 0.5})
    fast = {"write_bytes_per_second": 1e9, "read_bytes_per_second": 2e9, "fsync_seconds": 1e-3}
    monkeypatch.setattr(health, "measure_disk", lambda _: {"folder": "/runs", "free_bytes": 50 * GB} | fast)
    monkeypatch.setattr(hardware, "free_bytes", lambda _: 8 * GB)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], None]:
    """One GPU that is there now; called with the speeds of the CPU and of the GPU."""
    properties = SimpleNamespace(name="Fast 9000", total_memory=80 * 2**30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)

    def speeds(cpu: float, cuda: float) -> None:
        def measure(plan: Plan) -> float:
            return {"cpu": cpu, "cuda": cuda}[plan.device.type]

        monkeypatch.setattr(device_choice, "samples_per_second", measure)

    return speeds


def test_the_settings_are_those_of_training() -> None:
    found, plan = examine("snake", "auto", "cpu"), decide(Settings("snake", device="cpu"))
    assert (found["env"], found["algo"], found["torch"]) == ("snake", "ppo", torch.__version__)
    assert found["class"] == plan.hardware.tier
    assert found["settings"] == {name: setting.describe() for name, setting in plan.provenance.items()}
    values = {name: choice["value"] for name, choice in found["settings"].items()}
    assert values["num_envs"] == plan.num_envs
    assert values["batch_size"] == plan.algo_config.batch_size
    assert values["precision"] == plan.precision
    assert values["device"] == "cpu"
    assert (values["compile"], values["graph"]) == (plan.compile, plan.graph)
    assert found["hardware"]["cores"] >= 1
    assert json.loads(json.dumps(found))["settings"].keys() == plan.provenance.keys()


def test_the_report_gives_every_setting_with_its_reason() -> None:
    found = examine("snake", "dqn", "cpu")
    text = report(found)
    defaults = [
        name
        for name, record in found["settings"].items()
        if record["source"].split()[0] in ("algorithm", "environment")
    ]
    for name, record in found["settings"].items():
        lines = [line for line in text.splitlines() if line.startswith(f"  {name} ")]
        assert len(lines) == (name not in defaults)
        if lines:
            value = ",".join(map(str, record["value"])) if isinstance(record["value"], tuple) else str(record["value"])
            assert re.fullmatch(
                rf"  {name} +{re.escape(value)} +{record['source']} *{re.escape(record['reason'])}", lines[0]
            )
    assert f"The other {len(defaults)} options keep the defaults of algorithm and environment" in text
    assert f"Device: cpu, {found['hardware']['name']}" in text
    assert f"Class: {found['class']}, a CPU of " in text
    assert "Also here" not in text
    assert "Warning" not in text


def test_every_class_is_described() -> None:
    assert TIERS.keys() == set(get_args(Tier))
    assert len(set(TIERS.values())) == len(TIERS)


@pytest.mark.parametrize("compiler", ["g++", ""])
def test_a_gpu_and_a_missing_compiler_are_told(
    compiler: str, gpu: Callable[[float, float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(2e5, 1.2e7)
    monkeypatch.setattr(hardware, "find_compiler", lambda: compiler)
    found = examine("snake", "dqn", "auto")
    assert found["settings"]["graph"]["value"] is True
    text = report({**found, "cuda": "12.8"})
    assert "CUDA 12.8" in text
    assert "Device: cuda:0, Fast 9000, 80 GB; " in text
    assert "Class: gpu-large, a GPU of 30 GB or more" in text
    assert "Also here: cpu, " in text
    assert re.search(
        r"cuda:0 +derived from a measurement +measured before compilation: cpu 200 k, cuda:0 12 M samples/s", text
    )
    assert f"Measurements are cached in {device_choice.cache_file()}" in text
    assert ("C++ compiler: g++" in text) == bool(compiler)
    assert ("none found" in text) == (not compiler)


def test_a_gpu_that_is_slower_is_not_used_and_it_is_said(gpu: Callable[[float, float], None]) -> None:
    gpu(3e3, 2e3)
    found = examine("snake", "dqn", "auto")
    assert found["hardware"]["device"] == found["settings"]["device"]["value"] == "cpu"
    text = report(found)
    assert "Also here: cuda:0, Fast 9000, 80 GB" in text
    assert re.search(
        r"cpu +derived from a measurement +measured before compilation: cpu 3 k, cuda:0 2 k samples/s", text
    )
    asked = report(examine("snake", "dqn", "cuda"))
    assert "Device: cuda:0" in asked
    assert "cached in" not in asked


def test_a_run_of_the_past_does_not_decide(gpu: Callable[[float, float], None]) -> None:
    """The doctor tells of the machine, not of what was trained in this folder."""
    Path("runs/snake-dqn").mkdir(parents=True)
    Path("runs/snake-dqn/config.json").write_text(json.dumps({"device": "cpu"}))
    gpu(1.0, 2.0)
    assert examine("snake", "dqn", "auto")["hardware"]["device"] == "cuda:0"


# ---- warnings


def warned(device: str = "cpu") -> list[str]:
    return find_warnings(resolve(Settings("snake", device=device)))


def test_nothing_to_warn_of(gpu: Callable[[float, float], None], monkeypatch: pytest.MonkeyPatch) -> None:
    assert warned() == []
    monkeypatch.setattr(hardware, "has_nvidia_driver", lambda: True)  # and torch uses it
    gpu(1.0, 2.0)
    assert warned("cuda") == []


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "find_compiler", lambda: "")
    (text,) = warned()
    assert text.startswith("There is no C++ compiler")
    assert "Install g++ or clang++" in text
    assert f"Warning: {text}" in report(examine("snake", "dqn", "cpu"))


@pytest.mark.parametrize(
    ("cuda", "told"),
    [(None, "is built without CUDA: .*Install one with it"), ("13.0", "built for CUDA 13.0, cannot use it: .*Update")],
)
def test_a_driver_without_a_torch_for_it(cuda: str | None, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "has_nvidia_driver", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    (text,) = warned()
    assert text.startswith("There is an NVIDIA driver, but ")
    assert re.search(told, text)


def test_little_memory(gpu: Callable[[float, float], None], monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"cpu": 1.94 * GB, "cuda": 30 * GB}
    monkeypatch.setattr(hardware, "free_bytes", lambda device: free[device.type])
    (text,) = warned("cpu")
    assert text.startswith("Only 1.9 GB of memory are free on cpu: ")
    assert "smaller --num-envs and --replay-capacity" in text
    gpu(1.0, 2.0)
    assert warned("cuda") == [text]  # the host's memory matters there too
    free["cuda"] = GB
    assert [line[:44] for line in warned("cuda")] == [
        "Only 1.0 GB of memory are free on cuda:0: ga",
        "Only 1.9 GB of memory are free on cpu: games",
    ]
    free |= {"cpu": 2 * GB, "cuda": 2 * GB}
    assert warned("cuda") == []


@pytest.mark.parametrize(("wrong", "sentence"), [({"env": "snak"}, "did you mean 'snake'"), ({"algo": "dq"}, "'dqn'")])
def test_wrong_names(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        examine(**{"env": "snake", "algo": "dqn", "device": "cpu"} | wrong)
