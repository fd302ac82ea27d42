"""Return distributions: categorical (C51) and quantile (QR-DQN).

A network outputs K numbers per action, which a kind interprets. B samples, A actions, K atoms.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Categorical:
    """Logits of K support points, evenly spaced from low to high (C51, Bellemare et al. 2017)."""

    atoms: int
    low: float
    high: float

    def expected(self, outputs: Tensor) -> Tensor:
        """Return expected returns: (…, K) -> (…)."""
        return (outputs.softmax(-1) * _support(self.atoms, self.low, self.high, outputs.device)).sum(-1)

    def mixed(self, outputs: Tensor, policy: Tensor) -> Tensor:
        """Return the distribution under policy (B, A): outputs (B, A, K) -> probabilities (B, K)."""
        return (outputs.softmax(2) * policy.unsqueeze(2)).sum(1)

    def losses(self, outputs: Tensor, following: Tensor, reward: Tensor, discount: Tensor) -> Tensor:
        """Return the cross entropies (B,) of outputs (B, K) with reward + discount * following, a mixture (B, K)."""
        targets = project(following, reward, discount, self.low, self.high)
        return -(targets * outputs.log_softmax(1)).sum(1)


@dataclass(frozen=True)
class Quantile:
    """K equally likely quantiles of the return (QR-DQN, Dabney et al. 2018), without a fixed range."""

    atoms: int
    huber: float = 1.0

    def expected(self, outputs: Tensor) -> Tensor:
        """Return expected returns: (…, K) -> (…)."""
        return outputs.mean(-1)

    def mixed(self, outputs: Tensor, policy: Tensor) -> Tensor:
        """Return the mean of each quantile under policy (B, A): outputs (B, A, K) -> (B, K)."""
        return (outputs * policy.unsqueeze(2)).sum(1)

    def losses(self, outputs: Tensor, following: Tensor, reward: Tensor, discount: Tensor) -> Tensor:
        """Return the quantile losses (B,) of outputs (B, K) against reward + discount * following, a mixture (B, K)."""
        return quantile_huber(outputs, reward.unsqueeze(1) + discount.unsqueeze(1) * following, self.huber)


Kind = Categorical | Quantile


def project(probabilities: Tensor, reward: Tensor, discount: Tensor, low: float, high: float) -> Tensor:
    """Return probabilities (B, K) after moving each support point to reward + discount * point; reward, discount (B,).

    Mass between two support points is split between them in proportion to proximity; mass outside goes to the nearest end.
    All K * K pairs are multiplied: on a GPU, scattered sums would depend on the order of the threads.
    """
    atoms = probabilities.shape[1]
    number = torch.arange(atoms, dtype=torch.float32, device=probabilities.device)
    moved = reward.unsqueeze(1) + discount.unsqueeze(1) * _support(atoms, low, high, probabilities.device)
    place = ((moved - low) * ((atoms - 1) / (high - low))).clamp(0, atoms - 1)  # (B, K), in atoms
    overlap = (1 - (place.unsqueeze(2) - number).abs()).clamp(min=0)  # (B, K from, K to)
    return (probabilities.unsqueeze(2) * overlap).sum(1)


def quantile_huber(quantiles: Tensor, targets: Tensor, delta: float) -> Tensor:
    """Return the losses (B,) of quantiles (B, K) against equally likely targets (B, M): sum over K, mean over M.

    The Huber loss of an error, divided by delta, is weighted by the quantile's level if the target lies above, else by
    1 - level.
    """
    atoms = quantiles.shape[1]
    level = (torch.arange(atoms, dtype=torch.float32, device=quantiles.device) + 0.5) / atoms
    error = targets.unsqueeze(1) - quantiles.unsqueeze(2)  # (B, K, M)
    size = error.abs()
    near = size.clamp(max=delta)
    huber = near * (size - 0.5 * near) / delta
    weight = (level.unsqueeze(1) - (error < 0).to(torch.float32)).abs()
    return (weight * huber).mean(2).sum(1)


def _support(atoms: int, low: float, high: float, device: torch.device) -> Tensor:
    """Return the support points (K,)."""
    return low + torch.arange(atoms, dtype=torch.float32, device=device) * ((high - low) / (atoms - 1))
