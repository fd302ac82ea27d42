"""Curriculum: environment options that change as training progresses, phase by phase.

    [{"name": "short", "from": 0.0, "to": 0.3, "env": {"start_height": 4}},
     {"name": "tall",  "from": 0.3, "to": 0.8, "env": {"start_height": 12}}]

`from` and `to` are training progress, 0 to 1. Intervals without a phase (here the last fifth) use the run's own options, and so
does every evaluation. Training never returns to an earlier phase, even if a resumed run has a higher limit.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from redline.core import random, select
from redline.core.errors import UserError, nearest
from redline.core.records import leaves
from redline.envs import batch, change_rules
from redline.envs.batch import Rules
from redline.recipes import Phase

BASE = "base"  # name of an interval without a phase
_PROBES = 64  # games played to find out whether an option changes observations
_PROBE_STEPS = 8


class Curriculum:
    """Phases in order, covering progress 0 to 1 without gaps, and the rules of each."""

    def __init__(self, phases: Iterable[Phase], base: Rules) -> None:
        self.phases = _without_gaps(_checked(phases))
        self.rules = tuple(_rules_of(phase, base) for phase in self.phases)  # plain numbers
        changed = {option for phase in self.phases for option in phase.options}
        self.live = tuple(option for option in base.game.LIVE if option in changed)
        self.fixed = tuple(sorted(changed - set(self.live)))  # changing one of these requires recompiling
        for phase, rules in zip(self.phases, self.rules, strict=True):
            _check_learnable(
                phase, change_rules(base, {k: v for k, v in phase.options.items() if k in self.live}), rules
            )

    def at(self, progress: float) -> int:
        """Return the index of the phase at this progress; the last phase from 1 on."""
        return max(i for i, phase in enumerate(self.phases) if i == 0 or phase.start <= progress)

    def find(self, name: str) -> int:
        """Return the index of the phase called `name`; 0 if there is none, for example because the curriculum was changed."""
        return next((i for i, phase in enumerate(self.phases) if phase.name == name), 0)

    def compiles_again(self, before: int, after: int) -> bool:
        """Return whether two phases differ in more than live options."""
        a, b = self.rules[before].config, self.rules[after].config
        return any(getattr(a, name) != getattr(b, name) for name in self.fixed)

    def describe(self) -> list[dict[str, Any]]:
        """Return the phases as written in a curriculum file."""
        return [phase.describe() for phase in self.phases]


def read_phases(path: str) -> list[Phase]:
    """Return the phases in a JSON file."""
    try:
        records = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"curriculum_file {path} could not be read: {error.strerror}.") from None
    except ValueError as error:
        raise UserError(f"curriculum_file {path} is not JSON: {error}.") from None
    if not isinstance(records, list) or not records:
        raise UserError(f"curriculum_file {path} holds {_kind(records)}; expected a list of phases.")
    return [_phase(record, number) for number, record in enumerate(records, 1)]


def phases_of(records: Iterable[Phase], without: Iterable[str] = ()) -> list[Phase]:
    """Return a recipe's phases without the options in `without`, which the user requested; empty if nothing is left."""
    requested = {name.replace("-", "_") for name in without}
    phases = [
        dataclasses.replace(phase, options={k: v for k, v in phase.options.items() if k not in requested})
        for phase in records
    ]
    return phases if any(phase.options for phase in phases) else []


def _phase(record: Any, number: int) -> Phase:
    kinds: dict[str, tuple[type, ...]] = {"name": (str,), "from": (int, float), "to": (int, float), "env": (dict,)}
    if not isinstance(record, dict):
        raise UserError(f"Phase {number} of the curriculum is {_kind(record)}; expected an object with {_keys(kinds)}.")
    for key, value in record.items():
        if key not in kinds:
            hint = nearest(key, kinds) or "."
            raise UserError(f"Phase {number} of the curriculum has no '{key}'{hint} Expected {_keys(kinds)}.")
        if not isinstance(value, kinds[key]) or isinstance(value, bool):
            expected = {"name": "a text", "env": "an object of options"}.get(key, "a number from 0 to 1")
            raise UserError(f"Phase {number} of the curriculum: '{key}' is {value!r}; expected {expected}.")
    if missing := kinds.keys() - record.keys():
        raise UserError(f"Phase {number} of the curriculum lacks '{min(missing)}'; expected {_keys(kinds)}.")
    return Phase(record["name"], float(record["from"]), float(record["to"]), record["env"])


