"""What learners have in common with each other: how they act, and hooks around an iteration, which most do not need."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from redline.core.records import PolicyInput


class ActingLearner(ABC):
    """Plays all environments with the behaviour policy; others may play it too and hand over what it said, see `remember`."""

    num_envs: int
    key: Tensor  # () int32: root of its random streams
    acted: Tensor  # () int64: turns every environment has had
    progress: Tensor  # () float32: share of training done

    def act(self, obs: Tensor, legal: Tensor | None = None) -> Tensor:
        """Actions (N,) int64 of the behaviour policy for all environments; what they were chosen from is remembered."""
        env_index = torch.arange(self.num_envs, device=obs.device)
        policy_input = PolicyInput(
            obs, legal, self.key, env_index, self.num_envs, self.acted, self.acted, self.progress
        )
        action, outputs = self.select_actions(policy_input)
        self.remember(obs, legal, action, outputs)
        return action

    @property
    @abstractmethod
    def acting_network(self) -> nn.Module:
        """The network whose weights the behaviour policy has."""

    @abstractmethod
    def select_actions(self, policy_input: PolicyInput) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Actions (N,) int64 of the behaviour policy, and what it says of them, the algorithm's OUTPUTS, (N,) each."""

    @abstractmethod
    def remember(self, obs: Tensor, legal: Tensor | None, action: Tensor, outputs: tuple[Tensor, ...]) -> Tensor | None:
        """Keep what a turn of all environments was played from; gives where it lies, if it does."""


class Hooks:
    """Called by the loop on the host, outside what is compiled and captured."""

    wants_stacks = False  # final States with all frames that are seen, not with the newest alone

    def before(self) -> None:
        """Before each iteration."""

    def after(self) -> None:
        """After each iteration."""

    def adapt(self, replay: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """A checkpoint's memory as it fits into this one's."""
        return replay

    def loaded(self) -> bool:
        """After a checkpoint's tensors were copied into those of `state_dict`; False: its memory is lost."""
        return True

    def interrupted(self) -> bool:
        """All environments begin anew: what was remembered last is followed by nothing. False: the memory is lost."""
        return True

    def close(self) -> None:
        """When nothing more will be learned."""
