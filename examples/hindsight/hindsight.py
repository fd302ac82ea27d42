"""States on the device, replayed with goals reached later (hindsight experience replay, Andrychowicz et al. 2017).

Even a lost game shows how to reach the States that it did reach. Four of five samples therefore get a goal that a later State
of the same episode achieved, and the reward for that goal. Replay stores States and builds observations when it samples, so
relabelling only changes a field of the State.

The game defines, besides its rules,

    achieved(config, state) -> goal                    the goal that each State achieves, (N, …)
    with_goal(config, state, goal) -> state            the same States with other goals
    judge(config, state) -> reward, terminated         outcome of reaching these States, by their own goals
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from redline.core import random
from redline.core.errors import UserError
from redline.core.records import Batch
from redline.replay import device
from redline.replay.contract import Location, Replay, ReplayRequest, TransitionBytes
from redline.replay.windows import Window, ending_of

LOCATION = Location.DEVICE
SHARE = 0.8  # fraction of the samples that get a new goal
HORIZON = 32  # a new goal is achieved at most this many steps later


def make(request: ReplayRequest) -> Replay:
    """Allocate a memory on the device of `request.state`."""
    return HindsightReplay(request)


def bytes_per_transition(state_bytes: int) -> TransitionBytes:
    """Return the estimate of `device` replay: relabelling stores nothing extra."""
    return device.bytes_per_transition(state_bytes)


class HindsightReplay(device.DeviceReplay):
    """A ring of States whose samples may have a different goal from the one the agent played for."""

    def __init__(self, request: ReplayRequest) -> None:
        game = request.rules.game
        missing = [name for name in ("achieved", "with_goal", "judge") if not hasattr(game.module, name)]
        if missing:
            raise UserError(f"replay is hindsight, but the game has no goals: it does not define {', '.join(missing)}.")
        if request.n_step != 1:
            raise UserError(
                f"n_step is {request.n_step}; hindsight needs 1: rewards of several steps are not recomputed."
            )
        super().__init__(request)
        self.goals: Any = game.module

    def sample(self, key: Tensor, size: int, beta: Tensor | float = 1.0, number: Tensor | None = None) -> Batch:
        del number
        draw = self.ring.draw(key, size)
        window, states = self._read(draw.row, draw.env_index)
        window, states = self._relabel(random.fold(key, 1), window, states)
        return self.ring.weigh(self.windows.observe(window, states), draw, beta)

    def _read(self, row: Tensor, env_index: Tensor) -> tuple[Window, dict[str, Tensor]]:
        steps = self.steps[self.ring.slot(row, env_index)].unsqueeze(1)
        window = self.windows.fold(row, env_index, steps)
        return window, self._find_states(window)

    def _relabel(self, key: Tensor, window: Window, states: dict[str, Tensor]) -> tuple[Window, dict[str, Tensor]]:
        """Give most samples a goal that a later State of their episode achieved."""
        config, size, number = (
            self.windows.rules.config,
            window.row.shape[0],
            torch.arange(window.row.shape[0], device=self.device),
        )
        later, found = self._later_state(key, window)
        goal = self.goals.achieved(config, self.windows.state(later))
        chosen = found & (random.uniform(random.bits(key, 2 * number + 1)) < SHARE)
        both = self.windows.state(states)
        relabelled = self.goals.with_goal(config, both, torch.cat([goal, goal]))
        pairs = zip(states, (getattr(relabelled, name) for name in states), strict=True)
        twice = torch.cat([chosen, chosen])
        states = {name: torch.where(_like(twice, new), new, states[name]) for name, new in pairs}
        reward, terminated = self.goals.judge(config, type(relabelled)(*(field[size:] for field in relabelled)))
        discount = torch.where(terminated, 0.0, self.windows.gamma)
        return (
            window._replace(
                reward=torch.where(chosen, reward, window.reward),
                discount=torch.where(chosen, discount, window.discount),
            ),
            states,
        )

    def _later_state(self, key: Tensor, window: Window) -> tuple[dict[str, Tensor], Tensor]:
        """Return a random later State (B, …) of the same episode, and whether there is one, (B,) bool.

        The State after the last step of an episode is never chosen: the ring does not store it, or not in order.
        """
        row, env_index = window.row, window.env_index
        number = torch.arange(HORIZON, device=self.device)
        ahead = row.unsqueeze(1) + number
        ended = ending_of(self.steps[self.ring.slot(ahead, env_index.unsqueeze(1))][..., 1]) != 0
        stored = ahead + 1 < self.written
        follows = (stored & ~ended).to(torch.int64).cumprod(1).sum(1)  # States of this episode after the first
        chance = random.bits(key, 2 * torch.arange(row.shape[0], device=self.device))
        offset = 1 + random.below(chance, follows.clamp(min=1))
        slot = self.ring.slot(row + offset, env_index)
        return {name: table[slot] for name, table in self.states.items()}, follows > 0


def _like(mask: Tensor, tensor: Tensor) -> Tensor:
    return mask.view(-1, *(1,) * (tensor.dim() - 1))
