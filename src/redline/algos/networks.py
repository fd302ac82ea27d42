"""Networks built from the Spec: value networks, afterstate networks, return distributions and actor-critics.

A value network maps obs (B, …) and `legal` (B, A) bool to (B, A) float32, ILLEGAL for illegal actions, and has
`chosen(obs, action)`, the value (B,) of one action per state.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from redline.algos.bodies import MLP, Body, TwinBody, body_kind, make_body
from redline.algos.columns import AfterstateColumns
from redline.algos.distribution import Kind
from redline.algos.init_weights import init_weights
from redline.algos.network_config import NetworkConfig, gather, masked
from redline.algos.noisy import make_noisy
from redline.core.errors import UserError
from redline.core.records import Spec


class Afterstates(nn.Module):
    """One network applied to every action's afterstate: an action's value is its reward plus the discounted afterstate value.

    obs (B, A, F), with the reward as feature 0 -> (B, A) float32. The network is an MLP, or `columns` if there are boards.
    """

    def __init__(self, spec: Spec, config: NetworkConfig, gamma: float, outputs: int = 1) -> None:
        super().__init__()
        self.gamma, self.outputs = gamma, outputs
        row = dataclasses.replace(spec, obs_shape=spec.obs_shape[1:], num_actions=outputs, afterstates=False)
        if config.net == "columns":
            assert spec.afterstate_board is not None
            self.row: nn.Module = AfterstateColumns(row, spec.afterstate_board, config)
        else:
            self.row = MLP(row, config)

    def rows(self, obs: Tensor) -> Tensor:
        """Return the outputs for every afterstate: (B, A, outputs) float32."""
        out: Tensor = self.row(obs.flatten(0, 1))
        return out.view(*obs.shape[:2], self.outputs)

    def forward(self, obs: Tensor, legal: Tensor | None = None) -> Tensor:
        return masked(obs[:, :, 0] + self.gamma * self.rows(obs)[:, :, 0], legal)

    def chosen(self, obs: Tensor, action: Tensor) -> Tensor:
        """Return the values (B,) of `action` (B,); obs may contain only the action's row, (B, 1, F)."""
        index = action.view(-1, 1, 1).expand(-1, 1, obs.shape[2])
        row = (obs if obs.shape[1] == 1 else obs.gather(1, index)).squeeze(1)
        value: Tensor = self.row(row)[:, 0]
        return row[:, 0] + self.gamma * value


class Distributional(nn.Module):
    """A return distribution per action; forward gives the expected returns. (B, …) -> (B, A) float32."""

    def __init__(self, spec: Spec, config: NetworkConfig, kind: Kind, dueling: bool = False) -> None:
        super().__init__()
        self.kind, self.dueling = kind, dueling
        self.body = make_body(dataclasses.replace(spec, num_actions=(spec.num_actions + dueling) * kind.atoms), config)

    def outputs(self, obs: Tensor) -> Tensor:
        """Return K numbers per action, interpreted by `kind`: (B, A, K) float32."""
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
    """Policy and value, from one trunk or two networks. obs (B, …), legal (B, A) -> logits (B, A), value (B,), float32.

    The value head predicts returns normalised by running statistics kept here; `forward` returns values in reward units.
    With afterstates every row has a logit and a value, and a state's value is the expectation under its policy.
    """

    mean: Tensor
    variance: Tensor
    updates: Tensor

    def __init__(self, spec: Spec, config: NetworkConfig, gamma: float, separate: bool = False) -> None:
        super().__init__()
        self.num_actions, self.gamma, self.afterstates = spec.num_actions, gamma, spec.afterstates
        wider = dataclasses.replace(spec, num_actions=spec.num_actions + 1)  # one output more, the value
        self.critic: nn.Module | None = None
        if spec.afterstates:
            self.body: nn.Module = Afterstates(spec, config, gamma, outputs=2)
        elif separate and body_kind(spec, config) == "mlp" and config.hidden:
            self.body = TwinBody(spec, config)
        elif separate:
            self.body = make_body(spec, config)
            self.critic = make_body(dataclasses.replace(spec, num_actions=1), config)
        else:
            self.body = make_body(wider, config)
        self.register_buffer("mean", torch.zeros(()))  # of returns
        self.register_buffer("variance", torch.ones(()))
        self.register_buffer("updates", torch.zeros(()))  # calls of include_returns with finite numbers

    @property
    def deviation(self) -> Tensor:
        """Standard deviation of returns, ()."""
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
        action_value = obs[:, :, 0] + self.gamma * (self.mean + self.deviation * value)
        return logits, (logits.detach().softmax(1) * action_value).sum(1)

    def update_return_stats(self, returns: Tensor) -> None:
        """Include `returns` (any shape) in the running mean and variance."""
        self.include_returns(*torch.var_mean(returns, correction=0))

    def include_returns(self, variance: Tensor, mean: Tensor) -> None:
        """Include returns with this variance () and mean () in the running statistics.

        The first hundred calls are weighted equally; later ones form an exponential average over about the last hundred.
        Non-finite returns are ignored: after a rollback, experience from bad weights must not spoil the statistics.
        """
        finite = variance.isfinite()
        self.updates += finite
        weight = torch.where(finite, (1 / self.updates).clamp(min=0.01), 0.0)
        mean, variance = torch.where(finite, mean, self.mean), torch.where(finite, variance, self.variance)
        delta = mean - self.mean
        self.variance.copy_((1 - weight) * self.variance + weight * variance + weight * (1 - weight) * delta * delta)
        self.mean.add_(weight * delta)


ValueNet = Body | Afterstates | Distributional


def build(
    spec: Spec,
    config: NetworkConfig,
    seed: int,
    gamma: float = 1.0,
    dueling: bool = False,
    kind: Kind | None = None,
    sigma: float | None = None,
) -> ValueNet:
    """Return a value network with initial weights drawn from `seed`, the same on any device.

    gamma: discount of afterstate values. kind: learn return distributions of this kind. sigma: make dense layers noisy.
    """
    if spec.afterstates and dueling:
        raise UserError(
            "dueling is on, but with afterstates an action's value is that of the state it leads to. Turn dueling off."
        )
    if spec.afterstates and kind is not None:
        raise UserError(
            "distribution is on, but with afterstates only expected returns are learned. Set distribution to none."
        )
    _check_afterstates(spec, config)
    net: ValueNet
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # (torch.manual_seed would permanently reseed the GPUs too)
        if spec.afterstates:
            net = Afterstates(spec, config, gamma)
        else:
            net = make_body(spec, config, dueling) if kind is None else Distributional(spec, config, kind, dueling)
        init_weights(net, config.init)
    if sigma is not None:
        make_noisy(net, sigma)
    return net


def build_actor_critic(
    spec: Spec, config: NetworkConfig, seed: int, gamma: float = 1.0, separate: bool = False
) -> ActorCritic:
    """Return an actor-critic with initial weights drawn from `seed`, the same on any device."""
    _check_afterstates(spec, config)
    if spec.afterstates and separate:
        raise UserError("separate is on, but with afterstates one network gives logits and values. Turn separate off.")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        net = ActorCritic(spec, config, gamma, separate)
        init_weights(net, config.init)
    return net


def _check_afterstates(spec: Spec, config: NetworkConfig) -> None:
    if not spec.afterstates or config.net in ("auto", "mlp"):
        return
    if spec.afterstate_board is None:
        raise UserError(f"net is {config.net}, but afterstates are rows of features; use mlp or auto.")
    if config.net != "columns":
        raise UserError(f"net is {config.net}, but boards of afterstates are read by columns, mlp or auto only.")
