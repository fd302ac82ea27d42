"""Final States of truncated episodes: what a sample bootstraps from where the next row is another episode's.

Every step's final State is written to the current slot of its environment. It is kept, and the environment moves on to
its next slot, only if the step truncated the episode. A slot that was reused belongs to another transition: samples
that would need its old content get weight 0, so no sample ever bootstraps across a reset.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MAX_SLOTS = 1 << 22  # a slot's number must fit into its step's word, see `windows`


class FinalStates:
    """A small ring of final States for each environment."""

    def __init__(self, tables: dict[str, Tensor], num_envs: int, slots: int, device: torch.device) -> None:
        """tables: the stored fields of State, (num_envs * slots, …) each."""
        self.tables, self.num_envs, self.slots = tables, num_envs, slots
        # (num_envs * slots,) the transition each State belongs to, as row * num_envs + env_index
        self.owner = torch.full((num_envs * slots,), -1, dtype=torch.int64, device=device)
        self.truncations = torch.zeros(num_envs, dtype=torch.int32, device=device)  # of each environment so far

    @staticmethod
    def slots_for(rows: int, kept: int | None, episode_limit: int) -> int:
        """Return the slots that `kept` States of each environment need; None: enough for episodes of 16 steps or the limit.

        One slot more than States are kept, for the step under way.
        """
        length = min(episode_limit or 16, 16)
        return min(1 + (max(1, rows // length) if kept is None else kept), MAX_SLOTS)

    def current_slot(self) -> Tensor:
        """Return the slot (N,) int32 in which each environment's next final State is written."""
        return self.truncations % self.slots

    def write(self, final_state: Any, truncated: Tensor, row: Tensor) -> None:
        """Store the final States (N, …) of a row () and keep those where truncated (N,) bool."""
        env_index = torch.arange(self.num_envs, device=self.owner.device)
        place = self.place(env_index, self.current_slot())
        self.owner.index_copy_(0, place, row * self.num_envs + env_index)
        for name, table in self.tables.items():
            table.index_copy_(0, place, getattr(final_state, name))
        self.truncations += truncated

    def forget(self, lost: Tensor) -> None:
        """Forget the newest kept State where lost (N,) bool: samples that would bootstrap from it get weight 0."""
        env_index = torch.arange(self.num_envs, device=self.owner.device)
        newest = self.place(env_index, (self.truncations - 1) % self.slots)
        self.owner.index_copy_(0, newest, torch.where(lost, -1, self.owner[newest]))

    def place(self, env_index: Tensor, slot: Tensor) -> Tensor:
        """Return indices into the tables."""
        place: Tensor = env_index * self.slots + slot
        return place

    def overwritten(self, place: Tensor, row: Tensor, env_index: Tensor) -> Tensor:
        """Return where (B,) bool the State at `place` is not that of transition (row, env_index)."""
        different: Tensor = self.owner[place] != row * self.num_envs + env_index
        return different

    def tensors(self) -> dict[str, Tensor]:
        """Return everything for checkpoints, by name."""
        named = {f"finals.{name}": table for name, table in self.tables.items()}
        return named | {"finals_owner": self.owner, "truncations": self.truncations}

    def clear(self) -> None:
        """Forget all States."""
        self.truncations.zero_()
        self.owner.fill_(-1)
