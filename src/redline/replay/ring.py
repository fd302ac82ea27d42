"""The ring of rows underlying every replay kind: where transitions are stored, and which of them are drawn.

            env 0   env 1   …   env N-1
    row t     o       o           o       A row holds one step of all environments. The next row holds their next
    row t+1   o       o           o       States, so each State is stored only once.

Rows are numbered in the order they are written, from 0; row t is stored at place t % rows of the ring. Storage is not part
of the ring: it draws the same transitions wherever their contents are stored.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from redline.core import random
from redline.core.errors import UserError
from redline.core.records import Batch
from redline.replay.contract import ReplayRequest
from redline.replay.priority import Priorities, in_rows


class Draw(NamedTuple):
    """Transitions drawn as the starts of samples. Each (B,) int64."""

    row: Tensor  # number of the row
    env_index: Tensor
    units: Tensor | None  # priority in units, see `priority`; None: drawn uniformly


class ReplayRing:
    """Index arithmetic, sampling and priorities of a ring. All counters are tensors: nothing synchronises with the host."""

    def __init__(self, request: ReplayRequest, reserved_rows: int = 0) -> None:
        """`reserved_rows`: the number of oldest rows that are stored but never drawn."""
        self.num_envs, self.device = request.num_envs, request.device
        self.n_step, self.alpha, self.reserved_rows = request.n_step, request.alpha, reserved_rows
        self.frames = request.rules.game.spec(request.rules.config).frames
        self.rows = request.capacity // self.num_envs
        least = self.n_step + self.frames + 1 + reserved_rows
        if self.rows < least:
            raise UserError(
                f"replay_capacity is {request.capacity:,}; {self.num_envs:,} environments with {self.n_step}-step returns "
                f"need at least {self.num_envs * least:,} transitions. Increase the capacity or use fewer environments."
            )
        self.written = torch.zeros((), dtype=torch.int64, device=self.device)  # rows written since the ring was empty
        self.priorities = None if self.alpha is None else Priorities(self.size, self.device)

    @property
    def size(self) -> int:
        """Capacity in transitions."""
        return self.rows * self.num_envs

    def slot(self, row: Tensor, env_index: Tensor) -> Tensor:
        """Return the slots of transitions, from 0 to size - 1. row and env_index broadcast."""
        slot: Tensor = (row % self.rows) * self.num_envs + env_index
        return slot

    def row_slots(self, row: Tensor) -> Tensor:
        """Return the slots (N,) of row () int64 for all environments."""
        return self.slot(row, torch.arange(self.num_envs, device=self.device))

    def advance(self) -> None:
        """Count a row just stored, and update which rows can be drawn."""
        if self.priorities is not None:
            # The oldest row can no longer be drawn; the row of n steps ago can, from now on, with the highest priority.
            oldest = ((self.written + self.frames - 1 + self.reserved_rows) % self.rows) * self.num_envs
            self.priorities.set_span(oldest, self.num_envs, torch.zeros_like(self.priorities.highest))
            complete = self.written - self.n_step
            units = torch.where(complete >= 0, self.priorities.highest, 0)
            self.priorities.set_span((complete % self.rows) * self.num_envs, self.num_envs, units)
        self.written += 1

    def draw(self, key: Tensor, size: int) -> Draw:
        """Return the starts of `size` samples, drawn by priority if there are priorities, else uniformly. key () int32."""
        return self.draw_uniformly(key, size) if self.priorities is None else self.draw_by_priority(key, size)

    def draw_uniformly(self, key: Tensor, size: int) -> Draw:
        """Return `size` transitions drawn uniformly from the rows with a complete n-step window and frame stack."""
        number = torch.arange(size, device=self.device)
        # The last n rows are excluded: the row that their windows bootstrap from is not written yet.
        first = (self.written - self.rows + self.frames - 1 + self.reserved_rows).clamp(min=0)
        offset = random.below(random.bits(key, 2 * number), self.written - self.n_step - first)
        env_index = random.below(random.bits(key, 2 * number + 1), self.num_envs)
        return Draw(first + offset, env_index, None)

    def draw_by_priority(self, key: Tensor, size: int) -> Draw:
        """Return `size` transitions drawn in proportion to their priorities."""
        assert self.priorities is not None
        slot, units = self.priorities.draw(key, size)
        place = torch.div(slot, self.num_envs, rounding_mode="floor")
        newest = self.written - 1
        return Draw(newest - (newest - place) % self.rows, slot - place * self.num_envs, units)

    def weigh(self, batch: Batch, draw: Draw, beta: Tensor | float) -> Batch:
        """Return a batch drawn by priority with places and importance weights added; a uniform batch unchanged."""
        if self.priorities is None:
            return batch
        assert draw.units is not None
        valid = (batch.weight > 0) & (draw.units > 0)
        lowest = in_rows(torch.where(valid, draw.units, (1 << 31) - 1)).amin(1).amin()
        importance = (lowest.to(torch.float32) / draw.units.clamp(min=1).to(torch.float32)) ** beta
        place = draw.row * self.num_envs + draw.env_index
        return batch._replace(weight=torch.where(valid, importance, 0.0), place=place)

    def update_priorities(self, place: Tensor, td_errors: Tensor) -> None:
        """See `Replay.update_priorities`."""
        assert self.priorities is not None
        assert self.alpha is not None
        row = torch.div(place, self.num_envs, rounding_mode="floor")
        slot = (row % self.rows) * self.num_envs + place - row * self.num_envs
        present = self.priorities.levels[0][slot]
        stored = (row >= self.written - self.rows) & (row < self.written) & (present > 0)
        units = self.priorities.units(torch.where(stored, td_errors, 0.0), self.alpha)
        self.priorities.set(slot, torch.where(stored, units, present))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors for checkpoints, by name."""
        priorities = {} if self.priorities is None else self.priorities.tensors()
        return {"written": self.written} | {f"priorities.{name}": x for name, x in priorities.items()}

    def clear(self) -> None:
        """Empty the ring."""
        self.written.zero_()
        if self.priorities is not None:
            self.priorities.clear()
