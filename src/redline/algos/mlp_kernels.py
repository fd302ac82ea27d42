"""Triton kernels of `fused_mlp`: a whole MLP for a tile of rows, with its activations in registers.

Imported only where Triton is installed. Shapes: x (B, K) observations of any dtype, weights as nn.Linear keeps them,
(outputs, inputs), in bfloat16 or float16. Sums are float32, activations are rounded to the dtype of the weights, as cuBLAS
does it layer by layer. With `norm` every hidden layer is normalised over its units before its ReLU.
"""

# ruff: noqa: SIM108 (Triton compiles only the branch of an `if` that a constant chooses)
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

_EPSILON = tl.constexpr(1e-5)  # of layer normalisation, as in torch


@triton.jit
def _first_layer(
    x, scale, weight, bias, kept_x, row, exists, dtype: tl.constexpr, inputs: tl.constexpr, padded: tl.constexpr,
    width: tl.constexpr, block: tl.constexpr, tile: tl.constexpr, k_tile: tl.constexpr, keep: tl.constexpr,
):  # fmt: skip
    """Return scaled x @ weight.T + bias, (tile, block) float32; with `keep`, write the scaled x to `kept_x`."""
    column, unit = tl.arange(0, k_tile), tl.arange(0, block)
    total = tl.zeros((tile, block), dtype=tl.float32)
    for start in range(0, padded, k_tile):
        k = start + column
        seen = tl.load(x + row[:, None] * inputs + k[None, :], mask=exists[:, None] & (k < inputs)[None, :], other=0)
        factor = tl.load(scale + k, mask=k < inputs, other=0.0)
        seen = (seen.to(tl.float32) * factor[None, :]).to(dtype)
        if keep:
            tl.store(kept_x + row[:, None] * padded + k[None, :], seen, mask=exists[:, None] & (k < padded)[None, :])
        inside = (unit < width)[None, :] & (k < padded)[:, None]
        total = tl.dot(seen, tl.load(weight + unit[None, :] * padded + k[:, None], mask=inside, other=0.0), total)
    return total + tl.load(bias + unit, mask=unit < width, other=0.0).to(tl.float32)[None, :]


@triton.jit
def forward_kernel(
    x, scale, weight_1, bias_1, weight_2, bias_2, weight_3, bias_3, out, kept_x, kept_1, kept_2, inverse_1, inverse_2, size,
    inputs: tl.constexpr, padded: tl.constexpr, width_1: tl.constexpr, width_2: tl.constexpr, outputs: tl.constexpr,
    block_1: tl.constexpr, block_out: tl.constexpr, tile: tl.constexpr, k_tile: tl.constexpr, n_tile: tl.constexpr,
    norm: tl.constexpr, keep: tl.constexpr,
):  # fmt: skip
    """Two hidden layers and the output; n_tile units of the second layer at a time, each part going to the output at once.

    With `norm` the second layer is computed twice: its mean and deviation are needed before the first part can go on. `keep`
    writes the outputs of the hidden layers, with `norm` before their ReLU, and the inverse deviations.
    """
    dtype: tl.constexpr = weight_1.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    exists = row < size
    unit, action = tl.arange(0, block_1), tl.arange(0, block_out)
    first = _first_layer(
        x, scale, weight_1, bias_1, kept_x, row, exists, dtype, inputs, padded, width_1, block_1, tile, k_tile, keep
    )  # fmt: skip
    if norm:
        first = tl.where((unit < width_1)[None, :], first - (tl.sum(first, 1) / width_1)[:, None], 0.0)
        inverse = 1 / tl.sqrt(tl.sum(first * first, 1) / width_1 + _EPSILON)
        first = first * inverse[:, None]
        if keep:
            tl.store(inverse_1 + row, inverse, mask=exists)
    else:
        first = tl.where(first <= 0, 0.0, first)  # NaN stays, as in torch
    first = first.to(dtype)
    if keep:
        inside = exists[:, None] & (unit < width_1)[None, :]
        tl.store(kept_1 + row[:, None] * width_1 + unit[None, :], first, mask=inside)
    if norm:
        first = tl.where(first <= 0, 0.0, first).to(dtype)
        sums, squares = tl.zeros((tile,), dtype=tl.float32), tl.zeros((tile,), dtype=tl.float32)
        for start in range(0, width_2, n_tile):
            n = start + tl.arange(0, n_tile)
            weights = tl.load(
                weight_2 + n[None, :] * width_1 + unit[:, None], mask=(unit < width_1)[:, None], other=0.0
            )
            second = tl.dot(first, weights) + tl.load(bias_2 + n).to(tl.float32)[None, :]
            sums += tl.sum(second, 1)
            squares += tl.sum(second * second, 1)
        mean = sums / width_2
        inverse = 1 / tl.sqrt(tl.maximum(squares / width_2 - mean * mean, 0.0) + _EPSILON)
        if keep:
            tl.store(inverse_2 + row, inverse, mask=exists)
    total = tl.zeros((tile, block_out), dtype=tl.float32)
    for start in range(0, width_2, n_tile):
        n = start + tl.arange(0, n_tile)
        weights = tl.load(weight_2 + n[None, :] * width_1 + unit[:, None], mask=(unit < width_1)[:, None], other=0.0)
        second = tl.dot(first, weights) + tl.load(bias_2 + n).to(tl.float32)[None, :]
        if norm:
            second = (second - mean[:, None]) * inverse[:, None]
        else:
            second = tl.where(second <= 0, 0.0, second)
        second = second.to(dtype)
        if keep:
            tl.store(kept_2 + row[:, None] * width_2 + n[None, :], second, mask=exists[:, None])
        if norm:
            second = tl.where(second <= 0, 0.0, second).to(dtype)
        head = tl.load(weight_3 + action[None, :] * width_2 + n[:, None], mask=(action < outputs)[None, :], other=0.0)
        total = tl.dot(second, head, total)
    total += tl.load(bias_3 + action, mask=action < outputs, other=0.0).to(tl.float32)[None, :]
    inside = exists[:, None] & (action < outputs)[None, :]
    # Rounded as the layer itself would be, then float32 as every network's output.
    tl.store(out + row[:, None] * outputs + action[None, :], total.to(dtype).to(tl.float32), mask=inside)


