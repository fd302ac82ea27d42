"""Compute the size of a network from its options, to refuse one that cannot fit before any memory is allocated."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch

from redline.core.errors import UserError
from redline.core.records import Spec
from redline.engine import hardware
from redline.run.plan import Plan

_SMALL = 256 << 20  # bytes: smaller networks are not measured, which takes seconds the first time
_COPIES = 4  # in training, at least: weights, gradients, and two moments of Adam


def network_bytes(algo: Any, spec: Spec, config: Any) -> int:
    """Return the bytes of an algorithm's network; 0 if it is certainly small, or of an unknown kind."""
    if _at_most(spec, config) < _SMALL:
        return 0
    try:
        with torch.device("meta"):  # shapes without memory
            net = algo.acting_network(spec, config)
    except Exception:  # an external algorithm may need real tensors
        return 0
    return sum(tensor.nbytes for tensor in (*net.parameters(), *net.buffers()))


def check_network(plan: Plan) -> None:
    """Raise UserError if training the weights alone needs more memory than is free on the host or than the GPU has."""
    needed = _COPIES * network_bytes(plan.algo, plan.rules.game.spec(plan.rules.config), plan.algo_config)
    on_gpu = plan.device.type == "cuda"
    available = int(plan.hardware.memory_gb * 2**30) if on_gpu else hardware.free_bytes(plan.device)
    if needed > available:
        raise UserError(
            f"The weights of this network need about {needed / 1e9:,.1f} GB on {plan.device} in training, where "
            f"{available / 1e9:,.1f} GB are {'there' if on_gpu else 'free'}; choose smaller layers "
            f"({plan.algo.group}.hidden, {plan.algo.group}.channels)."
        )


def _at_most(spec: Spec, config: Any) -> int:
    """Return an upper bound for the bytes of all weights, from the widths of the layers."""
    hidden, channels = getattr(config, "hidden", ()), getattr(config, "channels", (1,))
    outputs = (spec.num_actions + 1) * getattr(config, "atoms", 1)
    widths = (math.prod(spec.obs_shape) * max(channels), *hidden, outputs)
    dense = sum(a * b for a, b in pairwise(widths)) + math.prod(spec.obs_shape) * max(channels) * max(hidden, default=1)
    convolutions = 64 * sum(a * b for a, b in pairwise((max(spec.obs_shape), *channels)))  # 8x8 of pixels, resnets
    return int(8 * (dense + convolutions))  # float32; two networks where actor and critic share nothing