def _checked(phases: Iterable[Phase]) -> list[Phase]:
    """Return the phases in order; raise UserError for progress out of range, overlaps, and missing or duplicate names."""
    ordered = sorted(phases, key=lambda phase: phase.start)
    for phase in ordered:
        if not 0 <= phase.start < phase.end <= 1:
            raise UserError(
                f"Phase '{phase.name}' of the curriculum goes from {phase.start:g} to {phase.end:g}; expected progress of the "
                "training from 0 to 1, the second above the first."
            )
        if not phase.name:
            raise UserError(f"A phase of the curriculum ({phase.start:g} to {phase.end:g}) has no name; give it one.")
        if [other.name for other in ordered].count(phase.name) > 1:
            raise UserError(f"Two phases of the curriculum are called '{phase.name}'; give each its own name.")
    for before, after in pairwise(ordered):
        if after.start < before.end:
            raise UserError(
                f"Phases '{before.name}' and '{after.name}' of the curriculum overlap: one ends at {before.end:g}, the "
                f"other begins at {after.start:g}."
            )
    return ordered


def _without_gaps(phases: Sequence[Phase]) -> tuple[Phase, ...]:
    whole: list[Phase] = []
    for phase in [*phases, Phase(BASE, 1.0, 1.0, {})]:
        reached = whole[-1].end if whole else 0.0
        if phase.start > reached:
            taken = {other.name for other in (*phases, *whole)}
            name = next(name for n in range(len(taken) + 1) if (name := f"{BASE} {n + 1}" if n else BASE) not in taken)
            whole.append(Phase(name, reached, phase.start, {}))
        if phase.end > phase.start:
            whole.append(phase)
    return tuple(whole)


def _rules_of(phase: Phase, base: Rules) -> Rules:
    try:
        return change_rules(base, phase.options)
    except UserError as error:
        raise UserError(f"Phase '{phase.name}' of the curriculum: {error}") from None


def _check_learnable(phase: Phase, base: Rules, rules: Rules) -> None:
    """Raise UserError for options that change observations or the shapes of States.

    The observation of a State must not change: the learner always observes stored States with its initial rules.
    """
    if base.config == rules.config:
        return
    options = ", ".join(f"env.{name}" for name in phase.options if name not in base.game.LIVE)
    keys = batch.env_keys(0, torch.arange(_PROBES))
    played = [batch.reset(r, keys) for r in (base, rules)]
    same = base.game.spec(base.config) == rules.game.spec(rules.config) and _shapes(played[0]) == _shapes(played[1])
    for t in range(_PROBE_STEPS if same else 0):
        for envs in played:
            views = [(r.game.observe(r.config, envs.game), r.game.legal(r.config, envs.game)) for r in (base, rules)]
            same = same and all(torch.equal(a, b) for a, b in zip(*views, strict=True))
        for i, r in enumerate((base, rules)):
            action = select.draw(r.game.legal(r.config, played[i].game), random.bits(keys, t))
            played[i], _ = batch.step(r, played[i], action)
    if not same:
        raise UserError(
            f"Phase '{phase.name}' of the curriculum sets {options}, which changes what the agent sees; only options that "
            "leave observation, actions and the size of the board as they are can change while training."
        )


def _shapes(envs: batch.EnvState) -> dict[str, Any]:
    return {name: (x.shape, x.dtype) for name, x in leaves(envs.game).items()}


def _keys(kinds: Iterable[str]) -> str:
    return ", ".join(f"'{key}'" for key in kinds)


def _kind(value: Any) -> str:
    names = {
        dict: "an object",
        list: "an empty list" if not value else "a list",
        str: "a text",
        bool: "true or false",
        type(None): "null",
    }
    return names.get(type(value), "a number")
