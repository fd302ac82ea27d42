"""Returns and advantages of a rollout: generalised advantage estimation and Q(lambda).

A rollout has T steps of N environments. `done` marks the last step of an episode, terminated or truncated. The reward of a
truncated step must already include the discounted value of the state it led to, see RolloutBuffer.bootstrapped_rewards.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gae(
    reward: Tensor, value: Tensor, bootstrap_value: Tensor, done: Tensor, gamma: float | Tensor, gae_lambda: float
) -> Tensor:
    """Return generalised advantage estimates (T, N) (Schulman et al. 2016).

    reward, value, done: (T, N). bootstrap_value: (N,), value of the state after the last step.
    """
    advantages = []
    advantage, next_value = torch.zeros_like(bootstrap_value), bootstrap_value
    for t in range(reward.shape[0] - 1, -1, -1):
        following = torch.where(done[t], 0.0, gamma * (next_value + gae_lambda * advantage))
        advantage = reward[t] + following - value[t]
        advantages.append(advantage)
        next_value = value[t]
    return torch.stack(advantages[::-1])


def q_lambda_returns(
    reward: Tensor, value: Tensor, bootstrap_value: Tensor, done: Tensor, gamma: float | Tensor, q_lambda: float
) -> Tensor:
    """Return Peng's Q(lambda) returns (T, N).

    reward, value, done: (T, N), value being that of each state's best action. bootstrap_value: (N,), as in `gae`.
    """
    returns = []
    running = next_value = bootstrap_value
    for t in range(reward.shape[0] - 1, -1, -1):
        following = q_lambda * running + (1 - q_lambda) * next_value
        running = reward[t] + torch.where(done[t], 0.0, gamma * following)
        returns.append(running)
        next_value = value[t]
    return torch.stack(returns[::-1])
