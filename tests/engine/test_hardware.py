"""What the machine has, and the sentence for what it has not."""

from __future__ import annotations

import os
from types import SimpleNamespace

import psutil
import pytest
import torch

from redline.core.errors import UserError
from redline.core.records import Hardware, Tier
from redline.engine import hardware


def with_gpus(monkeypatch: pytest.MonkeyPatch, count: int, current: int = 0) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)


@pytest.mark.parametrize(
    ("wanted", "gpus", "expected"),
    [
        ("auto", 0, "cpu"),
        ("auto", 1, "cuda:0"),
        ("auto", 4, "cuda:2"),  # the current one
        ("cpu", 1, "cpu"),
        ("cuda", 2, "cuda:0"),
        ("cuda:1", 2, "cuda:1"),
    ],
)
def test_device_that_is_there(wanted: str, gpus: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, gpus, current=2 if gpus == 4 else 0)
    assert str(hardware.pick_device(wanted)) == expected


@pytest.mark.parametrize(
    ("wanted", "gpus", "sentence"),
    [
        ("cuda", 0, r"device is 'cuda', but torch \S+ sees no CUDA device here; take --device auto\."),
        ("cuda:99", 0, r"device is 'cuda:99', but torch \S+ sees no CUDA device here; take --device auto\."),
        ("cuda:99", 1, r"device is 'cuda:99', but torch \S+ sees 1 CUDA device here; take --device auto\."),
        ("cuda:2", 2, r"device is 'cuda:2', but torch \S+ sees 2 CUDA devices here; take --device auto\."),
        ("cud", 1, r"device is 'cud'; did you mean 'cuda'\? Expected auto, cpu, cuda, cuda:N or mps\."),
        ("cpi", 1, r"device is 'cpi'; did you mean 'cpu'\? Expected auto, cpu, cuda, cuda:N or mps\."),
        ("teapot", 1, r"device is 'teapot'\. Expected auto, cpu, cuda, cuda:N or mps\."),
        ("", 1, r"device is ''\. Expected auto"),
        ("cuda:x", 1, r"device is 'cuda:x'; did you mean 'cuda'\? Expected"),
        ("cuda:-1", 1, r"device is 'cuda:-1'; did you mean 'cuda'\? Expected"),
        ("cuda:", 1, r"device is 'cuda:'; did you mean 'cuda'\? Expected"),
        ("cuda:²", 1, r"device is 'cuda:²'; did you mean 'cuda'\? Expected"),
        ("cpu:1", 1, r"device is 'cpu:1'; did you mean 'cpu'\? Expected"),
    ],
)
def test_device_that_is_not(wanted: str, gpus: int, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, gpus)
    with pytest.raises(UserError, match=f"^{sentence}"):
        hardware.pick_device(wanted)


def test_no_apple_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"^device is 'mps', but there is no Apple GPU here .*; take --device auto\.$"):
        hardware.pick_device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert hardware.pick_device("mps") == torch.device("mps")


def test_this_machine() -> None:
    found = hardware.detect(torch.device("cpu"))
    assert (found.device, found.kind, found.bf16, found.capability) == ("cpu", "cpu", False, (0, 0))
    assert 1 <= found.cores <= (os.cpu_count() or 1)
    assert found.memory_gb == pytest.approx(psutil.virtual_memory().total / 2**30)
    assert found.name


def test_cores_are_those_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3}, raising=False)
    assert hardware.detect(torch.device("cpu")).cores == 1


@pytest.mark.parametrize(("major", "minor", "bf16"), [(9, 0, True), (8, 0, True), (7, 5, False), (12, 0, True)])
def test_a_gpu(major: int, minor: int, bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="a GPU", total_memory=80 * 2**30, major=major, minor=minor)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    found = hardware.detect(torch.device("cuda", 1))
    assert (found.device, found.kind, found.name, found.memory_gb) == ("cuda:1", "cuda", "a GPU", 80.0)
    assert (found.bf16, found.capability) == (bf16, (major, minor))


@pytest.mark.parametrize(
    ("device", "cores", "memory_gb", "capability", "tier"),
    [
        ("cpu", 1, 4.0, (0, 0), "cpu-few"),
        ("cpu", 4, 500.0, (0, 0), "cpu-few"),
        ("cpu", 5, 4.0, (0, 0), "cpu-many"),
        ("cpu", 128, 500.0, (0, 0), "cpu-many"),
        ("mps", 8, 16.0, (0, 0), "cpu-many"),
        ("cuda:0", 2, 3.9, (6, 1), "gpu-small"),  # GTX 1050 Ti
        ("cuda:0", 16, 7.6, (8, 9), "gpu-small"),  # RTX 4060
        ("cuda:0", 64, 9.8, (8, 6), "gpu-small"),  # RTX 3080
        ("cuda:1", 4, 10.0, (8, 6), "gpu-mid"),
        ("cuda:0", 4, 14.6, (7, 5), "gpu-mid"),  # T4
        ("cuda:0", 16, 23.5, (8, 9), "gpu-mid"),  # RTX 4090
        ("cuda:0", 8, 31.7, (7, 0), "gpu-mid"),  # V100
        ("cuda:0", 16, 31.4, (12, 0), "gpu-large"),  # RTX 5090
        ("cuda:0", 2, 39.4, (8, 0), "gpu-large"),  # A100
        ("cuda:3", 64, 139.8, (9, 0), "gpu-large"),  # H200
    ],
)
def test_class_of_machine(device: str, cores: int, memory_gb: float, capability: tuple[int, int], tier: Tier) -> None:
    found = Hardware(device, "x", cores, memory_gb, bf16=False, compiler="", capability=capability)
    assert found.tier == tier


@pytest.mark.parametrize(("file", "program"), [(True, False), (False, True), (True, True), (False, False)])
def test_an_nvidia_driver(file: bool, program: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"/proc/driver/nvidia/version"} if file else set()
    monkeypatch.setattr(hardware.Path, "exists", lambda path: str(path) in there)
    monkeypatch.setattr(hardware.shutil, "which", lambda name: name if program and name == "nvidia-smi" else None)
    assert hardware.has_nvidia_driver() == (file or program)


def test_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    total = psutil.virtual_memory().total
    assert 0 < hardware.free_bytes(torch.device("cpu")) <= total
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: {1: (7, 99)}[device.index])
    assert hardware.free_bytes(torch.device("cuda", 1)) == 7
