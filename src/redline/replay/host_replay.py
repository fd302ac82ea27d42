"""Replay with records off the device, for kinds that store them in host memory or in a file.

    device   write ─► outbox      draw for later ─► places        inbox ─► sample
                        │                             │             ▲
    host                └──► records     places ──────┴─► gather ───┘        see `transfer`

A row and the places drawn after it leave the device together; the records at those places arrive AHEAD iterations later.
A transfer may take that long before the learner waits for it. Batches do not depend on the speed of transfers: the same
run draws the same samples. The ring, its priorities and the final States stay on the device.

A run resumed from a checkpoint draws the same samples as an uninterrupted one only if its environments continue too. CPU
environments restart with new episodes, but rows in transit can no longer be marked as truncated, so the memory is cleared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from redline.core import random
from redline.core.records import Batch, Step
from redline.engine.gather import prepare
from redline.replay.contract import Replay, ReplayRequest
from redline.replay.final_states import FinalStates
from redline.replay.record_storage import RecordStorage
from redline.replay.ring import Draw, ReplayRing
from redline.replay.row_layout import RowLayout
from redline.replay.transfer import AHEAD, SLOTS, TransferSpec, make_transfer
from redline.replay.windows import STEP_FIELD, NStepWindows, Window, ending_of, pack_steps, stored_fields

_REDRAW = -(1 << 60)  # row number that marks draws to be repeated


class _Records(NamedTuple):
    """The unpacked records of B windows of n steps."""

    steps: Tensor  # (B, n, 2) int32
    # Fields of State as integers, see `RowLayout.words`: (2 B, W), where each window starts, then n steps later. Stacked
    # fields: (B, frames + n, W), all frames from the oldest shown at the start to the newest shown at the end.
    states: dict[str, Tensor]
    earlier_steps: Tensor | None  # (B, frames - 1, 2) int32: the steps before the window


class HostReplay(Replay):
    """A ring of rows stored as records in a `RecordStorage`; needs `before_iteration` and `after_iteration` to be called."""

    def __init__(
        self,
        request: ReplayRequest,
        make_storage: Callable[[int, RowLayout], RecordStorage],
        final_states: int | None = None,
        threaded: bool | None = None,
    ) -> None:
        """make_storage(entries, layout) allocates the records.

        final_states: number kept for each environment, see FinalStates.
        threaded: transfer in a thread; None: if there is a GPU.
        """
        assert request.key is not None, "batches drawn ahead need a random stream"
        rules, state, device = request.rules, request.state, request.device
        self.batch_size, self.batches, self.key = request.batch_size, request.batches_per_iteration, request.key
        self.notify, self.lead = request.notify, AHEAD
        # The oldest rows are not drawn: a resumed run must still find the records of batches in transit.
        self.ring = ring = ReplayRing(request, reserved_rows=SLOTS)
        self.rows, self.num_envs, self.n_step, self.device = ring.rows, ring.num_envs, ring.n_step, device
        prepare(request.notify)
        fields = stored_fields(rules, state)
        kept = max(1, min(ring.rows // 16, 64)) if final_states is None else final_states
        slots = FinalStates.slots_for(ring.rows, kept, rules.game.spec(rules.config).limit)
        finals = {
            name: torch.zeros(ring.num_envs * slots, *shape, dtype=dtype, device=device)
            for name, (shape, dtype) in fields.items()
        }
        self.finals = FinalStates(finals, ring.num_envs, slots, device)
        self.windows = NStepWindows(rules, state, ring, self.finals, request.gamma)
        self.layout = RowLayout({f"states.{name}": shape for name, shape in fields.items()} | STEP_FIELD)
        self.storage = make_storage(ring.size, self.layout)
        self.in_checkpoints, self.survives_interrupt = self.storage.saved_in_checkpoints, False
        self.histories = self.storage.histories()
        self.missing_rows = torch.zeros(ring.rows, dtype=torch.bool, device=device)  # rows that the storage lost
        # Offsets of the rows gathered for a window: its start, its end, those between, and those of earlier frames.
        self._offsets = (0, self.n_step, *range(1, self.n_step), *range(-1, -ring.frames, -1))
        gathered = len(self._offsets) * self.batch_size
        self.outbox = torch.zeros(ring.num_envs, self.layout.size, dtype=torch.uint8, device=device)
        self.places = torch.zeros(self.batches, gathered, dtype=torch.int64, device=device)
        self.inbox = torch.zeros(self.batches, gathered, self.layout.size, dtype=torch.uint8, device=device)
        drawn = torch.zeros(SLOTS, self.batches, self.batch_size, dtype=torch.int64, device=device)
        self.drawn = {"row": drawn, "env_index": drawn.clone(), "units": drawn.clone()}  # batches in transit, see Draw
        spec = TransferSpec(self.outbox, self.places, self.inbox)
        self.transfer = make_transfer(self.storage, spec, ring.rows, self.notify, threaded, request.pin_memory)
        self.iteration = 0  # rows written, as counted by the host

    # ------------------------------------------------------------------------------------- on the device, in the graph

    @property
    def written(self) -> Tensor:
        """Number of rows written so far, () int64."""
        return self.ring.written

    def write(self, state: Any, action: Tensor, step: Step) -> None:
        """Append one row, and draw the batches to be sampled AHEAD iterations later."""
        for name in self.finals.tables:
            field = f"states.{name}"
            self.layout.words(self.outbox, field).copy_(self.layout.to_words(getattr(state, name), field))
        self.layout.view(self.outbox, "step").copy_(pack_steps(action, step, self.finals.current_slot()))
        self.finals.write(step.final_state, step.truncated, self.written)
        self.ring.advance()

        place = ((self.written - 1) % self.rows).view(1)
        self.missing_rows.index_copy_(0, place, torch.zeros_like(place, dtype=torch.bool))
        slot = ((self.written - 1) % SLOTS).view(1)
        keys = [random.fold(self.key, self.written * self.batches + number) for number in range(self.batches)]
        draws = [self._draw(key) for key in keys]
        for name, table in self.drawn.items():
            table.index_copy_(0, slot, torch.stack([getattr(draw, name) for draw in draws]).unsqueeze(0))
        self.places.copy_(torch.stack([self._record_places(draw.row, draw.env_index) for draw in draws]))

    def sample(self, key: Tensor, size: int, beta: Tensor | float = 1.0, number: Tensor | None = None) -> Batch:
        """Return the batch with index `number` () int64 among those delivered for this iteration; `key` is unused."""
        del key
        assert size == self.batch_size
        which = (torch.zeros_like(self.written) if number is None else number % self.batches).view(1)
        slot = ((self.written - 1 - AHEAD) % SLOTS).view(1)
        row, env_index, units = (
            self.drawn[name].index_select(0, slot)[0].index_select(0, which)[0]
            for name in ("row", "env_index", "units")
        )
        draw = Draw(row, env_index, units)
        records = self._unpack(self.inbox[0] if self.batches == 1 else self.inbox.index_select(0, which)[0])
        window = self.windows.fold(draw.row, draw.env_index, records.steps)
        states = self._find_states(window, records)
        number_in_window = torch.arange(1 - self.ring.frames, self.n_step + 1, device=self.device)
        complete = ~self.missing_rows[(draw.row.unsqueeze(1) + number_in_window) % self.rows].any(1)
        window = window._replace(weight=torch.where(complete, window.weight, 0.0))
        return self.ring.weigh(self.windows.observe(window, states), draw, beta)

    def update_priorities(self, place: Tensor, td_errors: Tensor) -> None:
        self.ring.update_priorities(place, td_errors)

    def _draw(self, key: Tensor) -> Draw:
        draw = self.ring.draw(key, self.batch_size)
        return draw if draw.units is not None else draw._replace(units=torch.ones_like(draw.row))

    def _record_places(self, row: Tensor, env_index: Tensor) -> Tensor:
        """Return the slots of all records of the windows, in the order of `_offsets`."""
        return torch.cat([self.ring.slot(row + offset, env_index) for offset in self._offsets])

    def _unpack(self, records: Tensor) -> _Records:
        """Return the fields of records that are in the order of `_record_places`."""
        size, frames = self.batch_size, self.ring.frames

        def in_time(field: Tensor, first: int, last: int) -> Tensor:
            """Return a field in rows `first` to `last` of the windows, (B, rows, …)."""
            starts = [self._offsets.index(offset) * size for offset in range(first, last + 1)]
            return torch.stack([field[start : start + size] for start in starts], 1)

        states = {name: self.layout.words(records, f"states.{name}") for name in self.finals.tables}
        for name, field in states.items():
            stacked = name in self.windows.stacked
            states[name] = in_time(field, 1 - frames, self.n_step) if stacked else field[: 2 * size]
        steps = self.layout.view(records, "step")
        earlier = in_time(steps, 1 - frames, -1) if self.windows.stacked and frames > 1 else None
        return _Records(in_time(steps, 0, self.n_step - 1), states, earlier)

    def _find_states(self, window: Window, records: _Records) -> dict[str, Tensor]:
        """Return the States (2 B, …) where windows start, then those they bootstrap from: from records, or final States."""
        size = len(window.row)
        truncated = torch.cat([torch.zeros_like(window.truncated), window.truncated])
        final_place = torch.cat([torch.zeros_like(window.final_place), window.final_place])
        frame_index = self._frame_index(window, records) if self.windows.stacked else None
        sample_index = torch.arange(2 * size, device=self.device).unsqueeze(1) % size
        states = {}
        for name, stored in records.states.items():
            field, condition = f"states.{name}", truncated.unsqueeze(1)
            final = self.layout.to_words(self.finals.tables[name], field)[final_place]
            if name not in self.windows.stacked:
                states[name] = self.layout.from_words(torch.where(condition, final, stored), field)
                continue
            stack = stored[sample_index, frame_index]  # (2 B, frames, W)
            newest = torch.where(condition, final, stack[:, -1])
            states[name] = self.layout.from_words(torch.cat([stack[:, :-1], newest.unsqueeze(1)], 1), field)
        return states

    def _frame_index(self, window: Window, records: _Records) -> Tensor:
        """Return the indices (2 B, frames) of the unpacked frames shown at the start of each window, then at its end."""
        row, truncated, length = window.row, window.truncated, window.last_row - window.row + 1
        frames = self.ring.frames
        before_start = frames - 1  # unpacked frames before a window's start
        steps = records.steps if records.earlier_steps is None else torch.cat([records.earlier_steps, records.steps], 1)
        ending = ending_of(steps[..., 1])
        newest = before_start + torch.cat([torch.zeros_like(length), torch.where(truncated, length, self.n_step)])
        earlier = newest.unsqueeze(1) - torch.arange(1, frames, device=self.device)
        before_first = torch.cat([row, row]).unsqueeze(1) + earlier - before_start < 0
        starts = before_first | (torch.cat([ending, ending]).gather(1, earlier) != 0)
        return newest.unsqueeze(1) - self.windows.steps_back(
            starts, torch.cat([torch.zeros_like(truncated), truncated])
        )

    # ------------------------------------------------------------------------------------------------------ on the host

    def before_iteration(self) -> None:
        """Copy this iteration's batches into the inbox."""
        self.transfer.fetch(self.iteration)

    def after_iteration(self) -> None:
        """Send the row just written and the places drawn after it."""
        self.transfer.send(self.iteration)
        self.iteration += 1

    def flush(self) -> None:
        """Wait until all rows sent so far are stored, durably if in a file."""
        self.transfer.flush(self.iteration)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors for checkpoints, after storing all rows in transit.

        Records in a file are not included: the checkpoint is only complete together with that file.
        """
        self.flush()
        named = self.finals.tensors() | self.ring.tensors()
        named |= {f"drawn.{name}": table for name, table in self.drawn.items()}
        named |= {"missing_rows": self.missing_rows, "histories": self.histories}
        return named | ({"records": self.storage.records} if self.storage.saved_in_checkpoints else {})

    def adapt(self, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a checkpoint's tensors converted to the current layout.

        If the batch size has changed, batches in transit are marked to be drawn again.
        """
        fits = all(saved[f"drawn.{k}"].shape == x.shape for k, x in self.drawn.items() if f"drawn.{k}" in saved)
        redraw = {f"drawn.{name}": torch.full_like(table, _REDRAW) for name, table in self.drawn.items()}
        saved = dict(saved) | ({} if fits else redraw)
        if "records" in saved:  # final States show the fields as they were when the checkpoint was written
            finals = {name.removeprefix("finals."): x for name, x in saved.items() if name.startswith("finals.")}
            earlier = RowLayout({f"states.{name}": (x.shape[1:], x.dtype) for name, x in finals.items()} | STEP_FIELD)
            saved["records"] = self.layout.convert(saved["records"], earlier)
        return saved

    def loaded(self) -> bool:
        """Determine which rows the storage lost and redeliver the batches in transit; return False if cleared instead."""
        self.iteration = self.transfer.delivered = int(self.written)
        self._begin_history(self.iteration)
        stored = min(self.iteration, self.rows)
        self.missing_rows.logical_or_(self.storage.lost_rows(self.iteration).to(self.device))
        missing = int(self.missing_rows.sum())
        refill = 2 * missing > stored
        if missing:
            self.notify(
                f"{missing * self.num_envs:,} of {stored * self.num_envs:,} transitions are missing from the replay file: "
                f"{'starting with an empty memory.' if refill else 'they are not sampled.'}"
            )
        if refill:
            self.clear()
            return False
        if bool((self.drawn["row"] == _REDRAW).any()) and self.iteration > self.n_step:
            self._redraw()
        first = max(0, self.iteration - AHEAD)
        self.transfer.delivered = first
        for iteration in range(first, self.iteration):
            row, env_index = (self.drawn[name][iteration % SLOTS] for name in ("row", "env_index"))
            places = [self._record_places(*draw) for draw in zip(row, env_index, strict=True)]
            self.transfer.resend(iteration, torch.stack(places))
        self.transfer.wait(self.iteration)
        return True

    def _redraw(self) -> None:
        """Draw new batches in place of those in transit."""
        for slot in range(SLOTS):
            for number in range(self.batches):
                draw = self._draw(random.fold(self.key, -1 - slot * self.batches - number))
                for name, table in self.drawn.items():
                    table[slot, number] = getattr(draw, name)

    def forget(self, lost: Tensor) -> None:
        self.finals.forget(lost)

    def interrupt(self) -> bool:
        """Clear the memory and return False: the endings of rows in transit can no longer be changed."""
        self.clear()
        return False

    def clear(self) -> None:
        self.flush()
        self.ring.clear()
        self.finals.clear()
        self.missing_rows.zero_()
        self.iteration = self.transfer.delivered = 0
        self._begin_history(0)

    def _begin_history(self, written: int) -> None:
        """Start a new history, so that rows written from now on are distinguished from those of abandoned histories."""
        self.storage.begin_history(self.histories, written)
        self.histories.copy_(self.storage.histories())

    def close(self) -> None:
        self.transfer.close()
        self.storage.close()
