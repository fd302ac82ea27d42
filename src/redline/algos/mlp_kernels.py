"""Triton kernels of `fused_mlp`: a whole MLP for a tile of rows, with its activations in registers.

Imported only where Triton is installed. Shapes: x (B, K) observations of any dtype, weights as in nn.Linear, (outputs, inputs),
in bfloat16 or float16. Sums are float32; activations are rounded to the dtype of the weights, as by cuBLAS layer by layer. With
`norm` every hidden layer is normalised over its units before its ReLU.
"""


# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

_EPSILON = tl.constexpr(1e-5)  # of layer normalisation, as in torch


@triton.jit
def _first_layer(
    x, scale, weight, bias, kept_x, row, exists, written, first_unit, dtype: tl.constexpr, inputs: tl.constexpr,
    padded: tl.constexpr, width: tl.constexpr, block: tl.constexpr, tile: tl.constexpr, k_tile: tl.constexpr,
    keep: tl.constexpr,
):  # fmt: skip
    """Return scaled x @ weight.T + bias from `first_unit` on, (tile, block) float32.

    `keep` writes the rows `written` of the scaled x to `kept_x`, with a 1 in the first column of padding.
    """
    column, unit = tl.arange(0, k_tile), first_unit + tl.arange(0, block)
    total = tl.zeros((tile, block), dtype=tl.float32)
    for start in range(0, padded, k_tile):
        k = start + column
        seen = tl.load(x + row[:, None] * inputs + k[None, :], mask=exists[:, None] & (k < inputs)[None, :], other=0)
        factor = tl.load(scale + k, mask=k < inputs, other=0.0)
        seen = (seen.to(tl.float32) * factor[None, :]).to(dtype)
        if keep:
            kept = tl.where((k == inputs)[None, :], 1.0, seen).to(dtype)
            tl.store(kept_x + row[:, None] * padded + k[None, :], kept, mask=written[:, None] & (k < padded)[None, :])
        inside = (unit < width)[None, :] & (k < padded)[:, None]
        total = tl.dot(seen, tl.load(weight + unit[None, :] * padded + k[:, None], mask=inside, other=0.0), total)
    return total + tl.load(bias + unit, mask=unit < width, other=0.0).to(tl.float32)[None, :]


@triton.jit
def first_layer_kernel(
    x, scale, weight, bias, out, kept_x, size,
    inputs: tl.constexpr, padded: tl.constexpr, width: tl.constexpr, block: tl.constexpr, tile: tl.constexpr,
    k_tile: tl.constexpr, keep: tl.constexpr,
):  # fmt: skip
    """out (B, width): ReLU of the first layer; programs (rows / tile, width / block). `keep` writes the scaled x."""
    dtype: tl.constexpr = weight.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    exists = row < size
    first_unit = tl.program_id(1) * block
    unit = first_unit + tl.arange(0, block)
    sums = _first_layer(
        x, scale, weight, bias, kept_x, row, exists, exists & (first_unit == 0), first_unit, dtype, inputs, padded, width,
        block, tile, k_tile, keep,
    )  # fmt: skip
    values = tl.where(sums <= 0, 0.0, sums).to(dtype)  # NaN stays, as in torch
    tl.store(out + row[:, None] * width + unit[None, :], values, mask=exists[:, None] & (unit < width)[None, :])


