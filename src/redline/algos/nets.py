"""Networks, chosen from the Spec: boards too large for an MLP get a CNN, afterstates one MLP for all their rows.

A value network gives (B, A) float32 and has `chosen`, the values of one action a state. `legal` (B, A) bool brings the
values of illegal actions down to ILLEGAL.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from redline.core.errors import UserError
from redline.core.records import Spec

ILLEGAL = -1e9  # value or logit of an illegal action: finite, so that a state without legal actions gives no NaN


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


class MLP(nn.Module):
    """Flattened observation through fully connected layers; without hidden ones it is linear. (B, …) -> (B, A) float32."""

    def __init__(self, spec: Spec, hidden: tuple[int, ...], dueling: bool = False) -> None:
        super().__init__()
        inputs = math.prod(spec.obs_shape)
        self.pad = _round_up(inputs, 8) - inputs  # 300 inputs would miss the 16-byte alignment of tensor cores
        widths = [inputs + self.pad, *hidden]
        self.scale = Scale(spec)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.head = Head(widths[-1], spec.num_actions, dueling)

    def forward(self, obs: Tensor, legal: Tensor | None = None) -> Tensor:
        x = F.pad(self.scale(obs).flatten(1), (0, self.pad))
        for layer in self.layers:
            x = F.relu(layer(x))
        return masked(self.head(x), legal)

    def chosen(self, obs: Tensor, action: Tensor) -> Tensor:
        return gather(self(obs), action)


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

    def forward(self, obs: Tensor, legal: Tensor | None = None) -> Tensor:
        x = self.scale(obs).to(memory_format=torch.channels_last)
        for conv in self.convs:
            x = F.relu(conv(x))
        x = x.flatten(1)
        for layer in self.layers:
            x = F.relu(layer(x))
        return masked(self.head(x), legal)

    def chosen(self, obs: Tensor, action: Tensor) -> Tensor:
        return gather(self(obs), action)


class Afterstates(nn.Module):
    """One MLP for the row of every action: an action is worth its reward and what the board it leads to is worth.

    obs (B, A, F), of which feature 0 is the reward -> (B, A) float32.
    """

    def __init__(self, spec: Spec, hidden: tuple[int, ...], gamma: float, outputs: int = 1) -> None:
        super().__init__()
        self.gamma, self.outputs = gamma, outputs
        row = dataclasses.replace(spec, obs_shape=spec.obs_shape[1:], num_actions=outputs, afterstates=False)
        self.row = MLP(row, hidden)

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


class ActorCritic(nn.Module):
    """Policy and value from one trunk. obs (B, …), legal (B, A) -> logits (B, A), values (B,), float32.

    The value output is of returns brought to mean 0 and deviation 1 by the running statistics kept here; what comes out is
    in rewards again. With afterstates every row has a logit and a value; a state is worth what its policy will earn.
    """

    mean: Tensor
    variance: Tensor
    counted: Tensor

    def __init__(self, spec: Spec, kind: str, hidden: tuple[int, ...], gamma: float) -> None:
        super().__init__()
        self.num_actions, self.gamma, self.afterstates = spec.num_actions, gamma, spec.afterstates
        wider = dataclasses.replace(spec, num_actions=spec.num_actions + 1)  # one output more, the value
        self.body = Afterstates(spec, hidden, gamma, outputs=2) if spec.afterstates else _plain(wider, kind, hidden)
        self.register_buffer("mean", torch.zeros(()))  # of returns
        self.register_buffer("variance", torch.ones(()))
        self.register_buffer("counted", torch.zeros(()))  # calls of `follow`

    @property
    def deviation(self) -> Tensor:
        return self.variance.sqrt().clamp(min=1e-4)

    def forward(self, obs: Tensor, legal: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if not self.afterstates:
            out = self.body(obs)
            logits, value = masked(out[:, : self.num_actions], legal), out[:, self.num_actions]
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


def build(
    spec: Spec, kind: str, hidden: tuple[int, ...], dueling: bool, seed: int, gamma: float = 1.0
) -> MLP | CNN | Afterstates:
    """The value network of that kind, see `_plain`. Same weights on any device. `gamma` is the discount of afterstates."""
    if spec.afterstates and dueling:
        raise UserError("dueling is on; with afterstates the value of an action is that of its board. Leave it off.")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # (torch.manual_seed would seed the GPUs too, for good)
        net = Afterstates(spec, hidden, gamma) if spec.afterstates else _plain(spec, kind, hidden, dueling)
        _first_weights(net)
    return net


def build_actor_critic(spec: Spec, kind: str, hidden: tuple[int, ...], seed: int, gamma: float) -> ActorCritic:
    """The policy and value network of that kind. Same weights on any device."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        net = ActorCritic(spec, kind, hidden, gamma)
        _first_weights(net)
    return net


def _plain(spec: Spec, kind: str, hidden: tuple[int, ...], dueling: bool = False) -> MLP | CNN:
    """The network of that kind; `auto` takes an MLP up to 512 inputs and for flat ones."""
    if kind == "auto":
        kind = "cnn" if len(spec.obs_shape) == 3 and math.prod(spec.obs_shape) > 512 else "mlp"
    return CNN(spec, hidden[-1:], dueling=dueling) if kind == "cnn" else MLP(spec, hidden, dueling=dueling)


def _first_weights(net: nn.Module) -> None:
    for module in net.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            assert module.bias is not None
            nn.init.zeros_(module.bias)
    for module in net.modules():
        if isinstance(module, Head):  # small first values: nothing is believed before it is learned
            nn.init.normal_(module.out.weight, std=0.01)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
