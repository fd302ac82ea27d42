"""The first convolution of boards, and ReLUs with their gradients: plain operations, and kernels by Triton's interpreter."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from plain_conv import check

from redline.algos import fused_conv, networks, rectified
from redline.core.records import Spec
from redline.engine import triton_use
from triton_interpreter import interpret, needs_triton

SPEC = Spec((3, 10, 10), torch.uint8, (0.1, 1.0, 1.0), 99, 4, "points")


@pytest.mark.parametrize(
    ("dtype", "outputs", "half", "suited"),
    [
        (torch.uint8, 64, torch.bfloat16, True),
        (torch.float32, 16, torch.float16, True),
        (torch.uint8, 512, torch.bfloat16, False),
        (torch.uint8, 64, torch.float32, False),
        (torch.int64, 64, torch.bfloat16, False),
    ],
)
def test_which_convolutions_the_kernel_computes(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, outputs: int, half: torch.dtype, suited: bool
) -> None:
    monkeypatch.setattr(triton_use, "_ready", True)
    obs = SimpleNamespace(is_cuda=True, dtype=dtype)
    assert fused_conv.suits(obs, outputs, half) is suited  # type: ignore[arg-type]


def test_a_cpu_convolves_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_use, "_ready", True)
    obs = torch.randint(0, 2, (5, 3, 10, 10)).to(torch.uint8)
    configs = [networks.NetworkConfig("cnn", (64,), channels=(16, 16), fused_conv=on) for on in (True, False)]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(*(networks.build(SPEC, config, seed=1)(obs) for config in configs))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("padding", [0, 1])
def test_plain_operations_take_over_where_triton_fails(
    monkeypatch: pytest.MonkeyPatch, norm: bool, padding: int
) -> None:
    messages: list[str] = []
    monkeypatch.setattr(triton_use, "_broken", set())
    monkeypatch.setattr(triton_use, "_notify", messages.append)
    monkeypatch.setitem(sys.modules, "redline.algos.conv_kernels", None)  # an ImportError
    check((5, 3, 7, 6), 20, padding, norm, torch.uint8, torch.bfloat16, "cpu", tolerance=0.1)
    (message,) = messages
    assert message.startswith("Running convolutions without their kernel, which failed (")


def test_gradients_of_a_relu_without_triton() -> None:
    out, gradient = torch.randn(2, 3, 4, 5).relu(), torch.randn(2, 3, 4, 5)
    masked, sums = rectified.relu_gradient(gradient, out)
    assert torch.equal(masked, gradient * (out > 0))
    torch.testing.assert_close(sums, masked.sum((0, 1, 2)))


def test_operations_are_described_to_the_compiler_as_they_are() -> None:
    x, weight, bias = (torch.randn(shape, requires_grad=True) for shape in ((9, 16), (24, 16), (24,)))
    torch.library.opcheck(rectified.linear_relu, (x, weight, bias))
    torch.library.opcheck(rectified.relu_gradient, (torch.randn(5, 6), torch.randn(5, 6)))


@pytest.mark.parametrize("planes", [3, 8])  # with and without padding of the weights
def test_the_convolution_is_described_to_the_compiler_as_it_is(monkeypatch: pytest.MonkeyPatch, planes: int) -> None:
    monkeypatch.setattr(triton_use, "_broken", {"convolutions"})
    obs, scale = torch.ones(2, planes, 5, 5), torch.ones(planes)
    weight, bias = torch.randn(16, -(-9 * planes // 8) * 8), torch.randn(16)
    torch.library.opcheck(fused_conv._forward, (obs, scale, weight, bias, 1, True))
    gradient = torch.randn(2, 5, 5, 16)
    torch.library.opcheck(fused_conv._gradient, (gradient, obs, scale, weight, bias, 1, False))


INTERPRETED = """
import torch
from plain_conv import check
from redline.algos import fused_conv, rectified
from redline.engine import triton_use
fused_conv._TILE, fused_conv._PROGRAMS, rectified._PROGRAMS, triton_use._ready = 16, 5, 3, True
for shape, outputs, padding, norm, dtype in (
    ((3, 3, 10, 10), 64, 1, False, torch.uint8),
    ((2, 3, 10, 10), 16, 0, True, torch.uint8),
    ((1, 1, 4, 5), 20, 1, True, torch.float32),
    ((2, 11, 5, 5), 32, 0, False, torch.int16),
    ((2, 8, 4, 4), 16, 1, True, torch.uint8),
):
    check(shape, outputs, padding, norm, dtype, torch.float16, "cpu")
for shape in ((70, 64), (3, 5, 6, 20), (9, 512), (1, 16)):
    out, gradient = torch.randn(shape).relu().half(), torch.randn(shape).half()
    masked, sums = rectified.relu_gradient(gradient, out)
    assert torch.equal(masked, torch.where(out > 0, gradient, 0))
    torch.testing.assert_close(sums, masked.float().flatten(0, -2).sum(0).half())
assert not triton_use._broken
"""


@needs_triton
def test_the_kernels_equal_plain_operations_by_the_interpreter() -> None:
    interpret(INTERPRETED)
