"""Returns and advantages of a rollout: generalised advantage estimation and Q(lambda).

A rollout has T steps of N environments. `done` marks the last step of an episode, terminated or truncated. The reward of a
truncated step must already include the discounted value of the state it led to, see RolloutBuffer.bootstrapped_rewards.

On a GPU, the loop over the steps compiles to one kernel. On a CPU, compiling 32 steps takes longer than compiling the network,
so the loop is a torch operator written in NumPy, with the same operations in the same order.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor


def gae(
    reward: Tensor, value: Tensor, bootstrap_value: Tensor, done: Tensor, gamma: float | Tensor, gae_lambda: float
) -> Tensor:
    """Return generalised advantage estimates (T, N) (Schulman et al. 2016).

    reward, value, done: (T, N). bootstrap_value: (N,), value of the state after the last step.
    """
    function = _gae_operator if reward.device.type == "cpu" else _gae
    return function(reward, value, bootstrap_value, done, gamma, gae_lambda)


def q_lambda_returns(
    reward: Tensor, value: Tensor, bootstrap_value: Tensor, done: Tensor, gamma: float | Tensor, q_lambda: float
) -> Tensor:
    """Return Peng's Q(lambda) returns (T, N).

    reward, value, done: (T, N), with the value of each state's best action. bootstrap_value: (N,), as in `gae`.
    """
    function = _q_lambda_operator if reward.device.type == "cpu" else _q_lambda
    return function(reward, value, bootstrap_value, done, gamma, q_lambda)


def _gae(
    reward: Tensor, value: Tensor, bootstrap_value: Tensor, done: Tensor, gamma: float | Tensor, decay: float
) -> Tensor:
    """Compute `gae` with tensor operations."""
    advantages = []
    advantage, next_value = torch.zeros_like(bootstrap_value), bootstrap_value
    for t in range(reward.shape[0] - 1, -1, -1):
        following = torch.where(done[t], 0.0, gamma * (next_value + decay * advantage))
        advantage = reward[t] + following - value[t]
        advantages.append(advantage)
        next_value = value[t]
    return torch.stack(advantages[::-1])


def _q_lambda(
    reward: Tensor, value: Tensor, bootstrap_value: Tensor, done: Tensor, gamma: float | Tensor, decay: float
) -> Tensor:
    """Compute `q_lambda_returns` with tensor operations."""
    returns = []
    running = next_value = bootstrap_value
    for t in range(reward.shape[0] - 1, -1, -1):
        following = decay * running + (1 - decay) * next_value
        running = reward[t] + torch.where(done[t], 0.0, gamma * following)
        returns.append(running)
        next_value = value[t]
    return torch.stack(returns[::-1])


def _gae_on_cpu(
    reward: Tensor, value: Tensor, bootstrap_value: Tensor, done: Tensor, gamma: float | Tensor, decay: float
) -> Tensor:
    rewards, values, next_value, ends = _arrays(reward, value, bootstrap_value, done)
    advantages, advantage, gamma = np.empty_like(rewards), np.zeros_like(next_value), float(gamma)
    for t in range(len(rewards) - 1, -1, -1):
        following = advantage * decay
        following += next_value
        following *= gamma
        np.copyto(following, 0.0, where=ends[t])
        advantage = np.add(rewards[t], following, out=advantages[t])
        advantage -= values[t]
        next_value = values[t]
    return torch.from_numpy(advantages)


def _q_lambda_on_cpu(
    reward: Tensor, value: Tensor, bootstrap_value: Tensor, done: Tensor, gamma: float | Tensor, decay: float
) -> Tensor:
    rewards, values, next_value, ends = _arrays(reward, value, bootstrap_value, done)
    returns, running, gamma = np.empty_like(rewards), next_value, float(gamma)
    for t in range(len(rewards) - 1, -1, -1):
        following = running * decay
        following += next_value * (1 - decay)
        following *= gamma
        np.copyto(following, 0.0, where=ends[t])
        running = np.add(rewards[t], following, out=returns[t])
        next_value = values[t]
    return torch.from_numpy(returns)


def _arrays(*tensors: Tensor) -> list[np.ndarray]:
    return [x.detach().numpy() for x in tensors]


_library = torch.library.Library("redline", "FRAGMENT")


def _operator(name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function registered as a torch operator, which the compiler calls without tracing into it."""
    _library.define(
        f"{name}(Tensor reward, Tensor value, Tensor bootstrap_value, Tensor done, Tensor gamma, float decay) -> Tensor"
    )
    _library.impl(name, function, "CPU")
    torch.library.register_fake(f"redline::{name}", lambda reward, *_: torch.empty_like(reward), lib=_library)
    operator: Callable[..., Tensor] = getattr(torch.ops.redline, name).default

    def call(
        reward: Tensor, value: Tensor, bootstrap_value: Tensor, done: Tensor, gamma: float | Tensor, decay: float
    ) -> Tensor:
        gamma = gamma if isinstance(gamma, Tensor) else torch.full((), gamma)
        return operator(reward, value, bootstrap_value, done, gamma, decay)

    return call


_gae_operator, _q_lambda_operator = _operator("gae", _gae_on_cpu), _operator("q_lambda", _q_lambda_on_cpu)
