"""Value networks over one observation: MLP, CNN, ResNet, Pixels and Columns, and `make_body`, which chooses one.

forward(obs (B, …), legal (B, A) bool or None) -> (B, A) float32; `chosen(obs, action (B,))` -> (B,).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from redline.algos.columns import Columns
from redline.algos.conv import Conv, PixelBatchNorm, PixelConv, PixelNorm, Residual
from redline.algos.dense import Dense, Scale, TwinMLP, activate, precision, round_up
from redline.algos.fused_mlp import fused_mlp, suits
from redline.algos.network_config import NetworkConfig, gather, masked
from redline.core.errors import UserError
from redline.core.records import Spec

_PIXELS = ((8, 4), (4, 2), (3, 1))  # kernel and stride of the convolutions of images


class Flat(nn.Module):
    """Flatten and scale observations: (B, …) -> (B, width), padded, in the network's precision."""

    factors: Tensor

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        inputs = math.prod(spec.obs_shape)
        self.width = round_up(inputs, 8)  # 300 inputs would miss the 16-byte alignment of tensor cores
        self.pad, self.scale = self.width - inputs, Scale(spec)
        factors = self.scale.scale.expand(spec.obs_shape).flatten()
        self.register_buffer("factors", factors, persistent=False)  # (inputs,): the scale of each

    def forward(self, obs: Tensor) -> Tensor:
        flat = self.scale(obs).flatten(1)
        if obs.device.type == "cpu":  # compiled, padding takes eight times as long as concatenating there
            return torch.cat([flat, flat.new_zeros(flat.shape[0], self.pad)], 1)
        return F.pad(flat, (0, self.pad))


def flat_then_dense(flat: Flat, dense: Dense | TwinMLP, obs: Tensor, fused: bool) -> Tensor:
    """Return dense(flat(obs)); with `fused`, a single kernel computes it if it supports these layers."""
    if fused and obs.is_cuda:
        rows, layers, half = obs.flatten(1), dense.layers_to_fuse(), precision(obs)
        if suits(rows, layers, dense.norm, half):
            return dense.values(fused_mlp(rows, flat.factors, layers, dense.norm, half))
    out: Tensor = dense(flat(obs))
    return out


class TwinBody(nn.Sequential):
    """Two MLPs with the same flattened input. (B, …) -> (B, 2, at least 4) float32."""

    def __init__(self, spec: Spec, config: NetworkConfig) -> None:
        flat = Flat(spec)
        super().__init__(flat, TwinMLP(flat.width, config.hidden, spec.num_actions, config.layer_norm))
        self.fused = config.fused_mlp

    def forward(self, obs: Tensor) -> Tensor:
        flat, twins = self
        assert isinstance(flat, Flat)
        assert isinstance(twins, TwinMLP)
        return flat_then_dense(flat, twins, obs, self.fused)


class MLP(nn.Module):
    """Dense layers over the flattened observation; linear without hidden layers. (B, …) -> (B, A) float32."""

    def __init__(self, spec: Spec, config: NetworkConfig, dueling: bool = False) -> None:
        super().__init__()
        self.flat = Flat(spec)
        self.dense = Dense(self.flat.width, config.hidden, spec.num_actions, config.layer_norm, dueling)
        self.fused = config.fused_mlp

    def forward(self, obs: Tensor, legal: Tensor | None = None) -> Tensor:
        return masked(flat_then_dense(self.flat, self.dense, obs, self.fused), legal)

    def chosen(self, obs: Tensor, action: Tensor) -> Tensor:
        return gather(self(obs), action)


