"""A whole MLP in one Triton kernel: observations in, outputs out, without storing activations between the layers.

Computed layer by layer, most of the time goes into writing 256 numbers per sample and layer to memory, reading them again, and
converting observations to half precision. The kernel keeps a tile of 64 samples in registers instead. If gradients are needed,
it stores the scaled observations and the outputs of both hidden layers for the backward pass.

For wider networks, only the first layer and the gradients of hidden layers have kernels here; cuBLAS multiplies the rest.
Networks run layer by layer on a CPU, in float32, with other numbers of layers, without Triton, and on GPUs whose shared memory
is too small. If Triton cannot build the kernel, plain operations compute the same numbers, and a message reports it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from redline.engine.triton_use import HALF, INPUTS, attempt, power_of_two, ready

MAX_WIDTH = 256  # units of the first hidden layer whose outputs stay in registers
MAX_WIDE = 1024  # units of hidden layers computed one by one, with kernels for the first layer and the gradients
MAX_OUTPUTS = 64
_INPUT_TILE = 64  # inputs multiplied at a time


class Blocks(NamedTuple):
    """How a kernel divides its work, and how Triton builds it."""

    tile: int  # samples of a block
    units: int  # units of the second layer computed at a time, at most
    warps: int
    stages: int  # loads in flight at the same time


# The fastest of four to six choices each on an H200. Blocks small enough for two per multiprocessor win.
BLOCKS = {
    "forward": Blocks(64, 64, 4, 3),
    "forward with norm": Blocks(64, 64, 4, 3),
    "backward": Blocks(64, 32, 4, 3),
    "backward with norm": Blocks(32, 32, 4, 3),
    "first layer": Blocks(64, 64, 4, 3),  # of wider networks
    "wide backward": Blocks(128, 64, 8, 3),
}
_MEAN_TILE = 16  # inputs whose weights one program averages
_WHAT = "MLPs"

Layers = tuple[tuple[Tensor, Tensor], ...]
"""Weight (outputs, inputs) and bias (outputs,) of each layer."""


def suits(obs: Tensor, layers: Layers, norm: bool, half: torch.dtype) -> bool:
    """Return whether the kernels can compute these layers for observations (B, K) in the dtype `half`."""
    if not (ready() and obs.is_cuda and half in HALF and obs.dtype in INPUTS and len(layers) == 3):
        return False
    width_1, width_2, outputs = (len(weight) for weight, _ in layers)
    if width_1 % 16 or width_2 % 16 or outputs > MAX_OUTPUTS:
        return False
    return width_1 <= MAX_WIDTH or (max(width_1, width_2) <= MAX_WIDE and not norm)


def fused_mlp(obs: Tensor, scale: Tensor, layers: Layers, norm: bool, half: torch.dtype) -> Tensor:
    """Return the outputs (B, outputs) float32 of two hidden layers with ReLU and a last one without.

    obs (B, K) is multiplied by scale (K,) float32, and padded with zeros if the first weight has more inputs than K. norm:
    each hidden layer is normalised before its ReLU.
    """
    parameters = [parameter.to(half) for layer in layers for parameter in layer]
    obs = obs.contiguous()
    if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in parameters):
        outputs: Tensor = _forward_for_gradient(obs, scale, parameters, norm)[0]
        return outputs
    return _forward(obs, scale, parameters, norm)  # type: ignore[no-any-return]


# ---- torch operators, known to the compiler and autograd; `parameters`: weight and bias of the three layers


@torch.library.custom_op("redline::mlp", mutates_args=())
def _forward(obs: Tensor, scale: Tensor, parameters: Sequence[Tensor], norm: bool) -> Tensor:
    """Return the outputs (B, outputs) float32."""
    outputs = _empty_outputs(obs, scale, parameters, norm)
    if attempt(_WHAT, lambda: _launch_forward(obs, scale, parameters, norm, outputs, None)):
        return outputs  # type: ignore[no-any-return]
    return _plain_forward(obs, scale, parameters, norm)[0]


@_forward.register_fake
def _empty_outputs(obs: Tensor, scale: Tensor, parameters: Sequence[Tensor], norm: bool) -> Tensor:
    del scale, norm
    return obs.new_empty(obs.shape[0], parameters[4].shape[0], dtype=torch.float32)


@torch.library.custom_op("redline::mlp_for_gradient", mutates_args=())
def _forward_for_gradient(obs: Tensor, scale: Tensor, parameters: Sequence[Tensor], norm: bool) -> list[Tensor]:
    """Return the outputs, then the tensors that the backward pass needs.

    These are the scaled observations (B, padded), each followed by a 1, and the outputs of both hidden layers. With `norm`, the
    hidden outputs are those before the ReLU, the second not yet divided by its deviation; then come the inverse deviations (B,)
    of both layers and the derivatives (B, outputs) of the outputs by a number added to all units of the second layer.
    """
    outputs, *kept = _empty_for_gradient(obs, scale, parameters, norm)
    if attempt(_WHAT, lambda: _launch_forward(obs, scale, parameters, norm, outputs, kept)):
        return [outputs, *kept]
    return _plain_forward(obs, scale, parameters, norm)


@_forward_for_gradient.register_fake
def _empty_for_gradient(obs: Tensor, scale: Tensor, parameters: Sequence[Tensor], norm: bool) -> list[Tensor]:
    weight_1, _, weight_2, *_ = parameters
    rows, half = obs.shape[0], weight_1.dtype
    outputs = _empty_outputs(obs, scale, parameters, norm)
    widths = weight_1.shape[1], weight_1.shape[0], weight_2.shape[0]
    kept = [obs.new_empty(rows, width, dtype=half) for width in widths]
    if norm:
        kept += [obs.new_empty(rows, dtype=torch.float32), obs.new_empty(rows, dtype=torch.float32)]
        kept.append(torch.empty_like(outputs))
    return [outputs, *kept]


@torch.library.custom_op("redline::mlp_gradient", mutates_args=())
def _hidden_gradients(gradient: Tensor, last: Sequence[Tensor], kept: Sequence[Tensor], norm: bool) -> list[Tensor]:
    """Return the gradients of the preactivations of both hidden layers; with `norm` also their ReLU outputs.

    gradient: (B, outputs), of the outputs. last: weight of the second layer, weight and bias of the third. kept: the outputs
    and all other tensors from `_forward_for_gradient` except the observations.
    """
    gradients = _empty_gradients(gradient, last, kept, norm)
    if attempt(_WHAT, lambda: _launch_backward(gradient, last, kept, norm, gradients)):
        return gradients  # type: ignore[no-any-return]
    return _plain_gradients(gradient, last, kept, norm)


@_hidden_gradients.register_fake
def _empty_gradients(gradient: Tensor, last: Sequence[Tensor], kept: Sequence[Tensor], norm: bool) -> list[Tensor]:
    del gradient, last
    return [torch.empty_like(hidden) for hidden in (*kept[1:3], *(kept[1:3] if norm else ()))]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    obs, _, parameters, ctx.norm = inputs
    ctx.inputs = obs.shape[1]
    outputs, scaled, *kept = output
    ctx.save_for_backward(parameters[2], *parameters[4:], scaled, outputs, *kept)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, gradients: list[Tensor]) -> tuple[None, None, list[Tensor], None]:
    *last, scaled, outputs, first, second = ctx.saved_tensors[:7]
    gradient = gradients[0]
    sums_1, sums_2, *rectified = _hidden_gradients(gradient, last, [outputs, *ctx.saved_tensors[5:]], ctx.norm)
    if ctx.norm:
        first, second = rectified
    weight = sums_1.t() @ scaled
    if ctx.inputs < scaled.shape[1]:  # the 1 after the observations makes the bias gradient a column of `weight`
        of_parameters = [F.pad(weight[:, : ctx.inputs], (0, scaled.shape[1] - ctx.inputs)), weight[:, ctx.inputs]]
    else:
        of_parameters = [weight, sums_1.sum(0)]
    for sums, inputs in ((sums_2, first), (gradient.to(first.dtype), second)):
        of_parameters += [sums.t() @ inputs, sums.sum(0)]
    return None, None, of_parameters, None


_forward_for_gradient.register_autograd(_gradients, setup_context=_save)


# ---- the kernels


def _launch_forward(
    obs: Tensor, scale: Tensor, parameters: Sequence[Tensor], norm: bool, outputs: Tensor, kept: list[Tensor] | None
) -> None:
    from redline.algos import mlp_kernels

    weight_1, bias_1, weight_2, bias_2, weight_3, bias_3 = parameters = [each.contiguous() for each in parameters]
    (rows, inputs), (width_1, padded), width_2, count = obs.shape, weight_1.shape, weight_2.shape[0], outputs.shape[1]
    input_tile = min(_INPUT_TILE, power_of_two(padded))
    if width_1 > MAX_WIDTH:
        scaled, first, second = kept or (outputs, *(weight_1.new_empty(rows, width) for width in (width_1, width_2)))
        blocks = BLOCKS["first layer"]
        mlp_kernels.first_layer_kernel[(-(-rows // blocks.tile), -(-width_1 // MAX_WIDTH))](
            obs, scale, weight_1, bias_1, first, scaled, rows,
            inputs, padded, width_1, MAX_WIDTH, blocks.tile, input_tile, kept is not None,
            num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip
        torch._addmm_activation(bias_2, first, weight_2.t(), out=second)
        outputs.copy_(torch.addmm(bias_3, second, weight_3.t()))
        return
    means = outputs  # unused by the kernel
    if norm:
        means = scale.new_empty(width_1 + 1)
        mlp_kernels.mean_kernel[(-(-width_1 // _MEAN_TILE),)](
            weight_2, bias_2, means, width_1, width_2, power_of_two(width_2), _MEAN_TILE
        )
    keep, kept = (
        kept is not None,
        [*(kept or ()), *[outputs] * 6][:6],
    )  # the kernel does not access the missing ones
    blocks = BLOCKS["forward with norm" if norm else "forward"]
    mlp_kernels.forward_kernel[(-(-rows // blocks.tile),)](
        obs, scale, *parameters, means, outputs, *kept, rows,
        inputs, padded, width_1, width_2, count, power_of_two(width_1), power_of_two(count),
        blocks.tile, input_tile, _divisor(width_2, blocks.units), norm, keep,
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip


def _launch_backward(
    gradient: Tensor, last: Sequence[Tensor], kept: Sequence[Tensor], norm: bool, gradients: list[Tensor]
) -> None:
    from redline.algos import mlp_kernels

    (rows, width_1), width_2, count = kept[1].shape, kept[2].shape[1], gradient.shape[1]
    blocks = BLOCKS["wide backward" if width_1 > MAX_WIDTH else "backward with norm" if norm else "backward"]
    block = min(MAX_WIDTH, power_of_two(width_1))
    missing = [kept[0]] * 3  # the kernel accesses these only with `norm`
    mlp_kernels.backward_kernel[(-(-rows // blocks.tile), -(-width_1 // block))](
        gradient.contiguous(), *(each.contiguous() for each in last), *[*kept, *missing][:6], *[*gradients, *missing][:4], rows,
        width_1, width_2, count, block, power_of_two(count), blocks.tile, _divisor(width_2, blocks.units), norm,
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip


def _divisor(width: int, largest: int) -> int:
    """Return the largest power of two that divides `width`, at most `largest`."""
    return min(largest, width & -width)


# ---- the same in plain operations


def _plain_forward(obs: Tensor, scale: Tensor, parameters: Sequence[Tensor], norm: bool) -> list[Tensor]:
    """Return the same as `_forward_for_gradient`."""
    half = parameters[0].dtype
    x = scaled = F.pad((obs.to(torch.float32) * scale).to(half), (0, parameters[0].shape[1] - obs.shape[1]))
    hidden, inverses = [], []
    for weight, bias in (parameters[:2], parameters[2:4]):
        x = F.linear(x, weight, bias)
        if norm:
            variance, mean = torch.var_mean(x.to(torch.float32), 1, correction=0, keepdim=True)
            inverses.append((variance + 1e-5).rsqrt())
            hidden.append((x - mean).to(half))
            x = (hidden[-1] * inverses[-1]).to(half)
        x = F.relu(x)
        if not norm:
            hidden.append(x)
    outputs = F.linear(x, *parameters[4:]).to(torch.float32)
    if obs.shape[1] < scaled.shape[1]:
        scaled = scaled.clone()
        scaled[:, obs.shape[1]] = 1
    if not norm:
        return [outputs, scaled, *hidden]
    slopes = F.linear((hidden[1] > 0).to(half), parameters[4]).to(torch.float32)
    hidden[0] = (hidden[0] * inverses[0]).to(half)
    return [outputs, scaled, *hidden, *(inverse.squeeze(1) for inverse in inverses), slopes]


def _plain_gradients(gradient: Tensor, last: Sequence[Tensor], kept: Sequence[Tensor], norm: bool) -> list[Tensor]:
    """Return the same as `_hidden_gradients`."""
    (weight_2, weight_3, _), (_, first, second, *inverses) = last, kept
    if norm:
        second = (second * inverses[1].unsqueeze(1)).to(second.dtype)
    gradient, gradients = gradient.to(first.dtype), []
    for number, weight, values in ((1, weight_3, second), (0, weight_2, first)):
        sums = torch.where(values <= 0, 0.0, (gradient @ weight).to(torch.float32))
        if norm:
            normal = values.to(torch.float32)
            products = (sums * normal).mean(1, keepdim=True)
            sums = inverses[number].unsqueeze(1) * (sums - sums.mean(1, keepdim=True) - normal * products)
        gradient = sums.to(values.dtype)
        gradients.append(gradient)
    return [*gradients[::-1], *((F.relu(first), F.relu(second)) if norm else ())]
