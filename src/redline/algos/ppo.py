"""PPO: clipped policy gradients on fresh rollouts.

Follows Schulman et al. 2017 with generalised advantage estimation, advantages normalised per batch and returns normalised by
running statistics. Left out: clipping of the value loss (it did not help in Andrychowicz et al. 2021), reward clipping (rewards
are options of the game) and recurrent networks (observations hide at most a few ticks). With a target KL, the remaining
gradient steps of an update are computed but not applied: a captured iteration has a fixed length.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from redline.algos import networks, on_policy
from redline.algos.metrics import batch_mean
from redline.algos.network_config import gather, share_buffers
from redline.algos.on_policy import OnPolicyConfig, OnPolicyLearner, part_count
from redline.algos.on_policy import fill_defaults as fill_defaults
from redline.algos.on_policy import memory_bytes as memory_bytes
from redline.algos.on_policy import samples_per_step as samples_per_step
from redline.algos.optimizer import flatten, linear
from redline.algos.returns import gae
from redline.core import random
from redline.core.records import PolicyInput, Spec
from redline.engine.runtime import Runtime
from redline.envs.batch import Rules, legal


@dataclass(frozen=True)
class Config(OnPolicyConfig):
    """Options of PPO."""

    gae_lambda: float = 0.95  # 0: one-step advantages; 1: Monte Carlo advantages
    clip_range: float = 0.2  # largest relative change of a probability that is rewarded
    value_coef: float = 0.5  # weight of the value loss
    entropy_coef: float = 0.01  # weight of the entropy bonus at the start of training
    entropy_end: float = 0.001  # weight of the entropy bonus at the end of training
    target_kl: float = 0.0  # stop an update when the policy has moved farther than this; 0: no limit
    ema_decay: float = 0.0  # decay of an average of the weights, which is the greedy policy; 0: no average
    separate: bool = False  # separate networks for policy and value

    def __post_init__(self) -> None:
        super().__post_init__()
        self.expect(("gae_lambda",), "a number from 0 to 1", lambda x: 0 <= x <= 1)
        self.expect(("ema_decay",), "a number from 0 to below 1", lambda x: 0 <= x < 1)
        self.expect(("clip_range",), "a number above 0", lambda x: x > 0)
        self.expect(("value_coef", "entropy_coef", "entropy_end", "target_kl"), "0 or more", lambda x: x >= 0)


RESUME_FIXED = (*on_policy.RESUME_FIXED, "separate", "ema_decay")
STOCHASTIC = True  # actions are sampled from logits
POLICY_OUTPUTS = ("value", "logp")  # the state's value, the action's log-probability
_EMA = "ema."  # prefix of the averaged weights in a checkpoint


def normalize(advantages: Tensor, batch: Tensor | None = None) -> Tensor:
    """Return advantages (B,) normalised by the mean and standard deviation of `batch` (default: their own).

    Advantages that are equal except for rounding become 0.
    """
    return standardize(advantages, *torch.std_mean(advantages if batch is None else batch, correction=0))


def standardize(advantages: Tensor, deviation: Tensor, mean: Tensor) -> Tensor:
    """Return advantages normalised by this mean and deviation; 0 if they are equal except for rounding."""
    return (advantages - mean) / (deviation + 1e-5 * (1 + mean.abs()))


def policy_loss(logp: Tensor, old_logp: Tensor, advantages: Tensor, clip_range: float) -> Tensor:
    """Return the clipped surrogate loss () of logp, old_logp and advantages, (B,) each."""
    ratio = (logp - old_logp).exp()
    return -batch_mean(torch.minimum(ratio * advantages, ratio.clamp(1 - clip_range, 1 + clip_range) * advantages))


@torch.no_grad()
def select_actions(config: Config, net: nn.Module, policy_input: PolicyInput) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return actions (N,) int64 sampled from the policy, and POLICY_OUTPUTS, (N,) float32 each."""
    del config
    logits, value = net(policy_input.obs, policy_input.legal)
    actions = logits.shape[1]
    number = policy_input.env_index.unsqueeze(1) * actions + torch.arange(actions, device=logits.device)
    noise = random.gumbel(random.bits(random.fold(policy_input.key, 2 * policy_input.draw), number))
    action: Tensor = (logits + noise).argmax(1)
    return action, (value, gather(logits.log_softmax(1), action))


def acting_network(spec: Spec, config: Config) -> networks.ActorCritic:
    """Return a network for `select_actions`."""
    return networks.build_actor_critic(spec, config, 0, config.gamma, config.separate)


