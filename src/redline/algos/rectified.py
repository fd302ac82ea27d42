"""Half-precision layers with a ReLU on a GPU: the library's kernel applies the ReLU; its gradient is one pass over memory.

The compiler leaves matrix products and convolutions to cuBLAS and cuDNN. It would add a kernel for the ReLU, which reads and
writes all activations again, and in the backward pass one kernel for the gradient of the ReLU and two for the bias. The
operations are custom operators because torch cannot cache compiled graphs with autograd functions on disk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from redline.engine.triton_use import attempt, power_of_two, ready

_ELEMENTS = 8192  # per tile
_PROGRAMS = 1056  # eight blocks for each multiprocessor of an H200
_MAX_COLUMNS = 2048
_SUMMED = 16384  # numbers read by one program of `sum_rows`


@torch.library.custom_op("redline::linear_relu", mutates_args=())
def linear_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return ReLU(x @ weight.T + bias) of x (B, F), computed by cuBLAS."""
    return torch._addmm_activation(bias, x, weight.t())


@linear_relu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    del bias
    return x.new_empty(x.shape[0], weight.shape[0])


@torch.library.custom_op("redline::conv_relu", mutates_args=())
def conv_relu(x: Tensor, weight: Tensor, bias: Tensor, stride: int, padding: int) -> Tensor:
    """Return the ReLU of a convolution of x (B, C, H, W), computed by cuDNN."""
    return torch.cudnn_convolution_relu(x, weight, bias, [stride, stride], [padding, padding], [1, 1], 1)


@conv_relu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, stride: int, padding: int) -> Tensor:
    del bias
    height, width = (
        (side + 2 * padding - kernel) // stride + 1 for side, kernel in zip(x.shape[2:], weight.shape[2:], strict=True)
    )
    last = x.is_contiguous(memory_format=torch.channels_last)
    form = torch.channels_last if last else torch.contiguous_format
    return torch.empty((x.shape[0], weight.shape[0], height, width), dtype=x.dtype, device=x.device, memory_format=form)


@torch.library.custom_op("redline::relu_gradient", mutates_args=())
def relu_gradient(gradient: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient (…, F) of the input of a ReLU with output `out` (…, F), and its sums (F,) over all rows."""
    columns = out.shape[-1]
    gradient, out = gradient.contiguous(), out.contiguous()
    rows, block = out.numel() // columns, power_of_two(columns)
    tile = _ELEMENTS // block
    tiles = -(-rows // (tile * _PROGRAMS)) if tile else 0  # of each program
    programs = -(-rows // (tile * tiles)) if tiles else 0
    masked, sums = torch.empty_like(gradient), out.new_empty(columns)
    partial = out.new_empty(programs, columns, dtype=torch.float32)

    def launch() -> None:
        from redline.algos import gradient_kernels

        gradient_kernels.relu_kernel[(programs,)](gradient, out, masked, partial, rows, tiles, columns, block, tile)
        sum_rows(partial, sums)

    if ready() and programs and columns <= _MAX_COLUMNS and attempt("ReLUs", launch):
        return masked, sums
    masked = torch.where(out > 0, gradient, 0)
    return masked, masked.flatten(0, -2).sum(0)


@relu_gradient.register_fake
def _(gradient: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gradient, memory_format=torch.contiguous_format), out.new_empty(out.shape[-1])


def sum_rows(partial: Tensor, out: Tensor) -> None:
    """Write the sums of partial (rows, …) float32 over its rows to `out`, rounded to its dtype.

    Torch's own sum over few columns takes three times as long.
    """
    from redline.algos import gradient_kernels

    rows, columns, block = len(partial), out.numel(), power_of_two(len(partial))
    tile = max(8, _SUMMED // block)
    gradient_kernels.sum_kernel[(-(-columns // tile),)](partial, out, rows, columns, block, tile, num_warps=8)


def _save_linear(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2], output)


def _linear_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
    x, weight, out = ctx.saved_tensors
    gradient, sums = relu_gradient(gradient, out)
    return gradient @ weight if ctx.needs_input_grad[0] else None, gradient.t() @ x, sums


def _save_conv(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, ctx.stride, ctx.padding = inputs
    ctx.save_for_backward(x, weight, output)


def _conv_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, out = ctx.saved_tensors
    gradient, sums = relu_gradient(gradient.permute(0, 2, 3, 1), out.permute(0, 2, 3, 1))
    stride, padding, needed = [ctx.stride] * 2, [ctx.padding] * 2, [ctx.needs_input_grad[0], True, False]
    for_x, for_weight, _ = torch.ops.aten.convolution_backward(
        gradient.permute(0, 3, 1, 2), x, weight, None, stride, padding, [1, 1], False, [0, 0], 1, needed
    )
    return for_x, for_weight, sums, None, None


linear_relu.register_autograd(_linear_gradient, setup_context=_save_linear)
conv_relu.register_autograd(_conv_gradient, setup_context=_save_conv)
