"""The ring: States are stored, observations are made when they are sampled.

        environment 0  environment 1  …  environment N-1
    t     s a r   s a r       s a r     A row holds what all environments did in one step; the next row of a environment holds its next
    t+1   s a r   s a r       s a r     State. So a State is stored once and a transition costs one State, not two.

Where an episode was cut short (truncated) the next row already belongs to another game. The State to bootstrap from is then
kept in a small side ring of the environment, `finals`. Where the side ring has moved on before the main ring, the sample's weight
is 0: no sample ever bootstraps across a reset. Everything is a static tensor and every method runs without the host
knowing a number, so that a whole iteration can be captured as one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from redline.core import random
from redline.core.errors import UserError
from redline.core.records import Batch, Ending, Step
from redline.envs.batch import Rules, legal
from redline.replay.priority import Priorities
from redline.replay.row_layout import Shape

TERMINATED, TRUNCATED = Ending.TERMINATED.value, Ending.TRUNCATED.value  # values of `ended`

Tables = tuple[dict[str, Tensor], dict[str, Tensor]]  # of transitions, and of final States
Allocate = Callable[[int, int, Mapping[str, Shape]], Tables]  # so many of each, of States with such fields


class Fetched(NamedTuple):
    """What lies in the tables for B windows of n steps, without States where these are still to be looked up."""

    steps: Tensor  # (B, n, 2) int32: as the table `step` holds them
    # Of the fields of State: (2 B, …) where each window starts, then n steps later; of those stacked (B, frames + n, …) all
    # frames from the first that may be seen to the last.
    states: dict[str, Tensor] | None = None
    before: Tensor | None = None  # (B, frames - 1, 2) int32: the steps before the window


class Window(NamedTuple):
    """n-step windows before their observations are made. B windows, 2 B States: where each starts, then where it ends."""

    states: dict[str, Tensor]  # (2 B, …) the fields of State that observations read
    action: Tensor  # (B,) int64
    reward: Tensor  # (B,) float32: discounted sum
    discount: Tensor  # (B,) float32
    weight: Tensor  # (B,) float32: 0 where the State to bootstrap from is no longer known


class ReplayRing:
    """Transitions of N environments, the last `rows` steps of each."""

    def __init__(
        self,
        rules: Rules,
        state: Any,
        capacity: int,
        n_step: int,
        gamma: float,
        finals: int | None = None,
        alpha: float | None = None,
        allocate: Allocate | None = None,
    ) -> None:
        """`state` (N, …) is an example of the game's State; it gives number of environments, shapes, dtypes and device.

        `finals` is how many States before a truncation each environment keeps. With `alpha` transitions are drawn by priority.
        `allocate` makes the large tables, in ordinary memory of the device unless it is given.
        """
        self.rules, self.n_step, self.gamma, self.alpha = rules, n_step, gamma, alpha
        self.num_envs = state[0].shape[0]
        self.device = state[0].device
        self.margin = 0  # oldest rows that are not drawn
        self.lead = 0  # iterations between drawing a batch and having it
        spec = rules.game.spec(rules.config)
        self.frames, self.stacked = spec.frames, getattr(rules.game, "STACKED", ())
        if spec.num_actions > 256:
            raise UserError(f"The game has {spec.num_actions} actions; replay stores an action in a byte: at most 256.")
        self.rows = capacity // self.num_envs
        least = n_step + self.frames + 1
        if self.rows < least:
            raise UserError(
                f"replay_capacity is {capacity:,}; {self.num_envs:,} environments with {n_step}-step returns need at least "
                f"{self.num_envs * least:,} transitions. Take more capacity or fewer environments."
            )
        # One slot more than is kept: each step's final State is written there, and stays if the episode was cut short.
        often = min(spec.limit or 16, 16)
        self.final_slots = min(1 + (max(1, self.rows // often) if finals is None else finals), _MOST_FINALS)
        seen, size, kept = shapes_seen(rules, state), self.rows * self.num_envs, self.num_envs * self.final_slots
        self._words: dict[str, Tensor] = {}  # tables of States, the finals behind them, as words
        self.tables, self.finals = (allocate or self._allocate)(size, kept, seen)
        self.states = {name: self.tables[f"states.{name}"] for name in seen}
        self.final_of = torch.full((kept,), -1, dtype=torch.int64, device=self.device)  # the transition it belongs to
        self.written = torch.zeros((), dtype=torch.int64, device=self.device)  # rows ever written
        self.cuts = torch.zeros(
            self.num_envs, dtype=torch.int32, device=self.device
        )  # truncations of each environment so far
        self.priorities = None if alpha is None else Priorities(self.rows * self.num_envs, self.device)
        # A State rebuilt for `observe` holds zeros where `observe` and `legal` never look.
        self._hidden = {name: torch.zeros_like(x[:1]) for name, x in state._asdict().items() if name not in seen}

    def _allocate(self, size: int, kept: int, seen: Mapping[str, Shape]) -> Tables:
        """Finals lie behind the States of the ring: either is then found by one number."""
        whole = self._zeros(size + kept, seen)
        self._words = {name: in_words(table) for name, table in whole.items()}
        tables = {f"states.{name}": table[:size] for name, table in whole.items()} | self._zeros(size, STEP)
        return tables, {name: table[size:] for name, table in whole.items()}

    def _zeros(self, entries: int, shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
        return {
            k: torch.zeros(entries, *shape, dtype=dtype, device=self.device) for k, (shape, dtype) in shapes.items()
        }

    @property
    def bytes_per_transition(self) -> float:
        size = sum(x.numel() * x.element_size() for x in self.tensors().values())
        return float(size / (self.rows * self.num_envs))

    @property
    def reward(self) -> Tensor:
        """Of every transition, (rows * environments,) float32: the table itself."""
        return self.tables["step"][:, 0].view(torch.float32)

    @property
    def action(self) -> Tensor:
        """Of every transition, (rows * environments,) int32."""
        return self.tables["step"][:, 1] & 255

    @property
    def ended(self) -> Tensor:
        """Of every transition whether an episode ended with it, and how, (rows * environments,) int32."""
        return ended_of(self.tables["step"][:, 1])

    def tensors(self) -> dict[str, Tensor]:
        """Everything that makes up the memory, by name: for checkpoints."""
        named = self.tables | {f"finals.{k}": v for k, v in self.finals.items()}
        named |= {name: getattr(self, name) for name in ("final_of", "written", "cuts")}
        if self.priorities is not None:
            named |= {f"priorities.{name}": x for name, x in self.priorities.tensors().items()}
        return named

    def clear(self) -> None:
        """Forget everything."""
        for tensor in (self.written, self.cuts, self.tables["step"]):
            tensor.zero_()
        self.final_of.fill_(-1)
        if self.priorities is not None:
            self.priorities.clear()

    def interrupt(self) -> bool:
        """The row written last is followed by States of other episodes: it is cut short, and worth what followed then."""
        last = ((self.written - 1) % self.rows) * self.num_envs + torch.arange(self.num_envs, device=self.device)
        happened = self.tables["step"][last, 1]
        going_on = ended_of(happened) == 0
        self.tables["step"][last, 1] = torch.where(going_on, happened | TRUNCATED << 8, happened)
        # The State that followed is where it was put in case it would be needed, and stays there.
        self.cuts += going_on.to(self.cuts.dtype)
        return True

    def write(self, state: Any, action: Tensor, step: Step) -> None:
        """Append one row: the States (N, …) the actions (N,) were taken in, and what came of them."""
        env_index = torch.arange(self.num_envs, device=self.device)
        kept = env_index * self.final_slots + self.cuts % self.final_slots
        ended = step.terminated.to(torch.int32) * TERMINATED + step.truncated.to(torch.int32) * TRUNCATED
        happened = action.to(torch.int32) | (ended << 8) | ((self.cuts % self.final_slots) << 10)
        row = {f"states.{name}": getattr(state, name) for name in self.states}
        self.store(row | {"step": torch.stack([step.reward.view(torch.int32), happened], 1)})
        self.final_of.index_copy_(0, kept, self.written * self.num_envs + env_index)
        for name, table in self.finals.items():
            table.index_copy_(0, kept, getattr(step.final_state, name))
        self.cuts += step.truncated
        self._rank_new_row()
        self.written += 1

    def store(self, row: dict[str, Tensor]) -> None:
        """Put a row, the entries (N, …) of each table by name, where the next one belongs."""
        slot = (self.written % self.rows) * self.num_envs + torch.arange(self.num_envs, device=self.device)
        for name, entries in row.items():
            self.tables[name].index_copy_(0, slot, entries)

    def _rank_new_row(self) -> None:
        """Priorities as a row is written: the oldest can no longer be drawn; that of n steps ago can from now on."""
        if self.priorities is None:
            return
        oldest = ((self.written + self.frames - 1 + self.margin) % self.rows) * self.num_envs
        self.priorities.set_span(oldest, self.num_envs, torch.zeros_like(self.priorities.highest))
        ripe = self.written - self.n_step
        units = torch.where(ripe >= 0, self.priorities.highest, 0)
        self.priorities.set_span((ripe % self.rows) * self.num_envs, self.num_envs, units)

    # ------------------------------------------------------------------------------------------------------- sampling

    def sample(self, key: Tensor, size: int, beta: Tensor | float = 1.0, number: Tensor | None = None) -> Batch:
        """`size` transitions with replacement, as n-step windows with observations made; by priority where there are any.

        Then `place` says which they are, for `learned`, and `weight` undoes what priority does to the mean, in full with
        `beta` 1; the largest weight of a batch is 1. `number` counts the samples drawn; it plays no part here.
        """
        del number
        if self.priorities is None:
            return self.batch(*self.draw(key, size))
        row, env_index, units = self.draw_by_priority(key, size)
        return self.weigh(self.batch(row, env_index), row, env_index, units, beta)

    def weigh(self, found: Batch, row: Tensor, env_index: Tensor, units: Tensor, beta: Tensor | float) -> Batch:
        """Give samples drawn by priority their place and their importance; others are left as they are."""
        if self.priorities is None:
            return found
        known = (found.weight > 0) & (units > 0)
        rare = torch.where(known, units, (1 << 31) - 1).amin()
        importance = (rare.to(torch.float32) / units.clamp(min=1).to(torch.float32)) ** beta
        return found._replace(weight=torch.where(known, importance, 0.0), place=row * self.num_envs + env_index)

    def before(self) -> None:
        """Before an iteration: nothing to do where everything is on the device."""

    def after(self) -> None:
        """After an iteration: nothing to do."""

    def adapt(self, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A checkpoint's tensors as they fit into `tensors`: as they are."""
        return dict(saved)

    def loaded(self) -> bool:
        """After a checkpoint was copied into `tensors`: True, all of it is there."""
        return True

    def close(self) -> None:
        """Nothing is held but memory."""

    def draw(self, key: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Uniform places to start a sample: rows ever counted and environments, each (size,) int64. key () int32."""
        number = torch.arange(size, device=self.device)
        # The last n rows are left out: the row a full n-step window bootstraps from is not written yet.
        first = (self.written - self.rows + self.frames - 1 + self.margin).clamp(min=0)
        offset = random.below(random.bits(key, 2 * number), self.written - self.n_step - first)
        env_index = random.below(random.bits(key, 2 * number + 1), self.num_envs)
        return first + offset, env_index

    def draw_by_priority(self, key: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Places as of `draw`, in proportion to their priority, and their units, each (size,) int64."""
        assert self.priorities is not None
        slot, units = self.priorities.draw(key, size)
        at = torch.div(slot, self.num_envs, rounding_mode="floor")
        newest = self.written - 1
        return newest - (newest - at) % self.rows, slot - at * self.num_envs, units

    def update_priorities(self, place: Tensor, errors: Tensor) -> None:
        """Rank samples by how wrong their values were: their places (B,) and errors (B,). Those since overwritten stay."""
        assert self.priorities is not None
        assert self.alpha is not None
        row = torch.div(place, self.num_envs, rounding_mode="floor")
        slot = (row % self.rows) * self.num_envs + place - row * self.num_envs
        now = self.priorities.levels[0][slot]
        alive = (row >= self.written - self.rows) & (row < self.written) & (now > 0)
        units = self.priorities.note(torch.where(alive, errors, 0.0), self.alpha)
        self.priorities.set(slot, torch.where(alive, units, now))

    def batch(self, row: Tensor, env_index: Tensor) -> Batch:
        """The n-step windows that start at the given rows (ever counted) and environments, each (B,) int64."""
        return self.observe(self.windows(row, env_index))

    def windows(self, row: Tensor, env_index: Tensor) -> Window:
        """As `batch`, without observations."""
        return self.assemble(row, env_index, self.fetch(row, env_index))

    def fetch(self, row: Tensor, env_index: Tensor) -> Fetched:
        """What the tables hold for the windows that start at these rows and environments."""
        steps = torch.arange(self.n_step, device=row.device)
        window = self._slot(row.unsqueeze(1) + steps, env_index.unsqueeze(1))  # (B, n)
        return Fetched(self.tables["step"][window])

    def assemble(self, row: Tensor, env_index: Tensor, found: Fetched) -> Window:
        """Windows up to their first end, from what lies in the tables."""
        steps = torch.arange(self.n_step, device=self.device)
        rewards, happened = found.steps[..., 0].view(torch.float32), found.steps[..., 1]
        first_end = torch.where(ended_of(happened) != 0, steps, self.n_step).amin(1)  # n where the episode goes on
        counted = steps <= first_end.unsqueeze(1)
        weights = torch.pow(self.gamma, steps.to(torch.float32))
        reward = torch.where(counted, weights * rewards, 0.0).sum(1)
        taken = (first_end + 1).clamp(max=self.n_step)

        last_row = row + taken - 1
        last = happened.gather(1, (taken - 1).unsqueeze(1)).squeeze(1)
        terminated, truncated = ended_of(last) == TERMINATED, ended_of(last) == TRUNCATED
        kept = torch.where(truncated, env_index * self.final_slots + ((last >> 10) & (_MOST_FINALS - 1)), 0)
        lost = truncated & (self.final_of[kept] != last_row * self.num_envs + env_index)
        return Window(
            states=self._states(row, env_index, last_row, truncated, kept, found),
            action=(happened[:, 0] & 255).to(torch.int64),
            reward=reward,
            discount=torch.where(terminated, 0.0, torch.pow(self.gamma, taken.to(torch.float32))),
            weight=torch.where(lost, 0.0, 1.0),
        )

    def _slot(self, row: Tensor, env_index: Tensor) -> Tensor:
        """Where a row, ever counted, lies in the tables."""
        slot: Tensor = (row % self.rows) * self.num_envs + env_index
        return slot

    def _states(
        self,
        row: Tensor,
        env_index: Tensor,
        last_row: Tensor,
        truncated: Tensor,
        kept: Tensor,
        found: Fetched,
    ) -> dict[str, Tensor]:
        """First the States the windows start in, then those they bootstrap from: both in one go."""
        del found
        end = torch.where(truncated, self.rows * self.num_envs + kept, self._slot(row + self.n_step, env_index))
        place = torch.cat([self._slot(row, env_index), end])
        stacks = place
        if self.stacked:
            cut = torch.cat([torch.zeros_like(truncated), truncated])
            rows, num_envs = torch.cat([row, row + self.n_step]), torch.cat([env_index, env_index])
            stacks = self._stacks(rows, num_envs, torch.cat([row, last_row]), cut)
            stacks = torch.cat([stacks[:, :-1], place.unsqueeze(1)], 1)
        states = {}
        for name, words in self._words.items():
            at, like = stacks if name in self.stacked else place, self.states[name]
            states[name] = words[at].view(like.dtype).view(*at.shape, *like.shape[1:])
        return states

    def _stacks(self, row: Tensor, env_index: Tensor, last_row: Tensor, cut: Tensor) -> Tensor:
        """(M, frames): places of the frames up to `row`, oldest first, or of a cut episode up to what came after `last_row`.

        Before an episode's first frame there is only that frame.
        """
        newest = torch.where(cut, last_row + 1, row)
        # How far back each goes without leaving its episode; the end of a cut one itself is no border.
        back = torch.arange(1, self.frames, device=self.device)
        earlier = newest.unsqueeze(1) - back  # (M, frames - 1), nearest first
        before = self.tables["step"][self._slot(earlier, env_index.unsqueeze(1))]
        steps = self._steps_back((earlier < 0) | (ended_of(before[..., 1]) != 0), cut)
        return self._slot(newest.unsqueeze(1) - steps, env_index.unsqueeze(1))

    def _steps_back(self, border: Tensor, cut: Tensor) -> Tensor:
        """(M, frames): how many steps before the newest frame each one lies, oldest first.

        border (M, frames - 1) says, nearest first, before which step an episode begins; the end of a cut one (M,) is none.
        """
        border = border & ~(cut.unsqueeze(1) & (torch.arange(self.frames - 1, device=self.device) == 0))
        reach = (~border).to(torch.int64).cumprod(1).sum(1)
        return torch.minimum(torch.arange(self.frames - 1, -1, -1, device=self.device), reach.unsqueeze(1))

    def observe(self, window: Window) -> Batch:
        """Make the observations of windows."""
        size = window.action.shape[0]
        hidden = {name: x.expand(2 * size, *x.shape[1:]) for name, x in self._hidden.items()}
        state = self.rules.game.State(**window.states, **hidden)
        obs = self.rules.game.observe(self.rules.config, state)
        following = self.rules.game.State(*(x[size:] for x in state))
        return Batch(
            obs=obs[:size],
            action=window.action,
            reward=window.reward,
            next_obs=obs[size:],
            discount=window.discount,
            weight=window.weight,
            next_legal=legal(self.rules, following),
        )


# A step is two words, side by side so that they are found together: the bits of its reward; and from bit 0 its action, from
# bit 8 how it ended, from bit 10 where its environment keeps the State before a truncation.
STEP: dict[str, Shape] = {"step": ((2,), torch.int32)}
_MOST_FINALS = 1 << 22


def ended_of(happened: Tensor) -> Tensor:
    """0, TERMINATED or TRUNCATED, from the second word of steps."""
    return (happened >> 8) & 3


def in_words(table: Tensor) -> Tensor:
    """The rows of a contiguous table as the widest integers that fit: they are gathered in fewer, larger pieces."""
    if table.dim() == 1:
        return table
    flat = table.flatten(1)
    size = flat.shape[1] * table.element_size()
    for dtype in (torch.int64, torch.int32, torch.int16):
        if size % dtype.itemsize == 0 and dtype.itemsize > table.element_size():
            return flat.view(dtype)
    return flat


def shapes_seen(rules: Rules, state: Any) -> dict[str, Shape]:
    """The fields of a State that observations read, and so must be stored."""
    return {k: (x.shape[1:], x.dtype) for k, x in state._asdict().items() if k not in rules.game.HIDDEN}
