"""A2C: synchronous advantage actor-critic, an algorithm outside the package.

Follows Mnih et al. 2016 with one gradient step per rollout. Left out: asynchronous workers (all environments step together)
and RMSProp (the package's optimizer is Adam with gradient clipping). Train it from this folder:

    redline train snake --algo a2c --minutes 1 --a2c.rollout_steps 8
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from redline.algos import learner, networks
from redline.algos.metrics import read_means
from redline.algos.network_config import NETWORK_RESUME_FIXED, NetworkConfig, gather
from redline.algos.optimizer import Optimizer
from redline.algos.returns import gae
from redline.algos.rollout import RolloutBuffer
from redline.core import random
from redline.core.errors import UserError
from redline.core.records import PolicyInput, Spec, Transition
from redline.engine.runtime import Runtime
from redline.envs.batch import Rules, legal

POLICY_OUTPUTS = ("value",)  # select_actions also returns the state's value
STOCHASTIC = True  # policy_network returns logits
RESUME_FIXED = (*NETWORK_RESUME_FIXED, "rollout_steps", "gamma")


@dataclass(frozen=True)
class Config(NetworkConfig):
    """Options of A2C."""

    rollout_steps: int = 8  # steps of every environment between two gradient steps
    batch_size: int = 0  # samples per gradient step; always the whole rollout
    learning_rate: float = 1e-3  # of Adam
    gamma: float = 0.99  # discount
    gae_lambda: float = 1.0  # 1: n-step advantages, as in the paper
    value_coef: float = 0.5  # weight of the value loss
    entropy_coef: float = 0.01  # weight of the entropy bonus
    max_grad_norm: float = 0.5  # gradients are clipped to this norm

    def __post_init__(self) -> None:
        super().__post_init__()
        self.expect(("rollout_steps",), "at least 1", lambda x: x >= 1)
        self.expect(("gamma", "gae_lambda"), "a number from 0 to 1", lambda x: 0 <= x <= 1)
        self.expect(("learning_rate", "max_grad_norm"), "a number above 0", lambda x: x > 0)


def fill_defaults(config: Config, num_envs: int, requested: Collection[str]) -> tuple[Config, dict[str, str]]:
    """Return the config with the whole rollout as its batch size, and the reason."""
    if "batch_size" in requested:
        raise UserError("a2c.batch_size is set, but A2C trains on whole rollouts; set a2c.rollout_steps instead.")
    return replace(config, batch_size=num_envs * config.rollout_steps), {"batch_size": "the whole rollout"}


@torch.no_grad()
def select_actions(config: Config, net: nn.Module, policy_input: PolicyInput) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Draw actions (N,) int64 from the policy; return them and the values (N,) float32."""
    del config
    logits, value = net(policy_input.obs, policy_input.legal)
    actions = logits.shape[1]
    number = policy_input.env_index.unsqueeze(1) * actions + torch.arange(actions, device=logits.device)
    noise = random.gumbel(random.bits(random.fold(policy_input.key, policy_input.draw), number))
    return (logits + noise).argmax(1), (value,)


def acting_network(spec: Spec, config: Config) -> networks.ActorCritic:
    """Return a network for `select_actions`."""
    return networks.build_actor_critic(spec, config, 0, config.gamma)


