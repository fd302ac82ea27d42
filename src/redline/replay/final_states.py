"""Final States of truncated episodes, which samples bootstrap from when the next row belongs to another episode.

Every step's final State is written to the current slot of its environment. Only if the step truncated the episode is it
kept, and the environment moves on to its next slot. A reused slot belongs to another transition: samples that would need
its old content get weight 0, so no sample ever bootstraps across a reset.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MAX_SLOTS = 1 << 22  # slot numbers must fit into a step's word, see `windows`


class FinalStates:
    """A small ring of final States for each environment."""

    def __init__(self, tables: dict[str, Tensor], num_envs: int, slots: int, device: torch.device) -> None:
        """tables: the stored fields of State, (num_envs * slots, …) each."""
        self.tables, self.num_envs, self.slots = tables, num_envs, slots
        # (num_envs * slots,) transition that each State belongs to, as row * num_envs + env_index; -1: none
        self.owner = torch.full((num_envs * slots,), -1, dtype=torch.int64, device=device)
        self.truncations = torch.zeros(num_envs, dtype=torch.int32, device=device)  # of each environment so far

    @staticmethod
    def slots_for(rows: int, kept: int | None, episode_limit: int) -> int:
        """Return the number of slots per environment for `kept` States, plus one for the current step.

        With `kept` None: as many States as there are truncations if episodes last 16 steps, or `episode_limit` if shorter.
        """
        length = min(episode_limit or 16, 16)
        return min(1 + (max(1, rows // length) if kept is None else kept), MAX_SLOTS)

    def current_slot(self) -> Tensor:
        """Return the slot (N,) int32 where each environment's next final State will be written."""
        return self.truncations % self.slots

    def write(self, final_state: Any, truncated: Tensor, row: Tensor) -> None:
        """Store the final States (N, …) of row () int64 and keep those where truncated (N,) bool is True."""
        env_index = torch.arange(self.num_envs, device=self.owner.device)
        place = self.place(env_index, self.current_slot())
        self.owner.index_copy_(0, place, row * self.num_envs + env_index)
        for name, table in self.tables.items():
            table.index_copy_(0, place, getattr(final_state, name))
        self.truncations += truncated

    def forget(self, lost: Tensor) -> None:
        """Drop the newest kept State where lost (N,) bool is True: samples that would bootstrap from it get weight 0."""
        env_index = torch.arange(self.num_envs, device=self.owner.device)
        newest = self.place(env_index, (self.truncations - 1) % self.slots)
        self.owner.index_copy_(0, newest, torch.where(lost, -1, self.owner[newest]))

    def place(self, env_index: Tensor, slot: Tensor) -> Tensor:
        """Return indices into the tables."""
        place: Tensor = env_index * self.slots + slot
        return place

    def overwritten(self, place: Tensor, row: Tensor, env_index: Tensor) -> Tensor:
        """Return (B,) bool: whether the State at `place` belongs to another transition than (row, env_index)."""
        different: Tensor = self.owner[place] != row * self.num_envs + env_index
        return different

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors for checkpoints, by name."""
        named = {f"finals.{name}": table for name, table in self.tables.items()}
        return named | {"finals_owner": self.owner, "truncations": self.truncations}

    def clear(self) -> None:
        """Drop all States."""
        self.truncations.zero_()
        self.owner.fill_(-1)
