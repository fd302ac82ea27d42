"""Where an MLP runs as one kernel, and where layer by layer; the kernel itself by Triton's interpreter."""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from redline.algos import fused_mlp, networks
from redline.core.records import Spec

GPU = torch.device("cuda")


def prepared(monkeypatch: pytest.MonkeyPatch, triton: bool, shared: int = 227 * 1024, major: int = 9) -> list[str]:
    """Return the messages of `prepare` on a GPU like this."""
    properties = SimpleNamespace(major=major, shared_memory_per_block_optin=shared)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: object() if triton else None)
    monkeypatch.setattr(fused_mlp, "_ready", False)
    messages: list[str] = []
    fused_mlp.prepare(GPU, messages.append)
    return messages


def test_a_large_gpu_with_triton_runs_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert prepared(monkeypatch, triton=True) == []
    assert fused_mlp._ready


def test_a_gpu_without_triton_says_so_once_and_runs_layers_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    (message,) = prepared(monkeypatch, triton=False)
    assert "Triton" in message
    assert not fused_mlp._ready


@pytest.mark.parametrize(("shared", "major"), [(100 * 1024, 8), (227 * 1024, 7)])
def test_a_small_gpu_runs_layers_one_by_one(monkeypatch: pytest.MonkeyPatch, shared: int, major: int) -> None:
    assert prepared(monkeypatch, True, shared, major) == []
    assert not fused_mlp._ready


def test_a_cpu_runs_layers_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_mlp, "_ready", True)
    spec = Spec((3, 10, 10), torch.uint8, (0.1, 1.0, 1.0), 99, 4, "points")
    obs = torch.randint(0, 2, (5, 3, 10, 10)).to(torch.uint8)
    nets = [networks.build(spec, networks.NetworkConfig("mlp", (64, 64), fused_mlp=on), seed=1) for on in (True, False)]
    assert torch.equal(*(net(obs) for net in nets))


@pytest.mark.parametrize(
    ("widths", "dtype", "half", "suited"),
    [
        ((304, 256, 256, 8), torch.uint8, torch.bfloat16, True),
        ((304, 256, 256, 8), torch.uint8, torch.float32, False),
        ((304, 256, 256, 8), torch.int64, torch.bfloat16, False),
        ((304, 512, 256, 8), torch.uint8, torch.bfloat16, False),
        ((304, 250, 256, 8), torch.uint8, torch.bfloat16, False),
        ((304, 256, 256, 208), torch.uint8, torch.bfloat16, False),
        ((304, 256, 8), torch.uint8, torch.bfloat16, False),
    ],
)
def test_which_layers_the_kernel_computes(
    monkeypatch: pytest.MonkeyPatch, widths: tuple[int, ...], dtype: torch.dtype, half: torch.dtype, suited: bool
) -> None:
    monkeypatch.setattr(fused_mlp, "_ready", True)
    obs = SimpleNamespace(is_cuda=True, dtype=dtype)
    layers = tuple((torch.zeros(out, inputs), torch.zeros(out)) for inputs, out in itertools.pairwise(widths))
    assert fused_mlp.suits(obs, layers, half) is suited  # type: ignore[arg-type]


INTERPRETED = """
import itertools
import torch
from redline.algos import fused_mlp

def draw(*shape):
    return (torch.randn(shape) / shape[-1] ** 0.5).requires_grad_()

torch.manual_seed(0)
for rows, inputs, widths, dtype, norm in (
    (70, 300, (64, 64, 8), torch.uint8, False),
    (37, 20, (48, 96, 8), torch.float32, True),
    (1, 7, (16, 16, 1), torch.int16, True),
):
    obs, scale = torch.randint(0, 5, (rows, inputs)).to(dtype), torch.rand(inputs)
    sizes = (-(-inputs // 8) * 8, *widths)
    layers = tuple((draw(out, entering), draw(out)) for entering, out in itertools.pairwise(sizes))
    found = fused_mlp.fused_mlp(obs, scale, layers, norm, torch.float16)
    expected = fused_mlp.plain_mlp(obs, scale, layers, norm, torch.float16)
    torch.testing.assert_close(found, expected, rtol=0.01, atol=0.01)
    with torch.no_grad():
        assert torch.equal(fused_mlp.fused_mlp(obs, scale, layers, norm, torch.float16), found)
    parameters = [parameter for layer in layers for parameter in layer]
    direction = torch.randn_like(found)
    for ours, theirs in zip(*(torch.autograd.grad(x, parameters, direction) for x in (found, expected))):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02 * float(theirs.abs().max() + 0.01))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed here")
def test_the_kernel_equals_the_layers_by_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
