"""Records passed between packages, and operations on them.

A record is a NamedTuple of tensors with the batch on axis 0: immutable, a pytree for torch.compile, without hidden
state. Letters in shapes: N environments, A actions, B samples, H rows and W columns of a board.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

# Any NamedTuple of tensors: a game's State, a Step, a Batch.
RecordT = TypeVar("RecordT", bound=tuple[Any, ...])
# Hardware classes: a CPU with up to 4 cores, or more; a GPU below 10 GB, below 30 GB or without bfloat16 (T4), or above.
Tier = Literal["cpu-few", "cpu-many", "gpu-small", "gpu-mid", "gpu-large"]


class Ending(IntEnum):
    """Whether and how a step ended its episode. The values are stored in replay memory; compiled code reads `.value`."""

    RUNNING = 0  # the episode continues
    TERMINATED = 1  # the game is over, won or lost: its value is zero from here on
    TRUNCATED = 2  # a time limit or the rules stopped it: bootstrap from the final observation


@dataclass(frozen=True)
class Spec:
    """Shapes, dtypes and other properties of an environment that a learner needs."""

    obs_shape: tuple[int, ...]  # of one observation; boards have channels first: (planes, height, width)
    obs_dtype: torch.dtype
    obs_scale: tuple[float, ...]  # per channel (afterstates: per feature): factor that scales usual values to about 1
    obs_high: float  # largest value in an observation
    num_actions: int
    score_name: str  # noun for the score, such as "foods"
    obs_low: float = 0  # smallest value in an observation
    masked: bool = False  # some actions can be illegal: use the game's `legal`
    afterstates: bool = (
        False  # an observation is (A, F): row a describes the board after action a, feature 0 its reward
    )
    # Rows and columns of the board, if its cells are features 1 to H * W of an afterstate, row by row; else None.
    afterstate_board: tuple[int, int] | None = None
    frames: int = 1  # number of stacked frames in an observation, the newest last
    truncates: bool = False  # the rules can truncate an episode (Events.truncated)
    limit: int = 0  # most steps in an episode before the rules truncate it; 0: unknown
    winnable: bool = True  # a game can be won (Events.won); False: win rates are meaningless and not shown


class Events(NamedTuple):
    """Results of a game's step other than reward and termination. Each (N,)."""

    score: Tensor  # int32: increase of the score (Snake: foods eaten)
    won: Tensor  # bool: the game ended and was won
    truncated: Tensor  # bool: the rules stop the episode without a loss (Snake: starvation)


class Episode(NamedTuple):
    """Statistics of the current episode; in a Step, of the episode that the step belongs to. Each (N,)."""

    length: Tensor  # int32: steps
    score: Tensor  # int32
    episode_return: Tensor  # float32: sum of rewards


class Step(NamedTuple):
    """One step of N environments with same-step auto-reset. Each tensor is (N, …)."""

    reward: Tensor  # float32
    terminated: Tensor  # bool: the game is over; do not bootstrap
    truncated: Tensor  # bool: stopped by a time limit or by the rules; bootstrap from final_state
    won: Tensor  # bool: terminated by winning
    final_state: Any  # the game's State after the action, before any reset; the next state where the episode continues
    episode: Episode  # statistics including this step; final where terminated | truncated


class Batch(NamedTuple):
    """Sampled transitions for a value learner. Each (B, …)."""

    obs: Tensor  # observation; (B, 1, F), the row of `action`, where the game has `observe_afterstate`
    action: Tensor  # int64
    reward: Tensor  # float32: discounted n-step sum
    next_obs: Tensor  # observation to bootstrap from
    discount: Tensor  # float32: gamma ** steps taken, 0 where the game terminated
    weight: Tensor  # float32: importance weight; 1 without priorities, 0 for a sample to ignore
    next_legal: Tensor | None = None  # (B, A) bool: legal actions in next_obs; None: all
    place: Tensor | None = None  # int64: index of the transition in a prioritized replay memory


class PolicyInput(NamedTuple):
    """Input of a behaviour policy for a subset of N environments."""

    obs: Tensor  # (N, …)
    legal: Tensor | None  # (N, A) bool; None: all actions are legal
    key: Tensor  # () int32: root of the policy's random streams
    env_index: Tensor  # (N,) int64: indices among all environments
    num_envs: int  # number of all environments
    draw: Tensor  # () int64: counter of random draws, unique for every action of an environment
    acted: Tensor  # () int64: number of actions that every environment has already taken
    progress: Tensor  # () float32: fraction of training done, 0 to 1


class Transition(NamedTuple):
    """One step of all environments, passed from a collector to a learner. Each (N, …)."""

    state: Any  # the game's State before the action
    action: Tensor  # int64
    step: Step


@dataclass(frozen=True)
class Hardware:
    """Machine properties that settings depend on."""

    device: str  # cpu, cuda, cuda:1, mps
    name: str  # model of the CPU or GPU
    cores: int
    memory_gb: float  # of the training device
    bf16: bool  # bfloat16 matrix products in hardware
    compiler: str  # C++ compiler; empty: none
    capability: tuple[int, int] = (0, 0)  # CUDA compute capability

    @property
    def kind(self) -> str:
        """Device type without its index: cpu, cuda or mps."""
        return self.device.split(":")[0]

    @property
    def tier(self) -> Tier:
        """Hardware class by which recipes choose settings. An Apple GPU counts as its CPU."""
        if self.kind != "cuda":
            return "cpu-few" if self.cores <= 4 else "cpu-many"
        if self.memory_gb < 10:
            return "gpu-small"
        return "gpu-mid" if self.memory_gb < 30 or self.capability < (8, 0) else "gpu-large"


def map_record(function: Callable[..., Tensor], *records: RecordT) -> RecordT:
    """Return a record made by applying `function` field by field to records of one type, including nested ones."""
    first = records[0]
    values = (
        map_record(function, *fields) if isinstance(fields[0], tuple) else function(*fields)
        for fields in zip(*records, strict=True)
    )
    return first._make(values)  # type: ignore[attr-defined,no-any-return]


def where(condition: Tensor, yes: RecordT, no: RecordT) -> RecordT:
    """Return the fields of `yes` where `condition` (N,) bool is True, else those of `no`."""

    def choose(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(condition.view(-1, *(1,) * (a.dim() - 1)), a, b)

    return map_record(choose, yes, no)


def leaves(record: tuple[Any, ...], prefix: str = "") -> dict[str, Tensor]:
    """Return all tensors of a record by dotted name, omitting fields that are None."""
    tensors: dict[str, Tensor] = {}
    for name, value in zip(record._fields, record, strict=True):  # type: ignore[attr-defined]
        if isinstance(value, tuple):
            tensors.update(leaves(value, f"{prefix}{name}."))
        elif value is not None:
            tensors[prefix + name] = value
    return tensors


def from_leaves(like: RecordT, tensors: dict[str, Tensor], prefix: str = "") -> RecordT:
    """Return a record of the type of `like` from tensors by dotted name: the inverse of `leaves`."""
    values = (
        from_leaves(value, tensors, f"{prefix}{name}.") if isinstance(value, tuple) else tensors[prefix + name]
        for name, value in zip(like._fields, like, strict=True)  # type: ignore[attr-defined]
    )
    return like._make(values)  # type: ignore[attr-defined,no-any-return]


def assign(target: RecordT, source: RecordT) -> None:
    """Copy `source` into the static buffers of `target`."""
    map_record(lambda a, b: a.copy_(b), target, source)