@triton.jit
def backward_kernel(
    gradient, weight_2, weight_3, kept_1, kept_2, inverse_1, inverse_2, gradient_1, gradient_2, size,
    width_1: tl.constexpr, width_2: tl.constexpr, outputs: tl.constexpr,
    block_1: tl.constexpr, block_out: tl.constexpr, tile: tl.constexpr, n_tile: tl.constexpr, norm: tl.constexpr,
):  # fmt: skip
    """Gradients of what each hidden layer sums up, from that of the output (B, outputs) and what the forward pass kept."""
    dtype: tl.constexpr = weight_2.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    exists = row < size
    unit, action = tl.arange(0, block_1), tl.arange(0, block_out)
    inside = exists[:, None] & (action < outputs)[None, :]
    given = tl.load(gradient + row[:, None] * outputs + action[None, :], mask=inside, other=0.0).to(dtype)
    if norm:
        sums, products = tl.zeros((tile,), dtype=tl.float32), tl.zeros((tile,), dtype=tl.float32)
        for start in range(0, width_2, n_tile):
            n = start + tl.arange(0, n_tile)
            head = tl.load(
                weight_3 + action[:, None] * width_2 + n[None, :], mask=(action < outputs)[:, None], other=0.0
            )
            normal = tl.load(kept_2 + row[:, None] * width_2 + n[None, :], mask=exists[:, None], other=0.0).to(
                tl.float32
            )
            second = tl.where(normal <= 0, 0.0, tl.dot(given, head))
            sums += tl.sum(second, 1)
            products += tl.sum(second * normal, 1)
        inverse = tl.load(inverse_2 + row, mask=exists, other=0.0)
    total = tl.zeros((tile, block_1), dtype=tl.float32)
    for start in range(0, width_2, n_tile):
        n = start + tl.arange(0, n_tile)
        head = tl.load(weight_3 + action[:, None] * width_2 + n[None, :], mask=(action < outputs)[:, None], other=0.0)
        normal = tl.load(kept_2 + row[:, None] * width_2 + n[None, :], mask=exists[:, None], other=0.0).to(tl.float32)
        second = tl.where(normal <= 0, 0.0, tl.dot(given, head))
        if norm:
            second = inverse[:, None] * (second - (sums / width_2)[:, None] - normal * (products / width_2)[:, None])
        second = second.to(dtype)
        tl.store(gradient_2 + row[:, None] * width_2 + n[None, :], second, mask=exists[:, None])
        weights = tl.load(weight_2 + n[:, None] * width_1 + unit[None, :], mask=(unit < width_1)[None, :], other=0.0)
        total = tl.dot(second, weights, total)
    inside = exists[:, None] & (unit < width_1)[None, :]
    normal = tl.load(kept_1 + row[:, None] * width_1 + unit[None, :], mask=inside, other=0.0).to(tl.float32)
    first = tl.where(normal <= 0, 0.0, total)
    if norm:
        inverse = tl.load(inverse_1 + row, mask=exists, other=0.0)
        sums, products = tl.sum(first, 1) / width_1, tl.sum(first * normal, 1) / width_1
        first = inverse[:, None] * (first - sums[:, None] - normal * products[:, None])
    tl.store(gradient_1 + row[:, None] * width_1 + unit[None, :], first.to(dtype), mask=inside)