@triton.jit
def mean_kernel(
    weight, bias, means,
    width_1: tl.constexpr, width_2: tl.constexpr, block_2: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """means (width_1 + 1,): means over the units of the weights (width_2, width_1) and the bias; `tile` inputs per program."""
    unit, column = tl.arange(0, block_2), tl.program_id(0) * tile + tl.arange(0, tile)
    inside = (unit < width_2)[:, None] & (column < width_1)[None, :]
    weights = tl.load(weight + unit[:, None] * width_1 + column[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(means + column, tl.sum(weights, 0) / width_2, mask=column < width_1)
    if tl.program_id(0) == 0:
        biases = tl.load(bias + unit, mask=unit < width_2, other=0.0).to(tl.float32)
        tl.store(means + width_1, tl.sum(biases, 0) / width_2)


@triton.jit
def forward_kernel(
    x, scale, weight_1, bias_1, weight_2, bias_2, weight_3, bias_3, means,
    out, kept_x, kept_1, kept_2, inverse_1, inverse_2, slopes, size,
    inputs: tl.constexpr, padded: tl.constexpr, width_1: tl.constexpr, width_2: tl.constexpr, outputs: tl.constexpr,
    block_1: tl.constexpr, block_out: tl.constexpr, tile: tl.constexpr, k_tile: tl.constexpr, n_tile: tl.constexpr,
    norm: tl.constexpr, keep: tl.constexpr,
):  # fmt: skip
    """out (B, outputs): two hidden layers and the output layer. Every n_tile units of the second layer are added directly.

    With `norm`, the mean of the second layer is computed from the means of its weights and bias, given by `mean_kernel`.
    Its deviation is known only after the last tile; since ReLU(x / d) = ReLU(x) / d, the output is divided by it.
    `keep` writes the outputs of the hidden layers (with `norm`: before the ReLU, the second not yet divided), the inverse
    deviations, and `slopes`: the derivative of each output by a number added to all units of the second layer.
    """
    dtype: tl.constexpr = weight_1.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    exists = row < size
    unit, action = tl.arange(0, block_1), tl.arange(0, block_out)
    first = _first_layer(
        x, scale, weight_1, bias_1, kept_x, row, exists, exists, 0, dtype, inputs, padded, width_1, block_1, tile, k_tile, keep
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
        mean_weight = tl.load(means + unit, mask=unit < width_1, other=0.0)
        mean = tl.sum(first.to(tl.float32) * mean_weight[None, :], 1) + tl.load(means + width_1)
    squares = tl.zeros((tile,), dtype=tl.float32)
    total, slope = tl.zeros((tile, block_out), dtype=tl.float32), tl.zeros((tile, block_out), dtype=tl.float32)
    for start in range(0, width_2, n_tile):
        n = start + tl.arange(0, n_tile)
        weights = tl.load(weight_2 + n[None, :] * width_1 + unit[:, None], mask=(unit < width_1)[:, None], other=0.0)
        second = tl.dot(first, weights) + tl.load(bias_2 + n).to(tl.float32)[None, :]
        if norm:
            second -= mean[:, None]
            squares += tl.sum(second * second, 1)
        else:
            second = tl.where(second <= 0, 0.0, second)
        second = second.to(dtype)
        if keep:
            tl.store(kept_2 + row[:, None] * width_2 + n[None, :], second, mask=exists[:, None])
        head = tl.load(weight_3 + action[None, :] * width_2 + n[:, None], mask=(action < outputs)[None, :], other=0.0)
        if norm and keep:
            slope = tl.dot(tl.where(second <= 0, 0.0, 1.0).to(dtype), head, slope)
        if norm:
            second = tl.where(second <= 0, 0.0, second).to(dtype)
        total = tl.dot(second, head, total)
    inside = exists[:, None] & (action < outputs)[None, :]
    position = row[:, None] * outputs + action[None, :]
    if norm:
        inverse = 1 / tl.sqrt(squares / width_2 + _EPSILON)
        total *= inverse[:, None]
        if keep:
            tl.store(inverse_2 + row, inverse, mask=exists)
            tl.store(slopes + position, slope, mask=inside)
    total += tl.load(bias_3 + action, mask=action < outputs, other=0.0).to(tl.float32)[None, :]
    # Rounded like the output of a half-precision layer, then float32, like the output of every network.
    tl.store(out + position, total.to(dtype).to(tl.float32), mask=inside)


@triton.jit
def backward_kernel(
    gradient, weight_2, weight_3, bias_3, out, kept_1, kept_2, inverse_1, inverse_2, slopes,
    gradient_1, gradient_2, rectified_1, rectified_2, size,
    width_1: tl.constexpr, width_2: tl.constexpr, outputs: tl.constexpr,
    block_1: tl.constexpr, block_out: tl.constexpr, tile: tl.constexpr, n_tile: tl.constexpr, norm: tl.constexpr,
):  # fmt: skip
    """gradient_1, gradient_2: gradients of the preactivations, from the output gradient and the kept tensors.

    Programs (rows / tile, width_1 / block_1); with `norm` one program covers all units of the first layer, and the ReLU
    outputs of both layers are written too. With g the gradient of a layer's ReLU where that is above 0, the gradient through
    the normalisation is (g - mean(g) - x mean(g x)) / deviation. The loop computes g of the second layer in parts; the sum of
    g follows from the slopes, and the sum of g x from the outputs, which are sums of x times the last weights.
    """
    dtype: tl.constexpr = weight_2.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    part = tl.program_id(1)
    exists = row < size
    unit, action = part * block_1 + tl.arange(0, block_1), tl.arange(0, block_out)
    inside = exists[:, None] & (action < outputs)[None, :]
    position = row[:, None] * outputs + action[None, :]
    given = tl.load(gradient + position, mask=inside, other=0.0).to(dtype)
    if norm:
        outer = given.to(tl.float32)
        mean = tl.sum(outer * tl.load(slopes + position, mask=inside, other=0.0), 1) / width_2
        bias = tl.load(bias_3 + action, mask=action < outputs, other=0.0).to(tl.float32)
        sums = tl.load(out + position, mask=inside, other=0.0) - bias[None, :]
        product = tl.sum(tl.where(inside, outer * sums, 0.0), 1) / width_2
        inverse = tl.load(inverse_2 + row, mask=exists, other=0.0)
    total = tl.zeros((tile, block_1), dtype=tl.float32)
    for start in range(0, width_2, n_tile):
        n = start + tl.arange(0, n_tile)
        head = tl.load(weight_3 + action[:, None] * width_2 + n[None, :], mask=(action < outputs)[:, None], other=0.0)
        place = row[:, None] * width_2 + n[None, :]
        normal = tl.load(kept_2 + place, mask=exists[:, None], other=0.0).to(tl.float32)
        second = tl.where(normal <= 0, 0.0, tl.dot(given, head))
        if norm:
            normal *= inverse[:, None]
            second = inverse[:, None] * (second - mean[:, None] - normal * product[:, None])
            tl.store(rectified_2 + place, tl.where(normal <= 0, 0.0, normal).to(dtype), mask=exists[:, None])
        second = second.to(dtype)
        if part == 0:
            tl.store(gradient_2 + place, second, mask=exists[:, None])
        weights = tl.load(weight_2 + n[:, None] * width_1 + unit[None, :], mask=(unit < width_1)[None, :], other=0.0)
        total = tl.dot(second, weights, total)
    inside = exists[:, None] & (unit < width_1)[None, :]
    place = row[:, None] * width_1 + unit[None, :]
    normal = tl.load(kept_1 + place, mask=inside, other=0.0).to(tl.float32)
    first = tl.where(normal <= 0, 0.0, total)
    if norm:
        inverse = tl.load(inverse_1 + row, mask=exists, other=0.0)
        means, products = tl.sum(first, 1) / width_1, tl.sum(first * normal, 1) / width_1
        first = inverse[:, None] * (first - means[:, None] - normal * products[:, None])
        tl.store(rectified_1 + place, tl.where(normal <= 0, 0.0, normal).to(dtype), mask=inside)
    tl.store(gradient_1 + place, first.to(dtype), mask=inside)
