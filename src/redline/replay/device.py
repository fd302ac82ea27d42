"""States in a ring on the device; observations are built when they are sampled.

All data is in static tensors and no method needs a number on the host, so a whole iteration can be captured as one CUDA
graph. A checkpoint includes the whole memory, and a resumed run draws the same samples as an uninterrupted one. If
environments restart with new episodes (CPU environments), the newest row is marked as truncated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from redline.core.records import Batch, Step
from redline.engine.gather import gather_rows, pays, prepare
from redline.engine.host_memory import use_huge_pages
from redline.replay.contract import Location, Replay, ReplayRequest, TransitionBytes
from redline.replay.final_states import FinalStates
from redline.replay.planes import StoredPlanes, suits
from redline.replay.priority import Priorities
from redline.replay.ring import ReplayRing
from redline.replay.row_layout import Shape
from redline.replay.windows import (
    STEP_FIELD,
    NStepWindows,
    Window,
    action_of,
    ending_of,
    make_batch,
    pack_steps,
    stored_fields,
    truncate_steps,
)

LOCATION = Location.DEVICE


def make(request: ReplayRequest) -> Replay:
    """Return a replay memory on the device of `request.state`."""
    return DeviceReplay(request)


def bytes_per_transition(state_bytes: int) -> TransitionBytes:
    """Return the estimated size of a State, its step, and a sixteenth of a final State with its owner.

    The snapshot of a checkpoint is not counted: it fits into the half that `largest_capacity` leaves free.
    """
    return TransitionBytes(device=state_bytes * 17 / 16 + 8.5)


class DeviceReplay(Replay):
    """A ring of rows stored as tables in device memory."""

    def __init__(self, request: ReplayRequest, final_states: int | None = None) -> None:
        """`final_states`: number kept for each environment; None: see `FinalStates.slots_for`."""
        rules, state = request.rules, request.state
        self.ring = ring = ReplayRing(request)
        self.rows, self.num_envs, self.n_step, self.device = ring.rows, ring.num_envs, ring.n_step, ring.device
        fields = stored_fields(rules, state)
        slots = FinalStates.slots_for(ring.rows, final_states, rules.game.spec(rules.config).limit)
        # Final States are stored after those of the ring, so that one index can address either.
        tables = _zeros(ring.size + ring.num_envs * slots, fields, ring.device)
        self._words = {name: in_words(table) for name, table in tables.items()}
        self.states = {name: table[: ring.size] for name, table in tables.items()}
        self.steps = _zeros(ring.size, STEP_FIELD, ring.device)["step"]
        finals = {name: table[ring.size :] for name, table in tables.items()}
        self.finals = FinalStates(finals, ring.num_envs, slots, ring.device)
        self.windows = NStepWindows(rules, state, ring, self.finals, request.gamma)
        prepare(request.notify)
        self._planes = StoredPlanes(rules, tables) if suits(rules, tables, request.notify) else None

    @property
    def written(self) -> Tensor:
        """Number of rows written so far, () int64."""
        return self.ring.written

    @property
    def priorities(self) -> Priorities | None:
        return self.ring.priorities

    @property
    def reward(self) -> Tensor:
        """Rewards of all slots, (rows * N,) float32: a view of the table."""
        return self.steps[:, 0].view(torch.float32)

    @property
    def action(self) -> Tensor:
        """Actions of all slots, (rows * N,) int32."""
        return action_of(self.steps[:, 1])

    @property
    def bytes_per_transition(self) -> float:
        """Size of the memory in bytes, divided by its capacity in transitions."""
        return float(sum(x.nbytes for x in self.tensors().values()) / self.ring.size)

    def tensors(self) -> dict[str, Tensor]:
        states = {f"states.{name}": table for name, table in self.states.items()}
        return states | {"step": self.steps} | self.finals.tensors() | self.ring.tensors()

    def clear(self) -> None:
        self.ring.clear()
        self.finals.clear()
        self.steps.zero_()

    def forget(self, lost: Tensor) -> None:
        self.finals.forget(lost)

    def interrupt(self) -> bool:
        newest = self.ring.row_slots(self.written - 1)
        word = self.steps[newest, 1]
        self.steps[newest, 1] = truncate_steps(word)
        # Every step's final State was written to the environment's current slot; advancing the slot keeps it.
        self.finals.truncations += (ending_of(word) == 0).to(torch.int32)
        return True

    def write(self, state: Any, action: Tensor, step: Step) -> None:
        slots = self.ring.row_slots(self.written)
        for name, table in self.states.items():
            table.index_copy_(0, slots, getattr(state, name))
        self.steps.index_copy_(0, slots, pack_steps(action, step, self.finals.current_slot()))
        self.finals.write(step.final_state, step.truncated, self.written)
        self.ring.advance()

    def sample(self, key: Tensor, size: int, beta: Tensor | float = 1.0, number: Tensor | None = None) -> Batch:
        del number
        draw = self.ring.draw(key, size)
        return self.ring.weigh(self.batch(draw.row, draw.env_index), draw, beta)

    def update_priorities(self, place: Tensor, td_errors: Tensor) -> None:
        self.ring.update_priorities(place, td_errors)

    def batch(self, row: Tensor, env_index: Tensor) -> Batch:
        """Return the n-step windows that start at the given rows and environments, each (B,) int64."""
        number = torch.arange(self.n_step, device=row.device)
        steps = self.steps[self.ring.slot(row.unsqueeze(1) + number, env_index.unsqueeze(1))]  # (B, n, 2)
        window = self.windows.fold(row, env_index, steps)
        if self._planes is not None:
            return make_batch(window, *self._planes.observe(self._places(window)).chunk(2))
        return self.windows.observe(window, self._find_states(window))

    def _places(self, window: Window) -> Tensor:
        """Return the indices (2 B,) int64 of the States where windows start, then of those they bootstrap from."""
        following = self.ring.slot(window.row + self.n_step, window.env_index)
        end = torch.where(window.truncated, self.ring.size + window.final_place, following)
        return torch.cat([self.ring.slot(window.row, window.env_index), end])

    def _find_states(self, window: Window) -> dict[str, Tensor]:
        """Return the States (2 B, …) where windows start, then those they bootstrap from, read in one pass."""
        row, env_index, truncated = window.row, window.env_index, window.truncated
        stack = place = self._places(window)
        if self.windows.stacked:
            earlier = self._frame_slots(
                torch.cat([row, row + self.n_step]),
                torch.cat([env_index, env_index]),
                torch.cat([row, window.last_row]),
                torch.cat([torch.zeros_like(truncated), truncated]),
            )
            stack = torch.cat([earlier[:, :-1], place.unsqueeze(1)], 1)
        states = {}
        for name, words in self._words.items():
            index, table = stack if name in self.windows.stacked else place, self.states[name]
            states[name] = rows_at(words, index).view(table.dtype).view(*index.shape, *table.shape[1:])
        return states

    def _frame_slots(self, row: Tensor, env_index: Tensor, last_row: Tensor, truncated: Tensor) -> Tensor:
        """Return the slots (M, frames) of the frames up to `row`, oldest first.

        Where the episode was truncated, the newest frame is the final State after `last_row`, which has no slot in the
        ring: that column is meaningless.
        """
        newest = torch.where(truncated, last_row + 1, row)
        earlier = newest.unsqueeze(1) - torch.arange(1, self.ring.frames, device=self.device)  # nearest first
        word = self.steps[self.ring.slot(earlier, env_index.unsqueeze(1))][..., 1]
        steps = self.windows.steps_back((earlier < 0) | (ending_of(word) != 0), truncated)
        return self.ring.slot(newest.unsqueeze(1) - steps, env_index.unsqueeze(1))


def _zeros(entries: int, fields: Mapping[str, Shape], device: torch.device) -> dict[str, Tensor]:
    tables = {name: torch.empty(entries, *shape, dtype=dtype, device=device) for name, (shape, dtype) in fields.items()}
    for table in tables.values():
        use_huge_pages(table)
        table.zero_()
    return tables


def rows_at(words: Tensor, index: Tensor) -> Tensor:
    """Return rows of `words` (entries, W) or (entries,) by index (…), in a shape that can be viewed as another dtype."""
    several = words.device.type == "cpu" and words.dim() > 1 and words.shape[1] > 1
    if several and torch.compiler.is_compiling() and pays(words, index):
        return gather_rows(words, index.flatten())
    rows = words[index]
    # A CPU copies row by row; in a flat loop the compiler would divide and check an index for every word. But rows of a
    # single word have a stride that cannot be viewed as another dtype.
    return rows if several else rows.flatten()


def in_words(table: Tensor) -> Tensor:
    """Return a view of a contiguous table as the widest integers that fit its rows: wide elements are gathered faster."""
    if table.dim() == 1:
        return table
    flat = table.flatten(1)
    size = flat.shape[1] * table.element_size()
    for dtype in (torch.int64, torch.int32, torch.int16):
        if size % dtype.itemsize == 0 and dtype.itemsize > table.element_size():
            return flat.view(dtype)
    return flat
