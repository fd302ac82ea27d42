"""n-step windows: from stored steps and States to the samples a learner gets. Shared by all replay kinds.

A step is stored as two adjacent int32 words, so that a single read gets both:

    word 0   the bits of the reward, float32
    word 1   bits 0-7 action | bits 8-9 ending | bits 10-31 slot of the final State, see `final_states`
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from redline.core.errors import UserError
from redline.core.records import Batch, Ending, Step
from redline.envs.batch import Rules, legal
from redline.replay.final_states import MAX_SLOTS, FinalStates
from redline.replay.ring import ReplayRing
from redline.replay.row_layout import Shape

TERMINATED, TRUNCATED = Ending.TERMINATED.value, Ending.TRUNCATED.value  # plain integers, for compiled code; 0: none
MAX_ACTIONS = 256
STEP_FIELD: dict[str, Shape] = {"step": ((2,), torch.int32)}


class Window(NamedTuple):
    """n-step windows, each up to its first ending, without States. Each field is (B,)."""

    row: Tensor  # int64: first row
    env_index: Tensor  # int64
    last_row: Tensor  # int64
    truncated: Tensor  # bool: the last step truncated the episode
    final_place: Tensor  # int64: index of its final State; 0 if it was not truncated
    action: Tensor  # int64
    reward: Tensor  # float32: discounted sum
    discount: Tensor  # float32: of the value to bootstrap from
    weight: Tensor  # float32: 0 where the State to bootstrap from is no longer stored, else 1


def stored_fields(rules: Rules, state: Any) -> dict[str, Shape]:
    """Return the shape and dtype, by name, of the fields of State that replay must store: those observations read."""
    return {k: (x.shape[1:], x.dtype) for k, x in state._asdict().items() if k not in rules.game.HIDDEN}


def pack_steps(action: Tensor, step: Step, final_slot: Tensor) -> Tensor:
    """Return one step of N environments as words (N, 2) int32. action (N,), final_slot (N,) int32."""
    ending = step.terminated.to(torch.int32) * TERMINATED + step.truncated.to(torch.int32) * TRUNCATED
    word = action.to(torch.int32) | (ending << 8) | (final_slot << 10)
    return torch.stack([step.reward.view(torch.int32), word], 1)


def truncate_steps(word: Tensor) -> Tensor:
    """Return the second words (N,) of steps, marked TRUNCATED where the episode continued."""
    return torch.where(ending_of(word) == 0, word | TRUNCATED << 8, word)


def ending_of(word: Tensor) -> Tensor:
    """Return 0, TERMINATED or TRUNCATED from the second words of steps."""
    return (word >> 8) & 3


def action_of(word: Tensor) -> Tensor:
    """Return the actions from the second words of steps."""
    return word & 255


def final_slot_of(word: Tensor) -> Tensor:
    """Return the slots of final States from the second words of steps."""
    return (word >> 10) & (MAX_SLOTS - 1)


class NStepWindows:
    """Turns stored steps into n-step windows and builds their observations."""

    def __init__(self, rules: Rules, state: Any, ring: ReplayRing, finals: FinalStates, gamma: float | Tensor) -> None:
        spec = rules.game.spec(rules.config)
        if spec.num_actions > MAX_ACTIONS:
            raise UserError(
                f"The game has {spec.num_actions} actions; replay stores an action in one byte and allows {MAX_ACTIONS}."
            )
        self.rules, self.ring, self.finals, self.gamma = rules, ring, finals, gamma
        self.n_step, self.frames, self.device = ring.n_step, ring.frames, ring.device
        self.stacked: tuple[str, ...] = getattr(rules.game, "STACKED", ())  # fields observed as stacks of `frames`
        # If the game supports it, only the afterstate of the action taken is observed in past States.
        self._observe_afterstate = getattr(rules.game, "observe_afterstate", None) if spec.afterstates else None
        stored = stored_fields(rules, state)
        self._hidden = {name: torch.zeros_like(x[:1]) for name, x in state._asdict().items() if name not in stored}

    def fold(self, row: Tensor, env_index: Tensor, steps: Tensor) -> Window:
        """Return the windows that start at the given rows and environments (B,) int64, up to their first ending.

        steps (B, n, 2) int32 are the stored words of the n rows from `row` on.
        """
        number = torch.arange(self.n_step, device=self.device)
        rewards, word = steps[..., 0].view(torch.float32), steps[..., 1]
        first_end = torch.where(ending_of(word) != 0, number, self.n_step).amin(1)  # n where the episode continues
        included = number <= first_end.unsqueeze(1)
        discounts = torch.pow(self.gamma, number.to(torch.float32))
        reward = torch.where(included, discounts * rewards, 0.0).sum(1)
        length = (first_end + 1).clamp(max=self.n_step)

        last_row = row + length - 1
        last = word.gather(1, (length - 1).unsqueeze(1)).squeeze(1)
        terminated, truncated = ending_of(last) == TERMINATED, ending_of(last) == TRUNCATED
        final_place = torch.where(truncated, self.finals.place(env_index, final_slot_of(last)), 0)
        lost = truncated & self.finals.overwritten(final_place, last_row, env_index)
        return Window(
            row=row,
            env_index=env_index,
            last_row=last_row,
            truncated=truncated,
            final_place=final_place,
            action=action_of(word[:, 0]).to(torch.int64),
            reward=reward,
            discount=torch.where(terminated, 0.0, torch.pow(self.gamma, length.to(torch.float32))),
            weight=torch.where(lost, 0.0, 1.0),
        )

    def steps_back(self, starts: Tensor, truncated: Tensor) -> Tensor:
        """Return how many steps each frame of a stack lies before the newest one, (M, frames), oldest first.

        starts (M, frames - 1) bool: whether an episode ended at the step 1, 2, … before the newest frame.
        truncated (M,) bool: the newest frame is a final State; the truncation just before it does not start an episode.
        An episode's first frame is repeated where earlier frames are missing.
        """
        starts = starts & ~(truncated.unsqueeze(1) & (torch.arange(self.frames - 1, device=self.device) == 0))
        available = (~starts).to(torch.int64).cumprod(1).sum(1)
        return torch.minimum(torch.arange(self.frames - 1, -1, -1, device=self.device), available.unsqueeze(1))

    def state(self, stored: dict[str, Tensor]) -> Any:
        """Return a State (M, …) made from the stored fields; the hidden ones, which observations never read, are 0."""
        size = next(iter(stored.values())).shape[0]
        hidden = {name: x.expand(size, *x.shape[1:]) for name, x in self._hidden.items()}
        return self.rules.game.State(**stored, **hidden)

    def observe(self, window: Window, states: dict[str, Tensor]) -> Batch:
        """Return a Batch of the windows. states (2 B, …): the States where windows start, then those they bootstrap from."""
        game, config, size = self.rules.game, self.rules.config, window.action.shape[0]
        state = self.state(states)
        following = game.State(*(x[size:] for x in state))
        if self._observe_afterstate is not None:
            start = game.State(*(x[:size] for x in state))
            obs = self._observe_afterstate(config, start, window.action).unsqueeze(1)
            next_obs = game.observe(config, following)
        else:
            both = game.observe(config, state)
            obs, next_obs = both[:size], both[size:]
        return make_batch(window, obs, next_obs, legal(self.rules, following))


def make_batch(window: Window, obs: Tensor, next_obs: Tensor, next_legal: Tensor | None = None) -> Batch:
    """Return a Batch of windows with observations (B, …) of the States where they start and which they bootstrap from."""
    return Batch(
        obs=obs,
        action=window.action,
        reward=window.reward,
        next_obs=next_obs,
        discount=window.discount,
        weight=window.weight,
        next_legal=next_legal,
    )
