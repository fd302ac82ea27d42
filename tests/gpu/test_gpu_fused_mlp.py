"""The kernel for a whole MLP against the same layers one by one, and the two-step mean. Run with `make gpu-test`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_mlp import check, close, make_layers

from redline.algos import fused_mlp, networks
from redline.algos.metrics import batch_mean
from redline.core.records import Spec
from redline.engine import triton_use

pytestmark = pytest.mark.gpu

SPEC = Spec((3, 10, 10), torch.uint8, (0.1, 1.0, 1.0), 99, 4, "points")


@pytest.fixture(autouse=True)
def _prepared() -> None:
    triton_use.prepare(torch.device("cuda"), pytest.fail)
    if not triton_use._ready:
        pytest.skip("this GPU has too little shared memory for the kernel")


@settings(max_examples=12, deadline=None)
@given(
    rows=st.integers(1, 300),
    inputs=st.sampled_from([1, 7, 26, 100, 300, 392]),
    hidden=st.sampled_from([(16, 16), (64, 64), (128, 96), (256, 256), (48, 320), (512, 512)]),
    outputs=st.sampled_from([1, 4, 8, 33]),
    dtype=st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.bfloat16]),
    half=st.sampled_from([torch.bfloat16, torch.float16]),
    norm=st.booleans(),
)
def test_outputs_and_gradients_equal_the_plain_ones(
    rows: int, inputs: int, hidden: tuple[int, int], outputs: int, dtype: torch.dtype, half: torch.dtype, norm: bool
) -> None:
    norm = norm and hidden[0] <= fused_mlp.MAX_WIDTH
    check(rows, inputs, (*hidden, outputs), dtype, half, norm, "cuda")
    assert not triton_use._broken


def test_nan_stays_nan() -> None:
    layers = make_layers((64, 64, 64, 8), "cuda")
    with torch.no_grad():
        layers[0][0][:, 3] = torch.nan
    obs, scale = torch.ones(16, 64, device="cuda"), torch.ones(64, device="cuda")
    outputs = fused_mlp.fused_mlp(obs, scale, layers, False, torch.bfloat16)
    assert outputs.isnan().all()
    (gradient,) = torch.autograd.grad(outputs.sum(), [layers[2][0]])
    assert gradient.isnan().all()


@pytest.mark.parametrize("kind", ["values", "twins", "norm", "dueling", "afterstates", "wide"])
def test_networks_use_it_compiled(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launch, launched = fused_mlp._launch_forward, []
    monkeypatch.setattr(fused_mlp, "_launch_forward", lambda *arguments: (launched.append(1), launch(*arguments)))
    spec = SPEC
    if kind == "afterstates":
        spec = Spec((34, 26), torch.float32, (1.0,) * 26, 9.0, 34, "lines", masked=True, afterstates=True)
    outcomes = []
    obs = torch.randint(0, 2, (512, *spec.obs_shape), generator=torch.Generator().manual_seed(1)).to(spec.obs_dtype)
    for fused in (False, True):
        config = networks.NetworkConfig(
            "mlp", (512, 512) if kind == "wide" else (64, 64), layer_norm=kind == "norm", fused_mlp=fused
        )
        if kind == "twins":
            net: torch.nn.Module = networks.build_actor_critic(spec, config, seed=1, separate=True)
        else:
            net = networks.build(spec, config, seed=1, dueling=kind == "dueling")
        net = net.to("cuda")
        torch.compiler.reset()
        with torch.autocast("cuda", torch.bfloat16):
            result = torch.compile(net, fullgraph=True, dynamic=False)(obs.cuda())
        assert bool(launched) == fused
        values = torch.cat([x.reshape(len(obs), -1) for x in result], 1) if isinstance(result, tuple) else result
        gradients = torch.autograd.grad(values.square().sum(), list(net.parameters()))
        outcomes.append((values.detach(), torch.cat([g.flatten() for g in gradients])))
    for plain, ours in zip(*outcomes, strict=True):
        close(ours, plain)


def test_the_mean_in_two_steps_is_the_mean() -> None:
    x = torch.randn(65536, device="cuda", requires_grad=True)
    torch.testing.assert_close(batch_mean(x), x.mean())
    assert torch.equal(*(torch.autograd.grad(mean, x)[0] for mean in (batch_mean(x), x.mean())))
    torch.testing.assert_close(batch_mean(x[:1000]), x[:1000].mean())