class CNN(nn.Module):
    """3x3 convolutions, then dense layers. (B, C, H, W) -> (B, A) float32."""

    def __init__(self, spec: Spec, config: NetworkConfig, dueling: bool = False) -> None:
        super().__init__()
        self.scale = Scale(spec)
        planes, height, width = spec.obs_shape
        self.convs = nn.ModuleList()
        for index, out in enumerate(config.channels):
            stride = 1 if index == 0 else config.stride
            self.convs.append(Conv(planes, out, stride, (0, 0) if index else (height, width), config.padding))
            removed = 0 if config.padding else 2
            planes, height, width = out, -(-(height - removed) // stride), -(-(width - removed) // stride)
            if min(height, width) < 1:
                raise UserError(
                    f"padding is off and channels are {config.channels}: {index + 1} convolutions leave nothing of a board of "
                    f"{spec.obs_shape[1]}x{spec.obs_shape[2]}. Use fewer channels or turn padding on."
                )
        self.norm, self.fused = config.layer_norm, config.fused_conv
        features = planes * height * width
        self.dense = Dense(features, config.hidden[-1:], spec.num_actions, config.layer_norm, dueling)

    def forward(self, obs: Tensor, legal: Tensor | None = None) -> Tensor:
        first, *others = self.convs
        assert isinstance(first, Conv)
        if self.fused and first.reads_observations(obs):
            x = first.from_observations(obs, self.scale.scale, self.norm)
        else:
            x, others = self.scale(obs).permute(0, 2, 3, 1), [first, *others]
        for conv in others:
            x = activate(conv(x), True) if self.norm else conv(x, relu=True)
        return masked(self.dense(x.flatten(1)), legal)

    def chosen(self, obs: Tensor, action: Tensor) -> Tensor:
        return gather(self(obs), action)


class ResNet(nn.Module):
    """IMPALA's network (Espeholt et al. 2018): stages of a convolution and two residual blocks, then dense layers.

    In every stage but the first, a 3x3 max-pooling with stride `stride` follows the convolution; in the first stage too if
    the image has at least 32x32 cells. (B, C, H, W) -> (B, A) float32.
    """

    def __init__(self, spec: Spec, config: NetworkConfig, dueling: bool = False) -> None:
        super().__init__()
        self.scale = Scale(spec)
        planes, height, width = spec.obs_shape
        large = min(height, width) >= 32
        self.strides = [config.stride if index or large else 1 for index in range(len(config.channels))]
        self.convs, self.blocks = nn.ModuleList(), nn.ModuleList()
        for index, (out, stride) in enumerate(zip(config.channels, self.strides, strict=True)):
            self.convs.append(Conv(planes, out, board=(0, 0) if index else (height, width)))
            self.blocks.append(nn.Sequential(*(Residual(out, config.layer_norm) for _ in range(2))))
            planes, height, width = out, -(-height // stride), -(-width // stride)
        features = planes * height * width
        self.dense = Dense(features, config.hidden[-1:], spec.num_actions, config.layer_norm, dueling)

    def forward(self, obs: Tensor, legal: Tensor | None = None) -> Tensor:
        x = self.scale(obs).permute(0, 2, 3, 1)
        for conv, stride, blocks in zip(self.convs, self.strides, self.blocks, strict=True):
            x = conv(x)
            if stride > 1:
                x = F.max_pool2d(x.permute(0, 3, 1, 2), 3, stride, padding=1).permute(0, 2, 3, 1)
            x = blocks(x)
        return masked(self.dense(F.relu(x).flatten(1)), legal)

    def chosen(self, obs: Tensor, action: Tensor) -> Tensor:
        return gather(self(obs), action)


class Pixels(nn.Module):
    """Nature DQN's network for images (Mnih et al. 2015) with normalised convolutions, then dense layers.

    Kernels and strides are 8x8 and 4, 4x4 and 2, then 3x3 and 1; the options `stride` and `padding` do not apply.
    (B, C, H, W) -> (B, A) float32.
    """

    scale: Tensor

    def __init__(self, spec: Spec, config: NetworkConfig, dueling: bool = False) -> None:
        super().__init__()
        planes, height, width = spec.obs_shape
        self.register_buffer("scale", torch.tensor(spec.obs_scale), persistent=False)
        count = max(len(config.channels), len(_PIXELS))
        shapes = _PIXELS + _PIXELS[-1:] * (count - len(_PIXELS))
        self.convs, self.norms = nn.ModuleList(), nn.ModuleList()
        for index, (kernel, stride) in enumerate(shapes):
            out = config.channels[min(index, len(config.channels) - 1)]
            conv = PixelConv(planes, out, kernel, stride)
            self.convs.append(conv)
            self.norms.append(PixelBatchNorm(out) if config.batch_norm else PixelNorm(out))
            planes, height, width = out, conv.output_size(height), conv.output_size(width)
        if min(height, width) < 1:
            least = 1
            for kernel, stride in reversed(shapes):
                least = kernel + (least - 1) * stride
            raise UserError(
                f"net is pixels, but {count} convolutions leave nothing of images of "
                f"{spec.obs_shape[1]}x{spec.obs_shape[2]}; expected {least}x{least} or more. Use cnn or resnet."
            )
        self.dense = Dense(planes * height * width, config.hidden[-1:], spec.num_actions, config.layer_norm, dueling)

    def forward(self, obs: Tensor, legal: Tensor | None = None) -> Tensor:
        first: Any = self.convs[0]
        if first.accepts_uint8(obs):
            x = first.forward_uint8(obs, self.scale)
        else:
            x = first(obs.to(precision(obs)).permute(0, 2, 3, 1).contiguous(), self.scale)
        x = self.norms[0](x)
        for conv, norm in zip(self.convs[1:], self.norms[1:], strict=True):
            x = norm(conv(x))
        return masked(self.dense(x.flatten(1)), legal)

    def chosen(self, obs: Tensor, action: Tensor) -> Tensor:
        return gather(self(obs), action)


Body = MLP | CNN | ResNet | Pixels | Columns


def make_body(spec: Spec, config: NetworkConfig, dueling: bool = False) -> Body:
    """Return the network named by `config.net`; `auto` chooses it by the shape of the observation."""
    networks: dict[str, type[Body]] = {
        "mlp": MLP,
        "cnn": CNN,
        "resnet": ResNet,
        "pixels": Pixels,
        "columns": Columns,
    }
    kind = body_kind(spec, config)
    if config.batch_norm and kind != "pixels":
        raise UserError(f"batch_norm is on, but net is {kind}; use net pixels, or layer_norm.")
    body = networks[kind](spec, config, dueling)
    for module in body.modules():
        if isinstance(module, Conv | PixelConv):
            module.channels_last = config.channels_last
    return body


def body_kind(spec: Spec, config: NetworkConfig) -> str:
    """Return the name of the network; `auto` chooses a CNN for planes with more than 512 inputs, else an MLP."""
    board, kind = len(spec.obs_shape) == 3, config.net
    if kind == "auto":
        return "cnn" if board and math.prod(spec.obs_shape) > 512 else "mlp"
    if kind != "mlp" and not board:
        raise UserError(
            f"net is {kind}, but observations of shape {spec.obs_shape} are not planes (C, H, W); use mlp or auto."
        )
    return kind
