"""A whole MLP in one Triton kernel: observations in, outputs out, and no activations in memory between the layers.

Layer by layer, most of the time goes into writing 256 numbers per sample and layer to memory and reading them again, and into
converting observations to half precision. The kernel holds a tile of 64 samples in registers instead. For a gradient it
writes what the backward pass needs: scaled observations and the outputs of both hidden layers.

Networks run layer by layer on a CPU, in float32, with other numbers of layers, without Triton, and on GPUs whose shared memory
is too small. Where Triton cannot build the kernel, the same numbers come from plain operations, and a message says so.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from redline.engine.fast import first_line
from redline.engine.out_of_memory import is_out_of_memory

HALF = (torch.bfloat16, torch.float16)
INPUTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.float32, *HALF)
MAX_WIDTH = 256  # of the first hidden layer: its outputs stay in registers
MAX_OUTPUTS = 64
# The fastest of twelve choices on an H200, for 4,096 and for 65,536 samples:
_TILE = 64  # samples of a block
_INPUT_TILE = 64  # inputs that are multiplied at a time
_UNIT_TILE = 64  # units of the second layer that are computed at a time, at most
_LAUNCH = {"num_warps": 4, "num_stages": 3}
_SHARED_MEMORY = 160 * 1024  # bytes of shared memory that a block must be able to use for them

Layers = tuple[tuple[Tensor, Tensor], ...]
"""Weight (outputs, inputs) and bias (outputs,) of each layer."""

# Whether GPUs of this process run the kernel: `prepare` finds out before anything is compiled, as the compiler cannot ask.
_ready = False
_broken = False  # Triton could not build the kernel
_notify: Callable[[str], None] = print


def prepare(device: torch.device, notify: Callable[[str], None]) -> None:
    """Find out whether `device` runs the kernel. notify: receives a message if only Triton is missing, or fails later."""
    global _ready, _notify
    if device.type != "cuda":
        return
    _notify = notify
    properties = torch.cuda.get_device_properties(device)
    room: int = getattr(properties, "shared_memory_per_block_optin", 0)
    _ready = properties.major >= 8 and room >= _SHARED_MEMORY
    if _ready and importlib.util.find_spec("triton") is None:
        _ready = False
        notify("Running MLPs layer by layer: Triton, which compiles the kernel for whole networks, is not installed.")


def suits(obs: Tensor, layers: Layers, half: torch.dtype) -> bool:
    """Return whether the kernel computes these layers for observations (B, K), in the precision `half`."""
    if not (_ready and obs.is_cuda and half in HALF and obs.dtype in INPUTS and len(layers) == 3):
        return False
    (first, _), (second, _), (last, _) = layers
    fits = first.shape[0] <= MAX_WIDTH and first.shape[0] % 16 == 0 and second.shape[0] % 16 == 0
    return fits and last.shape[0] <= MAX_OUTPUTS


def fused_mlp(obs: Tensor, scale: Tensor, layers: Layers, norm: bool, half: torch.dtype) -> Tensor:
    """Return the outputs (B, outputs) float32 of two hidden layers with ReLU and a last one without.

    obs (B, K) is multiplied by scale (K,) float32; the first weight may have more inputs than K, which see zeros. norm: each
    hidden layer is normalised before its ReLU.
    """
    parameters = [parameter.to(half) for layer in layers for parameter in layer]
    obs = obs.contiguous()
    if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in parameters):
        outputs: Tensor = _forward_for_gradient(obs, scale, parameters, norm)[0]
        return outputs
    return _forward(obs, scale, parameters, norm)  # type: ignore[no-any-return]


# ---- operations of torch, so that the compiler and autograd know them; `parameters`: weight and bias of the three layers


@torch.library.custom_op("redline::mlp", mutates_args=())
def _forward(obs: Tensor, scale: Tensor, parameters: Sequence[Tensor], norm: bool) -> Tensor:
    """Return the outputs (B, outputs) float32."""
    outputs = _empty_outputs(obs, scale, parameters, norm)
    if _attempt(lambda: _launch_forward(obs, scale, parameters, norm, outputs, None)):
        return outputs  # type: ignore[no-any-return]
    return _plain_forward(obs, scale, parameters, norm)[0]


@_forward.register_fake
def _empty_outputs(obs: Tensor, scale: Tensor, parameters: Sequence[Tensor], norm: bool) -> Tensor:
    del scale, norm
    return obs.new_empty(obs.shape[0], parameters[4].shape[0], dtype=torch.float32)


@torch.library.custom_op("redline::mlp_for_gradient", mutates_args=())
def _forward_for_gradient(
    obs: Tensor, scale: Tensor, parameters: Sequence[Tensor], norm: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the outputs, and what the backward pass needs.

    That is the scaled observations (B, padded), the outputs of both hidden layers, with `norm` before their ReLU, and the
    inverse deviations (B,) of both; without `norm` these are empty.
    """
    outputs, *kept = _empty_for_gradient(obs, scale, parameters, norm)
    if _attempt(lambda: _launch_forward(obs, scale, parameters, norm, outputs, kept)):
        return outputs, *kept
    return _plain_forward(obs, scale, parameters, norm)