class Learner(learner.Learner):
    """Takes one gradient step per rollout, on the policy gradient, the value loss and the entropy."""

    config: Config
    metrics = ("loss", "entropy")
    needs_frame_stack = True  # bootstrapping needs observations of final states
    updates_per_iteration = 1

    def __init__(
        self,
        rules: Rules,
        config: Config,
        state: Any,
        num_envs: int,
        seed: int,
        runtime: Runtime,
        accumulate: int = 1,
    ) -> None:
        if accumulate > 1:
            raise UserError(f"accumulate is {accumulate}, but A2C takes one gradient step per rollout; remove it.")
        super().__init__(rules, config, state, num_envs, seed, runtime, accumulate)
        device = runtime.device
        self.rollout_steps = config.rollout_steps
        self.samples_per_update = num_envs * config.rollout_steps
        self.net = networks.build_actor_critic(self.spec, config, seed, config.gamma).to(device)
        self.optimizer = Optimizer(self.net, config.learning_rate, config.max_grad_norm, runtime)
        self.rollout = RolloutBuffer(rules, state, num_envs, config.rollout_steps, POLICY_OUTPUTS, device)
        self.metric_sums = {name: torch.zeros((), device=device) for name in self.metrics}
        self._loss, self._step = runtime.compile(self.loss), runtime.compile(torch.no_grad()(self.optimizer.step))

    @property
    def acting_network(self) -> nn.Module:
        return self.net

    def select_actions(self, policy_input: PolicyInput) -> tuple[Tensor, tuple[Tensor, ...]]:
        with self.runtime.autocast():
            return select_actions(self.config, self.net, policy_input)

    def record_actions(self, obs: Tensor, legal: Tensor | None, action: Tensor, outputs: tuple[Tensor, ...]) -> None:
        self.rollout.write_actions(obs, legal, action, outputs)
        self.acted += 1

    def policy(self, obs: Tensor, legal: Tensor | None = None) -> Tensor:
        with torch.no_grad(), self.runtime.autocast():
            logits: Tensor = self.net(obs, legal)[0]
        return logits.argmax(1)

    def ingest(self, transition: Transition) -> None:
        self.rollout.write_step(transition.step)

    def loss(self) -> tuple[Tensor, Tensor]:
        """Return the loss () and the entropy () of the rollout."""
        config, rollout = self.config, self.rollout
        with torch.no_grad():
            states = rollout.bootstrap_states
            obs = self.rules.game.observe(self.rules.config, states)
            with self.runtime.autocast():
                state_values = self.net(obs, legal(self.rules, states))[1]
            old_value = rollout.outputs["value"]
            reward, bootstrap_value = rollout.bootstrapped_rewards(state_values, config.gamma, old_value)
            value, done = rollout.steps(old_value), rollout.steps(rollout.done)
            advantages = gae(reward, value, bootstrap_value, done, config.gamma, config.gae_lambda).flatten()
            returns = advantages + old_value
            self.net.update_return_stats(returns)
        with self.runtime.autocast():
            logits, new_value = self.net(rollout.obs, rollout.legal)
        log_probs = logits.log_softmax(1)
        entropy = -(log_probs.exp() * log_probs).sum(1).mean()
        policy_loss = -(gather(log_probs, rollout.action) * advantages / self.net.deviation).mean()
        value_loss = 0.5 * ((new_value - returns) / self.net.deviation).square().mean()
        loss = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy
        return loss, entropy.detach()

    def update(self) -> None:
        loss, entropy = self._loss()
        self._step(self.optimizer.gradient(loss))
        self.metric_sums["loss"] += loss.detach()
        self.metric_sums["entropy"] += entropy

    def read_metrics(self, updates: int) -> dict[str, float]:
        return read_means(self.metric_sums, updates) | self.optimizer.read_metrics(updates)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        counters = {"key": self.key, "acted": self.acted}
        return {"model": dict(self.net.state_dict()), "optim": self.optimizer.tensors(), "rng": counters}


class Policy(nn.Module):
    """The policy alone: forward(obs (N, …), legal=None) -> logits (N, A)."""

    def __init__(self, net: networks.ActorCritic) -> None:
        super().__init__()
        self.net = net

    def forward(self, obs: Tensor, legal: Tensor | None = None) -> Tensor:
        logits: Tensor = self.net(obs, legal)[0]
        return logits


def policy_network(spec: Spec, config: Config, model: dict[str, Tensor]) -> nn.Module:
    """Return the policy with the weights `model` of a checkpoint."""
    net = acting_network(spec, config)
    net.load_state_dict(model)
    return Policy(net).eval()
