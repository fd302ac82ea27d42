"""Networks, chosen from the Spec: boards too large for an MLP get convolutions, afterstates one MLP for all their rows.

A value network gives (B, A) float32 and has `chosen`, the values of one action a state. `legal` (B, A) bool brings the
values of illegal actions down to ILLEGAL.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from redline.algos.distribution import Kind
from redline.algos.layers import (
    Conv,
    Dense,
    PixelConv,
    PixelNorm,
    Residual,
    Scale,
    TwinMLP,
    activate,
    init_weights,
    make_noisy,
    precision,
    round_up,
)
from redline.core.errors import UserError
from redline.core.records import Spec

_PIXELS = ((8, 4), (4, 2), (3, 1))  # rows and columns that the convolutions of images see, and their strides
ILLEGAL = -1e9  # value or logit of an illegal action: finite, so that a state without legal actions gives no NaN


@dataclass(frozen=True)
class NetworkConfig:
    """Settings of a network, part of those of every algorithm."""

    net: Literal["auto", "mlp", "cnn", "resnet", "pixels"] = "auto"  # auto: an MLP for few inputs, else a CNN
    hidden: tuple[int, ...] = (256, 256)  # widths of the fully connected layers; after convolutions only the last
    channels: tuple[int, ...] = (32, 64)  # of each convolution or stage of a resnet; of pixels the last is repeated
    stride: int = 2  # of all convolutions but the first; 1 keeps the size of the board
    padding: bool = (
        True  # of zeros around the board; without, every convolution of a cnn takes a row and a column off each side
    )
    layer_norm: bool = False  # normalise what each layer gives to the next
    init: Literal["he", "orthogonal"] = "he"  # first weights

    def __post_init__(self) -> None:
        for name, allowed in (("net", ("auto", "mlp", "cnn", "resnet", "pixels")), ("init", ("he", "orthogonal"))):
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


NETWORK_RESUME_FIXED = tuple(field.name for field in dataclasses.fields(NetworkConfig) if field.name != "init")


def masked(values: Tensor, legal: Tensor | None) -> Tensor:
    """Values (B, A) with ILLEGAL where `legal` (B, A) is False."""
    return values if legal is None else torch.where(legal, values, ILLEGAL)


def gather(values: Tensor, action: Tensor) -> Tensor:
    """Of each row of values (B, A) the one of its action (B,) int64: (B,)."""
    return values.gather(1, action.unsqueeze(1)).squeeze(1)


class Flat(nn.Module):
    """Observations as rows of inputs. (B, …) -> (B, width), in the precision the network runs in."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        inputs = math.prod(spec.obs_shape)
        self.width = round_up(inputs, 8)  # 300 inputs would miss the 16-byte alignment of tensor cores
        self.pad, self.scale = self.width - inputs, Scale(spec)

    def forward(self, obs: Tensor) -> Tensor:
        return F.pad(self.scale(obs).flatten(1), (0, self.pad))


class MLP(nn.Module):
    """Flattened observation through fully connected layers; without hidden ones it is linear. (B, …) -> (B, A) float32."""

    def __init__(self, spec: Spec, config: NetworkConfig, dueling: bool = False) -> None:
        super().__init__()
        self.flat = Flat(spec)
        self.dense = Dense(self.flat.width, config.hidden, spec.num_actions, config.layer_norm, dueling)

    def forward(self, obs: Tensor, legal: Tensor | None = None) -> Tensor:
        return masked(self.dense(self.flat(obs)), legal)

    def chosen(self, obs: Tensor, action: Tensor) -> Tensor:
        return gather(self(obs), action)


