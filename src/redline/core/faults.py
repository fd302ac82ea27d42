"""Fault injection: break a run at a chosen phase, for tests.

    REDLINE_FAULT="kill@save.manifest:3,raise@save.model,slow@save:2s"

`kill@PHASE` kills the process with SIGKILL, `raise@PHASE` raises InjectedFault and `oom@PHASE` runs out of memory, each
time the phase is reached or with `:N` the N-th time only. `slow@PHASE:2s` sleeps each time. The variable is read once, at
import; without it `reach` costs one truth test.
"""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import dataclass

import torch

from redline.core.errors import UserError, nearest

# Phases of saving a checkpoint, in order. `save.<group>` is reached with that group's file half-written, `save.prune`
# between renaming an old checkpoint and deleting it, every other phase just before its action.
SAVE_PHASES = (
    "save",
    "save.model",
    "save.optim",
    "save.rng",
    "save.envs",
    "save.replay",
    "save.state",
    "save.manifest",
    "save.sync",
    "save.rename",
    "save.sync_parent",
    "save.verify",
    "save.latest",
    "save.prune",
)
# Phases of a replay file, each reached before its action: create the file, clear an entry, sync the data, write the entry.
BLOCK_PHASES = ("blocks.create", "blocks.begin", "blocks.data", "blocks.entry")
# Before the gradient of a batch is computed, before a session is built, and before an iteration.
MEMORY_PHASES = ("session", "iteration", "gradient")
# A rule that names any other phase is an error: a typing mistake must not become a test that cannot fail.
PHASES = SAVE_PHASES + BLOCK_PHASES + MEMORY_PHASES

_RULE = re.compile(
    r"(?P<action>kill|raise|oom)@(?P<phase>[\w.]+)(:(?P<nth>[1-9]\d*))?|slow@(?P<slow_phase>[\w.]+):(?P<seconds>\d+(\.\d+)?)s"
)


class InjectedFault(RuntimeError):
    """The exception of a `raise` rule."""


@dataclass
class _Rule:
    action: str
    phase: str
    nth: int | None = None  # act only the n-th time; None: every time
    seconds: float = 0.0
    reached: int = 0


def parse(text: str) -> list[_Rule]:
    """Return the rules in the value of REDLINE_FAULT."""
    rules = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        match = _RULE.fullmatch(part)
        if match is None:
            raise UserError(
                f"REDLINE_FAULT has the rule '{part}'; expected kill@PHASE, raise@PHASE or oom@PHASE, with :N for the N-th "
                "time only, or slow@PHASE:2.5s."
            )
        phase = match["phase"] or match["slow_phase"]
        if phase not in PHASES:
            raise UserError(
                f"REDLINE_FAULT names the phase '{phase}', which does not exist{nearest(phase, PHASES)}; "
                f"phases: {', '.join(PHASES)}."
            )
        nth = int(match["nth"]) if match["nth"] else None
        rules.append(_Rule(match["action"] or "slow", phase, nth, float(match["seconds"] or 0)))
    return rules


_rules = parse(os.environ.get("REDLINE_FAULT", ""))


def arm(text: str) -> None:
    """Replace the rules and reset their counts; an empty text removes them all."""
    global _rules
    _rules = parse(text)


def reach(phase: str) -> None:
    """Announce that `phase` is reached; does nothing unless a rule names it."""
    if not _rules:
        return
    rules = [rule for rule in _rules if rule.phase == phase]
    for rule in rules:  # all count, even if one of them raises
        rule.reached += 1
    for rule in rules:
        if rule.nth not in (None, rule.reached):
            continue
        if rule.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif rule.action == "raise":
            raise InjectedFault(f"injected fault at {phase}")
        elif rule.action == "oom":
            raise torch.OutOfMemoryError(f"injected: out of memory at {phase}")
        else:
            time.sleep(rule.seconds)
