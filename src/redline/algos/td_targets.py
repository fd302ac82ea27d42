"""TD targets and losses of Q-learning from replay: double, Munchausen and distributional.

A batch has B samples; networks map obs (B, …) and legal (B, A) to values (B, A), see redline.algos.networks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from redline.algos.distribution import Kind
from redline.algos.network_config import gather, masked
from redline.core.records import Batch


class Munchausen(NamedTuple):
    """Options of Munchausen DQN (Vieillard et al. 2020)."""

    alpha: float = 0.9  # weight of the scaled log-probability in the reward
    tau: float = 0.03  # temperature of the soft policy
    clip: float = -1.0  # lowest scaled log-probability


def td_targets(
    batch: Batch, online: Any, target: Any, double: bool = True, munchausen: Munchausen | None = None
) -> Tensor:
    """Return the TD targets (B,) for the values of (obs, action).

    double: the online network chooses the next action, the target network evaluates it. Ignored with Munchausen.
    """
    if munchausen is not None:
        values: Tensor = target(batch.next_obs, batch.next_legal)
        policy, reward = munchausen_rewards(munchausen, batch, target(batch.obs), values)
        return reward + bootstrap_discount(batch) * (policy * values).sum(1)
    chooser = online if double else target
    values = chooser(batch.next_obs, batch.next_legal)
    best = values.argmax(1)
    next_value = target.chosen(batch.next_obs, best) if double else gather(values, best)
    return batch.reward + bootstrap_discount(batch) * next_value


def distributional_losses(
    batch: Batch, online: Any, target: Any, double: bool = True, munchausen: Munchausen | None = None
) -> tuple[Tensor, Tensor]:
    """Return the expected values of (obs, action) and the losses of their return distributions, both (B,)."""
    kind: Kind = online.kind
    taken = batch.action.view(-1, 1, 1).expand(-1, 1, kind.atoms)
    outputs = online.outputs(batch.obs).gather(1, taken).squeeze(1)
    with torch.no_grad():
        next_outputs = target.outputs(batch.next_obs)
        values = masked(kind.expected(next_outputs), batch.next_legal)
        reward = batch.reward
        if munchausen is not None:
            policy, reward = munchausen_rewards(munchausen, batch, target(batch.obs), values)
        else:
            best = (online(batch.next_obs, batch.next_legal) if double else values).argmax(1)
            policy = F.one_hot(best, values.shape[1])
        mixture = kind.mixed(next_outputs, policy)
    return kind.expected(outputs), kind.losses(outputs, mixture, reward, bootstrap_discount(batch))


def bootstrap_discount(batch: Batch) -> Tensor:
    """Return the discounts (B,), set to 0 where the next state has no legal action."""
    return batch.discount if batch.next_legal is None else torch.where(batch.next_legal.any(1), batch.discount, 0.0)


def munchausen_rewards(options: Munchausen, batch: Batch, values: Tensor, next_values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the soft policy in next_obs (B, A) and the augmented rewards (B,).

    values, next_values: of the target network in obs and next_obs, (B, A). The reward gains alpha times the clipped, scaled
    log-probability of the action taken and, where the episode continues, the discounted, scaled entropy of the next policy.
    Over n steps only the first action's log-probability is added: replay returns the rewards in between, not the states.
    """
    tau = options.tau
    log_prob = tau * gather((values / tau).log_softmax(1), batch.action)
    log_policy = (next_values / tau).log_softmax(1)
    policy = log_policy.exp()
    entropy = -(policy * log_policy).sum(1)
    reward = batch.reward + options.alpha * log_prob.clamp(min=options.clip)
    return policy, reward + bootstrap_discount(batch) * tau * entropy
