"""Kernels for convolutions of boards and for ReLUs against plain operations. Run with `make gpu-test`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_conv import check
from plain_mlp import close

from redline.algos import fused_conv, networks, rectified
from redline.core.records import Spec
from redline.engine import triton_use

pytestmark = pytest.mark.gpu

SPEC = Spec((3, 10, 10), torch.uint8, (0.1, 1.0, 1.0), 99, 4, "points")


@pytest.fixture(autouse=True)
def _prepared() -> None:
    triton_use.prepare(torch.device("cuda"), pytest.fail)
    if not triton_use.ready():
        pytest.skip("this GPU has too little shared memory for the kernels")


@settings(max_examples=10, deadline=None)
@given(
    boards=st.integers(1, 300),
    planes=st.sampled_from([1, 3, 4, 8, 11]),
    sides=st.sampled_from([(10, 10), (5, 7), (14, 7), (3, 3)]),
    outputs=st.sampled_from([16, 20, 64, 128]),
    padding=st.sampled_from([0, 1]),
    norm=st.booleans(),
    dtype=st.sampled_from([torch.uint8, torch.int16, torch.float32]),
    half=st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_outputs_and_gradients_equal_the_plain_ones(
    boards: int,
    planes: int,
    sides: tuple[int, int],
    outputs: int,
    padding: int,
    norm: bool,
    dtype: torch.dtype,
    half: torch.dtype,
) -> None:
    check((boards, planes, *sides), outputs, padding, norm, dtype, half, "cuda")
    assert not triton_use._broken


@settings(max_examples=10, deadline=None)
@given(
    rows=st.integers(1, 3000),
    columns=st.sampled_from([16, 20, 64, 256, 512, 2048]),
    half=st.sampled_from(triton_use.HALF),
)
def test_gradients_of_relus(rows: int, columns: int, half: torch.dtype) -> None:
    out, gradient = (torch.randn(rows, columns, device="cuda").to(half) for _ in range(2))
    masked, sums = rectified.relu_gradient(gradient, out)
    assert torch.equal(masked, torch.where(out > 0, gradient, 0))
    torch.testing.assert_close(sums, masked.to(torch.float32).sum(0).to(half), rtol=0.02, atol=0.1)
    assert not triton_use._broken


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("stride", [1, 2])
def test_networks_use_them_compiled(norm: bool, stride: int, monkeypatch: pytest.MonkeyPatch) -> None:
    attempted: list[str] = []
    attempt = fused_conv.attempt
    monkeypatch.setattr(fused_conv, "attempt", lambda what, launch: (attempted.append(what), attempt(what, launch))[1])
    obs = torch.randint(0, 2, (512, *SPEC.obs_shape), generator=torch.Generator().manual_seed(1)).to(torch.uint8).cuda()
    outcomes = []
    for fused in (False, True):
        config = networks.NetworkConfig("cnn", (64,), (16, 32), stride, layer_norm=norm, fused_conv=fused)
        net = networks.build(SPEC, config, seed=1).to("cuda")
        torch.compiler.reset()
        with torch.autocast("cuda", torch.bfloat16):
            values = torch.compile(net, fullgraph=True, dynamic=False)(obs)
        assert bool(attempted) == fused
        gradients = torch.autograd.grad(values.square().sum(), list(net.parameters()))
        outcomes.append((values.detach(), torch.cat([gradient.flatten() for gradient in gradients])))
    for plain, ours in zip(*outcomes, strict=True):
        close(ours, plain)
