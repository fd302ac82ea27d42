"""ActorJob: the settings that an actor process starts with, sent as one line of JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class GroupJob:
    """Environments of an actor that step together, and the ring that their rows are written to."""

    first: int  # index of the first among all environments of the run
    num_envs: int
    ring_offset: int  # in the shared memory
    ring_spec: dict[str, Any]  # result of SharedRingSpec.to_json


@dataclass(frozen=True)
class ActorJob:
    """An actor's environments, its policy, and its offsets into shared memory, in bytes."""

    parent: int  # process that the actor must not outlive
    fd: int  # descriptor of the shared memory
    bytes: int  # its size
    control_offset: int
    weights_offset: int
    status_offset: int
    groups: tuple[GroupJob, ...]
    env: str  # name of the environment
    env_options: dict[str, Any]
    time_limit: int
    backplay: float
    backplay_steps: int
    spec: dict[str, Any]  # result of `spec_to_json`: the actor's environments must have the same spec
    central: bool  # request actions from the inference server; else choose them with a copy of the policy
    algo: str
    algo_options: dict[str, Any]
    num_envs: int  # of the whole run
    seed: int
    check: bool  # verify checksums
    number: int = 0  # determines the episodes, together with `seed`
    acted: int = 0  # steps that every environment has already taken
    key: int = 0  # root of the learner's random streams
    cores: tuple[int, ...] = ()  # to run on; empty: any
    low_priority: bool = False  # yield to the learner, where they share cores

    @property
    def first(self) -> int:
        """Index of the actor's first environment among all."""
        return self.groups[0].first

    @property
    def last(self) -> int:
        """Index of the actor's last environment among all."""
        return self.groups[-1].first + self.groups[-1].num_envs - 1

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> ActorJob:
        fields = json.loads(line)
        groups = tuple(GroupJob(**group) for group in fields["groups"])
        return cls(**fields | {"groups": groups, "cores": tuple(fields["cores"])})
