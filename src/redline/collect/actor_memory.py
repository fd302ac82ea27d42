"""ActorMemory: the memory shared with all actors, with control flags, weights, and each actor's status and rings."""

from __future__ import annotations

import numpy as np

from redline.collect.actor_job import GroupJob
from redline.collect.actor_status import ActorStatus
from redline.collect.row_format import END_FLAGS, row_fields
from redline.collect.shared_memory import LINE, Memory, SharedLayout
from redline.collect.shared_ring import SharedRing, SharedRingSpec
from redline.collect.shared_weights import SharedWeights
from redline.core.records import Spec

_MIN_ROWS = 64  # least number of rows that an actor may be ahead of the learner


class Control:
    """Stop flag and training progress, set by the learner's process and read by actors."""

    def __init__(self, memory: Memory, offset: int) -> None:
        self._values = memory.array(offset, (2,), np.float64)

    @property
    def stopped(self) -> bool:
        """Whether actors should stop."""
        return bool(self._values[0])

    def stop(self) -> None:
        self._values[0] = 1.0

    @property
    def progress(self) -> float:
        """Fraction of training done, 0 to 1."""
        return float(self._values[1])

    @progress.setter
    def progress(self, progress: float) -> None:
        self._values[1] = progress


class ActorMemory:
    """One allocation with `control`, `weights`, a status per actor, and a ring per group of environments.

    control | weights | status, ring, ring of actor 0 | status, ring, ring of actor 1 | …
    """

    control_offset = 0
    weights_offset = LINE

    def __init__(
        self,
        spec: Spec,
        outputs: tuple[str, ...],
        groups: list[list[tuple[int, int]]],
        capacity: int,
        weights_bytes: int,
        drop_oldest: bool,
        check: bool,
    ) -> None:
        """`groups` lists (first environment, count) of the groups of each actor; `capacity` is the rows of a ring."""
        end = self.weights_offset + SharedWeights.layout(weights_bytes).bytes
        statuses: list[tuple[int, int]] = []  # offset, environments
        self.jobs: list[tuple[GroupJob, ...]] = []  # the groups of each actor's job
        ring_specs = []
        for actor_groups in groups:
            statuses.append((end, sum(count for _, count in actor_groups)))
            end += ActorStatus.layout(statuses[-1][1]).bytes
            jobs = []
            for first, count in actor_groups:
                ring_spec = _ring_spec(spec, outputs, count, capacity, drop_oldest, check)
                ring_specs.append((end, ring_spec))
                jobs.append(GroupJob(first, count, end, ring_spec.to_json()))
                end += ring_spec.layout.bytes
            self.jobs.append(tuple(jobs))
        self.memory = Memory.create(end)
        self.control = Control(self.memory, self.control_offset)
        self.weights = SharedWeights(self.memory, self.weights_offset, weights_bytes, check=check)
        self.status_offsets = [offset for offset, _ in statuses]
        self.statuses = [ActorStatus(self.memory, *place) for place in statuses]
        self.rings = [SharedRing(self.memory, offset, ring_spec) for offset, ring_spec in ring_specs]
        self.slices = [
            slice(first, first + count) for own in groups for first, count in own
        ]  # of each ring's environments
        rings = iter(self.rings)
        self.rings_of = [[next(rings) for _ in own] for own in groups]  # of each actor

    def close(self) -> None:
        self.memory.close()


def ring_rows(rollout_steps: int) -> int:
    """Return the default number of rows in a ring: a rollout, and room to continue while it is read."""
    return max(rollout_steps, _MIN_ROWS) + 2


def ring_bytes(spec: Spec, outputs: tuple[str, ...], groups: list[list[tuple[int, int]]], rows: int) -> int:
    """Return the total size in bytes of all actors' rings, as ActorMemory allocates them."""
    counts = [count for actor_groups in groups for _, count in actor_groups]
    return sum(_ring_spec(spec, outputs, count, rows, False, False).layout.bytes for count in counts)


def _ring_spec(
    spec: Spec, outputs: tuple[str, ...], count: int, rows: int, drop_oldest: bool, check: bool
) -> SharedRingSpec:
    """Return the spec of the ring for a group of `count` environments."""
    row = SharedLayout(row_fields(spec, count, outputs))
    return SharedRingSpec(row, rows, drop_oldest, check, "final_obs", END_FLAGS)


def split_envs(num_envs: int, actors: int, groups_per_actor: int) -> list[list[tuple[int, int]]]:
    """Return the groups of environments of each actor as (first, count). No group is empty.

    With central inference an actor has two groups: one steps while the other waits for actions.
    """
    split, first = [], 0
    for own in np.array_split(np.arange(num_envs), actors):
        groups = []
        for group in np.array_split(own, min(groups_per_actor, len(own))):
            groups.append((first, len(group)))
            first += len(group)
        split.append(groups)
    return split
