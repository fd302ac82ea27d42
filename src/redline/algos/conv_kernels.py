"""Triton kernels of `fused_conv`: 3x3 convolutions of boards with few planes, read directly from a game's observations.

Imported only where Triton is installed. A tile is a group of output cells, of any boards. Their neighbourhoods are read
straight from the observations x (B, C, H, W); sums are float32. Column (3 i + j) * C + c of the weight (outputs, columns) is
plane c of neighbour (i, j).
"""


# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

_EPSILON = tl.constexpr(1e-5)  # of layer normalisation, as in torch


@triton.jit
def _neighbourhoods(
    x, scale, cell, exists, dtype: tl.constexpr, planes: tl.constexpr, height: tl.constexpr, width: tl.constexpr,
    padding: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """Return the scaled neighbourhoods of output cells, (tile, block_k), with a 1 after the last neighbour."""
    rows: tl.constexpr = height + 2 * padding - 2
    columns: tl.constexpr = width + 2 * padding - 2
    k = tl.arange(0, block_k)
    neighbour, plane = k // planes, k % planes
    board, inside = cell // (rows * columns), (cell % (rows * columns)).to(tl.int32)
    y = (inside // columns)[:, None] + (neighbour // 3 - padding)[None, :]
    column = (inside % columns)[:, None] + (neighbour % 3 - padding)[None, :]
    seen = exists[:, None] & (k < 9 * planes)[None, :] & (y >= 0) & (y < height) & (column >= 0) & (column < width)
    offset = (board * (planes * height * width))[:, None] + (plane[None, :] * height + y) * width + column
    factor = tl.load(scale + plane, mask=k < 9 * planes, other=0.0)
    values = tl.load(x + offset, mask=seen, other=0).to(tl.float32) * factor[None, :]
    return tl.where((k == 9 * planes)[None, :], 1.0, values).to(dtype)


@triton.jit
def _convolve(
    seen, weight, bias, planes: tl.constexpr, stride: tl.constexpr, outputs: tl.constexpr, block_k: tl.constexpr,
    block_out: tl.constexpr, norm: tl.constexpr,
):  # fmt: skip
    """Return the convolution before its ReLU, (tile, block_out) float32, and with `norm` the inverse deviation of each cell."""
    k, unit = tl.arange(0, block_k), tl.arange(0, block_out)
    real = unit < outputs
    weights = tl.load(
        weight + unit[None, :] * stride + k[:, None], mask=(k < 9 * planes)[:, None] & real[None, :], other=0.0
    )
    sums = tl.dot(seen, weights) + tl.load(bias + unit, mask=real, other=0.0).to(tl.float32)[None, :]
    inverse = tl.sum(sums, 1)  # one number per cell; unused without `norm`
    if norm:
        sums = tl.where(real[None, :], sums - (inverse / outputs)[:, None], 0.0)
        inverse = 1 / tl.sqrt(tl.sum(sums * sums, 1) / outputs + _EPSILON)
        sums = sums * inverse[:, None]
    return sums, inverse


@triton.jit
def forward_kernel(
    x, scale, weight, bias, out, size, planes: tl.constexpr, height: tl.constexpr, width: tl.constexpr,
    padding: tl.constexpr, stride: tl.constexpr, outputs: tl.constexpr, block_k: tl.constexpr, block_out: tl.constexpr,
    tile: tl.constexpr, norm: tl.constexpr,
):  # fmt: skip
    """out (cells, outputs): the ReLU of the convolution, normalised over its outputs with `norm`. size: output cells."""
    dtype: tl.constexpr = weight.dtype.element_ty
    cell = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    exists = cell < size
    seen = _neighbourhoods(x, scale, cell, exists, dtype, planes, height, width, padding, block_k)
    sums, _ = _convolve(seen, weight, bias, planes, stride, outputs, block_k, block_out, norm)
    unit = tl.arange(0, block_out)
    inside = exists[:, None] & (unit < outputs)[None, :]
    values = tl.where(sums <= 0, 0.0, sums).to(dtype)  # NaN stays, as in torch
    tl.store(out + cell[:, None] * outputs + unit[None, :], values, mask=inside)


@triton.jit
def backward_kernel(
    gradient, x, scale, weight, bias, partial, size, tiles: tl.constexpr, planes: tl.constexpr, height: tl.constexpr,
    width: tl.constexpr, padding: tl.constexpr, stride: tl.constexpr, outputs: tl.constexpr, block_k: tl.constexpr,
    block_out: tl.constexpr, tile: tl.constexpr, norm: tl.constexpr,
):  # fmt: skip
    """partial (programs, block_k, block_out) float32: the gradient of the weight, summed over the tiles of each program.

    Row 9 * planes is the gradient of the bias. The convolution is recomputed: reading it would take as long as the gradient.
    """
    dtype: tl.constexpr = weight.dtype.element_ty
    k, unit = tl.arange(0, block_k), tl.arange(0, block_out)
    total = tl.zeros((block_k, block_out), dtype=tl.float32)
    for number in range(tiles):
        cell = (tl.program_id(0).to(tl.int64) * tiles + number) * tile + tl.arange(0, tile)
        exists = cell < size
        seen = _neighbourhoods(x, scale, cell, exists, dtype, planes, height, width, padding, block_k)
        normal, inverse = _convolve(seen, weight, bias, planes, stride, outputs, block_k, block_out, norm)
        inside = exists[:, None] & (unit < outputs)[None, :]
        given = tl.load(gradient + cell[:, None] * outputs + unit[None, :], mask=inside, other=0.0).to(tl.float32)
        given = tl.where(normal <= 0, 0.0, given)
        if norm:
            mean, product = tl.sum(given, 1) / outputs, tl.sum(given * normal, 1) / outputs
            given = inverse[:, None] * (given - mean[:, None] - normal * product[:, None])
            given = tl.where(inside, given, 0.0)
        total = tl.dot(tl.trans(seen), given.to(dtype), total)
    position = (tl.program_id(0) * block_k + k)[:, None] * block_out + unit[None, :]
    tl.store(partial + position, total)
