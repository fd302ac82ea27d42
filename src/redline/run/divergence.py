"""Divergence: detect skipped updates, roll back to the last good weights, and stop if that does not help.

The optimizer skips and counts steps whose gradient is NaN or infinite, on the device. At log points, which read from the device
anyway, the guard checks that count. If no step was skipped, it copies weights and optimizer state to the host every few
seconds. After many consecutive skipped steps it restores the newest copy and lowers the learning rate, a few times at most.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from redline.algos.learner import Learner
from redline.run.snapshot import copy_to_host, first_not_finite

MAX_SKIPPED = 32  # consecutive updates until weights are restored; float16 skips up to 15 to find its loss scale
MAX_ROLLBACKS = 3  # per run; then it stops
RATE_CUT = 0.25  # factor of the learning rate at each rollback
_COPY_SECONDS = 10.0  # between two copies of good weights
_SCALE_SEARCH = 15  # consecutive updates that float16 may skip
_ADVICE = "Continue with a lower learning rate or with --precision fp32, and check the environment's rewards."


class _GoodState(NamedTuple):
    env_steps: int
    tensors: dict[str, dict[str, Tensor]]  # group -> name -> CPU tensor


class DivergenceGuard:
    """Keep the last good weights of a learner and restore them when its updates are no longer finite."""

    def __init__(
        self,
        learner: Learner,
        notify: Callable[[str], None],
        env_steps: int = 0,
        rollbacks: int = 0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Continue a run after `rollbacks` rollbacks. now: the clock that times the copies of weights."""
        self.learner, self.notify, self.rollbacks, self.now = learner, notify, rollbacks, now
        self._good: list[_GoodState] = []  # at most two, the newest last
        self._copied_at = -math.inf
        self._skipped = int(learner.optimizer.skipped) if learner.optimizer else 0  # total at the last log point
        self.suspect = False  # the newest updates were skipped: the weights before them may already be bad
        self._cause = ""  # of the last skipped updates
        self._told = False
        self._unproven = False  # no update was taken since the last rollback
        self._set_learning_rate()
        if not self.bad_weight():
            self._copy(env_steps)

    def check(self, record: Mapping[str, Any]) -> str:
        """Check the log record of the last updates; return "diverged" if training cannot continue, else an empty string."""
        skipped = record.get("skipped_updates")
        if skipped is None or self.learner.optimizer is None:  # no update yet, or an algorithm with its own optimizer
            return ""
        before, self._skipped = self._skipped, int(skipped)
        if before == skipped:
            self._unproven = self.suspect = False
            if self.now() - self._copied_at >= _COPY_SECONDS and not self.bad_weight():
                self._copy(int(record["env_steps"]))
            return ""
        row = int(self.learner.optimizer.skipped_in_row)
        self._unproven = self._unproven and row > 0
        self.suspect = row > 0 and not self.learner.optimizer.scaled
        self._cause = self._find_cause(record)
        if not self._told and not self.learner.optimizer.scaled:
            self._told = True
            self.notify(
                f"Updates are skipped because {self._cause}; they change no weight and are counted as skipped_updates."
            )
        return (
            self._roll_back(f"the last {row:,} updates were skipped because {self._cause}")
            if row >= MAX_SKIPPED
            else ""
        )

    def before_save(self) -> str:
        """Roll back if the weights are not finite; return "diverged" if there are no good ones, else an empty string."""
        bad = self.bad_weight()
        return self._roll_back(f"the weight '{bad}' is NaN or infinite") if bad else ""

    def at_end(self) -> str:
        """Return "diverged" if a run that reached its limit ends with skipped updates or without an update since a rollback."""
        optimizer = self.learner.optimizer
        row = int(optimizer.skipped_in_row) if optimizer else 0
        if not self._unproven and row <= _SCALE_SEARCH:
            return ""
        return self._give_up(f"the last updates were skipped because {self._cause}")

    def bad_weight(self) -> str:
        """Return the name of a weight or optimizer tensor that is NaN or infinite, or an empty string."""
        return first_not_finite(self.learner.trained_state())

    def _find_cause(self, record: Mapping[str, Any]) -> str:
        if bad := self.bad_weight():
            return f"the weight '{bad}' is NaN or infinite"
        loss = record.get("loss", 0.0)
        return f"the {'gradient' if loss is not None and math.isfinite(loss) else 'loss'} is NaN or infinite"

    def _roll_back(self, problem: str) -> str:
        """Restore good weights and lower the learning rate; return "diverged" if no rollbacks are left."""
        if self.learner.optimizer is None or not self._good or self.rollbacks >= MAX_ROLLBACKS:
            return self._give_up(problem)
        self._restore()
        self.rollbacks += 1
        self._unproven = True
        self._set_learning_rate()
        self.notify(
            f"Going back to the weights of step {self._good[-1].env_steps:,} with the learning rate times "
            f"{RATE_CUT**self.rollbacks:g}, for {problem} (rollback {self.rollbacks} of {MAX_ROLLBACKS})."
        )
        if len(self._good) > 1:  # the restored ones may already be bad: the next rollback goes further back
            self._good.pop()
        return ""

    def _give_up(self, problem: str) -> str:
        """Restore good weights for the last checkpoint, with the full learning rate, and report why training ends."""
        tried = f" after {self.rollbacks} rollbacks" if self.rollbacks else ""
        kept = "There are no good weights to save: the last good checkpoint is kept."
        if self._good:
            self._restore()
            kept = f"The weights of step {self._good[-1].env_steps:,}, the last good ones, are restored."
        self.rollbacks = 0
        self._set_learning_rate()
        self.notify(f"Training has diverged{tried}: {problem}. {kept} {_ADVICE}")
        return "diverged"

    def _restore(self) -> None:
        """Copy the newest good state in place into the learner's tensors, which compiled and captured code reads."""
        own = self.learner.trained_state()
        with torch.no_grad():
            for group, tensors in self._good[-1].tensors.items():
                for name, tensor in tensors.items():
                    if name != "skipped":  # keeps counting
                        own[group][name].copy_(tensor)
        if self.learner.optimizer is not None:
            self.learner.optimizer.skipped_in_row.zero_()

    def _copy(self, env_steps: int) -> None:
        self._copied_at = self.now()
        with suppress(MemoryError, RuntimeError):  # too little memory: keep the existing copies
            self._good = [*self._good[-1:], _GoodState(env_steps, copy_to_host(self.learner.trained_state()))]

    def _set_learning_rate(self) -> None:
        if self.learner.optimizer is not None:
            self.learner.optimizer.rate_factor.fill_(RATE_CUT**self.rollbacks)
