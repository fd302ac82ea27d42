"""Networks, chosen from the Spec: boards too large for an MLP get convolutions, afterstates one MLP for all their rows.

A value network gives (B, A) float32 and has `chosen`, the values of one action a state. `legal` (B, A) bool brings the
values of illegal actions down to ILLEGAL.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from redline.algos.distribution import Kind
from redline.core import random
from redline.core.errors import UserError
from redline.core.records import Spec

_BOARD, _FEW = (
    1024,
    128,
)  # cells of a board, and neighbours times channels of a cell, up to which a product is the faster way
ILLEGAL = -1e9  # value or logit of an illegal action: finite, so that a state without legal actions gives no NaN


@dataclass(frozen=True)
class NetConfig:
    """Settings of a network, part of those of every algorithm."""

    net: Literal["auto", "mlp", "cnn", "resnet"] = "auto"  # auto: an MLP for few inputs, else a CNN
    hidden: tuple[int, ...] = (256, 256)  # widths of the fully connected layers; after convolutions only the last
    channels: tuple[int, ...] = (32, 64)  # of each 3x3 convolution, or of each stage of a resnet
    stride: int = 2  # of all convolutions but the first; 1 keeps the size of the board
    layer_norm: bool = False  # normalise what each layer gives to the next
    init: Literal["he", "orthogonal"] = "he"  # first weights

    def __post_init__(self) -> None:
        for name, allowed in (("net", ("auto", "mlp", "cnn", "resnet")), ("init", ("he", "orthogonal"))):
            self.expect((name,), ", ".join(allowed), allowed.__contains__)
        self.expect(("hidden",), "layer widths, as in 256,256", lambda widths: min(widths, default=1) >= 1)
        self.expect(("channels",), "numbers of channels, as in 32,64", lambda widths: min(widths, default=0) >= 1)
        self.expect(("stride",), "at least 1", lambda x: x >= 1)

    def expect(self, names: tuple[str, ...], what: str, holds: Callable[[Any], bool]) -> None:
        """Refuse settings of which something does not hold."""
        for name in names:
            if not holds(value := getattr(self, name)):
                algo = type(self).__module__.rpartition(".")[2]
                raise UserError(f"{algo}.{name} is {value}; expected {what}.")


NET_FIXED = tuple(field.name for field in dataclasses.fields(NetConfig) if field.name != "init")


def masked(values: Tensor, legal: Tensor | None) -> Tensor:
    """Values (B, A) with ILLEGAL where `legal` (B, A) is False."""
    return values if legal is None else torch.where(legal, values, ILLEGAL)


def gather(values: Tensor, action: Tensor) -> Tensor:
    """Of each row of values (B, A) the one of its action (B,) int64: (B,)."""
    return values.gather(1, action.unsqueeze(1)).squeeze(1)


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


class Dense(nn.Module):
    """Fully connected layers, each with a ReLU, and the head. (B, F) -> (B, A) float32."""

    def __init__(self, features: int, hidden: tuple[int, ...], num_actions: int, norm: bool, dueling: bool) -> None:
        super().__init__()
        widths = [features, *hidden]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for width in hidden) if norm else None
        self.head = Head(widths[-1], num_actions, dueling)

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            x = F.relu(x if self.norms is None else self.norms[number](x).to(x.dtype))
        out: Tensor = self.head(x)
        return out


class MLP(nn.Module):
    """Flattened observation through fully connected layers; without hidden ones it is linear. (B, …) -> (B, A) float32."""

    def __init__(self, spec: Spec, config: NetConfig, dueling: bool = False) -> None:
        super().__init__()
        inputs = math.prod(spec.obs_shape)
        self.pad = _round_up(inputs, 8) - inputs  # 300 inputs would miss the 16-byte alignment of tensor cores
        self.scale = Scale(spec)
        self.dense = Dense(inputs + self.pad, config.hidden, spec.num_actions, config.layer_norm, dueling)

    def forward(self, obs: Tensor, legal: Tensor | None = None) -> Tensor:
        return masked(self.dense(F.pad(self.scale(obs).flatten(1), (0, self.pad))), legal)

    def chosen(self, obs: Tensor, action: Tensor) -> Tensor:
        return gather(self(obs), action)


class Conv(nn.Module):
    """A 3x3 convolution of boards whose channels come last: (B, H, W, C) -> (B, H / stride, W / stride, out).

    Of few channels it is written as a matrix product of each cell's neighbourhood: a GPU's convolution of three channels
    took a third of a training step's time, most of it for the gradient of a few weights.
    """

    def __init__(self, channels: int, out: int, stride: int = 1, cells: int = 0) -> None:
        """`cells` are those of a board whose channels are few; 0: there are many."""
        super().__init__()
        few = 0 < cells <= _BOARD and 9 * channels <= _FEW and stride == 1
        self.pad = _round_up(9 * channels, 8) - 9 * channels if few else _round_up(channels, 8) - channels
        self.product = nn.Linear(9 * channels + self.pad, out) if few else None
        self.conv = None if few else nn.Conv2d(channels + self.pad, out, 3, stride=stride, padding=1)
        # Columns that are always 0 add nothing: first weights are those of the rest.
        self.gain = math.sqrt((9 * channels + self.pad) / (9 * channels) if few else (channels + self.pad) / channels)

    def forward(self, x: Tensor) -> Tensor:
        if self.product is None:
            assert self.conv is not None
            boards: Tensor = self.conv(F.pad(x, (0, self.pad)).permute(0, 3, 1, 2))
            return boards.permute(0, 2, 3, 1)
        height, width = x.shape[1:3]
        x = F.pad(x, (0, 0, 1, 1, 1, 1))
        around = [x[:, i : i + height, j : j + width] for i in range(3) for j in range(3)]
        out: Tensor = self.product(F.pad(torch.cat(around, 3), (0, self.pad)).flatten(0, 2))
        return out.view(-1, height, width, out.shape[1])


class CNN(nn.Module):
    """3x3 convolutions, then fully connected. (B, C, H, W) -> (B, A) float32."""

    def __init__(self, spec: Spec, config: NetConfig, dueling: bool = False) -> None:
        super().__init__()
        self.scale = Scale(spec)
        planes, height, width = spec.obs_shape
        self.convs = nn.ModuleList()
        for index, out in enumerate(config.channels):
            stride = 1 if index == 0 else config.stride
            self.convs.append(Conv(planes, out, stride, 0 if index else height * width))
            planes, height, width = out, -(-height // stride), -(-width // stride)
        self.norms = nn.ModuleList(nn.LayerNorm(out) for out in config.channels) if config.layer_norm else None
        features = planes * height * width
        self.dense = Dense(features, config.hidden[-1:], spec.num_actions, config.layer_norm, dueling)

    def forward(self, obs: Tensor, legal: Tensor | None = None) -> Tensor:
        x = self.scale(obs).permute(0, 2, 3, 1)
        for number, conv in enumerate(self.convs):
            x = conv(x)
            x = F.relu(x if self.norms is None else self.norms[number](x).to(x.dtype))
        return masked(self.dense(x.flatten(1)), legal)

    def chosen(self, obs: Tensor, action: Tensor) -> Tensor:
        return gather(self(obs), action)


class Residual(nn.Module):
    """What two 3x3 convolutions add to their input. (B, H, W, C) -> the same shape."""

    def __init__(self, channels: int, norm: bool) -> None:
        super().__init__()
        self.convs = nn.ModuleList(Conv(channels, channels) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for _ in range(2)) if norm else None

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for number, conv in enumerate(self.convs):
            y = F.relu(y if self.norms is None else self.norms[number](y).to(y.dtype))
            y = conv(y)
        return x + y


class ResNet(nn.Module):
    """As in Espeholt et al. 2018 (IMPALA): stages of a convolution and two residual blocks, then fully connected.

    All stages but the first take the maximum over 3x3 cells in steps of `stride`; so does the first of images of 32 cells
    or more. (B, C, H, W) -> (B, A) float32.
    """

    def __init__(self, spec: Spec, config: NetConfig, dueling: bool = False) -> None:
        super().__init__()
        self.scale = Scale(spec)
        planes, height, width = spec.obs_shape
        large = min(height, width) >= 32
        self.strides = [config.stride if index or large else 1 for index in range(len(config.channels))]
        self.convs, self.blocks = nn.ModuleList(), nn.ModuleList()
        for index, (out, stride) in enumerate(zip(config.channels, self.strides, strict=True)):
            self.convs.append(Conv(planes, out, cells=0 if index else height * width))
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


class Afterstates(nn.Module):
    """One MLP for the row of every action: an action is worth its reward and what the board it leads to is worth.

    obs (B, A, F), of which feature 0 is the reward -> (B, A) float32.
    """

    def __init__(self, spec: Spec, config: NetConfig, gamma: float, outputs: int = 1) -> None:
        super().__init__()
        self.gamma, self.outputs = gamma, outputs
        row = dataclasses.replace(spec, obs_shape=spec.obs_shape[1:], num_actions=outputs, afterstates=False)
        self.row = MLP(row, config)

    def rows(self, obs: Tensor) -> Tensor:
        """The outputs for every row: (B, A, outputs) float32."""
        out: Tensor = self.row(obs.flatten(0, 1))
        return out.view(*obs.shape[:2], self.outputs)

    def forward(self, obs: Tensor, legal: Tensor | None = None) -> Tensor:
        return masked(obs[:, :, 0] + self.gamma * self.rows(obs)[:, :, 0], legal)

    def chosen(self, obs: Tensor, action: Tensor) -> Tensor:
        place = action.view(-1, 1, 1).expand(-1, 1, obs.shape[2])
        row = obs.gather(1, place).squeeze(1)
        value: Tensor = self.row(row)[:, 0]
        return row[:, 0] + self.gamma * value


class Distributional(nn.Module):
    """A distribution of returns for every action, of which forward gives the expected values. (B, …) -> (B, A) float32."""

    def __init__(self, spec: Spec, config: NetConfig, kind: Kind, dueling: bool = False) -> None:
        super().__init__()
        self.kind, self.dueling = kind, dueling
        self.body = _plain(dataclasses.replace(spec, num_actions=(spec.num_actions + dueling) * kind.atoms), config)

    def outputs(self, obs: Tensor) -> Tensor:
        """K numbers an action, whose meaning `kind` knows: (B, A, K) float32."""
        out: Tensor = self.body(obs).unflatten(1, (-1, self.kind.atoms))
        if not self.dueling:
            return out
        value, advantage = out[:, :1], out[:, 1:]
        return value + advantage - advantage.mean(1, keepdim=True)

    def forward(self, obs: Tensor, legal: Tensor | None = None) -> Tensor:
        return masked(self.kind.expected(self.outputs(obs)), legal)

    def chosen(self, obs: Tensor, action: Tensor) -> Tensor:
        return gather(self(obs), action)


class Noisy(nn.Module):
    """A fully connected layer whose weights may be shaken, each as much as it has learned to (Fortunato et al. 2018).

    The noise is factored: one number an input, one an output. It stays as it was drawn last; there is none at first.
    """

    noise: Tensor

    def __init__(self, layer: nn.Linear, sigma: float) -> None:
        """Takes over the weights of `layer`; all begin with a deviation of sigma / sqrt(inputs)."""
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        deviation = sigma / math.sqrt(layer.in_features)
        self.weight_sigma = nn.Parameter(torch.full_like(layer.weight, deviation))
        self.bias_sigma = nn.Parameter(torch.full_like(layer.bias, deviation))
        self.sizes = [layer.in_features, layer.out_features]
        self.register_buffer("noise", torch.zeros(sum(self.sizes)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        noise_in, noise_out = self.noise.split(self.sizes)
        weight = self.weight + self.weight_sigma * (noise_out.unsqueeze(1) * noise_in)
        return F.linear(x, weight, self.bias + self.bias_sigma * noise_out)


@torch.no_grad()
def draw_noise(net: nn.Module, key: Tensor | None) -> None:
    """New noise for all noisy layers of `net` from `key` () int32; None: no noise."""
    buffers = [module.noise for module in net.modules() if isinstance(module, Noisy)]
    if key is None:
        for noise in buffers:
            noise.zero_()
        return
    sizes = [len(noise) for noise in buffers]
    normal = gaussian(random.bits(key, torch.arange(sum(sizes), device=key.device)))
    for noise, part in zip(buffers, (normal.sign() * normal.abs().sqrt()).split(sizes), strict=True):
        noise.copy_(part)


def gaussian(random_bits: Tensor) -> Tensor:
    """Standard normal float32, -5.2 to 5.2, from the upper 23 of `random_bits` (…) int64."""
    centred = ((random_bits >> 9).to(torch.float32) + 0.5) * 2.0**-22 - 1.0  # never -1 or 1
    return math.sqrt(2.0) * torch.erfinv(centred)


class ActorCritic(nn.Module):
    """Policy and value from one trunk, or of a network each. obs (B, …), legal (B, A) -> logits (B, A), values (B,), float32.

    The value output is of returns brought to mean 0 and deviation 1 by the running statistics kept here; what comes out is
    in rewards again. With afterstates every row has a logit and a value; a state is worth what its policy will earn.
    """

    mean: Tensor
    variance: Tensor
    counted: Tensor

    def __init__(self, spec: Spec, config: NetConfig, gamma: float, separate: bool = False) -> None:
        super().__init__()
        self.num_actions, self.gamma, self.afterstates = spec.num_actions, gamma, spec.afterstates
        wider = dataclasses.replace(spec, num_actions=spec.num_actions + 1)  # one output more, the value
        self.critic: nn.Module | None = None
        if spec.afterstates:
            self.body: nn.Module = Afterstates(spec, config, gamma, outputs=2)
        elif separate:
            self.body = _plain(spec, config)
            self.critic = _plain(dataclasses.replace(spec, num_actions=1), config)
        else:
            self.body = _plain(wider, config)
        self.register_buffer("mean", torch.zeros(()))  # of returns
        self.register_buffer("variance", torch.ones(()))
        self.register_buffer("counted", torch.zeros(()))  # calls of `follow`

    @property
    def deviation(self) -> Tensor:
        return self.variance.sqrt().clamp(min=1e-4)

    def forward(self, obs: Tensor, legal: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if not self.afterstates:
            out = self.body(obs)
            logits = masked(out[:, : self.num_actions], legal)
            value = out[:, self.num_actions] if self.critic is None else self.critic(obs)[:, 0]
            return logits, self.mean + self.deviation * value
        logits, value = self.body.rows(obs).unbind(2)  # type: ignore[operator]
        logits = masked(logits, legal)
        worth = obs[:, :, 0] + self.gamma * (self.mean + self.deviation * value)
        return logits, (logits.detach().softmax(1) * worth).sum(1)

    def follow(self, returns: Tensor) -> None:
        """Take `returns` (any shape) into the statistics: a mean over all at first, later over about the last hundred."""
        self.counted += 1
        share = (1 / self.counted).clamp(min=0.01)
        variance, mean = torch.var_mean(returns, correction=0)
        apart = mean - self.mean
        self.variance.copy_((1 - share) * self.variance + share * variance + share * (1 - share) * apart * apart)
        self.mean.add_(share * apart)


Net = MLP | CNN | ResNet
ValueNet = Net | Afterstates | Distributional


def build(
    spec: Spec,
    config: NetConfig,
    seed: int,
    gamma: float = 1.0,
    dueling: bool = False,
    kind: Kind | None = None,
    sigma: float | None = None,
) -> ValueNet:
    """The value network of that kind, see `_plain`. Same weights on any device. `gamma` is the discount of afterstates.

    With a `kind` of distribution it is of returns. With `sigma` its fully connected layers are noisy.
    """
    if spec.afterstates and dueling:
        raise UserError(
            "dueling is on; with afterstates the value of an action is that of its board. Leave it off (--no-dqn.dueling)."
        )
    if spec.afterstates and kind is not None:
        raise UserError(
            "distribution is on; with afterstates only the mean is learned. Set it to none (--dqn.distribution none)."
        )
    _check_afterstates(spec, config)
    net: ValueNet
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # (torch.manual_seed would seed the GPUs too, for good)
        if spec.afterstates:
            net = Afterstates(spec, config, gamma)
        else:
            net = _plain(spec, config, dueling) if kind is None else Distributional(spec, config, kind, dueling)
        _first_weights(net, config.init)
    if sigma is not None:
        _make_noisy(net, sigma)
    return net


def build_actor_critic(
    spec: Spec, config: NetConfig, seed: int, gamma: float = 1.0, separate: bool = False
) -> ActorCritic:
    """The policy and value network of that kind. Same weights on any device."""
    _check_afterstates(spec, config)
    if spec.afterstates and separate:
        raise UserError("separate is on; with afterstates one network judges every board. Leave it off.")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        net = ActorCritic(spec, config, gamma, separate)
        _first_weights(net, config.init)
    return net


def _check_afterstates(spec: Spec, config: NetConfig) -> None:
    if spec.afterstates and config.net not in ("auto", "mlp"):
        raise UserError(f"net is {config.net}, but afterstates are rows of features; leave it away or take mlp.")


def _plain(spec: Spec, config: NetConfig, dueling: bool = False) -> Net:
    """The network of that kind; `auto` takes an MLP up to 512 inputs and for flat ones."""
    board, kind = len(spec.obs_shape) == 3, config.net
    if kind == "auto":
        kind = "cnn" if board and math.prod(spec.obs_shape) > 512 else "mlp"
    if kind != "mlp" and not board:
        raise UserError(
            f"net is {kind}, but observations of shape {spec.obs_shape} are no planes; leave it away or take mlp."
        )
    nets: dict[str, type[Net]] = {"mlp": MLP, "cnn": CNN, "resnet": ResNet}
    return nets[kind](spec, config, dueling)


def _first_weights(net: nn.Module, init: str) -> None:
    for module in net.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            if init == "he":
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            else:
                nn.init.orthogonal_(module.weight, math.sqrt(2.0))
            assert module.bias is not None
            nn.init.zeros_(module.bias)
    for module in net.modules():
        if isinstance(module, Head):  # small first values: nothing is believed before it is learned
            nn.init.normal_(module.out.weight, std=0.01)
        if isinstance(module, Conv):
            weights = module.product or module.conv
            assert weights is not None
            weights.weight.data.mul_(module.gain)
        if isinstance(module, Residual):  # every block begins as if it were not there
            last = module.convs[-1].conv
            assert isinstance(last, nn.Conv2d)
            nn.init.zeros_(last.weight)


def _make_noisy(net: nn.Module, sigma: float) -> None:
    """Let every fully connected layer be noisy, with the weights it has; convolutions are left alone."""
    for dense in [module for module in net.modules() if isinstance(module, Dense)]:
        for parent in list(dense.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, Noisy(child, sigma))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
