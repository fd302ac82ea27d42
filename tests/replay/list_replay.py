"""A replay memory in plain Python, and transitions whose every number says which environment, step and field it is from.

Used as the reference for all kinds of replay.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from redline.core.records import Batch, Episode, Spec, Step
from redline.envs.batch import Rules
from redline.replay.device import DeviceReplay

RUNNING, TERMINATED, TRUNCATED = 0, 1, 2


class State(NamedTuple):
    """A number that no other State has, in two shapes, and a field observations never read."""

    stamp: Tensor  # (N,) int32
    board: Tensor  # (N, 2, 3) int16: the stamp in every cell
    secret: Tensor  # (N,) int64


def observe(config: Any, state: State) -> Tensor:
    """(N, 8): stamp, six cells, secret."""
    del config
    columns = (state.stamp.unsqueeze(1), state.board.flatten(1), state.secret.unsqueeze(1))
    return torch.cat([x.to(torch.int64) for x in columns], 1)


def rules_of(masked: bool) -> Rules:
    """With masks, bit b of a State's stamp says whether action b is legal in it."""
    spec = Spec((8,), torch.int64, (1.0,) * 8, 1 << 14, 5, "points", masked=masked)

    def legal(config: Any, state: State) -> Tensor:
        del config
        assert masked, "masks of a game without masks"
        return (state.stamp.unsqueeze(1) >> torch.arange(5)) & 1 == 1

    game = SimpleNamespace(State=State, HIDDEN=("secret",), observe=observe, spec=lambda _: spec, legal=legal)
    return Rules(game, None, 0)  # type: ignore[arg-type]


RULES = rules_of(masked=False)


def states(stamps: list[int]) -> State:
    stamp = torch.tensor(stamps, dtype=torch.int32)
    board = stamp.to(torch.int16).view(-1, 1, 1).expand(-1, 2, 3).clone()
    return State(stamp, board, torch.full((len(stamps),), 77))


def seen(stamp: int) -> list[int]:
    """The observation of a State that was stored: what is hidden reads as 0."""
    return [stamp] * 7 + [0]


class Transition(NamedTuple):
    stamp: int
    action: int
    reward: float
    ended: int
    final: int  # stamp of the State after the action, before any reset


class ListReplay:
    """The reference: lists of all transitions of each environment, read with plain loops."""

    def __init__(self, num_envs: int, rows: int, n_step: int, gamma: float, finals: int) -> None:
        self.rows, self.n_step, self.gamma, self.finals = rows, n_step, gamma, finals
        self.played: list[list[Transition]] = [[] for _ in range(num_envs)]

    def places(self) -> list[tuple[int, int]]:
        """(row, environment) of each start whose whole window, and the State after it, is in memory."""
        written = len(self.played[0])
        oldest = max(0, written - self.rows)
        return [
            (row, env_index) for row in range(oldest, written - self.n_step) for env_index in range(len(self.played))
        ]

    def window(self, row: int, env_index: int) -> dict[str, Any]:
        history = self.played[env_index]
        reward, discount, last = 0.0, 1.0, row
        for last in range(row, row + self.n_step):
            reward += discount * history[last].reward
            discount *= self.gamma
            if history[last].ended != RUNNING:
                break
        # A later truncation takes the next slot for final States; the oldest is reused once another step is written.
        later = sum(t.ended == TRUNCATED for t in history[last + 1 : -1])
        ended = history[last].ended
        return {
            "obs": seen(history[row].stamp),
            "action": history[row].action,
            "reward": reward,
            "discount": 0.0 if ended == TERMINATED else discount,
            "next_obs": seen(history[last].final),
            "weight": 0.0 if ended == TRUNCATED and later >= self.finals else 1.0,
        }


class Writable(Protocol):
    def write(self, state: Any, action: Tensor, step: Step) -> None: ...


def play(memory: Writable, naive: ListReplay, endings: list[list[int]], first: int = 1) -> None:
    """Write a row for each of `endings` (one per environment) into both. Numbers count from `first`."""
    num_envs = len(naive.played)
    fresh = iter(range(first, 1 << 14))
    now = [next(fresh) for _ in range(num_envs)]
    for row, ended in enumerate(endings):
        action = [(row * num_envs + env_index) % 251 for env_index in range(num_envs)]
        reward = [float(next(fresh)) for _ in range(num_envs)]
        final = [next(fresh) for _ in range(num_envs)]
        step = Step(
            reward=torch.tensor(reward),
            terminated=torch.tensor([e == TERMINATED for e in ended]),
            truncated=torch.tensor([e == TRUNCATED for e in ended]),
            won=torch.zeros(num_envs, dtype=torch.bool),
            final_state=states(final),
            episode=Episode(*(torch.zeros(num_envs) for _ in range(3))),
        )
        memory.write(states(now), torch.tensor(action), step)
        for env_index in range(num_envs):
            naive.played[env_index].append(
                Transition(now[env_index], action[env_index], reward[env_index], ended[env_index], final[env_index])
            )
        now = [final[env_index] if ended[env_index] == RUNNING else next(fresh) for env_index in range(num_envs)]


def batch_of(memory: DeviceReplay, places: list[tuple[int, int]]) -> Batch:
    row, env_index = torch.tensor(places).unbind(1)
    return memory.batch(row, env_index)


def assert_same(found: Batch, places: list[tuple[int, int]], naive: ListReplay) -> dict[str, int]:
    """Compare sample by sample; return how many samples of each kind there were, to know that something was tested."""
    kinds = {"terminated": 0, "lost": 0, "whole": 0}
    for number, (row, env_index) in enumerate(places):
        expected, where = naive.window(row, env_index), f"row {row}, environment {env_index}"
        assert found.obs[number].tolist() == expected["obs"], where
        assert found.action[number].item() == expected["action"], where
        assert found.reward[number].item() == expected["reward"], where
        assert found.discount[number].item() == expected["discount"], where
        assert found.weight[number].item() == expected["weight"], where
        kinds["terminated"] += expected["discount"] == 0.0
        kinds["lost"] += expected["weight"] == 0.0
        if expected["discount"] and expected["weight"]:  # else next_obs does not matter
            kinds["whole"] += 1
            assert found.next_obs[number].tolist() == expected["next_obs"], where
    return kinds
