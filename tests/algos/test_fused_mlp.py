"""Where an MLP runs as one kernel, and where layer by layer; the kernel itself by Triton's interpreter."""

from __future__ import annotations

import importlib.util
import itertools
from types import SimpleNamespace

import pytest
import torch
from plain_mlp import check, make_layers, plain_mlp

from redline.algos import fused_mlp, networks
from redline.core.records import Spec
from redline.engine import triton_use
from triton_interpreter import interpret, needs_triton

GPU = torch.device("cuda")
SPEC = Spec((3, 10, 10), torch.uint8, (0.1, 1.0, 1.0), 99, 4, "points")


def prepared(monkeypatch: pytest.MonkeyPatch, triton: bool, shared: int = 227 * 1024, major: int = 9) -> list[str]:
    """Return the messages of `prepare` on a GPU like this."""
    properties = SimpleNamespace(major=major, shared_memory_per_block_optin=shared)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: object() if triton else None)
    monkeypatch.setattr(triton_use, "_ready", False)
    messages: list[str] = []
    triton_use.prepare(GPU, messages.append)
    return messages


def test_a_large_gpu_with_triton_runs_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert prepared(monkeypatch, triton=True) == []
    assert triton_use._ready


def test_a_gpu_without_triton_says_so_once_and_runs_layers_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    (message,) = prepared(monkeypatch, triton=False)
    assert "Triton" in message
    assert not triton_use._ready


@pytest.mark.parametrize(("shared", "major"), [(100 * 1024, 8), (227 * 1024, 7)])
def test_a_small_gpu_runs_layers_one_by_one(monkeypatch: pytest.MonkeyPatch, shared: int, major: int) -> None:
    assert prepared(monkeypatch, True, shared, major) == []
    assert not triton_use._ready


def test_a_cpu_runs_layers_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_use, "_ready", True)
    obs = torch.randint(0, 2, (5, 3, 10, 10)).to(torch.uint8)
    nets = [networks.build(SPEC, networks.NetworkConfig("mlp", (64, 64), fused_mlp=on), seed=1) for on in (True, False)]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(*(net(obs) for net in nets))


@pytest.mark.parametrize(
    ("widths", "dtype", "half", "suited"),
    [
        ((304, 256, 256, 8), torch.uint8, torch.bfloat16, True),
        ((304, 256, 256, 8), torch.float32, torch.float16, True),
        ((304, 256, 250, 8), torch.uint8, torch.bfloat16, False),
        ((304, 256, 256, 8), torch.uint8, torch.float32, False),
        ((304, 256, 256, 8), torch.int64, torch.bfloat16, False),
        ((304, 512, 512, 8), torch.uint8, torch.bfloat16, True),
        ((304, 2048, 256, 8), torch.uint8, torch.bfloat16, False),
        ((304, 250, 256, 8), torch.uint8, torch.bfloat16, False),
        ((304, 256, 256, 208), torch.uint8, torch.bfloat16, False),
        ((304, 256, 8), torch.uint8, torch.bfloat16, False),
    ],
)
def test_which_layers_the_kernel_computes(
    monkeypatch: pytest.MonkeyPatch, widths: tuple[int, ...], dtype: torch.dtype, half: torch.dtype, suited: bool
) -> None:
    monkeypatch.setattr(triton_use, "_ready", True)
    obs = SimpleNamespace(is_cuda=True, dtype=dtype)
    layers = tuple((torch.zeros(out, inputs), torch.zeros(out)) for inputs, out in itertools.pairwise(widths))
    assert fused_mlp.suits(obs, layers, False, half) is suited  # type: ignore[arg-type]


@pytest.mark.parametrize("norm", [False, True])
def test_plain_operations_take_over_where_triton_fails(monkeypatch: pytest.MonkeyPatch, norm: bool) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("Failed to find C compiler.\nSee the documentation.")

    messages: list[str] = []
    monkeypatch.setattr(fused_mlp, "_launch_forward", fail)
    monkeypatch.setattr(triton_use, "_broken", set())
    monkeypatch.setattr(triton_use, "_notify", messages.append)
    check(70, 300, (64, 48, 8), torch.uint8, torch.bfloat16, norm, "cpu")
    assert messages == ["Running MLPs without their kernel, which failed (RuntimeError: Failed to find C compiler.)."]


@pytest.mark.parametrize("norm", [False, True])
def test_gradients_of_the_plain_operations_are_those_of_the_layers(monkeypatch: pytest.MonkeyPatch, norm: bool) -> None:
    monkeypatch.setattr(fused_mlp, "attempt", lambda *_: False)
    generator = torch.Generator().manual_seed(1)
    obs, scale = torch.rand(50, 21, generator=generator), torch.rand(21, generator=generator)
    layers = make_layers((24, 32, 48, 5), "cpu")
    parameters = [parameter for layer in layers for parameter in layer]
    outputs = [mlp(obs, scale, layers, norm, torch.float32) for mlp in (fused_mlp.fused_mlp, plain_mlp)]
    for ours, theirs in zip(*(torch.autograd.grad(x.square().sum(), parameters) for x in outputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_layers_that_do_more_than_multiply_are_not_fused() -> None:
    noisy = networks.build(SPEC, networks.NetworkConfig("mlp", (64, 64)), seed=1, sigma=0.5)
    twins = networks.build_actor_critic(
        SPEC, networks.NetworkConfig("mlp", (64, 64), layer_norm=True), 1, separate=True
    )
    plain = networks.build(SPEC, networks.NetworkConfig("mlp", (64, 64)), seed=1)
    assert noisy.dense.layers_to_fuse() == twins.body[1].layers_to_fuse() == ()
    assert len(plain.dense.layers_to_fuse()) == 3


INTERPRETED = """
import torch
from plain_mlp import check
for rows, inputs, widths, dtype, norm in (
    (70, 300, (64, 64, 8), torch.uint8, False),
    (37, 20, (48, 96, 8), torch.float32, True),
    (1, 7, (16, 16, 1), torch.int16, True),
    (25, 7, (16, 16, 1), torch.uint8, True),
    (130, 20, (272, 32, 4), torch.uint8, False),
):
    check(rows, inputs, widths, dtype, torch.float16, norm, "cpu")
from redline.engine import triton_use
assert not triton_use._broken
"""


@needs_triton
def test_the_kernel_equals_the_layers_by_the_interpreter() -> None:
    interpret(INTERPRETED)