class CNN(nn.Module):
    """3x3 convolutions, then fully connected. (B, C, H, W) -> (B, A) float32."""

    def __init__(self, spec: Spec, config: NetworkConfig, dueling: bool = False) -> None:
        super().__init__()
        self.scale = Scale(spec)
        planes, height, width = spec.obs_shape
        self.convs = nn.ModuleList()
        for index, out in enumerate(config.channels):
            stride = 1 if index == 0 else config.stride
            self.convs.append(Conv(planes, out, stride, (0, 0) if index else (height, width), config.padding))
            lost = 0 if config.padding else 2
            planes, height, width = out, -(-(height - lost) // stride), -(-(width - lost) // stride)
            if min(height, width) < 1:
                raise UserError(
                    f"border is off and channels are {config.channels}; a board of {spec.obs_shape[1]}x{spec.obs_shape[2]} is "
                    f"used up by {index + 1} convolutions. Take fewer or leave border on."
                )
        self.norm = config.layer_norm
        features = planes * height * width
        self.dense = Dense(features, config.hidden[-1:], spec.num_actions, config.layer_norm, dueling)

    def forward(self, obs: Tensor, legal: Tensor | None = None) -> Tensor:
        x = self.scale(obs).permute(0, 2, 3, 1)
        for conv in self.convs:
            x = activate(conv(x), True) if self.norm else conv(x, relu=True)
        return masked(self.dense(x.flatten(1)), legal)

    def chosen(self, obs: Tensor, action: Tensor) -> Tensor:
        return gather(self(obs), action)


class ResNet(nn.Module):
    """As in Espeholt et al. 2018 (IMPALA): stages of a convolution and two residual blocks, then fully connected.

    All stages but the first take the maximum over 3x3 cells in steps of `stride`; so does the first of images of 32 cells
    or more. (B, C, H, W) -> (B, A) float32.
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
    """For images: few convolutions in large steps, as in Mnih et al. 2015, each normalised, then fully connected.

    The first sees 8x8 cells in steps of 4, the second 4x4 in steps of 2, all others 3x3; `stride` and `border` are those of
    other networks. (B, C, H, W) -> (B, A) float32.
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
            self.norms.append(PixelNorm(out))
            planes, height, width = out, conv.after(height), conv.after(width)
        if min(height, width) < 1:
            least = 1
            for kernel, stride in reversed(shapes):
                least = kernel + (least - 1) * stride
            raise UserError(
                f"net is pixels, but images of {spec.obs_shape[1]}x{spec.obs_shape[2]} are used up by {count} convolutions; "
                f"expected {least}x{least} or more. Take cnn or resnet."
            )
        self.dense = Dense(planes * height * width, config.hidden[-1:], spec.num_actions, config.layer_norm, dueling)

    def forward(self, obs: Tensor, legal: Tensor | None = None) -> Tensor:
        first: Any = self.convs[0]
        if first.takes_bytes(obs):
            x = first.of_bytes(obs, self.scale)
        else:
            x = first(obs.to(precision(obs)).permute(0, 2, 3, 1).contiguous(), self.scale)
        x = self.norms[0](x)
        for conv, norm in zip(self.convs[1:], self.norms[1:], strict=True):
            x = norm(conv(x))
        return masked(self.dense(x.flatten(1)), legal)

    def chosen(self, obs: Tensor, action: Tensor) -> Tensor:
        return gather(self(obs), action)


class Afterstates(nn.Module):
    """One MLP for the row of every action: an action is worth its reward and what the board it leads to is worth.

    obs (B, A, F), of which feature 0 is the reward -> (B, A) float32.
    """

    def __init__(self, spec: Spec, config: NetworkConfig, gamma: float, outputs: int = 1) -> None:
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

    def __init__(self, spec: Spec, config: NetworkConfig, kind: Kind, dueling: bool = False) -> None:
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


class ActorCritic(nn.Module):
    """Policy and value from one trunk, or of a network each. obs (B, …), legal (B, A) -> logits (B, A), values (B,), float32.

    The value output is of returns brought to mean 0 and deviation 1 by the running statistics kept here; what comes out is
    in rewards again. With afterstates every row has a logit and a value; a state is worth what its policy will earn.
    """

    mean: Tensor
    variance: Tensor
    counted: Tensor

    def __init__(self, spec: Spec, config: NetworkConfig, gamma: float, separate: bool = False) -> None:
        super().__init__()
        self.num_actions, self.gamma, self.afterstates = spec.num_actions, gamma, spec.afterstates
        wider = dataclasses.replace(spec, num_actions=spec.num_actions + 1)  # one output more, the value
        self.critic: nn.Module | None = None
        if spec.afterstates:
            self.body: nn.Module = Afterstates(spec, config, gamma, outputs=2)
        elif separate and _kind(spec, config) == "mlp" and config.hidden:
            inputs = Flat(spec)
            self.body = nn.Sequential(inputs, TwinMLP(inputs.width, config.hidden, spec.num_actions, config.layer_norm))
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
            policy, critic = out.unbind(1) if out.ndim == 3 else (out, out[:, self.num_actions :])
            if self.critic is not None:
                critic = self.critic(obs)
            logits, value = policy[:, : self.num_actions], critic[:, 0]
            return masked(logits, legal), self.mean + self.deviation * value
        logits, value = self.body.rows(obs).unbind(2)  # type: ignore[operator]
        logits = masked(logits, legal)
        worth = obs[:, :, 0] + self.gamma * (self.mean + self.deviation * value)
        return logits, (logits.detach().softmax(1) * worth).sum(1)

    def follow(self, returns: Tensor) -> None:
        """Take `returns` (any shape) into the statistics: a mean over all at first, later over about the last hundred."""
        self.counted += 1
        weight = (1 / self.counted).clamp(min=0.01)
        variance, mean = torch.var_mean(returns, correction=0)
        apart = mean - self.mean
        self.variance.copy_((1 - weight) * self.variance + weight * variance + weight * (1 - weight) * apart * apart)
        self.mean.add_(weight * apart)


Net = MLP | CNN | ResNet | Pixels
ValueNet = Net | Afterstates | Distributional


def build(
    spec: Spec,
    config: NetworkConfig,
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
        init_weights(net, config.init)
    if sigma is not None:
        make_noisy(net, sigma)
    return net


def build_actor_critic(
    spec: Spec, config: NetworkConfig, seed: int, gamma: float = 1.0, separate: bool = False
) -> ActorCritic:
    """The policy and value network of that kind. Same weights on any device."""
    _check_afterstates(spec, config)
    if spec.afterstates and separate:
        raise UserError("separate is on; with afterstates one network judges every board. Leave it off.")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        net = ActorCritic(spec, config, gamma, separate)
        init_weights(net, config.init)
    return net


def _check_afterstates(spec: Spec, config: NetworkConfig) -> None:
    if spec.afterstates and config.net not in ("auto", "mlp"):
        raise UserError(f"net is {config.net}, but afterstates are rows of features; leave it away or take mlp.")


def _plain(spec: Spec, config: NetworkConfig, dueling: bool = False) -> Net:
    """The network of that kind."""
    networks: dict[str, type[Net]] = {"mlp": MLP, "cnn": CNN, "resnet": ResNet, "pixels": Pixels}
    return networks[_kind(spec, config)](spec, config, dueling)


def _kind(spec: Spec, config: NetworkConfig) -> str:
    """Of network; `auto` takes an MLP up to 512 inputs and for flat ones."""
    board, kind = len(spec.obs_shape) == 3, config.net
    if kind == "auto":
        return "cnn" if board and math.prod(spec.obs_shape) > 512 else "mlp"
    if kind != "mlp" and not board:
        raise UserError(
            f"net is {kind}, but observations of shape {spec.obs_shape} are no planes; leave it away or take mlp."
        )
    return kind
