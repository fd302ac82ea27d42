"""Policies for evaluation, greedy or sampled, and the seeds of held-out games."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from redline.core import random
from redline.run.settings import MAX_SEED as MAX_SEED

HELD_OUT = 0x4E1D_0000_0000  # above all training seeds: evaluation never plays a training game

# Observations (N, …) and legal actions (N, A) bool, None where all actions are legal -> actions (N,) int64.
Policy = Callable[[Tensor, Tensor | None], Tensor]


def greedy(net: nn.Module, device: torch.device) -> Policy:
    """Return the policy that takes the action with the largest output; observations on any device, actions on `device`."""

    @torch.no_grad()
    def policy(obs: Tensor, legal: Tensor | None = None) -> Tensor:
        return outputs(net, device, obs, legal).argmax(1)

    return policy


def sampled(net: nn.Module, device: torch.device, seed: int) -> Policy:
    """Return the policy that samples actions from the logits of `net`."""
    key, count = random.seed_key(seed, device), torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def policy(obs: Tensor, legal: Tensor | None = None) -> Tensor:
        logits = outputs(net, device, obs, legal)
        number = torch.arange(logits.numel(), device=device).view_as(logits)
        noise = random.gumbel(random.bits(random.fold(key, count), number))
        count.add_(1)
        return (logits + noise).argmax(1)

    return policy


def outputs(net: nn.Module, device: torch.device, obs: Tensor, legal: Tensor | None) -> Tensor:
    """Return the outputs of the network, (N, A)."""
    outputs: Tensor = net(obs.to(device)) if legal is None else net(obs.to(device), legal.to(device))
    return outputs
