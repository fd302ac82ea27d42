"""Fault injection: break a run at a chosen phase, for tests.

    REDLINE_FAULT="kill@save.manifest:3,raise@env.step:100,slow@save:2s,nan@gradient:5"

A rule is ACTION@PHASE, and acts every time the phase is reached. With `:N` it acts only the N-th time; with `:/PATH` only if
that file exists, and the first process to act removes it. Each process counts separately; actors read the variable too.
Actions:

    kill     end the process with SIGKILL         raise    raise InjectedFault
    sigterm  send the process SIGTERM; likewise   oom      run out of memory
             sigint, sighup, sigusr1              full     fail as on a full disk
    hang     sleep indefinitely                   nan      overwrite the phase's data with NaN
    slow     sleep; `:2.5s` instead of `:N`

Except for `nan`, a rule that acts prints a line to standard error. The variable is read once, on import; without it,
`reach` costs one truth test, and no phase lies inside compiled code or a captured graph. Does not import torch.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import signal
import sys
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from redline.core.errors import UserError, nearest


class Phase(StrEnum):
    """The places in a run that a rule can name, each reached just before its action unless the comment says otherwise.

    On a GPU the phases after ITERATION are only reached until the iteration is captured as a graph.
    """

    SESSION = "session"  # environments and learner are built
    COMPILE = "compile"  # the first call of a compiled function
    CAPTURE = "capture"  # a CUDA graph is captured
    ITERATION = "iteration"
    WARM_UP = "warm_up"  # an iteration that collects without learning, until the learner is ready
    COLLECT = "collect"
    UPDATE = "update"
    GRADIENT = "gradient"  # the gradient of a batch; `nan` spoils it
    WEIGHTS = "weights"  # before an iteration; `nan` spoils the acting network
    PUBLISH = "publish"  # new weights go to the actors
    LOG = "log"  # a log record is written
    EVALUATE = "evaluate"
    LOAD = "load"  # a checkpoint is read
    ENV_MAKE = "env.make"
    ENV_RESET = "env.reset"
    ENV_STEP = "env.step"
    ENV_OBS = "env.obs"  # after a step; `nan` spoils the observations
    ENV_REWARD = "env.reward"  # after a step; `nan` spoils the rewards
    ACTOR = "actor"  # an actor process begins to play
    # Saving a checkpoint, in order. `save.<group>` is reached with that group's file half-written, `save.prune` between
    # renaming an old checkpoint and deleting it.
    SAVE = "save"
    SAVE_MODEL = "save.model"
    SAVE_OPTIM = "save.optim"
    SAVE_RNG = "save.rng"
    SAVE_ENVS = "save.envs"
    SAVE_REPLAY = "save.replay"
    SAVE_STATE = "save.state"
    SAVE_MANIFEST = "save.manifest"
    SAVE_SYNC = "save.sync"
    SAVE_RENAME = "save.rename"
    SAVE_SYNC_PARENT = "save.sync_parent"
    SAVE_VERIFY = "save.verify"
    SAVE_LATEST = "save.latest"
    SAVE_PRUNE = "save.prune"
    # A replay file: create the file, clear an entry, sync the data, write the entry.
    BLOCKS_CREATE = "blocks.create"
    BLOCKS_BEGIN = "blocks.begin"
    BLOCKS_DATA = "blocks.data"
    BLOCKS_ENTRY = "blocks.entry"
    REPLAY_WRITE = "replay.write"  # a row is written to a replay memory off the device, in the writing thread


PHASES = tuple(phase.value for phase in Phase)
SAVE_PHASES = tuple(phase for phase in PHASES if phase.partition(".")[0] == "save")
BLOCK_PHASES = tuple(phase for phase in PHASES if phase.startswith("blocks."))
# Phases with data that `nan` can spoil: `reach` returns True and the caller overwrites the data.
_DATA_PHASES = (Phase.GRADIENT, Phase.WEIGHTS, Phase.ENV_OBS, Phase.ENV_REWARD)

_SIGNALS = {"kill": "SIGKILL", "sigterm": "SIGTERM", "sigint": "SIGINT", "sighup": "SIGHUP", "sigusr1": "SIGUSR1"}
_ACTIONS = (*_SIGNALS, "raise", "oom", "full", "hang", "nan")
_RULE = re.compile(
    rf"(?P<action>{'|'.join(_ACTIONS)})@(?P<phase>[\w.]+)(:(?P<nth>[1-9]\d*)|:(?P<file>/.+))?"
    r"|slow@(?P<slow_phase>[\w.]+):(?P<seconds>\d+(\.\d+)?)s"
)


class InjectedFault(RuntimeError):
    """The exception of a `raise` rule."""


@dataclass
class _Rule:
    action: str
    phase: str
    nth: int | None = None  # act only the n-th time; None: every time
    seconds: float = 0.0  # to sleep
    file: str | None = None  # act only if it exists, and remove it
    reached: int = 0

    def acts(self) -> bool:
        """Return whether to act now that the phase is reached; the rule's file, if any, is removed."""
        if self.file is None:
            return self.nth in (None, self.reached)
        try:
            os.unlink(self.file)
        except OSError:
            return False
        return True


