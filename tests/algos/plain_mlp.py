"""The MLP of `fused_mlp`, layer by layer: what its kernel is compared with."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.nn import functional as F

from redline.algos import fused_mlp
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
    generator = torch.Generator(device).manual_seed(rows)
    obs = torch.randint(0, 5, (rows, inputs), generator=generator, device=device).to(dtype)
    scale = torch.rand(inputs, generator=generator, device=device)
    layers = make_layers((-(-inputs // 8) * 8, *widths), device)
    outputs = fused_mlp.fused_mlp(obs, scale, layers, norm, half)
    with torch.no_grad():
        assert torch.equal(fused_mlp.fused_mlp(obs, scale, layers, norm, half), outputs)
    direction = torch.randn(outputs.shape, generator=generator, device=device)
    if norm:
        _check_stages(obs, scale, layers, half, direction)
        return
    expected = plain_mlp(obs, scale, layers, norm, half)
    close(outputs, expected)
    parameters = [parameter for layer in layers for parameter in layer]
    for ours, theirs in zip(*(torch.autograd.grad(x, parameters, direction) for x in (outputs, expected)), strict=True):
        close(ours, theirs)


@torch.no_grad()
def _check_stages(obs: Tensor, scale: Tensor, layers: Layers, half: torch.dtype, direction: Tensor) -> None:
    """Fail unless each stage of a normalised MLP follows from the stage before it.

    Its gradients as a whole say little: normalised units near 0 change sign by rounding, their ReLU and all gradients behind
    it with them, so that those of plain layers in half precision are up to half of the largest away from float32.
    """
    parameters = [parameter.to(half) for layer in layers for parameter in layer]
    weight_1, bias_1, weight_2, bias_2, weight_3, bias_3 = (parameter.to(torch.float32) for parameter in parameters)
    outputs, scaled, *kept = fused_mlp._forward_for_gradient(obs, scale, parameters, True)
    first, second, inverse_1, inverse_2, slopes = (x.to(torch.float32) for x in kept)

    x = F.pad((obs.to(torch.float32) * scale).to(half), (0, len(weight_1[0]) - obs.shape[1])).to(torch.float32)
    assert torch.equal(scaled[:, : obs.shape[1]].to(torch.float32), x[:, : obs.shape[1]])
    centred, deviation = _centred(F.linear(x, weight_1, bias_1))
    close(1 / inverse_1, deviation)
    close(first, centred / deviation.unsqueeze(1))
    centred, deviation = _centred(F.linear(F.relu(first), weight_2, bias_2))
    close(1 / inverse_2, deviation)
    close(second, centred)
    units = F.relu(second) * inverse_2.unsqueeze(1)
    close(outputs, F.linear(units, weight_3, bias_3), F.linear(units, weight_3.abs()).max())
    active = (second > 0).to(torch.float32)
    close(slopes, F.linear(active, weight_3), F.linear(active, weight_3.abs()).max())

    backward = (direction, [parameters[2], *parameters[4:]], [outputs, *kept], True)
    for ours, theirs in zip(fused_mlp._hidden_gradients(*backward), fused_mlp._plain_gradients(*backward), strict=True):
        close(ours, theirs)


def _centred(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums (B, units) of a layer less their mean over the units, and their deviations (B,)."""
    variance, mean = torch.var_mean(sums, 1, correction=0, keepdim=True)
    return sums - mean, (variance.squeeze(1) + 1e-5).sqrt()


def close(values: Tensor, expected: Tensor, largest: Tensor | None = None) -> None:
    """Fail unless they differ by less than the rounding of bfloat16 in a few layers explains.

    largest (): the size that errors are compared with, where sums may cancel; default: the largest expected number.
    """
    values, expected = values.to(torch.float32), expected.to(torch.float32)
    error = (values - expected).abs().max() / (expected.abs().max() if largest is None else largest).clamp(min=1e-3)
    assert error < 0.04, f"{error:.4f} of the largest number"
    if values.numel() > 64:
        assert torch.cosine_similarity(values.flatten(), expected.flatten(), dim=0) > 0.999