class Learner(OnPolicyLearner):
    """Actor-critic trained with the clipped surrogate."""

    config: Config
    net: networks.ActorCritic
    metrics = ("loss", "policy_loss", "value_loss", "entropy", "clip_fraction", "approx_kl")

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
        config, _ = on_policy.fill_batch_size(config, num_envs)
        spec = rules.game.spec(rules.config)
        net = networks.build_actor_critic(spec, config, seed, config.gamma, config.separate).to(runtime.device)
        super().__init__(rules, config, state, num_envs, seed, runtime, accumulate, net, POLICY_OUTPUTS)
        self.advantages = torch.zeros(self.rollout.size, device=runtime.device)
        # With several ranks: advantages, normalised over each sample's batch across all ranks in this epoch.
        self.normalized = torch.zeros_like(self.advantages) if self.several_ranks else None
        self.update_kl = torch.zeros((), device=runtime.device)  # () float32: largest KL divergence in this update
        self.ema_network = copy.deepcopy(self.net).requires_grad_(False) if config.ema_decay else None
        if self.ema_network is not None and config.batch_norm:
            share_buffers(self.ema_network, self.net)
        self.ema_weights = flatten(self.ema_network) if self.ema_network is not None else None

    def policy(self, obs: Tensor, legal: Tensor | None = None) -> Tensor:
        """Return the most likely actions (N,) int64."""
        net = self.net if self.ema_network is None else self.ema_network
        with torch.no_grad(), self.runtime.autocast():
            logits: Tensor = net(obs, legal)[0]
        return logits.argmax(1)

    def select_actions(self, policy_input: PolicyInput) -> tuple[Tensor, tuple[Tensor, ...]]:
        with self.runtime.autocast():
            return select_actions(self.config, self.behaviour_network, policy_input)

    @torch.no_grad()
    def state_values(self, state: Any) -> Tensor:
        obs, allowed = self.rules.game.observe(self.rules.config, state), legal(self.rules, state)
        with self.runtime.autocast():
            value: Tensor = self.behaviour_network(obs, allowed)[1]
        return value

    @torch.no_grad()
    def compute_targets(self) -> None:
        """Compute advantages and returns of the rollout; update return statistics and learning rate."""
        advantages = gae(*self.rollout_returns(), self.discount(), self.config.gae_lambda).flatten()
        returns = advantages + self.rollout.outputs["value"]
        self.advantages.copy_(advantages)
        self.targets.copy_(returns)
        if not self.several_ranks:
            self.net.update_return_stats(returns)
        self.update_kl.zero_()
        self.update_learning_rate()

    @torch.no_grad()
    def share_targets(self) -> None:
        """Update the return statistics with the returns of all ranks."""
        self.net.include_returns(*self.ranks.var_mean(self.targets))

    @torch.no_grad()
    def share_batches(self) -> None:
        """Normalise advantages over each batch across all ranks, with one exchange for all batches of an epoch."""
        assert self.normalized is not None
        advantages = self.advantages[self.order].view(-1, self.samples_per_update)
        variance, mean = self.ranks.var_mean(advantages)
        normalized = standardize(advantages, variance.sqrt().unsqueeze(1), mean.unsqueeze(1))
        self.normalized.index_copy_(0, self.order, normalized.flatten())

    def loss(self, index: Tensor, batch: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the loss and the metrics; advantages are normalised over the whole batch."""
        config, rollout, parts = self.config, self.rollout, part_count(index, batch)
        with self.runtime.autocast():
            legal = None if rollout.legal is None else rollout.legal[index]
            logits, value = self.net(rollout.observations(index), legal)
        log_probs = logits.log_softmax(1)
        entropy = -batch_mean((log_probs.exp() * log_probs).sum(1))  # an illegal action has probability 0
        logp, old_logp = gather(log_probs, rollout.action[index]), rollout.outputs["logp"][index]
        if self.normalized is not None:
            advantages = self.normalized[index]
        else:
            advantages = normalize(self.advantages[index], None if batch is None else self.advantages[batch])
        surrogate = policy_loss(logp, old_logp, advantages, config.clip_range)
        value_loss = 0.5 * batch_mean(((value - self.targets[index]) / self.net.deviation).square())
        entropy_coef = linear(config.entropy_coef, config.entropy_end, self.progress)
        loss = (surrogate + config.value_coef * value_loss - entropy_coef * entropy) / parts
        with torch.no_grad():
            log_ratio = logp - old_logp
            ratio = log_ratio.exp()
            clip_fraction = batch_mean(((ratio - 1).abs() > config.clip_range).to(torch.float32))
            approx_kl = batch_mean(ratio - 1 - log_ratio)
            metrics = torch.stack([surrogate, value_loss, entropy, clip_fraction, approx_kl]) / parts
        return loss, torch.cat([loss.detach().unsqueeze(0), metrics])

    def record_metrics(self, metrics: Tensor) -> None:
        super().record_metrics(metrics)
        if self.config.target_kl:
            self.update_kl.copy_(torch.maximum(self.update_kl, metrics[self.metrics.index("approx_kl")]))

    @torch.no_grad()
    def apply(self, gradients: tuple[Tensor, ...]) -> None:
        """Take a gradient step unless the policy has moved beyond target_kl; then update the average of the weights."""
        allowed = self.update_kl <= self.config.target_kl if self.config.target_kl else None
        self.optimizer.step(gradients, allowed)
        if self.ema_weights is not None:
            self.ema_weights.lerp_(self.optimizer.flat, 1.0 - self.config.ema_decay)

    def model(self) -> dict[str, Tensor]:
        averages = {} if self.ema_network is None else self.ema_network.state_dict()
        return dict(self.net.state_dict()) | {_EMA + name: weights for name, weights in averages.items()}


class Policy(nn.Module):
    """The policy of an actor-critic: forward(obs (N, …), legal=None) -> logits (N, A)."""

    def __init__(self, net: networks.ActorCritic) -> None:
        super().__init__()
        self.net = net

    def forward(self, obs: Tensor, legal: Tensor | None = None) -> Tensor:
        return self.with_value(obs, legal)[0]

    def with_value(self, obs: Tensor, legal: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return logits (N, A) and the critic's values (N,) in units of reward."""
        logits, value = self.net(obs, legal)
        return logits, value


def policy_network(spec: Spec, config: Config, model: dict[str, Tensor]) -> nn.Module:
    """Return the policy of a checkpoint's model group: forward(obs (N, …), legal=None) -> logits (N, A)."""
    net = acting_network(spec, config)
    averages = {k.removeprefix(_EMA): v for k, v in model.items() if k.startswith(_EMA)}
    net.load_state_dict(averages or model)
    return Policy(net).eval()
