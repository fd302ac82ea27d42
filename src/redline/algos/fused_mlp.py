"""A whole MLP in one Triton kernel: observations in, outputs out, and no activations in memory between the layers.

Layer by layer, most of the time goes into writing 256 numbers per sample and layer to memory and reading them again, and into
converting observations to half precision. The kernel holds a tile of 64 samples in registers instead. For a gradient it
writes what the backward pass needs: scaled observations and the outputs of both hidden layers.

Layers are computed one by one on a CPU, in float32, for other numbers of layers, without Triton, and on GPUs whose shared
memory is too small; `plain_mlp` is what the kernel is tested against.
"""

# ruff: noqa: ARG001 (functions that give the shapes of an operation's results take all of its arguments)

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

HALF = (torch.bfloat16, torch.float16)
INPUTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.float32, *HALF)
MAX_WIDTH = 256  # of the first hidden layer: its outputs stay in registers
MAX_OUTPUTS = 64
_TILE, _WARPS, _STAGES, _K_TILE, _N_TILE = (
    64,
    4,
    3,
    64,
    64,
)  # the fastest of twelve on an H200, for 4,096 and 65,536 samples
_SHARED_MEMORY = 160 * 1024  # bytes that a block may use on GPUs for which the tile was chosen
Layers = tuple[tuple[Tensor, Tensor], ...]
"""Weight (outputs, inputs) and bias (outputs,) of each layer."""


# Whether GPUs of this process run the kernel: `prepare` finds out before anything is compiled, as the compiler cannot ask.
_ready = False


def prepare(device: torch.device, notify: Callable[[str], None]) -> None:
    """Find out whether `device` runs the kernel; a GPU on which Triton is missing is told about in a message."""
    global _ready
    if device.type != "cuda":
        return
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
        out: Tensor = _forward_keeping(obs, scale, *parameters, norm)[0]
        return out
    return _forward(obs, scale, *parameters, norm)  # type: ignore[no-any-return]


def plain_mlp(obs: Tensor, scale: Tensor, layers: Layers, norm: bool, half: torch.dtype) -> Tensor:
    """Return what `fused_mlp` returns, computed layer by layer: the version that the kernel is tested against."""
    x = F.pad((obs.to(torch.float32) * scale).to(half), (0, layers[0][0].shape[1] - obs.shape[1]))
    *hidden, last = ((weight.to(half), bias.to(half)) for weight, bias in layers)
    for weight, bias in hidden:
        x = F.linear(x, weight, bias)
        if norm:
            x = F.layer_norm(x.to(torch.float32), x.shape[-1:]).to(half)
        x = F.relu(x)
    return F.linear(x, *last).to(torch.float32)


@torch.library.custom_op("redline::mlp", mutates_args=())
def _forward(
    x: Tensor,
    scale: Tensor,
    weight_1: Tensor,
    bias_1: Tensor,
    weight_2: Tensor,
    bias_2: Tensor,
    weight_3: Tensor,
    bias_3: Tensor,
    norm: bool,
) -> Tensor:
    """Return the outputs (B, outputs) float32."""
    out = _empty_output(x, scale, weight_1, bias_1, weight_2, bias_2, weight_3, bias_3, norm)
    _launch_forward(x, scale, (weight_1, bias_1, weight_2, bias_2, weight_3, bias_3), norm, out, None)
    return out  # type: ignore[no-any-return]


