"""Contracts of replay memories: `Replay`, the memory itself, and `ReplayKind`, a module that makes one.

Shapes: N environments, B samples of a batch, () a scalar tensor. Every tensor is on the training device.

A module that defines a kind needs

    LOCATION: Location                                          where most of its data is stored
    make(request: ReplayRequest) -> Replay                      allocate the memory
    bytes_per_transition(state_bytes: int) -> TransitionBytes   estimate its size beforehand
    FILES: tuple[str, ...] = ()                                 files it stores in the run folder, optional

and a docstring with a first line that describes the kind to users.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from redline.core.errors import UserError
from redline.core.records import Batch, Step
from redline.envs.batch import Rules
from redline.replay.priority import Priorities


class Location(IntEnum):
    """Where a replay memory is stored, from near to far."""

    DEVICE = 0  # memory of the training device
    HOST = 1  # memory of the host
    DISK = 2  # a file in the run folder


class TransitionBytes(NamedTuple):
    """Estimated bytes per transition in each location."""

    device: float = 0.0
    host: float = 0.0
    disk: float = 0.0
    snapshot: float = 0.0  # on the host, in addition to `host`, while a checkpoint that includes the memory is written


@dataclass(frozen=True)
class ReplayRequest:
    """Arguments for making a replay memory."""

    rules: Rules
    state: Any  # (N, …) example of the game's State: gives the number of environments, shapes, dtypes and device
    capacity: int  # in transitions
    n_step: int
    gamma: float | Tensor  # a () tensor may change between samples
    alpha: float | None = None  # priority exponent; None: uniform sampling
    key: Tensor | None = None  # () int32: random stream for batches that are drawn ahead of time
    batch_size: int = 1
    batches_per_iteration: int = 1
    folder: Path = Path(".")  # for files
    notify: Callable[[str], None] = print  # shows a message to the user
    pin_memory: bool = True  # page-lock host memory that is copied to and from a GPU

    @property
    def num_envs(self) -> int:
        return int(self.state[0].shape[0])

    @property
    def device(self) -> torch.device:
        device: torch.device = self.state[0].device
        return device


class Replay(ABC):
    """The last `rows` steps of N environments, sampled as n-step transitions.

    `write`, `sample` and `update_priorities` run on the device, may be compiled and captured in a CUDA graph, and never
    synchronise with the host. The other methods are called from the host, outside compiled and captured code.
    """

    rows: int  # steps of each environment that can be stored
    num_envs: int
    n_step: int
    device: torch.device
    lead: int = 0  # iterations between drawing a batch and delivering it
    in_checkpoints: bool = True  # `tensors` includes all transitions; False: a file does, and later rows overwrite it
    survives_interrupt: bool = True  # transitions are kept by `interrupt`

    @property
    def written(self) -> Tensor | None:
        """Number of rows written since the memory was empty, () int64; None if the kind does not count them."""
        return None

    @abstractmethod
    def write(self, state: Any, action: Tensor, step: Step) -> None:
        """Append one row: the States (N, …) before the actions (N,) int64, the actions, and the resulting Step (N, …)."""

    @abstractmethod
    def sample(self, key: Tensor, size: int, beta: Tensor | float = 1.0, number: Tensor | None = None) -> Batch:
        """Return `size` n-step transitions, drawn with replacement: uniformly, or in proportion to their priority.

        key: () int32. number: () int64, a running count of samples, which selects among batches that were drawn ahead.
        With priorities, `Batch.place` (B,) int64 identifies the transitions for `update_priorities`, and `Batch.weight`
        (B,) float32 holds importance weights with exponent `beta`, scaled so that the largest in the batch is 1.
        The weight is 0 where the state to bootstrap from is no longer stored.
        """

    @abstractmethod
    def update_priorities(self, place: Tensor, td_errors: Tensor) -> None:
        """Set the priorities of transitions `place` (B,) int64 from TD errors (B,); overwritten transitions are skipped."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to save in a checkpoint, by name. Loading a checkpoint copies into these same tensors."""

    @abstractmethod
    def clear(self) -> None:
        """Remove all transitions."""

    @abstractmethod
    def interrupt(self) -> bool:
        """Mark the newest row as truncated, because all environments restart; return False if the memory was cleared."""

    def forget(self, lost: Tensor) -> None:  # noqa: B027
        """Give weight 0 to samples ending with the newest transition where lost (N,) bool: its outcome is unknown.

        The transition must have been written as truncated.
        """

    def before_iteration(self) -> None:  # noqa: B027
        """Prepare the batches for the next iteration to sample."""

    def after_iteration(self) -> None:  # noqa: B027
        """Store the row that the iteration wrote."""

    def adapt(self, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a checkpoint's tensors converted to the current shapes of `tensors`."""
        return dict(saved)

    def loaded(self) -> bool:
        """Resume after a checkpoint was copied into `tensors`; return False if its transitions are lost."""
        return True

    def close(self) -> None:  # noqa: B027
        """Release threads and files."""


@dataclass(frozen=True)
class ReplayKind:
    """A kind of replay memory, made from the module that defines it."""

    name: str
    description: str
    location: Location
    make: Callable[[ReplayRequest], Replay]
    bytes_per_transition: Callable[[int], TransitionBytes]
    files: tuple[str, ...] = ()

    def memory_bytes(self, capacity: int, state_bytes: int, prioritized: bool) -> TransitionBytes:
        """Return the bytes of `capacity` transitions in each location, including priorities.

        state_bytes: size of the fields of one State that observations read.
        """
        each = self.bytes_per_transition(state_bytes)
        total = TransitionBytes(*(capacity * size for size in each))
        return total._replace(device=total.device + (Priorities.bytes_needed(capacity) if prioritized else 0))

    def largest_capacity(self, free: float, state_bytes: int) -> int:
        """Return the capacity in transitions that uses half of the `free` bytes at `location`.

        If a checkpoint's snapshot needs the same memory, the replay memory and its snapshot take a third each.
        """
        each = self.bytes_per_transition(state_bytes)
        size = (each.device, each.host, each.disk)[self.location]
        parts = 3 if self.location == Location.HOST and each.snapshot else 2
        return max(1, int(free / parts / size))


@runtime_checkable
class UsesReplay(Protocol):
    """Options of an algorithm that learns from a replay memory."""

    @property
    def replay(self) -> str: ...
    @property
    def replay_capacity(self) -> int: ...
    @property
    def prioritized(self) -> bool: ...


def build_kind(name: str, module: Any) -> ReplayKind:
    """Return the replay kind defined by `module`; raise UserError naming a missing or wrong member."""
    checks = {
        "LOCATION": (isinstance(getattr(module, "LOCATION", None), Location), "a Location"),
        "make": (callable(getattr(module, "make", None)), "a function"),
        "bytes_per_transition": (callable(getattr(module, "bytes_per_transition", None)), "a function"),
        "FILES": (isinstance(getattr(module, "FILES", ()), tuple), "a tuple of file names"),
    }
    for member, (valid, meaning) in checks.items():
        if not valid:
            value = getattr(module, member, "missing")
            raise UserError(f"The replay kind '{name}' needs {member}, {meaning}; it is {value!r}.")
    lines = (module.__doc__ or "").strip().splitlines()
    return ReplayKind(
        name=name,
        description=lines[0] if lines else "",
        location=module.LOCATION,
        make=module.make,
        bytes_per_transition=module.bytes_per_transition,
        files=getattr(module, "FILES", ()),
    )
