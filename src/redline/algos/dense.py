"""Fully connected parts of networks: input scaling, dense layers, the output head, and two networks run as one."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from redline.algos import rectified
from redline.algos.fused_mlp import Layers
from redline.core.records import Spec
from redline.engine.triton_use import HALF


class Scale(nn.Module):
    """Multiply observations of any dtype by the Spec's scale per channel; return them in the network's precision."""

    scale: Tensor

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        scale = torch.tensor(spec.obs_scale).view(-1, *(1,) * (len(spec.obs_shape) - 1))
        self.register_buffer("scale", scale, persistent=False)

    def forward(self, obs: Tensor) -> Tensor:
        return (obs.to(torch.float32) * self.scale).to(precision(obs))


def precision(obs: Tensor) -> torch.dtype:
    """Return the dtype in which networks compute on the device of `obs`: autocast's, else float32."""
    device = obs.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32


class Head(nn.Module):
    """Map features (B, F) to action values (B, A) float32; with `dueling`, as a state value plus centred advantages."""

    def __init__(self, features: int, num_actions: int, dueling: bool) -> None:
        super().__init__()
        self.num_actions, self.dueling = num_actions, dueling
        # A multiple of 8 outputs keeps the matrix product aligned on a GPU; the unused ones are cut off.
        self.out = nn.Linear(features, round_up(num_actions + dueling, 8))

    def forward(self, features: Tensor) -> Tensor:
        return self.values(self.out(features).to(torch.float32))

    def in_float32(self, features: Tensor) -> Tensor:
        """Return the result of `forward`, always computed in float32."""
        features = features.to(torch.float32)
        with torch.autocast(features.device.type, enabled=False):
            if self.out.weight.dtype == torch.float32:
                return self.values(self.out(features))
            # An acting network may have weights in half precision, but never together with noisy layers.
            assert type(self.out) is nn.Linear
            weight, bias = self.out.weight.to(torch.float32), self.out.bias.to(torch.float32)
            return self.values(F.linear(features, weight, bias))

    def values(self, out: Tensor) -> Tensor:
        """Return the action values (B, A) float32 from the outputs of the linear layer."""
        if not self.dueling:
            return out[:, : self.num_actions]
        value, advantages = out[:, :1], out[:, 1 : 1 + self.num_actions]
        return value + advantages - advantages.mean(1, keepdim=True)


def activate(x: Tensor, norm: bool) -> Tensor:
    """Return ReLU(x) of x (…, F), after layer normalisation over the features if `norm`.

    The normalisation has no weight and bias: the next layer can absorb them, and on a GPU the gradients of these few
    parameters cost as much as those of a whole layer.
    """
    return F.relu(F.layer_norm(x, x.shape[-1:]).to(x.dtype) if norm else x)


def linear_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return ReLU(x @ weight.T + bias) of x (B, F); in half precision on a GPU, cuBLAS applies the ReLU."""
    half = precision(x)
    if not (x.is_cuda and half in HALF):
        return F.relu(F.linear(x, weight, bias))
    out: Tensor = rectified.linear_relu(x.to(half), weight.to(half), bias.to(half))
    return out


class Dense(nn.Module):
    """Fully connected layers with ReLU, and the head. (B, F) -> (B, A) float32."""

    def __init__(self, features: int, hidden: tuple[int, ...], num_actions: int, norm: bool, dueling: bool) -> None:
        super().__init__()
        widths = [features, *hidden]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.norm = norm
        self.head = Head(widths[-1], num_actions, dueling)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.hidden(x))
        return out

    def hidden(self, x: Tensor) -> Tensor:
        """Return the outputs of the last hidden layer."""
        for layer in self.layers:
            if self.norm or not isinstance(layer, nn.Linear):  # a NoisyLinear computes its own weights
                x = activate(layer(x), self.norm)
            else:
                x = linear_relu(x, layer.weight, layer.bias)
        return x

    def layers_to_fuse(self) -> Layers:
        """Return the weight and bias of each layer, the head last; empty if any layer is noisy."""
        layers = [*self.layers, self.head.out]
        if not all(type(layer) is nn.Linear for layer in layers):
            return ()
        return tuple((layer.weight, layer.bias) for layer in layers)

    def values(self, out: Tensor) -> Tensor:
        """Return the result of `forward`, given the outputs of the last layer."""
        return self.head.values(out)


class BlockDiagonalLinear(nn.Linear):
    """Two independent linear layers in one matrix product: each half of the outputs depends on its half of the inputs.

    The off-diagonal blocks of the weight are zero and receive no gradient.
    """

    mask: Tensor

    def __init__(self, features: int, out: int) -> None:
        """features, out: inputs and outputs of each of the two layers."""
        super().__init__(2 * features, 2 * out)
        ones = torch.ones(out, features)
        self.register_buffer("mask", torch.block_diag(ones, ones), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.masked_weight(), self.bias)

    def masked_weight(self) -> Tensor:
        """Return the weight, with gradients for its two blocks only."""
        return self.weight * self.mask if torch.is_grad_enabled() else self.weight


class TwinMLP(nn.Module):
    """Two MLPs with the same input and no shared weights. (B, F) -> (B, 2, at least 4) float32.

    Narrow layers leave a GPU waiting for kernel launches; computed side by side, the two MLPs need half as many.
    """

    def __init__(self, features: int, hidden: tuple[int, ...], outputs: int, norm: bool) -> None:
        """hidden: at least one width."""
        super().__init__()
        self.norm = norm
        self.first = nn.Linear(features, 2 * hidden[0])
        self.layers = nn.ModuleList(BlockDiagonalLinear(a, b) for a, b in itertools.pairwise(hidden))
        self.head = BlockDiagonalLinear(hidden[-1], round_up(outputs, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self._layer(x, self.first, self.first.weight)
        for layer in self.layers:
            assert isinstance(layer, BlockDiagonalLinear)
            x = self._layer(x, layer, layer.masked_weight())
        return self.values(self.head(x).to(torch.float32))

    def layers_to_fuse(self) -> Layers:
        """Return the weight and bias of each layer, the head last; empty with normalisation, which is done per twin."""
        if self.norm:
            return ()
        layers = [(self.first.weight, self.first.bias)]
        for layer in (*self.layers, self.head):
            assert isinstance(layer, BlockDiagonalLinear)
            layers.append((layer.masked_weight(), layer.bias))
        return tuple(layers)

    def values(self, out: Tensor) -> Tensor:
        """Return the result of `forward`, given the outputs of the last layer."""
        twins: Tensor = out.unflatten(1, (2, -1))
        return twins

    def _layer(self, x: Tensor, layer: nn.Linear, weight: Tensor) -> Tensor:
        if not self.norm:
            return linear_relu(x, weight, layer.bias)
        return activate(F.linear(x, weight, layer.bias).unflatten(1, (2, -1)), True).flatten(1)


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `number`."""
    return -(-number // multiple) * multiple
