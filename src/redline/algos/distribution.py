"""Distributions of returns: what an action may bring, not only its mean.

A network gives K numbers an action; a kind says what they mean. B samples, K atoms.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Categorical:
    """Logits of K fixed returns, evenly spaced from low to high (C51, Bellemare et al. 2017)."""

    atoms: int
    low: float
    high: float

    def expected(self, outputs: Tensor) -> Tensor:
        """(…, K) -> (…)."""
        return (outputs.softmax(-1) * _support(self.atoms, self.low, self.high, outputs.device)).sum(-1)

    def mixed(self, outputs: Tensor, policy: Tensor) -> Tensor:
        """What actions drawn by policy (B, A) bring: outputs (B, A, K) -> probabilities (B, K)."""
        return (outputs.softmax(2) * policy.unsqueeze(2)).sum(1)

    def losses(self, outputs: Tensor, following: Tensor, reward: Tensor, discount: Tensor) -> Tensor:
        """Cross entropies (B,) of outputs (B, K) with reward + discount * what follows, a mixture (B, K)."""
        targets = project(following, reward, discount, self.low, self.high)
        return -(targets * outputs.log_softmax(1)).sum(1)


@dataclass(frozen=True)
class Quantile:
    """Quantiles of the return, K of equal share (QR-DQN, Dabney et al. 2018); they need no range of returns."""

    atoms: int
    huber: float = 1.0

    def expected(self, outputs: Tensor) -> Tensor:
        """(…, K) -> (…)."""
        return outputs.mean(-1)

    def mixed(self, outputs: Tensor, policy: Tensor) -> Tensor:
        """Quantile by quantile the mean over actions drawn by policy (B, A): outputs (B, A, K) -> (B, K)."""
        return (outputs * policy.unsqueeze(2)).sum(1)

    def losses(self, outputs: Tensor, following: Tensor, reward: Tensor, discount: Tensor) -> Tensor:
        """Quantile losses (B,) of outputs (B, K) against reward + discount * what follows, a mixture (B, K)."""
        return quantile_huber(outputs, reward.unsqueeze(1) + discount.unsqueeze(1) * following, self.huber)


Kind = Categorical | Quantile


def project(probabilities: Tensor, reward: Tensor, discount: Tensor, low: float, high: float) -> Tensor:
    """Probabilities (B, K) of the returns low to high, of which each becomes reward + discount * return, (B,) both.

    What falls between two of the fixed returns is shared out between them, the nearer gets more; what falls outside goes to
    the end. Every pair of atoms is looked at: K * K products, but no scattered sums, whose order a GPU does not keep.
    """
    atoms = probabilities.shape[1]
    number = torch.arange(atoms, dtype=torch.float32, device=probabilities.device)
    moved = reward.unsqueeze(1) + discount.unsqueeze(1) * _support(atoms, low, high, probabilities.device)
    place = ((moved - low) * ((atoms - 1) / (high - low))).clamp(0, atoms - 1)  # (B, K), in atoms
    overlap = (1 - (place.unsqueeze(2) - number).abs()).clamp(min=0)  # (B, K from, K to)
    return (probabilities.unsqueeze(2) * overlap).sum(1)


def quantile_huber(quantiles: Tensor, targets: Tensor, delta: float) -> Tensor:
    """Losses (B,) of quantiles (B, K) against targets (B, M), each as likely as any other: sum over K, mean over M.

    An error counts by its Huber loss over delta, and by the quantile's share where it is above, by the rest where below.
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
    """The fixed returns (K,)."""
    return low + torch.arange(atoms, dtype=torch.float32, device=device) * ((high - low) / (atoms - 1))
