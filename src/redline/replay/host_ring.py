"""The ring in the host's memory or in a file, for a learner on a device: what is played travels out, batches travel in.

    device   write ─► outbox     draws for later ─► places        inbox ─► sample
                        │                             │              ▲
    host                └────► records      places ───┴─► gather ────┘       see `courier`

A row and the places drawn after it leave the device together; the records of those places come back AHEAD iterations later.
So there is that long to deliver, the learner does not wait, and what is sampled does not depend on how fast anything ran: the
same run gives the same samples. What must be at hand when a batch is put together (States before a truncation, priorities,
counters) stays on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from redline.core import random
from redline.core.errors import UserError
from redline.core.records import Batch, Step
from redline.envs.batch import Rules
from redline.replay.ring import STEP, Fetched, ReplayRing, Tables, ended_of
from redline.replay.row_layout import RowLayout, Shape
from redline.replay.transfer import AHEAD, SLOTS, Notify, Storage, TransferSpec, pinned, transfer

_NONE = -(1 << 60)  # in place of rows that are to be drawn again


class Pinned:
    """Records in page-locked memory, from which a device copies without the processor; else in ordinary memory."""

    def __init__(self, entries: int, layout: RowLayout, num_envs: int, device: torch.device, notify: Notify) -> None:
        self.records, self.rows = pinned((entries, layout.size), torch.uint8, device, notify), entries // num_envs

    def before_row(self, row: int) -> None:
        """Nothing to prepare."""

    def after_row(self, row: int) -> None:
        """Nothing to finish."""

    def flush(self) -> None:
        """Memory is always up to date."""

    def lost(self, written: int) -> Tensor:
        """(rows,) bool: nothing is."""
        del written
        return torch.zeros(self.rows, dtype=torch.bool)

    def histories(self) -> Tensor:
        """Memory has none but the present one."""
        return torch.zeros(0, 2, dtype=torch.int64)

    def begin_history(self, before: Tensor, written: int) -> None:
        """Nothing of another history can be here."""

    def close(self) -> None:
        """Nothing is held."""


class HostReplayRing(ReplayRing):
    """A Ring whose tables are records of the host. `before` and `after` frame each iteration."""

    def __init__(
        self,
        rules: Rules,
        state: Any,
        capacity: int,
        n_step: int,
        gamma: float,
        key: Tensor,
        batch_size: int,
        batches: int,
        storage: Callable[[int, RowLayout], Storage],
        alpha: float | None = None,
        finals: int | None = None,
        notify: Notify = print,
        threaded: bool | None = None,
    ) -> None:
        """`batches` of `batch_size` are sampled in an iteration; `storage` makes room for entries of a layout.

        `key` () int32 is the stream that draws come from.
        """
        self.batch_size, self.batches, self.key = batch_size, batches, key
        num_envs = state[0].shape[0]
        rows = capacity // num_envs
        frames = rules.game.spec(rules.config).frames
        if rows < (least := n_step + frames + 1 + SLOTS):  # before a file is made for them
            raise UserError(
                f"replay_capacity is {capacity:,}; {num_envs:,} environments with {n_step}-step returns in host memory need at "
                f"least {num_envs * least:,} transitions."
            )
        kept = max(1, min(rows // 16, 64)) if finals is None else finals
        self.layout: RowLayout
        self.storage: Storage

        def allocate(entries: int, finals: int, seen: Mapping[str, Shape]) -> Tables:
            self.layout = RowLayout({f"states.{name}": shape for name, shape in seen.items()} | STEP)
            self.storage = storage(entries, self.layout)
            return {k: self.layout.view(self.storage.records, k) for k in self.layout.shapes}, self._zeros(finals, seen)

        super().__init__(rules, state, capacity, n_step, gamma, kept, alpha, allocate)
        # Steps of a window whose records are gathered: its start, its end, those between, those whose frames it shows.
        self._offsets = (0, n_step, *range(1, n_step), *range(-1, -self.frames, -1))
        self.lead = AHEAD
        self.margin = SLOTS  # oldest rows not drawn: a batch under way must be found again after a restart
        device, size, wide = self.device, self.layout.size, len(self._offsets) * batch_size
        self.outbox = torch.zeros(self.num_envs, size, dtype=torch.uint8, device=device)
        self.places = torch.zeros(batches, wide, dtype=torch.int64, device=device)
        self.inbox = torch.zeros(batches, wide, size, dtype=torch.uint8, device=device)
        drawn = torch.zeros(SLOTS, batches, batch_size, dtype=torch.int64, device=device)
        self.drawn = {"row": drawn, "env_index": drawn.clone(), "units": drawn.clone()}  # of the batches under way
        self.holes = torch.zeros(self.rows, dtype=torch.bool, device=device)  # rows of a file that were lost
        self.histories = self.storage.histories()  # of that file
        self.notify = notify
        spec = TransferSpec(self.outbox, self.places, self.inbox)
        self.transfer = transfer(self.storage, spec, self.rows, notify, threaded)
        self.iteration = 0  # rows written, as the host counts them

    # ------------------------------------------------------------------------------------- on the device, in the graph

    def tensors(self) -> dict[str, Tensor]:
        """As a Ring's, with the records as they lie there after all rows under way are in them.

        Records in a file stay where they are: a checkpoint of the rest belongs to that file.
        """
        self.flush()
        named = {name: x for name, x in super().tensors().items() if name not in self.tables}
        named |= {f"drawn.{name}": x for name, x in self.drawn.items()}
        named |= {"holes": self.holes, "histories": self.histories}
        return named | ({"records": self.storage.records} if isinstance(self.storage, Pinned) else {})

    def store(self, row: dict[str, Tensor]) -> None:
        """Lay the row out as records for the way to the host."""
        for name, entries in row.items():
            self.layout.view(self.outbox, name).copy_(entries)

    def write(self, state: Any, action: Tensor, step: Step) -> None:
        """Append one row, and draw the batches of the iteration AHEAD of this one."""
        super().write(state, action, step)
        at = ((self.written - 1) % self.rows).view(1)
        self.holes.index_copy_(0, at, torch.zeros_like(at, dtype=torch.bool))
        slot = ((self.written - 1) % SLOTS).view(1)
        numbers = range(self.batches)
        drawn = [self._draw(random.fold(self.key, self.written * self.batches + number)) for number in numbers]
        for name, table in self.drawn.items():
            table.index_copy_(0, slot, torch.stack([found[name] for found in drawn]).unsqueeze(0))
        self.places.copy_(torch.stack([self._places(found["row"], found["env_index"]) for found in drawn]))

    def _places(self, row: Tensor, env_index: Tensor) -> Tensor:
        """Where the records of windows lie, step by step as `_offsets` has them."""
        return torch.cat([self._slot(row + step, env_index) for step in self._offsets])

    def sample(self, key: Tensor, size: int, beta: Tensor | float = 1.0, number: Tensor | None = None) -> Batch:
        """The batch of that `number` () int64 among those delivered for this iteration."""
        del key
        assert size == self.batch_size
        which = (torch.zeros_like(self.written) if number is None else number % self.batches).view(1)
        slot = ((self.written - 1 - AHEAD) % SLOTS).view(1)
        row, env_index, units = (
            self.drawn[name].index_select(0, slot)[0].index_select(0, which)[0]
            for name in ("row", "env_index", "units")
        )
        records = self.inbox.index_select(0, which)[0]
        window = self.assemble(row, env_index, self._unpack(records))
        steps = torch.arange(1 - self.frames, self.n_step + 1, device=self.device)
        whole = ~self.holes[(row.unsqueeze(1) + steps) % self.rows].any(1)
        window = window._replace(weight=torch.where(whole, window.weight, 0.0))
        return self.weigh(self.observe(window), row, env_index, units, beta)

    def _unpack(self, records: Tensor) -> Fetched:
        """What records say, which are in the order of `_places`."""
        size = self.batch_size

        def in_time(name: str, first: int, last: int) -> Tensor:
            """A field from one step of the windows to another, (B, steps, …)."""
            field = self.layout.view(records, name)
            parts = [self._offsets.index(step) * size for step in range(first, last + 1)]
            return torch.stack([field[start : start + size] for start in parts], 1)

        states = {
            name: in_time(f"states.{name}", 1 - self.frames, self.n_step)
            if name in self.stacked
            else self.layout.view(records, f"states.{name}")[: 2 * size]
            for name in self.states
        }
        before = in_time("step", 1 - self.frames, -1) if self.stacked and self.frames > 1 else None
        return Fetched(in_time("step", 0, self.n_step - 1), states, before)

    def _states(
        self,
        row: Tensor,
        env_index: Tensor,
        last_row: Tensor,
        truncated: Tensor,
        kept: Tensor,
        found: Fetched,
    ) -> dict[str, Tensor]:
        """Those found in the records, and those before a truncation, which are here."""
        del env_index
        assert found.states is not None
        cut = torch.cat([torch.zeros_like(truncated), truncated])
        finals = torch.cat([torch.zeros_like(kept), kept])
        index = self._frame_index(row, last_row - row + 1, truncated, found) if self.stacked else None
        window = torch.arange(2 * len(row), device=self.device).unsqueeze(1) % len(row)
        states = {}
        for name, here in found.states.items():
            kept_here = self.finals[name][finals]
            broad = cut.view(-1, *(1,) * (kept_here.dim() - 1))
            if name not in self.stacked:
                states[name] = torch.where(broad, kept_here, here)
                continue
            stack = here[window, index]  # (2 B, frames, …)
            newest = torch.where(broad, kept_here, stack[:, -1])
            states[name] = torch.cat([stack[:, :-1], newest.unsqueeze(1)], 1)
        return states

    def _frame_index(self, row: Tensor, taken: Tensor, truncated: Tensor, found: Fetched) -> Tensor:
        """(2 B, frames): which of the frames found are seen at the start of each window, and at its end."""
        past = self.frames - 1  # frames found before a window's start
        ended = ended_of((found.steps if found.before is None else torch.cat([found.before, found.steps], 1))[..., 1])
        cut = torch.cat([torch.zeros_like(truncated), truncated])
        newest = past + torch.cat([torch.zeros_like(taken), torch.where(truncated, taken, self.n_step)])
        earlier = newest.unsqueeze(1) - torch.arange(1, self.frames, device=self.device)
        began = torch.cat([row, row]).unsqueeze(1) + earlier - past < 0
        border = began | (torch.cat([ended, ended]).gather(1, earlier) != 0)
        return newest.unsqueeze(1) - self._steps_back(border, cut)

    # ------------------------------------------------------------------------------------------------------ on the host

    def before(self) -> None:
        """Have this iteration's batches in the inbox."""
        self.transfer.fetch(self.iteration)

    def after(self) -> None:
        """Send out the row just written and the places drawn."""
        self.transfer.send(self.iteration)
        self.iteration += 1

    def flush(self) -> None:
        """All rows sent so far are in the records, and the records are where they belong."""
        self.transfer.flush(self.iteration)

    def adapt(self, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A checkpoint's tensors with room for what is under way; of batches of another size nothing is kept."""
        fits = all(saved[f"drawn.{k}"].shape == x.shape for k, x in self.drawn.items() if f"drawn.{k}" in saved)
        return dict(saved) | ({} if fits else {f"drawn.{k}": torch.full_like(x, _NONE) for k, x in self.drawn.items()})

    def loaded(self) -> bool:
        """After a checkpoint was copied into `tensors`: gather again what was under way. False: nothing is left of it."""
        self.iteration = self.transfer.delivered = int(self.written)
        self.storage.begin_history(self.histories, self.iteration)
        self.histories.copy_(self.storage.histories())
        held = min(self.iteration, self.rows)
        self.holes.logical_or_(self.storage.lost(self.iteration).to(self.device))
        missing = int(self.holes.sum())
        if missing:
            self.notify(
                f"{missing * self.num_envs:,} of {held * self.num_envs:,} transitions are no longer in the replay file"
                f"{'; it is filled again.' if 2 * missing > held else '; they are left out.'}"
            )
        if 2 * missing > held:
            self.clear()
            return False
        if bool((self.drawn["row"] == _NONE).any()) and self.iteration > self.n_step:
            self._draw_again()
        first = max(0, self.iteration - AHEAD)
        self.transfer.delivered = first
        for number in range(first, self.iteration):
            row, env_index = (self.drawn[name][number % SLOTS] for name in ("row", "env_index"))
            places = [self._places(*where) for where in zip(row, env_index, strict=True)]
            self.transfer.send_again(number, torch.stack(places))
        self.transfer.wait(self.iteration)
        return True

    def _draw_again(self) -> None:
        """Other batches in place of those that were under way."""
        for slot in range(SLOTS):
            for number in range(self.batches):
                found = self._draw(random.fold(self.key, -1 - slot * self.batches - number))
                for name, values in found.items():
                    self.drawn[name][slot, number] = values

    def _draw(self, key: Tensor) -> dict[str, Tensor]:
        if self.priorities is None:
            row, env_index = self.draw(key, self.batch_size)
            return {"row": row, "env_index": env_index, "units": torch.ones_like(row)}
        row, env_index, units = self.draw_by_priority(key, self.batch_size)
        return {"row": row, "env_index": env_index, "units": units}

    def interrupt(self) -> bool:
        """What is on its way cannot be changed any more: everything is forgotten."""
        self.clear()
        return False

    def clear(self) -> None:
        """Forget everything; nothing drawn before is delivered."""
        self.flush()
        for tensor in (self.written, self.cuts):
            tensor.zero_()
        self.final_of.fill_(-1)
        if self.priorities is not None:
            self.priorities.clear()
        self.holes.zero_()
        self.iteration = self.transfer.delivered = 0
        self.storage.begin_history(self.histories, 0)
        self.histories.copy_(self.storage.histories())

    def close(self) -> None:
        """Stop the worker and let go of what is held."""
        self.transfer.close()
        self.storage.close()
