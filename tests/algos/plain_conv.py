"""The convolution of `fused_conv` by torch's operations in float32: what its kernel is compared with."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def plain_conv(
    obs: Tensor, scale: Tensor, weight: Tensor, bias: Tensor, padding: int, norm: bool, half: torch.dtype
) -> Tensor:
    """Return what `board_conv` returns, from inputs and weights rounded to `half`, not rounded itself."""
    boards = (obs.to(torch.float32) * scale.view(-1, 1, 1)).to(half).to(torch.float32)
    planes = obs.shape[1]
    filters = weight[:, : 9 * planes].to(half).to(torch.float32).unflatten(1, (3, 3, planes)).permute(0, 3, 1, 2)
    out = F.conv2d(boards, filters, bias.to(half).to(torch.float32), padding=padding).permute(0, 2, 3, 1)
    return F.relu(F.layer_norm(out, out.shape[-1:]) if norm else out)


def check(
    shape: tuple[int, ...],
    outputs: int,
    padding: int,
    norm: bool,
    dtype: torch.dtype,
    half: torch.dtype,
    device: str,
    tolerance: float = 0.03,
) -> None:
    """Fail unless output and gradients of `board_conv` differ from the plain ones by no more than rounding explains.

    tolerance: of gradients, as a part of the largest one. Where sums are rounded, those near 0 change their sign.
    """
    from redline.algos.fused_conv import board_conv

    generator = torch.Generator(device).manual_seed(sum(shape))
    obs = torch.randint(0, 5, shape, generator=generator, device=device).to(dtype)
    scale = torch.rand(shape[1], generator=generator, device=device)
    columns = -(-9 * shape[1] // 8) * 8
    weight = (torch.randn(outputs, columns, generator=generator, device=device) / 3).requires_grad_()
    bias = torch.randn(outputs, generator=generator, device=device).requires_grad_()
    out, expected = (conv(obs, scale, weight, bias, padding, norm, half) for conv in (board_conv, plain_conv))
    assert out.dtype == half
    assert out.is_contiguous()
    close(out, expected, 0.01)
    direction = torch.randn(out.shape, generator=generator, device=device).to(half).to(torch.float32)
    gradients = [torch.autograd.grad(x, (weight, bias), direction.to(x.dtype)) for x in (out, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        close(ours, theirs, tolerance)


def close(values: Tensor, expected: Tensor, tolerance: float) -> None:
    """Fail unless they differ by less than a part of the largest number."""
    error = (values.to(torch.float32) - expected).abs().max() / expected.abs().max().clamp(min=1e-3)
    assert error < tolerance, f"{error:.4f} of the largest number"
