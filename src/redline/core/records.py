"""The records that travel between the folders, and the few operations on them.

A record is a NamedTuple of tensors with the batch on axis 0: immutable, a pytree for torch.compile, and free of hidden state.
N games, C cells, A actions, B samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

# Any NamedTuple of tensors: a game's State, a Step, a Batch.
RecordT = TypeVar("RecordT", bound=tuple[Any, ...])
# Classes of machines: a CPU of up to 4 cores or more; a GPU below 10 GB, up to 30 GB or without bfloat16 (T4, RTX), above.
Tier = Literal["cpu-few", "cpu-many", "gpu-small", "gpu-mid", "gpu-large"]
EnvKind = Literal["tensor", "process"]  # tensor games on the device, or environments that the host must step


@dataclass(frozen=True)
class Spec:
    """What a learner must know of an environment."""

    obs_shape: tuple[int, ...]  # of one observation, channels first for boards: (planes, height, width)
    obs_dtype: torch.dtype
    obs_scale: tuple[float, ...]  # per channel (afterstates: per feature): brings what is usually seen to about 1
    obs_high: float  # largest value an observation holds
    num_actions: int
    score_name: str  # what the score counts, in the player's words
    obs_low: float = 0  # smallest value an observation holds
    masked: bool = False  # some actions may be illegal: the game's `legal` matters
    afterstates: bool = False  # an observation is (A, F): row a describes what action a leads to, feature 0 its reward
    frames: int = 1  # an observation shows so many of the State's STACKED frames, the newest last
    truncates: bool = False  # the rules themselves may cut an episode short (Events.truncated)
    limit: int = 0  # steps after which they do so at the latest, where that is known


class Events(NamedTuple):
    """What a step of a game brought besides its reward. Each (N,)."""

    score: Tensor  # int32: added to the game's own count (Snake: foods)
    won: Tensor  # bool: the game is over and won
    truncated: Tensor  # bool: the rules ask for an end that is no death (Snake: starvation)


class Episode(NamedTuple):
    """The episode under way; of the one that just ended where a Step says so. Each (N,)."""

    length: Tensor  # int32: steps
    score: Tensor  # int32
    episode_return: Tensor  # float32: sum of rewards


class Step(NamedTuple):
    """One step of N games with same-step auto-reset. `S` is the game's State; each tensor (N, …)."""

    reward: Tensor  # float32
    terminated: Tensor  # bool: the game ended; its value is what was earned
    truncated: Tensor  # bool: cut short (time limit, starvation); bootstrap from final_state
    won: Tensor  # bool: terminated by winning
    final_state: Any  # State after the action and before any reset; equals the next state where nothing ended
    episode: Episode  # counts including this step; an episode's result where terminated | truncated


class Batch(NamedTuple):
    """Sampled transitions for a value learner. Each (B, …)."""

    obs: Tensor  # observation
    action: Tensor  # int64
    reward: Tensor  # float32: discounted n-step sum
    next_obs: Tensor  # observation to bootstrap from
    discount: Tensor  # float32: gamma ** steps taken, 0 where the game terminated
    weight: Tensor  # float32: 0 for a sample that must not count, else 1 (or an importance weight)
    next_legal: Tensor | None = None  # (B, A) bool: actions that may be taken in next_obs; None: all, always
    place: Tensor | None = None  # int64: which transition of a memory with priorities this is


class PolicyInput(NamedTuple):
    """What a behaviour policy is asked: some of the environments, to be moved."""

    obs: Tensor  # (N, …)
    legal: Tensor | None  # (N, A) bool; None: all actions are
    key: Tensor  # () int32: root of the policy's random streams
    env_index: Tensor  # (N,) int64: their numbers among all
    num_envs: int  # of all
    draw: Tensor  # () int64: number of the draw; no two turns of a environment have the same
    acted: Tensor  # () int64: turns every environment has had before
    progress: Tensor  # () float32: share of training done


class Transition(NamedTuple):
    """What a collector hands to a learner: one step of all environments. Each (N, …)."""

    state: Any  # the game's State the action was taken in
    action: Tensor  # int64
    step: Step


@dataclass(frozen=True)
class Runtime:
    """How a learner's functions are to be run; made by `engine`, handed to learners."""

    device: torch.device
    amp_dtype: torch.dtype | None = None  # matrix products in bfloat16 or float16; None: float32
    compile: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function
    folder: Path = Path(".")  # for what a learner keeps on disk
    notify: Callable[[str], None] = print  # tells the user

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=self.amp_dtype, enabled=self.amp_dtype is not None)


@dataclass(frozen=True)
class Hardware:
    """What the machine has, as far as settings follow from it."""

    device: str  # cpu, cuda, cuda:1, mps
    name: str  # of the processor or the GPU
    cores: int
    memory_gb: float  # of the device that trains
    bf16: bool  # the device multiplies bfloat16 matrices in hardware
    compiler: str  # C++ compiler found, empty: none
    capability: tuple[int, int] = (0, 0)  # CUDA compute capability

    @property
    def kind(self) -> str:
        return self.device.split(":")[0]

    @property
    def tier(self) -> Tier:
        """The class of machine settings are chosen by. An Apple GPU counts as the CPU it comes with."""
        if self.kind != "cuda":
            return "cpu-few" if self.cores <= 4 else "cpu-many"
        if self.memory_gb < 10:
            return "gpu-small"
        return "gpu-mid" if self.memory_gb < 30 or self.capability < (8, 0) else "gpu-large"


def map_record(function: Callable[..., Tensor], *records: RecordT) -> RecordT:
    """Apply `function` field by field to records of one type, nested records included."""
    first = records[0]
    values = (
        map_record(function, *fields) if isinstance(fields[0], tuple) else function(*fields)
        for fields in zip(*records, strict=True)
    )
    return first._make(values)  # type: ignore[attr-defined,no-any-return]


def where(condition: Tensor, yes: RecordT, no: RecordT) -> RecordT:
    """Lane by environment: `yes` where `condition` (N,) bool, else `no`."""

    def choose(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(condition.view(-1, *(1,) * (a.dim() - 1)), a, b)

    return map_record(choose, yes, no)


def leaves(record: tuple[Any, ...], prefix: str = "") -> dict[str, Tensor]:
    """All tensors of a record by dotted name; a field that is None is left out."""
    found: dict[str, Tensor] = {}
    for name, value in zip(record._fields, record, strict=True):  # type: ignore[attr-defined]
        if isinstance(value, tuple):
            found.update(leaves(value, f"{prefix}{name}."))
        elif value is not None:
            found[prefix + name] = value
    return found


def from_leaves(like: RecordT, tensors: dict[str, Tensor], prefix: str = "") -> RecordT:
    """The inverse of `leaves`: a record shaped like `like` from tensors by dotted name."""
    values = (
        from_leaves(value, tensors, f"{prefix}{name}.") if isinstance(value, tuple) else tensors[prefix + name]
        for name, value in zip(like._fields, like, strict=True)  # type: ignore[attr-defined]
    )
    return like._make(values)  # type: ignore[attr-defined,no-any-return]


def assign(target: RecordT, source: RecordT) -> None:
    """Copy `source` into the static buffers of `target`."""
    map_record(lambda a, b: a.copy_(b), target, source)
