"""Triton kernels for gradients: the gradient of a ReLU, and the sum of all programs' results. Imported only with Triton."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def relu_kernel(
    gradient, out, masked, partial, rows,
    tiles: tl.constexpr, columns: tl.constexpr, block: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """masked (rows, columns): the gradient where `out` is above 0; partial (programs, columns): its sums over their rows."""
    column = tl.arange(0, block)
    total = tl.zeros((tile, block), dtype=tl.float32)
    for number in range(tiles):
        row = (tl.program_id(0).to(tl.int64) * tiles + number) * tile + tl.arange(0, tile)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        position = row[:, None] * columns + column[None, :]
        passed = tl.load(out + position, mask=inside, other=0.0) > 0
        values = tl.where(passed, tl.load(gradient + position, mask=inside, other=0.0), 0.0)
        tl.store(masked + position, values.to(masked.dtype.element_ty), mask=inside)
        total += values.to(tl.float32)
    tl.store(partial + tl.program_id(0) * columns + column, tl.sum(total, 0), mask=column < columns)


@triton.jit
def sum_kernel(
    partial, out, rows: tl.constexpr, columns: tl.constexpr, block: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """out (columns,): the sums of partial (rows, columns) over its rows; `tile` columns per program."""
    row, column = tl.arange(0, block), tl.program_id(0) * tile + tl.arange(0, tile)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    values = tl.load(partial + row[:, None] * columns + column[None, :], mask=inside, other=0.0)
    tl.store(out + column, tl.sum(values, 0).to(out.dtype.element_ty), mask=column < columns)
