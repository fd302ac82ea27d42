"""The first convolution of a board in one Triton kernel: observations in, normalised and rectified planes out.

A board has few planes, often of bytes, and its first convolution turns them into many: little arithmetic, but much memory
traffic. Torch's operations write neighbourhoods or a product of the whole board, then add the bias, normalise and rectify, each
in a pass of its own. The kernel writes the output once; the backward pass reads the gradient once.

cuDNN convolves boards with many planes. If Triton cannot build the kernel, plain operations compute the same numbers, and a
message reports it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn import grad

from redline.algos.rectified import sum_rows
from redline.engine.triton_use import HALF, INPUTS, attempt, power_of_two, ready

MAX_OUTPUTS = 128  # channels; their sums stay in registers
_TILE = 128  # output cells of a block
_LAUNCH = {"num_warps": 4, "num_stages": 2}
_PROGRAMS = 528  # of the backward pass, at most: four blocks for each multiprocessor of an H200
_WHAT = "convolutions"


def suits(obs: Tensor, outputs: int, half: torch.dtype) -> bool:
    """Return whether the kernel can convolve observations (B, C, H, W) to `outputs` channels in the dtype `half`."""
    return ready() and obs.is_cuda and half in HALF and obs.dtype in INPUTS and outputs <= MAX_OUTPUTS


def board_conv(
    obs: Tensor, scale: Tensor, weight: Tensor, bias: Tensor, padding: int, norm: bool, half: torch.dtype
) -> Tensor:
    """Return the rectified 3x3 convolution (B, H', W', outputs) of obs (B, C, H, W), in the dtype `half`.

    scale (C,) float32 multiplies the planes. weight (outputs, at least 9 C): column (3 i + j) C + c is plane c of neighbour
    (i, j). padding: rows and columns of zeros around the board, 0 or 1. norm: normalise the channels of each cell first.
    """
    out: Tensor = _forward(obs.contiguous(), scale, weight.to(half), bias.to(half), padding, norm)
    return out


@torch.library.custom_op("redline::board_conv", mutates_args=())
def _forward(obs: Tensor, scale: Tensor, weight: Tensor, bias: Tensor, padding: int, norm: bool) -> Tensor:
    """Return the rectified convolution (B, H', W', outputs)."""
    out: Tensor = _empty(obs, scale, weight, bias, padding, norm)
    cells = out[..., 0].numel()

    def launch() -> None:
        from redline.algos import conv_kernels

        conv_kernels.forward_kernel[(-(-cells // _TILE),)](
            obs, scale, weight.contiguous(), bias, out, cells, *_shapes(obs, weight, padding), norm, **_LAUNCH
        )

    return out if attempt(_WHAT, launch) else _plain(obs, scale, weight, bias, padding, norm)


@_forward.register_fake
def _empty(obs: Tensor, scale: Tensor, weight: Tensor, bias: Tensor, padding: int, norm: bool) -> Tensor:
    del scale, bias, norm
    height, width = (side + 2 * padding - 2 for side in obs.shape[2:])
    return obs.new_empty(obs.shape[0], height, width, weight.shape[0], dtype=weight.dtype)


@torch.library.custom_op("redline::board_conv_gradient", mutates_args=())
def _gradient(
    gradient: Tensor, obs: Tensor, scale: Tensor, weight: Tensor, bias: Tensor, padding: int, norm: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of weight and bias, given the gradient of the output (B, H', W', outputs)."""
    gradient, weight = gradient.contiguous(), weight.contiguous()
    cells, outputs = gradient[..., 0].numel(), weight.shape[0]
    tiles = -(-cells // (_TILE * _PROGRAMS))  # of each program
    programs = -(-cells // (_TILE * tiles)) if cells else 0
    columns = 9 * obs.shape[1]
    partial = scale.new_empty(programs, power_of_two(columns + 1), power_of_two(outputs))
    total = weight.new_empty(partial.shape[1:])

    def launch() -> None:
        from redline.algos import conv_kernels

        conv_kernels.backward_kernel[(programs,)](
            gradient, obs, scale, weight, bias, partial, cells, tiles, *_shapes(obs, weight, padding), norm, **_LAUNCH
        )
        sum_rows(partial, total)

    if attempt(_WHAT, launch):
        for_weight = F.pad(total[:columns, :outputs].t(), (0, weight.shape[1] - columns)).contiguous()
        return for_weight, total[columns, :outputs].clone()
    return _plain_gradient(gradient, obs, scale, weight, bias, padding, norm)


@_gradient.register_fake
def _empty_gradients(
    gradient: Tensor, obs: Tensor, scale: Tensor, weight: Tensor, bias: Tensor, padding: int, norm: bool
) -> tuple[Tensor, Tensor]:
    del gradient, obs, scale, padding, norm
    return torch.empty_like(weight, memory_format=torch.contiguous_format), torch.empty_like(bias)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    *tensors, ctx.padding, ctx.norm = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    weight, bias = _gradient(gradient, *ctx.saved_tensors, ctx.padding, ctx.norm)
    return None, None, weight, bias, None, None


_forward.register_autograd(_backward, setup_context=_save)


def _shapes(obs: Tensor, weight: Tensor, padding: int) -> tuple[int, ...]:
    """Return the kernels' arguments from `planes` to `tile`."""
    _, planes, height, width = obs.shape
    outputs, stride = weight.shape
    return planes, height, width, padding, stride, outputs, power_of_two(9 * planes + 1), power_of_two(outputs), _TILE


# ---- the same in plain operations


def _plain(obs: Tensor, scale: Tensor, weight: Tensor, bias: Tensor, padding: int, norm: bool) -> Tensor:
    """Return the same as `board_conv`."""
    boards, filters = _boards_and_filters(obs, scale, weight)
    out = F.conv2d(boards, filters, bias, padding=padding).permute(0, 2, 3, 1)
    out = F.relu(F.layer_norm(out, out.shape[-1:]) if norm else out)
    return out.to(weight.dtype).contiguous()  # autocast normalises in float32


def _plain_gradient(
    gradient: Tensor, obs: Tensor, scale: Tensor, weight: Tensor, bias: Tensor, padding: int, norm: bool
) -> tuple[Tensor, Tensor]:
    """Return the same as `_gradient`."""
    boards, filters = _boards_and_filters(obs, scale, weight)
    sums = F.conv2d(boards, filters, bias, padding=padding).permute(0, 2, 3, 1).to(torch.float32)
    variance, mean = torch.var_mean(sums, 3, correction=0, keepdim=True)
    inverse = (variance + 1e-5).rsqrt()
    normal = (sums - mean) * inverse if norm else sums
    given = torch.where(normal <= 0, 0.0, gradient.to(torch.float32))
    if norm:
        product = (given * normal).mean(3, keepdim=True)
        given = inverse * (given - given.mean(3, keepdim=True) - normal * product)
    given = given.to(weight.dtype).permute(0, 3, 1, 2)
    total = grad.conv2d_weight(boards, list(filters.shape), given, padding=padding)
    flat = total.permute(0, 2, 3, 1).flatten(1)
    return F.pad(flat, (0, weight.shape[1] - flat.shape[1])), given.sum((0, 2, 3))


def _boards_and_filters(obs: Tensor, scale: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the boards (B, C, H, W) and filters (outputs, C, 3, 3) for torch's convolution."""
    boards = (obs.to(torch.float32) * scale.view(-1, 1, 1)).to(weight.dtype)
    planes = boards.shape[1]
    return boards, weight[:, : 9 * planes].unflatten(1, (3, 3, planes)).permute(0, 3, 1, 2)
