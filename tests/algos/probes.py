"""Small games whose best play is known, for learners from fresh play."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from redline.core import random
from redline.core.records import Events, Spec
from redline.envs import batch
from redline.envs.batch import Rules


class State(NamedTuple):
    place: Tensor  # (N,) int32: 0 to 4
    clock: Tensor  # (N,) int32: steps of the episode
    key: Tensor  # (N,) int32


Outcome = tuple[Tensor, Tensor, Tensor]  # next place, reward, terminated
Step = Callable[[State, Tensor], Outcome]


def probe(
    step: Step,
    start: Callable[[Tensor], Tensor] = torch.zeros_like,
    time_limit: int = 0,
    masked: bool = False,
    afterstates: bool = False,
    cut_at: int = 0,
) -> Rules:
    """A game of five places, of which the player sees one alight; or for each action its reward and the place it leads to.

    The rules themselves truncate after `cut_at` steps, unless it is 0.
    """
    actions = 3 if masked else 2

    def init(config: Any, key: Tensor) -> State:
        del config
        return State(start(key).to(torch.int32), torch.zeros_like(key), key)

    def play(config: Any, state: State, action: Tensor) -> tuple[State, Tensor, Tensor, Events]:
        del config
        place, reward, terminated = step(state, action)
        never = torch.zeros_like(terminated)
        after = State(place.to(torch.int32), state.clock + 1, state.key)
        truncated = after.clock >= cut_at if cut_at else never
        return after, reward.to(torch.float32), terminated, Events(torch.zeros_like(state.clock), never, truncated)

    def observe(config: Any, state: State) -> Tensor:
        del config
        if not afterstates:
            return F.one_hot(state.place.to(torch.int64), 5).to(torch.uint8)
        rows = []
        for action in range(actions):
            place, reward, terminated = step(state, torch.full_like(state.place, action))
            lights = F.one_hot(place.to(torch.int64), 5) * ~terminated.unsqueeze(1)
            rows.append(torch.cat([reward.to(torch.float32).unsqueeze(1), lights.to(torch.float32)], 1))
        return torch.stack(rows, 1)

    def legal(config: Any, state: State) -> Tensor:
        del config
        found = F.one_hot(state.place.to(torch.int64) % 2, 3).bool()
        found[:, 2] = True
        return found

    def spec(config: Any) -> Spec:
        del config
        shape = (actions, 6) if afterstates else (5,)
        dtype, scale = (torch.float32, (1.0,) * 6) if afterstates else (torch.uint8, (1.0,) * 5)
        flags = {"masked": masked, "afterstates": afterstates, "truncates": cut_at > 0}
        return Spec(shape, dtype, scale, 1, actions, "points", **flags)

    game = SimpleNamespace(
        State=State, HIDDEN=("clock", "key"), init=init, step=play, observe=observe, spec=spec, legal=legal
    )
    return Rules(game, None, time_limit)  # type: ignore[arg-type]


def anywhere(key: Tensor) -> Tensor:
    return random.below(random.bits(key, 0), 5)


def paid_by_place(state: State, action: Tensor) -> Outcome:
    del action
    return state.place, state.place * 0.25, torch.ones_like(state.place, dtype=torch.bool)


def paid_by_action(state: State, action: Tensor) -> Outcome:
    return state.place, torch.where(action == state.place % 2, 1.0, -1.0), torch.ones_like(action, dtype=torch.bool)


def choose_then_earn(state: State, action: Tensor) -> Outcome:
    """Place 0: nothing yet, action 1 leads to place 2, action 0 to 1. Then place 2 pays 1 and the game is over."""
    choosing = state.place == 0
    return torch.where(choosing, 1 + action, state.place), (state.place == 2).float(), ~choosing


def stand_still(state: State, action: Tensor) -> Outcome:
    """A reward of 1 for whatever is done, for ever."""
    del action
    return state.place, torch.ones_like(state.place), torch.zeros_like(state.place, dtype=torch.bool)


def end_every_fourth(state: State, action: Tensor) -> Outcome:
    return *stand_still(state, action)[:2], state.clock == 3


def seen_at(rules: Rules, place: int) -> tuple[Tensor, Tensor | None]:
    none = torch.zeros(1, dtype=torch.int32)
    state = State(none + place, none, none)
    return rules.game.observe(None, state), batch.legal(rules, state)
