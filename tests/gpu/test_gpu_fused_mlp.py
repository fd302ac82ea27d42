"""The kernel for a whole MLP against the same layers one by one, and the two-step mean. Run with `make gpu-test`."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from redline.algos import fused_mlp, networks
from redline.algos.metrics import batch_mean
from redline.core.records import Spec

pytestmark = pytest.mark.gpu

SPEC = Spec((3, 10, 10), torch.uint8, (0.1, 1.0, 1.0), 99, 4, "points")


@pytest.fixture(autouse=True)
def _prepared() -> None:
    fused_mlp.prepare(torch.device("cuda"), pytest.fail)


def make_layers(widths: tuple[int, ...], generator: torch.Generator) -> fused_mlp.Layers:
    def draw(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator, device="cuda") / math.sqrt(shape[-1])
        return values.requires_grad_()

    return tuple((draw(out, inputs), draw(out)) for inputs, out in itertools.pairwise(widths))


def close(found: Tensor, expected: Tensor) -> None:
    """Fail unless they differ by less than the rounding of bfloat16 in a few layers explains."""
    error = (found - expected).abs().max() / expected.abs().max().clamp(min=1e-3)
    assert error < 0.04, f"{error:.4f} of the largest number"
    if found.numel() > 64:
        assert torch.cosine_similarity(found.flatten(), expected.flatten(), dim=0) > 0.999


@settings(max_examples=12, deadline=None)
@given(
    rows=st.integers(1, 300),
    inputs=st.sampled_from([1, 7, 26, 100, 300, 392]),
    hidden=st.sampled_from([(16, 16), (64, 64), (128, 96), (256, 256), (48, 320)]),
    outputs=st.sampled_from([1, 4, 8, 33]),
    dtype=st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.bfloat16]),
    half=st.sampled_from([torch.bfloat16, torch.float16]),
    norm=st.booleans(),
)
def test_outputs_and_gradients_equal_the_plain_ones(
    rows: int, inputs: int, hidden: tuple[int, int], outputs: int, dtype: torch.dtype, half: torch.dtype, norm: bool
) -> None:
    generator = torch.Generator("cuda").manual_seed(rows)
    obs = torch.randint(0, 5, (rows, inputs), generator=generator, device="cuda").to(dtype)
    scale = torch.rand(inputs, generator=generator, device="cuda")
    layers = make_layers((-(-inputs // 8) * 8, *hidden, outputs), generator)
    assert fused_mlp.suits(obs, layers, half)
    found = fused_mlp.fused_mlp(obs, scale, layers, norm, half)
    expected = fused_mlp.plain_mlp(obs, scale, layers, norm, half)
    close(found, expected)
    with torch.no_grad():
        assert torch.equal(fused_mlp.fused_mlp(obs, scale, layers, norm, half), found)
    direction = torch.randn(found.shape, generator=generator, device="cuda")
    parameters = [parameter for layer in layers for parameter in layer]
    pairs = zip(
        torch.autograd.grad(found, parameters, direction),
        torch.autograd.grad(expected, parameters, direction),
        strict=True,
    )
    for ours, theirs in pairs:
        close(ours, theirs)


@pytest.mark.parametrize("kind", ["values", "twins", "norm", "dueling", "afterstates"])
def test_networks_use_it_compiled(kind: str) -> None:
    spec = SPEC
    if kind == "afterstates":
        spec = Spec((34, 26), torch.float32, (1.0,) * 26, 9.0, 34, "lines", masked=True, afterstates=True)
    outcomes = []
    obs = torch.randint(0, 2, (512, *spec.obs_shape), generator=torch.Generator().manual_seed(1)).to(spec.obs_dtype)
    for fused in (False, True):
        config = networks.NetworkConfig("mlp", (64, 64), layer_norm=kind == "norm", fused_mlp=fused)
        if kind == "twins":
            net: torch.nn.Module = networks.build_actor_critic(spec, config, seed=1, separate=True)
        else:
            net = networks.build(spec, config, seed=1, dueling=kind == "dueling")
        net = net.to("cuda")
        torch.compiler.reset()
        with torch.autocast("cuda", torch.bfloat16):
            compiled = torch.compile(net, fullgraph=True, dynamic=False)
            found = compiled(obs.cuda())
        values = torch.cat([x.reshape(len(obs), -1) for x in found], 1) if isinstance(found, tuple) else found
        gradients = torch.autograd.grad(values.square().sum(), list(net.parameters()))
        outcomes.append((values.detach(), torch.cat([g.flatten() for g in gradients])))
    for plain, ours in zip(*outcomes, strict=True):
        close(ours, plain)


def test_the_mean_in_two_steps_is_the_mean() -> None:
    x = torch.randn(65536, device="cuda", requires_grad=True)
    torch.testing.assert_close(batch_mean(x), x.mean())
    assert torch.equal(*(torch.autograd.grad(mean, x)[0] for mean in (batch_mean(x), x.mean())))
    torch.testing.assert_close(batch_mean(x[:1000]), x[:1000].mean())
