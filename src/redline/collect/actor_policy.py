"""The behaviour policy with weights of its own: in an actor process, or asked by all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from redline.algos.algorithm import Algorithm
from redline.core.records import PolicyInput
from redline.envs.batch import Rules
from redline.envs.gym_envs import GymState, frame_shape, stacked


def flat_weights(net: torch.nn.Module) -> Tensor:
    """All numbers of a network's state, one behind the other, float32: (W,)."""
    return torch.cat([x.detach().flatten().to(torch.float32) for x in net.state_dict().values()])


class ActorPolicy:
    """Moves some environments at a time."""

    def __init__(
        self, rules: Rules, algo: Algorithm, config: Any, num_envs: int, key: int, device: torch.device | str = "cpu"
    ) -> None:
        """`environments` are those of all players; `key` is the root of the learner's random streams."""
        self.rules, self.algo, self.config, self.num_envs = rules, algo, config, num_envs
        self.spec = spec = rules.game.spec(rules.config)
        self.device = torch.device(device)
        self.net = algo.acting_network(spec, config).to(device).eval().requires_grad_(False)
        self.parts = list(self.net.state_dict().values())
        self.size = sum(part.numel() for part in self.parts)  # numbers in its weights
        self.version = -1  # of them
        self.key = torch.tensor(key, dtype=torch.int32, device=device)
        self.stack = torch.zeros(num_envs, spec.frames, *frame_shape(spec), dtype=spec.obs_dtype, device=device)

    @torch.no_grad()
    def load(self, weights: Tensor, version: int) -> None:
        """Take over `flat_weights` of a network of the same kind."""
        pieces = weights.split([part.numel() for part in self.parts])
        for part, piece in zip(self.parts, pieces, strict=True):
            part.copy_(piece.view_as(part))
        self.version = version

    @torch.inference_mode()
    def move(
        self, obs: Tensor, episode_start: Tensor, env_index: Tensor, draw: int, acted: int, progress: float
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Actions (N,) of environments (N,) int64 that see the frames `obs` (N, …), the first of an episode where it `begins`."""
        state = GymState(obs)
        if self.spec.frames > 1:
            state = GymState(stacked(self.stack.index_select(0, env_index), obs, episode_start))
            self.stack.index_copy_(0, env_index, state.obs)
        seen = self.rules.game.observe(self.rules.config, state)
        numbers = (torch.tensor(x, device=self.device) for x in (draw, acted, progress))
        policy_input = PolicyInput(seen, None, self.key, env_index, self.num_envs, *numbers)
        return self.algo.select_actions(self.config, self.net, policy_input)
