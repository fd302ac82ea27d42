"""Evaluate a policy on CPU environments: a few slots, in this process or in one process per core."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from redline.collect.child_process import CannotStart
from redline.collect.parallel_envs import ParallelEnvs
from redline.core.records import Ending
from redline.engine import hardware
from redline.envs.batch import Rules
from redline.envs.gym_envs import GymEnvs
from redline.envs.gym_game import WORTH_A_PROCESS, GymState, stacked
from redline.run.evaluation import Evaluation
from redline.run.policies import HELD_OUT, Policy

_SLOTS = 16  # enough to share the cost of calling the network
_REPORT_EVERY = 32  # steps between two progress reports, with a step budget


class CPUGames:
    """Slots of CPU environments that each play a quota of games or a number of steps."""

    def __init__(self, rules: Rules, policy: Policy, episodes: int, seed: int, max_steps: int, slot_steps: int) -> None:
        """Arguments as in `evaluate`, except slot_steps: every game is truncated after this many steps, and the next begins."""
        self.rules, self.policy, self.seed = rules, policy, seed
        self.max_steps, self.slot_steps = max_steps, slot_steps
        game: Any = rules.game
        levels = max(len(game.levels), 1)
        self.slots = min(episodes, max(_SLOTS // levels, 1) * levels)  # equally many for each level
        self.quota = episodes // self.slots + (np.arange(self.slots) < episodes % self.slots)
        self.limit = math.ceil(max_steps / self.slots) if max_steps else 0  # steps per slot, 0: no limit
        self.played, self.busy = np.zeros(self.slots, np.int64), np.ones(self.slots, bool)
        # The games of each slot: score, length, won, ending.
        self.games: list[list[tuple[float, float, bool, Ending]]] = [[] for _ in range(self.slots)]

    def run(self, progress: Callable[[int], None], notify: Callable[[str], None]) -> Evaluation:
        """Play to the end; progress: called with the number of finished games, or the steps of all slots."""
        time_limit = min((x for x in (self.rules.time_limit, self.slot_steps) if x), default=0)
        envs = _open(self.rules, self.slots, time_limit, notify)
        try:
            self._play(envs, progress)
        finally:
            envs.close()
        games = [game for slot in self.games for game in slot]
        score, length, won, ending = (torch.from_numpy(x) for x in np.array(games, dtype=np.float64).T)
        return Evaluation(
            score,
            length,
            won > 0,
            ending == Ending.TERMINATED.value,
            ending != Ending.RUNNING.value,
            "max_steps" if self.max_steps else "episodes",
            self._levels(),
        )

    def _levels(self) -> tuple[str, ...]:
        """Return the level of every game; empty unless there are several levels."""
        game: Any = self.rules.game
        played = enumerate(self.games) if game.levels else ()
        return tuple(game.level_of(slot) for slot, games in played for _ in games)

    def _play(self, envs: GymEnvs | ParallelEnvs, progress: Callable[[int], None]) -> None:
        rules, steps = self.rules, 0
        envs.reset(HELD_OUT + self.seed)
        frames, episode_start = rules.game.spec(rules.config).frames, torch.ones(self.slots, dtype=torch.bool)
        stack = torch.from_numpy(envs.obs).unsqueeze(1).repeat_interleave(frames, 1)
        while self.busy.any() and (not self.limit or steps < self.limit):
            stack = stacked(stack, torch.from_numpy(envs.obs), episode_start)
            obs = rules.game.observe(rules.config, GymState(stack if frames > 1 else stack[:, 0]))
            envs.step(self.policy(obs, None).cpu().numpy(), self.busy)
            steps += 1
            episode_start = torch.from_numpy(envs.terminated | envs.truncated)
            ended = envs.episode_over & self.busy
            self._record(envs, ended)
            if self.max_steps and (steps % _REPORT_EVERY == 0 or steps == self.limit):
                progress(min(steps * self.slots, self.max_steps))
            elif not self.max_steps and ended.any():
                progress(int(self.played.sum()))
        # Unfinished games count with their score so far: without them the longest games would be missing.
        for slot in np.flatnonzero(self.busy & ~envs.episode_over & (envs.length > 0)):
            self.games[slot].append((envs.score[slot], envs.length[slot], False, Ending.RUNNING))

    def _record(self, envs: Any, ended: np.ndarray[Any, Any]) -> None:
        """Record the games that `ended` (slots,) in the last step, and retire slots that have used up their quota."""
        for slot in np.flatnonzero(ended):
            stopped = self.slot_steps and envs.length[slot] == self.slot_steps  # by this evaluation, not by the rules
            ending = Ending.TERMINATED if envs.lost[slot] else Ending.RUNNING if stopped else Ending.TRUNCATED
            self.games[slot].append((envs.score[slot], envs.length[slot], bool(envs.won[slot]), ending))
        self.played += ended
        if not self.max_steps:
            self.busy &= self.played < self.quota


def _open(rules: Rules, slots: int, time_limit: int, notify: Callable[[str], None]) -> GymEnvs | ParallelEnvs:
    """Return the environments, in one process per core if a step costs more than the communication."""
    processes = min(hardware.detect(torch.device("cpu")).cores, slots)
    if processes > 1 and rules.game.step_seconds(rules.config) >= WORTH_A_PROCESS:  # type: ignore[attr-defined]
        try:
            return ParallelEnvs(rules, slots, time_limit, processes)
        except CannotStart as error:
            notify(f"Evaluating in this process alone: other processes cannot make the environment ({error}).")
    return GymEnvs(rules.game, rules.config, slots, time_limit)
