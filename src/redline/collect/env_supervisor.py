"""Supervise environments in this process: report and replace those that raise exceptions, within a restart budget."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import numpy as np

from redline.collect.actor_status import ACTIONS
from redline.collect.restart_budget import RestartBudget
from redline.collect.shared_memory import Array
from redline.core.errors import EnvsLost, InvalidStep, UserError
from redline.envs.gym_envs import GymEnvs

_TRACE = 2_000  # characters from the end of a traceback to report
_SEED_STEP = 1_000_003  # added to a seed, so that a new environment plays other episodes


class EnvSupervisor:
    """Replaces failed environments of a GymEnvs, and records the latest actions for its reports."""

    def __init__(self, envs: GymEnvs, notify: Callable[[str], None]) -> None:
        self.envs, self.notify = envs, notify
        self.budget = RestartBudget(envs.config.restarts, "environment")
        count = len(envs.envs)
        self._actions = np.zeros((ACTIONS, count), np.int64)
        self._steps = 0
        self._since = np.zeros(count, np.int64)  # step at which each environment was made
        envs.on_failure, envs.notify = self.replace, notify

    def record_actions(self, actions: Array) -> None:
        """Record the actions (N,) of the next step."""
        self._actions[self._steps % ACTIONS] = actions
        self._steps += 1

    def describe(self, env_index: int) -> str:
        """Return a description with the environment's index, seed and latest actions, newest last; only the index if closed."""
        if env_index >= len(self.envs.envs):
            return f"environment {env_index}"
        latest = np.arange(max(int(self._since[env_index]), self._steps - ACTIONS), self._steps) % ACTIONS
        actions = ", ".join(map(str, self._actions[latest, env_index].tolist())) or "none"
        return f"environment {env_index} (seed {self.envs.seeds[env_index]}); last actions: {actions}"

    def replace(self, env_index: int, error: UserError) -> None:
        """Report the failure and replace the environment, trying again if that fails.

        Raise EnvsLost if the restart budget is spent or a restart would not help.
        """
        while True:
            if isinstance(error, InvalidStep):
                raise EnvsLost(f"{error} It was {self.describe(env_index)}.\nThe run stops.") from error
            cause = error.__cause__ or error
            trace = "".join(traceback.format_exception(cause))[-_TRACE:].rstrip()
            report = f"{error} It was {self.describe(env_index)}.\n{trace}"
            if stop := self.budget.spend(env_index):
                raise EnvsLost(f"{report}\n{stop}") from error
            budget = self.budget
            self.notify(
                f"{report}\nMade anew ({budget.failures} of {budget.restarts}); its unfinished episode is discarded."
            )
            self._since[env_index] = self._steps
            try:
                self.envs.replace(env_index, (self.envs.seeds[env_index] + _SEED_STEP) & 0x7FFFFFFF)
                return
            except UserError as again:
                error = again
