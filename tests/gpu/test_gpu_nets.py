"""Networks on a GPU, compiled and in bfloat16, against a CPU in float32. Run with `make gpu-test`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from redline.algos import networks
from redline.algos.dense import linear_relu
from redline.core.records import Spec

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize(
    ("net", "stride", "padding"),
    [("mlp", 1, True), ("cnn", 2, True), ("cnn", 1, False), ("resnet", 2, True), ("pixels", 2, True)],
)
def test_values_and_gradients_are_those_of_the_cpu(net: Any, stride: int, padding: bool, layer_norm: bool) -> None:
    side = 40 if net == "pixels" else 10
    spec = Spec((3, side, side), torch.uint8, (0.1, 1.0, 1.0), 99, 4, "points")
    config = networks.NetworkConfig(
        net=net, hidden=(64,), channels=(16, 32), stride=stride, padding=padding, layer_norm=layer_norm
    )
    obs = torch.randint(0, 2, (256, *spec.obs_shape), generator=torch.Generator().manual_seed(1)).to(torch.uint8)

    def outcome(device: str, compiled: bool) -> tuple[Tensor, Tensor]:
        model = networks.build(spec, config, seed=3).to(device)
        with torch.no_grad():
            model.dense.head.out.weight.normal_(generator=torch.Generator(device).manual_seed(1)).mul_(0.1)
            if device == "cuda":
                model.load_state_dict(reference.state_dict())
        forward = torch.compile(model, fullgraph=True, dynamic=False) if compiled else model
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            values = forward(obs.to(device))
        gradients = torch.autograd.grad(values.square().mean(), list(model.parameters()))
        return values.detach().cpu(), torch.cat([g.flatten() for g in gradients]).cpu()

    reference = networks.build(spec, config, seed=3)
    with torch.no_grad():
        reference.dense.head.out.weight.normal_(generator=torch.Generator().manual_seed(1)).mul_(0.1)
    values, gradient = outcome("cpu", compiled=False)
    found, found_gradient = outcome("cuda", compiled=True)
    torch.testing.assert_close(found, values, rtol=0.05, atol=0.05 * values.abs().max().item())
    assert torch.cosine_similarity(found_gradient, gradient, dim=0) > 0.99


def test_twins_are_those_of_the_cpu() -> None:
    spec = Spec((3, 10, 10), torch.uint8, (0.1, 1.0, 1.0), 99, 4, "points")
    net = networks.build_actor_critic(spec, networks.NetworkConfig("mlp", (64, 64)), seed=1, separate=True)
    obs = torch.randint(0, 2, (256, *spec.obs_shape), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    expected = net(obs)
    with torch.autocast("cuda", torch.bfloat16):
        found = torch.compile(net.to("cuda"), fullgraph=True, dynamic=False)(obs.cuda())
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=0.05, atol=0.05 * theirs.abs().max().item())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_layer_with_its_relu_in_one_kernel_equals_the_plain_one(dtype: torch.dtype, compiled: bool) -> None:
    torch.compiler.reset()
    generator = torch.Generator("cuda").manual_seed(1)
    shapes = ((512, 304), (256, 304), (256,), (512, 256))
    x, weight, bias, direction = (torch.randn(shape, generator=generator, device="cuda") for shape in shapes)
    arguments = [tensor.requires_grad_() for tensor in (x.to(dtype), weight / 16, bias)]
    fused = torch.compile(linear_relu, fullgraph=True, dynamic=False) if compiled else linear_relu
    with torch.autocast("cuda", dtype):
        found, expected = fused(*arguments), F.relu(F.linear(*arguments))
        with torch.no_grad():
            torch.testing.assert_close(linear_relu(*arguments), expected)
    torch.testing.assert_close(found, expected)
    assert found.dtype == dtype
    for ours, theirs in zip(
        torch.autograd.grad(found, arguments, direction.to(dtype)),
        torch.autograd.grad(expected, arguments, direction.to(dtype)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.05)
