"""The MLP of `fused_mlp`, layer by layer: what its kernel is compared with."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.nn import functional as F

from redline.algos.fused_mlp import Layers


def plain_mlp(obs: Tensor, scale: Tensor, layers: Layers, norm: bool, half: torch.dtype) -> Tensor:
    """Return what `fused_mlp` returns."""
    x = F.pad((obs.to(torch.float32) * scale).to(half), (0, layers[0][0].shape[1] - obs.shape[1]))
    *hidden, last = ((weight.to(half), bias.to(half)) for weight, bias in layers)
    for weight, bias in hidden:
        x = F.linear(x, weight, bias)
        if norm:
            x = F.layer_norm(x.to(torch.float32), x.shape[-1:]).to(half)
        x = F.relu(x)
    return F.linear(x, *last).to(torch.float32)


def make_layers(widths: tuple[int, ...], device: str, seed: int = 1) -> Layers:
    """Return layers with these numbers of inputs and outputs, and random weights that want gradients."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator, device=device) / shape[-1] ** 0.5).requires_grad_()

    return tuple((draw(outputs, inputs), draw(outputs)) for inputs, outputs in itertools.pairwise(widths))


def check(
    rows: int, inputs: int, widths: tuple[int, ...], dtype: torch.dtype, half: torch.dtype, norm: bool, device: str
) -> None:
    """Fail unless outputs and gradients of `fused_mlp` differ from the plain ones by no more than rounding explains."""
    from redline.algos.fused_mlp import fused_mlp

    generator = torch.Generator(device).manual_seed(rows)
    obs = torch.randint(0, 5, (rows, inputs), generator=generator, device=device).to(dtype)
    scale = torch.rand(inputs, generator=generator, device=device)
    layers = make_layers((-(-inputs // 8) * 8, *widths), device)
    outputs, expected = (mlp(obs, scale, layers, norm, half) for mlp in (fused_mlp, plain_mlp))
    close(outputs, expected)
    with torch.no_grad():
        assert torch.equal(fused_mlp(obs, scale, layers, norm, half), outputs)
    direction = torch.randn(outputs.shape, generator=generator, device=device)
    parameters = [parameter for layer in layers for parameter in layer]
    for ours, theirs in zip(*(torch.autograd.grad(x, parameters, direction) for x in (outputs, expected)), strict=True):
        close(ours, theirs)


def close(values: Tensor, expected: Tensor) -> None:
    """Fail unless they differ by less than the rounding of bfloat16 in a few layers explains."""
    error = (values - expected).abs().max() / expected.abs().max().clamp(min=1e-3)
    assert error < 0.04, f"{error:.4f} of the largest number"
    if values.numel() > 64:
        assert torch.cosine_similarity(values.flatten(), expected.flatten(), dim=0) > 0.999
