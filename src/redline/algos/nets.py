"""Networks, chosen from the Spec: boards too large for an MLP get a CNN."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from redline.core.records import Spec


class Scale(nn.Module):
    """Observations of any dtype to floats of about 1, channel by channel, in the precision the network runs in."""

    scale: Tensor

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        scale = torch.tensor(spec.obs_scale).view(-1, *(1,) * (len(spec.obs_shape) - 1))
        self.register_buffer("scale", scale, persistent=False)

    def forward(self, obs: Tensor) -> Tensor:
        device = obs.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
        return (obs.to(torch.float32) * self.scale).to(dtype)


class Head(nn.Module):
    """From features (B, F) to action values (B, A); dueling splits them into a state's value and advantages."""

    def __init__(self, features: int, num_actions: int, dueling: bool) -> None:
        super().__init__()
        self.num_actions, self.dueling = num_actions, dueling
        # Rows of 8 keep the matrix product aligned on a GPU; the unused outputs are cut off.
        self.out = nn.Linear(features, _round_up(num_actions + dueling, 8))

    def forward(self, features: Tensor) -> Tensor:
        out: Tensor = self.out(features).to(torch.float32)
        if not self.dueling:
            return out[:, : self.num_actions]
        value, advantage = out[:, :1], out[:, 1 : 1 + self.num_actions]
        return value + advantage - advantage.mean(1, keepdim=True)


class MLP(nn.Module):
    """Flattened observation through fully connected layers. (B, …) -> (B, A) float32."""

    def __init__(self, spec: Spec, hidden: tuple[int, ...], dueling: bool = False) -> None:
        super().__init__()
        inputs = math.prod(spec.obs_shape)
        self.pad = _round_up(inputs, 8) - inputs  # 300 inputs would miss the 16-byte alignment of tensor cores
        widths = [inputs + self.pad, *hidden]
        self.scale = Scale(spec)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.head = Head(widths[-1], spec.num_actions, dueling)

    def forward(self, obs: Tensor) -> Tensor:
        x = F.pad(self.scale(obs).flatten(1), (0, self.pad))
        for layer in self.layers:
            x = F.relu(layer(x))
        out: Tensor = self.head(x)
        return out


class CNN(nn.Module):
    """Two 3x3 convolutions, the second with stride 2, then fully connected. (B, C, H, W) -> (B, A) float32."""

    def __init__(
        self, spec: Spec, hidden: tuple[int, ...], channels: tuple[int, ...] = (32, 64), dueling: bool = False
    ) -> None:
        super().__init__()
        self.scale = Scale(spec)
        planes, height, width = spec.obs_shape
        self.convs = nn.ModuleList()
        for index, out in enumerate(channels):
            stride = 1 if index == 0 else 2
            self.convs.append(nn.Conv2d(planes, out, 3, stride=stride, padding=1))
            planes, height, width = out, -(-height // stride), -(-width // stride)
        widths = [planes * height * width, *hidden]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.head = Head(widths[-1], spec.num_actions, dueling)

    def forward(self, obs: Tensor) -> Tensor:
        x = self.scale(obs).to(memory_format=torch.channels_last)
        for conv in self.convs:
            x = F.relu(conv(x))
        x = x.flatten(1)
        for layer in self.layers:
            x = F.relu(layer(x))
        out: Tensor = self.head(x)
        return out


def build(spec: Spec, kind: str, hidden: tuple[int, ...], dueling: bool, seed: int) -> nn.Module:
    """The network of that kind; `auto` takes an MLP up to 512 inputs and for flat ones. Same weights on any device."""
    if kind == "auto":
        kind = "cnn" if len(spec.obs_shape) == 3 and math.prod(spec.obs_shape) > 512 else "mlp"
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # (torch.manual_seed would seed the GPUs too, for good)
        net: nn.Module = (
            CNN(spec, hidden[-1:], dueling=dueling) if kind == "cnn" else MLP(spec, hidden, dueling=dueling)
        )
        for module in net.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                assert module.bias is not None
                nn.init.zeros_(module.bias)
        for module in net.modules():
            if isinstance(module, Head):  # small first values: nothing is believed before it is learned
                nn.init.normal_(module.out.weight, std=0.01)
    return net


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