@torch.library.custom_op("redline::mlp_keeping", mutates_args=())
def _forward_keeping(
    x: Tensor,
    scale: Tensor,
    weight_1: Tensor,
    bias_1: Tensor,
    weight_2: Tensor,
    bias_2: Tensor,
    weight_3: Tensor,
    bias_3: Tensor,
    norm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the outputs, and what the backward pass needs.

    That is the scaled observations (B, padded), the outputs of both hidden layers, with `norm` before their ReLU, and the
    inverse deviations (B,) of both; without `norm` these are empty.
    """
    found = _empty_outputs(x, scale, weight_1, bias_1, weight_2, bias_2, weight_3, bias_3, norm)
    out, *kept = found
    _launch_forward(x, scale, (weight_1, bias_1, weight_2, bias_2, weight_3, bias_3), norm, out, kept)
    return found  # type: ignore[no-any-return]


@_forward.register_fake
def _empty_output(x: Tensor, scale: Tensor, *parameters: Tensor | bool) -> Tensor:
    weight_3 = parameters[4]
    assert isinstance(weight_3, Tensor)
    return x.new_empty(x.shape[0], weight_3.shape[0], dtype=torch.float32)


@_forward_keeping.register_fake
def _empty_outputs(
    x: Tensor,
    scale: Tensor,
    weight_1: Tensor,
    bias_1: Tensor,
    weight_2: Tensor,
    bias_2: Tensor,
    weight_3: Tensor,
    bias_3: Tensor,
    norm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows, half = x.shape[0], weight_1.dtype
    widths = weight_1.shape[1], weight_1.shape[0], weight_2.shape[0]
    scaled, first, second = (x.new_empty(rows, width, dtype=half) for width in widths)
    inverse_1, inverse_2 = (x.new_empty(rows if norm else 0, dtype=torch.float32) for _ in range(2))
    out = x.new_empty(rows, weight_3.shape[0], dtype=torch.float32)
    return out, scaled, first, second, inverse_1, inverse_2


@torch.library.custom_op("redline::mlp_backward", mutates_args=())
def _hidden_gradients(
    gradient: Tensor,
    weight_2: Tensor,
    weight_3: Tensor,
    first: Tensor,
    second: Tensor,
    inverse_1: Tensor,
    inverse_2: Tensor,
    norm: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the sums of both hidden layers, from that of the outputs (B, outputs)."""
    from redline.algos import mlp_kernels

    found = torch.empty_like(first), torch.empty_like(second)
    (rows, width_1), width_2, outputs = first.shape, second.shape[1], weight_3.shape[0]
    mlp_kernels.backward_kernel[(-(-rows // _TILE),)](
        gradient.contiguous(), weight_2.contiguous(), weight_3.contiguous(), first, second, inverse_1, inverse_2, *found, rows,
        width_1, width_2, outputs, _power_of_two(width_1), _power_of_two(outputs), _TILE, _part(width_2), norm,
        num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip
    return found


@_hidden_gradients.register_fake
def _empty_gradients(
    gradient: Tensor, weight_2: Tensor, weight_3: Tensor, first: Tensor, second: Tensor, *_: Tensor | bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(first), torch.empty_like(second)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, _, _, weight_2, _, weight_3, _, ctx.norm = inputs
    ctx.save_for_backward(weight_2, weight_3, *output[1:])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, gradient: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    weight_2, weight_3, x, first, second, inverse_1, inverse_2 = ctx.saved_tensors
    sums_1, sums_2 = _hidden_gradients(
        gradient, weight_2, weight_3, first, second, inverse_1, inverse_2, ctx.norm
    )  # fmt: skip
    sums_3 = gradient.to(first.dtype)
    if ctx.norm:
        first, second = F.relu(first), F.relu(second)
    found: list[Tensor] = []
    for sums, inputs in ((sums_1, x), (sums_2, first), (sums_3, second)):
        found += [sums.t() @ inputs, sums.sum(0)]
    return None, None, *found, None


_forward_keeping.register_autograd(_gradients, setup_context=_save)


def _launch_forward(
    x: Tensor, scale: Tensor, parameters: tuple[Tensor, ...], norm: bool, out: Tensor, kept: list[Tensor] | None
) -> None:
    from redline.algos import mlp_kernels

    parameters = tuple(parameter.contiguous() for parameter in parameters)
    weight_1, _, weight_2, _, weight_3, _ = parameters
    (rows, inputs), (width_1, padded), width_2, outputs = x.shape, weight_1.shape, weight_2.shape[0], weight_3.shape[0]
    mlp_kernels.forward_kernel[(-(-rows // _TILE),)](
        x, scale, *parameters, out, *(kept or [out] * 5), rows,
        inputs, padded, width_1, width_2, outputs, _power_of_two(width_1), _power_of_two(outputs),
        _TILE, min(_K_TILE, _power_of_two(padded)), _part(width_2), norm, kept is not None,
        num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number` and 16, the least that tensor cores multiply."""
    return 1 << (max(number, 16) - 1).bit_length()


def _part(width: int) -> int:
    """Return how many units of a layer are computed at a time: a power of two that divides `width`, at most 64."""
    return min(_N_TILE, width & -width)