@_forward_for_gradient.register_fake
def _empty_for_gradient(
    obs: Tensor, scale: Tensor, parameters: Sequence[Tensor], norm: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    weight_1, _, weight_2, *_ = parameters
    rows, half = obs.shape[0], weight_1.dtype
    widths = weight_1.shape[1], weight_1.shape[0], weight_2.shape[0]
    scaled, first, second = (obs.new_empty(rows, width, dtype=half) for width in widths)
    inverse_1, inverse_2 = (obs.new_empty(rows if norm else 0, dtype=torch.float32) for _ in range(2))
    return _empty_outputs(obs, scale, parameters, norm), scaled, first, second, inverse_1, inverse_2


@torch.library.custom_op("redline::mlp_gradient", mutates_args=())
def _hidden_gradients(
    gradient: Tensor, weights: Sequence[Tensor], hidden: Sequence[Tensor], inverses: Sequence[Tensor], norm: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the sums of both hidden layers, from that of the outputs (B, outputs).

    weights: of the second and third layer. hidden, inverses: of both hidden layers, from `_forward_for_gradient`.
    """
    gradients = _empty_gradients(gradient, weights, hidden, inverses, norm)
    if _attempt(lambda: _launch_backward(gradient, weights, hidden, inverses, norm, gradients)):
        return gradients  # type: ignore[no-any-return]
    return _plain_gradients(gradient, weights, hidden, inverses, norm)


@_hidden_gradients.register_fake
def _empty_gradients(
    gradient: Tensor, weights: Sequence[Tensor], hidden: Sequence[Tensor], inverses: Sequence[Tensor], norm: bool
) -> tuple[Tensor, Tensor]:
    del gradient, weights, inverses, norm
    return torch.empty_like(hidden[0]), torch.empty_like(hidden[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, parameters, ctx.norm = inputs
    ctx.save_for_backward(parameters[2], parameters[4], *output[1:])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, gradient: Tensor, *_: None) -> tuple[None, None, list[Tensor], None]:
    weight_2, weight_3, scaled, first, second, *inverses = ctx.saved_tensors
    sums_1, sums_2 = _hidden_gradients(gradient, [weight_2, weight_3], [first, second], inverses, ctx.norm)
    if ctx.norm:
        first, second = F.relu(first), F.relu(second)
    gradients: list[Tensor] = []
    for sums, inputs in ((sums_1, scaled), (sums_2, first), (gradient.to(first.dtype), second)):
        gradients += [sums.t() @ inputs, sums.sum(0)]
    return None, None, gradients, None


_forward_for_gradient.register_autograd(_gradients, setup_context=_save)


# ---- the kernels


def _attempt(launch: Callable[[], None]) -> bool:
    """Launch a kernel; return False, from now on for all, if Triton cannot build it."""
    global _broken
    if not _broken:
        try:
            launch()
        except Exception as error:
            if is_out_of_memory(error):
                raise
            _broken = True
            _notify(f"Running MLPs without their kernel: Triton could not build it ({first_line(error)}).")
    return not _broken


def _launch_forward(
    obs: Tensor, scale: Tensor, parameters: Sequence[Tensor], norm: bool, outputs: Tensor, kept: list[Tensor] | None
) -> None:
    from redline.algos import mlp_kernels

    weight_1, _, weight_2, *_ = parameters = [parameter.contiguous() for parameter in parameters]
    (rows, inputs), (width_1, padded), width_2, count = obs.shape, weight_1.shape, weight_2.shape[0], outputs.shape[1]
    mlp_kernels.forward_kernel[(-(-rows // _TILE),)](
        obs, scale, *parameters, outputs, *(kept or [outputs] * 5), rows,
        inputs, padded, width_1, width_2, count, _power_of_two(width_1), _power_of_two(count),
        _TILE, min(_INPUT_TILE, _power_of_two(padded)), _unit_tile(width_2), norm, kept is not None, **_LAUNCH,
    )  # fmt: skip


def _launch_backward(
    gradient: Tensor,
    weights: Sequence[Tensor],
    hidden: Sequence[Tensor],
    inverses: Sequence[Tensor],
    norm: bool,
    gradients: tuple[Tensor, Tensor],
) -> None:
    from redline.algos import mlp_kernels

    (rows, width_1), width_2, count = hidden[0].shape, hidden[1].shape[1], gradient.shape[1]
    mlp_kernels.backward_kernel[(-(-rows // _TILE),)](
        gradient.contiguous(), *(weight.contiguous() for weight in weights), *hidden, *inverses, *gradients, rows,
        width_1, width_2, count, _power_of_two(width_1), _power_of_two(count), _TILE, _unit_tile(width_2), norm, **_LAUNCH,
    )  # fmt: skip


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number` and 16, the least that tensor cores multiply."""
    return 1 << (max(number, 16) - 1).bit_length()


def _unit_tile(width: int) -> int:
    """Return the largest power of two that divides `width`, at most _UNIT_TILE."""
    return min(_UNIT_TILE, width & -width)


# ---- the same in plain operations


def _plain_forward(
    obs: Tensor, scale: Tensor, parameters: Sequence[Tensor], norm: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return what `_forward_for_gradient` returns."""
    half = parameters[0].dtype
    x = scaled = F.pad((obs.to(torch.float32) * scale).to(half), (0, parameters[0].shape[1] - obs.shape[1]))
    hidden, inverses = [], []
    for weight, bias in (parameters[:2], parameters[2:4]):
        x = F.linear(x, weight, bias)
        if norm:
            variance, mean = torch.var_mean(x.to(torch.float32), 1, correction=0, keepdim=True)
            inverse = (variance + 1e-5).rsqrt()
            x = ((x - mean) * inverse).to(half)
            hidden.append(x)
            inverses.append(inverse.squeeze(1))
            x = F.relu(x)
        else:
            x = F.relu(x)
            hidden.append(x)
            inverses.append(scale.new_empty(0))
    outputs = F.linear(x, *parameters[4:]).to(torch.float32)
    return outputs, scaled, hidden[0], hidden[1], inverses[0], inverses[1]


def _plain_gradients(
    gradient: Tensor, weights: Sequence[Tensor], hidden: Sequence[Tensor], inverses: Sequence[Tensor], norm: bool
) -> tuple[Tensor, Tensor]:
    """Return what `_hidden_gradients` returns."""
    gradient = gradient.to(hidden[0].dtype)
    gradients = []
    for weight, values, inverse in reversed(list(zip(weights, hidden, inverses, strict=True))):
        sums = torch.where(values <= 0, 0.0, (gradient @ weight).to(torch.float32))
        if norm:
            normal = values.to(torch.float32)
            products = (sums * normal).mean(1, keepdim=True)
            sums = inverse.unsqueeze(1) * (sums - sums.mean(1, keepdim=True) - normal * products)
        gradient = sums.to(values.dtype)
        gradients.append(gradient)
    return gradients[1], gradients[0]
