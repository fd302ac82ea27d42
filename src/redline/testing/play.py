"""Play games for the checks, with random actions that are the same in a batch of any size, and compare two plays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from redline.core import random
from redline.core.records import leaves, map_record
from redline.envs import batch
from redline.envs.batch import EnvState, Rules, env_keys

NUM_ENVS, STEPS, SEED = 32, 24, 3


class Broken(AssertionError):
    """A rule of the contract that a game breaks, as a sentence."""


class Record(NamedTuple):
    """One step of all environments: the action and its results."""

    action: Tensor  # (N,) int64
    envs: EnvState
    step: Any  # core.records.Step; None for the first record
    obs: Tensor


def legal_actions(rules: Rules, state: Any, t: int, env_index: Tensor) -> Tensor:
    """Return a random legal action for each environment at step t, (N,) int64, the same in a batch of any size."""
    legal = rules.game.legal(rules.config, state)
    index = env_index.to(legal.device)
    rank = random.below(random.bits(random.seed_key(t, legal.device), index), legal.sum(1))
    return (legal.cumsum(1) <= rank.unsqueeze(1)).sum(1).clamp(max=legal.shape[1] - 1)


def any_actions(rules: Rules, state: Any, t: int, env_index: Tensor) -> Tensor:
    """Return a random action for each environment at step t, (N,) int64, legal or not."""
    del state
    count = rules.game.spec(rules.config).num_actions
    return random.below(random.bits(random.seed_key(t), env_index), count)


def play(
    rules: Rules,
    seed: int = SEED,
    env_index: Tensor | None = None,
    steps: int = STEPS,
    choose: Callable[[Rules, Any, int, Tensor], Tensor] = legal_actions,
    device: str = "cpu",
    step: Callable[[Rules, EnvState, Tensor], Any] = batch.step,
) -> list[Record]:
    """Play the environments `env_index` and return a record from before the first step and after each step."""
    env_index = torch.arange(NUM_ENVS) if env_index is None else env_index
    envs = batch.reset(rules, env_keys(seed, env_index.to(device)))
    observe = rules.game.observe
    records = [Record(torch.full_like(env_index, -1), envs, None, observe(rules.config, envs.game))]
    for t in range(steps):
        action = choose(rules, envs.game, t, env_index)
        envs, outcome = step(rules, envs, action.to(device))
        records.append(Record(action.cpu(), envs, outcome, observe(rules.config, envs.game)))
    return records


_baseline: list[tuple[Rules, list[Record]]] = []  # the newest one


def baseline(rules: Rules) -> list[Record]:
    """Return the records of NUM_ENVS environments played for STEPS steps with legal actions, cached for the latest rules."""
    if not _baseline or _baseline[0][0] is not rules:
        _baseline[:] = [(rules, play(rules))]
    return _baseline[0][1]


def compare(ours: list[Record], theirs: list[Record], reason: str, rows: Tensor | None = None) -> None:
    """Raise Broken at the first difference between two plays. rows: the environments of `ours` contained in `theirs`."""
    for t, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        for (field, x), y in zip(flat_record(a).items(), flat_record(b).values(), strict=True):
            x, y = (x.cpu() if rows is None else x.cpu()[rows]), y.cpu()
            if torch.equal(x, y):
                continue
            wrong = first_environment(x != y)
            env_index = wrong if rows is None else int(rows[wrong])
            raise Broken(f"{reason}: {field} differs {describe_place(t, env_index, a.action)}.")


def flat_record(record: Record) -> dict[str, Tensor]:
    """Return all tensors of a record by name."""
    fields = {name.removeprefix("game."): x for name, x in leaves(record.envs).items()}
    if record.step is not None:
        fields |= leaves(record.step)
    return fields | {"the observation": record.obs}


def describe_place(t: int, env_index: int, action: Tensor) -> str:
    """Return the step, environment and action of a difference, as part of a sentence."""
    if t == 0:
        return f"in environment {env_index} before the first step"
    return f"at step {t} in environment {env_index}, after action {int(action[env_index])}"


def first_environment(wrong: Tensor) -> int:
    """Return the index of the first environment in which any of wrong (N, …) bool is True."""
    return int(wrong.flatten(1).any(1).nonzero()[0]) if wrong.dim() > 1 else int(wrong.nonzero()[0])


def take_rows(record: Record, rows: Tensor) -> Record:
    """Return the record of the environments selected by rows (N,) bool."""

    def take(x: Tensor) -> Tensor:
        return x[rows.to(x.device)]

    step = None if record.step is None else map_record(take, record.step)
    return Record(take(record.action), map_record(take, record.envs), step, take(record.obs))
