"""ActorPolicy: the behaviour policy with its own copy of the weights, in an actor process or in the inference server."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from redline.algos.algorithm import Algorithm
from redline.core.records import PolicyInput
from redline.envs.batch import Rules
from redline.envs.gym_game import GymState, frame_shape, stacked


def flat_weights(network: torch.nn.Module) -> Tensor:
    """Return a network's state dict as one float32 vector (W,)."""
    return torch.cat([x.detach().flatten().to(torch.float32) for x in network.state_dict().values()])


class ActorPolicy:
    """Chooses actions for any subset of the environments and keeps their frame stacks."""

    def __init__(
        self, rules: Rules, algo: Algorithm, config: Any, num_envs: int, key: int, device: torch.device | str = "cpu"
    ) -> None:
        """`num_envs` counts the environments of all actors; `key` is the root of the learner's random streams."""
        self.rules, self.algo, self.config, self.num_envs = rules, algo, config, num_envs
        self.spec = spec = rules.game.spec(rules.config)
        self.device = torch.device(device)
        self.network = algo.acting_network(spec, config).to(device).eval().requires_grad_(False)
        self.parts = list(self.network.state_dict().values())
        self.size = sum(part.numel() for part in self.parts)  # length of `flat_weights`
        self.version = -1  # of the loaded weights
        self.key = torch.tensor(key, dtype=torch.int32, device=device)
        self.stack = torch.zeros(num_envs, spec.frames, *frame_shape(spec), dtype=spec.obs_dtype, device=device)

    @torch.no_grad()
    def load(self, weights: Tensor, version: int) -> None:
        """Load `flat_weights` (W,) of a network with the same architecture."""
        pieces = weights.split([part.numel() for part in self.parts])
        for part, piece in zip(self.parts, pieces, strict=True):
            part.copy_(piece.view_as(part))
        self.version = version

    @torch.inference_mode()
    def act(
        self, obs: Tensor, episode_start: Tensor, env_index: Tensor, draw: int, acted: int, progress: float
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return actions (K,) int64 and the policy's outputs, (K,) each, for environments `env_index` (K,) int64.

        `obs` (K, …) holds their newest frames; where `episode_start` (K,) bool is True, the first of an episode. `draw`
        numbers the random draw; `acted` is the number of steps that every environment has taken.
        """
        state = GymState(obs)
        if self.spec.frames > 1:
            state = GymState(stacked(self.stack.index_select(0, env_index), obs, episode_start))
            self.stack.index_copy_(0, env_index, state.obs)
        observation = self.rules.game.observe(self.rules.config, state)
        numbers = (torch.tensor(x, device=self.device) for x in (draw, acted, progress))
        policy_input = PolicyInput(observation, None, self.key, env_index, self.num_envs, *numbers)
        return self.algo.select_actions(self.config, self.network, policy_input)
