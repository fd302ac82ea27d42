"""The ring on the device: States are stored, observations are made when they are sampled.

        lane 0  lane 1  …  lane N-1
    t     s a r   s a r       s a r     A row holds what all lanes did in one step; the next row of a lane holds its next
    t+1   s a r   s a r       s a r     State. So a State is stored once and a transition costs one State, not two.

Where an episode was cut short (truncated) the next row already belongs to another game. The State to bootstrap from is then
kept in a small side ring of the lane, `finals`. Where the side ring has moved on before the main ring, the sample's weight
is 0: no sample ever bootstraps across a reset. Everything is a static tensor and every method runs without the host
knowing a number, so that a whole iteration can be captured as one CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from redline.core import random
from redline.core.errors import UserError
from redline.core.records import Batch, Step
from redline.envs.batch import Rules, legal

TERMINATED, TRUNCATED = 1, 2  # values of `ended`


class Ring:
    """Transitions of N lanes, the last `rows` steps of each."""

    def __init__(
        self, rules: Rules, state: Any, capacity: int, n_step: int, gamma: float, finals: int | None = None
    ) -> None:
        """`state` (N, …) is an example of the game's State; it gives number of lanes, shapes, dtypes and device.

        `finals` is how many States before a truncation each lane keeps.
        """
        self.rules, self.n_step, self.gamma = rules, n_step, gamma
        self.lanes = state[0].shape[0]
        self.device = state[0].device
        self.rows = capacity // self.lanes
        if self.rows < n_step + 2:
            raise UserError(
                f"replay_capacity is {capacity:,}; {self.lanes:,} environments with {n_step}-step returns need at least "
                f"{self.lanes * (n_step + 2):,} transitions. Take more capacity or fewer environments."
            )
        # One slot more than is kept: each step's final State is written there, and stays if the episode was cut short.
        self.final_slots = 1 + (max(1, self.rows // 16) if finals is None else finals)
        seen = {name: x for name, x in state._asdict().items() if name not in rules.game.HIDDEN}
        hidden = {name: torch.zeros_like(x[:1]) for name, x in state._asdict().items() if name in rules.game.HIDDEN}
        self._hidden = hidden  # a State rebuilt for `observe` holds zeros where `observe` and `legal` never look

        def table(size: int, like: Tensor) -> Tensor:
            return torch.zeros(size, *like.shape[1:], dtype=like.dtype, device=self.device)

        size = self.rows * self.lanes
        self.states = {name: table(size, x) for name, x in seen.items()}
        integer = {"dtype": torch.int64, "device": self.device}
        kept = self.lanes * self.final_slots
        self.finals = {name: table(kept, x) for name, x in seen.items()}
        self.final_of = torch.full((kept,), -1, **integer)  # transition a final State belongs to
        self.action = torch.zeros(size, dtype=torch.uint8, device=self.device)
        self.reward = torch.zeros(size, dtype=torch.float32, device=self.device)
        self.ended = torch.zeros(size, dtype=torch.uint8, device=self.device)
        self.final_slot = torch.zeros(size, dtype=torch.int32, device=self.device)  # where its final State was written
        self.written = torch.zeros((), **integer)  # rows ever written
        self.cuts = torch.zeros(self.lanes, dtype=torch.int32, device=self.device)  # truncations of each lane so far

    @property
    def bytes_per_transition(self) -> float:
        size = sum(x.numel() * x.element_size() for x in self.tensors().values())
        return float(size / (self.rows * self.lanes))

    def tensors(self) -> dict[str, Tensor]:
        """Everything that makes up the memory, by name: for checkpoints."""
        named = {f"states.{k}": v for k, v in self.states.items()} | {f"finals.{k}": v for k, v in self.finals.items()}
        for name in ("final_of", "action", "reward", "ended", "final_slot", "written", "cuts"):
            named[name] = getattr(self, name)
        return named

    def clear(self) -> None:
        """Forget everything."""
        for tensor in (self.written, self.cuts, self.ended):
            tensor.zero_()
        self.final_of.fill_(-1)

    def write(self, state: Any, action: Tensor, step: Step) -> None:
        """Append one row: the States (N, …) the actions (N,) were taken in, and what came of them."""
        lane = torch.arange(self.lanes, device=self.device)
        slot = (self.written % self.rows) * self.lanes + lane
        for name, table in self.states.items():
            table.index_copy_(0, slot, getattr(state, name))
        self.action.index_copy_(0, slot, action.to(torch.uint8))
        self.reward.index_copy_(0, slot, step.reward)
        ended = step.terminated.to(torch.uint8) * TERMINATED + step.truncated.to(torch.uint8) * TRUNCATED
        self.ended.index_copy_(0, slot, ended)

        kept = lane * self.final_slots + self.cuts % self.final_slots
        self.final_slot.index_copy_(0, slot, kept.to(torch.int32))
        self.final_of.index_copy_(0, kept, self.written * self.lanes + lane)
        for name, table in self.finals.items():
            table.index_copy_(0, kept, getattr(step.final_state, name))
        self.cuts += step.truncated
        self.written += 1

    def draw(self, key: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Uniform places to start a sample: rows ever counted and lanes, each (size,) int64. key () int32."""
        number = torch.arange(size, device=self.device)
        held = self.written.clamp(max=self.rows)
        # The last n rows are left out: the row a full n-step window bootstraps from is not written yet.
        offset = random.below(random.bits(key, 2 * number), held - self.n_step)
        lane = random.below(random.bits(key, 2 * number + 1), self.lanes)
        return self.written - held + offset, lane

    def sample(self, key: Tensor, size: int) -> Batch:
        """`size` transitions drawn uniformly with replacement, as n-step windows with observations made."""
        return self.batch(*self.draw(key, size))

    def batch(self, row: Tensor, lane: Tensor) -> Batch:
        """The n-step windows that start at the given rows (ever counted) and lanes, each (B,) int64."""
        step = torch.arange(self.n_step, device=self.device)
        window = ((row.unsqueeze(1) + step) % self.rows) * self.lanes + lane.unsqueeze(
            1
        )  # (B, n): places in the tables
        ended = self.ended[window]
        first_end = torch.where(ended != 0, step, self.n_step).amin(1)  # n where the episode goes on
        counted = step <= first_end.unsqueeze(1)
        weights = torch.pow(self.gamma, step.to(torch.float32))
        reward = torch.where(counted, weights * self.reward[window], 0.0).sum(1)
        taken = (first_end + 1).clamp(max=self.n_step)

        last_row = row + taken - 1
        last = (last_row % self.rows) * self.lanes + lane
        terminated, truncated = self.ended[last] == TERMINATED, self.ended[last] == TRUNCATED
        kept = torch.where(truncated, self.final_slot[last], 0).to(torch.int64)
        lost = truncated & (self.final_of[kept] != last_row * self.lanes + lane)

        # Both observations in one go: first the States the windows start in, then those they bootstrap from.
        size = row.shape[0]
        following = ((row + self.n_step) % self.rows) * self.lanes + lane
        places = torch.cat([window[:, 0], following])
        cut = torch.cat([torch.zeros_like(truncated), truncated])
        finals = torch.cat([torch.zeros_like(kept), kept])

        def gather(name: str, table: Tensor) -> Tensor:
            broad = cut.view(-1, *(1,) * (table.dim() - 1))
            return torch.where(broad, self.finals[name][finals], table[places])

        state = self._state({name: gather(name, table) for name, table in self.states.items()})
        obs = self.rules.game.observe(self.rules.config, state)
        following_state = self.rules.game.State(*(x[size:] for x in state))
        return Batch(
            obs=obs[:size],
            action=self.action[window[:, 0]].to(torch.int64),
            reward=reward,
            next_obs=obs[size:],
            discount=torch.where(terminated, 0.0, torch.pow(self.gamma, taken.to(torch.float32))),
            weight=torch.where(lost, 0.0, 1.0),
            next_legal=legal(self.rules, following_state),
        )

    def _state(self, fields: dict[str, Tensor]) -> Any:
        size = next(iter(fields.values())).shape[0]
        hidden = {name: x.expand(size, *x.shape[1:]) for name, x in self._hidden.items()}
        return self.rules.game.State(**fields, **hidden)
