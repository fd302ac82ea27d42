"""Faults on demand, so that tests can break a run at a chosen point.

    REDLINE_FAULT="kill@save.manifest:3,raise@save.model,slow@save:2s"

`kill@PHASE` ends the process with SIGKILL and `raise@PHASE` raises InjectedFault each time the phase is reached; with
`:N` only the N-th time. `slow@PHASE:2s` sleeps each time. The variable is read once, at import; without it `reach`
costs a truth test.
"""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import dataclass

from redline.core.errors import UserError, nearest

# The checkpoint protocol in order. `save.<group>` is reached with that group's file half-written, each other phase just
# before its action, `save.prune` between taking an old checkpoint's name away and deleting it.
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
# A replay file, each before its action: naming a new one, emptying an entry, syncing the data, writing the entry.
BLOCK_PHASES = ("blocks.create", "blocks.begin", "blocks.data", "blocks.entry")
PHASES = (
    SAVE_PHASES + BLOCK_PHASES
)  # all that a rule may name: a typing mistake must not become a test that cannot fail

_RULE = re.compile(
    r"(?P<action>kill|raise)@(?P<phase>[\w.]+)(:(?P<nth>[1-9]\d*))?|slow@(?P<slow_phase>[\w.]+):(?P<seconds>\d+(\.\d+)?)s"
)


class InjectedFault(RuntimeError):
    """What a `raise` rule raises."""


@dataclass
class _Rule:
    action: str
    phase: str
    nth: int | None = None  # act only the n-th time; None: every time
    seconds: float = 0.0
    reached: int = 0


def parse(text: str) -> list[_Rule]:
    """The rules of a REDLINE_FAULT value."""
    rules = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        match = _RULE.fullmatch(part)
        if match is None:
            raise UserError(
                f"REDLINE_FAULT has the rule '{part}'; expected kill@PHASE or raise@PHASE, with :N for the N-th time "
                "only, or slow@PHASE:2.5s."
            )
        phase = match["phase"] or match["slow_phase"]
        if phase not in PHASES:
            raise UserError(
                f"REDLINE_FAULT names the phase '{phase}', which is none{nearest(phase, PHASES)}; "
                f"phases: {', '.join(PHASES)}."
            )
        nth = int(match["nth"]) if match["nth"] else None
        rules.append(_Rule(match["action"] or "slow", phase, nth, float(match["seconds"] or 0)))
    return rules


_rules = parse(os.environ.get("REDLINE_FAULT", ""))


def arm(text: str) -> None:
    """Replace the rules, with the counts at zero; an empty text disarms."""
    global _rules
    _rules = parse(text)


def reach(phase: str) -> None:
    """Mark that `phase` is reached: does nothing unless a rule names it."""
    if not _rules:
        return
    for rule in _rules:
        if rule.phase != phase:
            continue
        rule.reached += 1
        if rule.nth not in (None, rule.reached):
            continue
        if rule.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif rule.action == "raise":
            raise InjectedFault(f"injected fault at {phase}")
        else:
            time.sleep(rule.seconds)
