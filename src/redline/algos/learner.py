"""What learners have in common with each other: how they act, and hooks around an iteration, which most do not need."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from redline.core.records import Turn


class Acts(ABC):
    """Plays all lanes with the behaviour policy; others may play it too and hand over what it said, see `remember`."""

    num_envs: int
    key: Tensor  # () int32: root of its random streams
    acted: Tensor  # () int64: turns every lane has had
    progress: Tensor  # () float32: share of training done

    def act(self, obs: Tensor, legal: Tensor | None = None) -> Tensor:
        """Actions (N,) int64 of the behaviour policy for all lanes; what they were chosen from is remembered."""
        lane = torch.arange(self.num_envs, device=obs.device)
        turn = Turn(obs, legal, self.key, lane, self.num_envs, self.acted, self.acted, self.progress)
        action, outputs = self.behave(turn)
        self.remember(obs, legal, action, outputs)
        return action

    @property
    @abstractmethod
    def plays(self) -> nn.Module:
        """The network whose weights the behaviour policy has."""

    @abstractmethod
    def behave(self, turn: Turn) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Actions (N,) int64 of the behaviour policy, and what it says of them, the algorithm's OUTPUTS, (N,) each."""

    @abstractmethod
    def remember(self, obs: Tensor, legal: Tensor | None, action: Tensor, outputs: tuple[Tensor, ...]) -> Tensor | None:
        """Keep what a turn of all lanes was played from; gives where it lies, if it does."""


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