def parse(text: str) -> list[_Rule]:
    """Return the rules in a value of REDLINE_FAULT; raise UserError for an invalid one."""
    rules = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        match = _RULE.fullmatch(part)
        if match is None:
            raise UserError(
                f"REDLINE_FAULT has the rule '{part}'; expected ACTION@PHASE with :N for the N-th time only or :/PATH for "
                f"when that file exists, or slow@PHASE:2.5s. Actions: {', '.join(_ACTIONS)}."
            )
        action, phase = match["action"] or "slow", match["phase"] or match["slow_phase"]
        # A typo must not lead to a test that cannot fail.
        if phase not in PHASES:
            raise UserError(
                f"REDLINE_FAULT names the phase '{phase}', which does not exist{nearest(phase, PHASES)}; "
                f"phases: {', '.join(PHASES)}."
            )
        if action == "nan" and phase not in _DATA_PHASES:
            raise UserError(f"REDLINE_FAULT has the rule '{part}'; nan is for {', '.join(_DATA_PHASES)}.")
        nth = int(match["nth"]) if match["nth"] else None
        rules.append(_Rule(action, phase, nth, float(match["seconds"] or 0), match["file"]))
    return rules


_rules = parse(os.environ.get("REDLINE_FAULT", ""))


def arm(text: str) -> None:
    """Replace all rules and reset their counts; an empty text removes them."""
    global _rules
    _rules = parse(text)


def reached() -> dict[str, int]:
    """Return how often each rule's phase was reached in this process."""
    return {rule.phase: rule.reached for rule in _rules}


def reach(phase: str) -> bool:
    """Apply the rules for `phase`, which is reached now; return whether the caller must overwrite its data with NaN."""
    if not _rules:
        return False
    rules = [rule for rule in _rules if rule.phase == phase]
    for rule in rules:  # all count, even if one of them raises
        rule.reached += 1
    acting = [_act(rule) for rule in rules if rule.acts()]
    return any(acting)


def spoil(data: Any) -> None:
    """Fill the floating-point tensors and arrays in `data`, a tensor, array or nested container, with NaN."""
    if isinstance(data, dict):
        data = tuple(data.values())
    if isinstance(data, tuple | list):
        for part in data:
            spoil(part)
    elif hasattr(data, "is_floating_point"):
        if data.is_floating_point():
            data.data.fill_(math.nan)
    elif getattr(getattr(data, "dtype", None), "kind", "") == "f":
        data.fill(math.nan)


def _act(rule: _Rule) -> bool:
    if rule.action == "nan":
        return True
    with contextlib.suppress(OSError, ValueError, AttributeError):  # standard error may be closed or missing
        print(f"REDLINE_FAULT: {rule.action} at {rule.phase}", file=sys.stderr, flush=True)
    if rule.action in _SIGNALS:
        os.kill(os.getpid(), getattr(signal, _SIGNALS[rule.action]))
    elif rule.action == "raise":
        raise InjectedFault(f"injected fault at {rule.phase}")
    elif rule.action == "oom":
        import torch

        raise torch.OutOfMemoryError(f"injected: out of memory at {rule.phase}")
    elif rule.action == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    elif rule.action == "hang":
        while True:
            time.sleep(3600)
    else:
        time.sleep(rule.seconds)
    return False
