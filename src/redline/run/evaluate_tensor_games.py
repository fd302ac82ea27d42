"""Evaluate a policy on tensor games: thousands of slots on the device, read every few dozen steps.

With an episode budget, every slot plays its quota to the end; with a step budget, every slot plays until the budget is used up.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from redline import recipes
from redline.core.records import Ending, assign, map_record
from redline.engine import fast
from redline.envs import batch
from redline.envs.batch import Rules
from redline.run.evaluation import Evaluation
from redline.run.policies import HELD_OUT, Policy

_MAX_SLOTS = 4096
_MAX_SLOTS_LONG = 65_536  # with a step budget: no slot waits for the longest games, and a GPU is kept busy
_LOOK_EVERY = 32  # steps between reads of the finished games: the only host synchronisation
_LOOK_EVERY_LONG = 256  # with a step budget
_COMPILE_AFTER = 256  # steps of a slot: shorter games end before compiling pays


class TensorGames:
    """Slots on the device that each play a quota of games or a number of steps."""

    def __init__(
        self,
        rules: Rules,
        policy: Policy,
        episodes: int,
        device: torch.device,
        seed: int,
        *,
        max_steps: int,
        slot_steps: int,
        compile: bool,
        graph: bool,
        notify: Callable[[str], None],
    ) -> None:
        """Arguments as in `evaluate`."""
        self.rules, self.policy, self.episodes = rules, policy, episodes
        self.slots = min(episodes, _MAX_SLOTS_LONG if max_steps else _MAX_SLOTS)
        self.slot = torch.arange(self.slots, device=device)  # of the slots that still play
        self.quota = episodes // self.slots + (self.slot < episodes % self.slots).to(torch.int32)
        self.max_steps = max_steps
        self.limit = math.ceil(max_steps / self.slots) if max_steps else slot_steps  # steps per slot, 0: no limit
        self.graph, self.notify = graph, notify
        self.compiler = fast.Compiler(compile, notify, device, recipes.compiler_options(rules.game))
        self.compile_from = 0 if max_steps and self.limit > _COMPILE_AFTER else _COMPILE_AFTER
        self.envs = batch.reset(rules, batch.env_keys(HELD_OUT + seed, self.slot))
        self.records: list[Tensor] = []  # of games that ended, (·, 6) each: slot, number, score, length, won, ending
        self.steps = 0  # of each slot
        self.unfinished = 1  # unfinished games of the quotas; at least 1 with a step budget

    def run(self, progress: Callable[[int], None]) -> Evaluation:
        """Play to the end; progress: called with the number of finished games, or the steps of all slots."""
        while self._goes_on():
            self._play(progress)
        return self._result()

    def _goes_on(self) -> bool:
        return bool(self.unfinished) and (not self.limit or self.steps < self.limit)

    def _play(self, progress: Callable[[int], None]) -> None:
        """Play to the end, or until the batch shrinks, or until it is time to compile."""
        look_every = _LOOK_EVERY_LONG if self.max_steps else _LOOK_EVERY
        table = _Table(self.rules, self.policy, self.envs, look_every)
        compiled = self.compiler.enabled and self.steps >= self.compile_from
        play = fast.Graph(self.compiler(table.step) if compiled else table.step, self.graph, self.notify)
        while self._goes_on():
            rows = min(look_every, self.limit - self.steps) if self.limit else look_every
            for _ in range(rows):
                play()
            self.steps += rows
            self.records.append(table.read(rows, self.slot, None if self.max_steps else self.quota))
            self.envs = table.envs
            if self.max_steps:
                progress(min(self.steps * self.slots, self.max_steps))
            else:
                busy = self.envs.played < self.quota
                self.unfinished = int((self.quota - self.envs.played).clamp(min=0).sum())
                progress(self.episodes - self.unfinished)
                # Half the slots are idle: continue without them. A compiled step keeps its shapes.
                if not compiled and int(busy.sum()) <= len(busy) // 2:
                    self._keep(busy)
                    return
            if self.compiler.enabled and not compiled and self.steps >= self.compile_from:
                return

    def _keep(self, mask: Tensor) -> None:
        """Continue with the slots where `mask` (slots,) is True."""
        self.envs = map_record(lambda x: x[mask], self.envs)
        self.quota, self.slot = self.quota[mask], self.slot[mask]

    def _result(self) -> Evaluation:
        envs, slot = self.envs, self.slot
        # Unfinished games count with their score so far: without them the longest games would be missing.
        unfinished = envs.episode.length > 0
        if not self.max_steps:
            unfinished = unfinished & (envs.played < self.quota)
        running = torch.full_like(slot, Ending.RUNNING.value)
        fields = (slot, envs.played, envs.episode.score, envs.episode.length, torch.zeros_like(slot), running)
        games = torch.cat([*self.records, torch.stack([x.to(torch.int64) for x in fields], 1)[unfinished].cpu()])
        games = games[torch.argsort(games[:, 0] * (1 + games[:, 1].max()) + games[:, 1])]  # by slot, then by number
        _, _, score, length, won, ending = games.unbind(1)
        return Evaluation(
            score.double(),
            length.double(),
            won > 0,
            ending == Ending.TERMINATED.value,
            ending != Ending.RUNNING.value,
            "max_steps" if self.max_steps or self.unfinished else "episodes",
        )


class _Table:
    """N slots in static buffers, and a log with one row per step."""

    def __init__(self, rules: Rules, policy: Policy, envs: batch.EnvState, rows: int) -> None:
        self.rules, self.policy = rules, policy
        self.envs = map_record(torch.clone, envs)
        device, count = envs.key.device, len(envs.key)
        self.row = torch.zeros(1, dtype=torch.int64, device=device)
        # Per step and slot: score and length so far, won, ending. Nothing is summed over slots in a step.
        self.log = torch.zeros(rows, 4, count, dtype=torch.int32, device=device)

    @torch.no_grad()
    def step(self) -> None:
        """Play one step of all slots and log it. May be compiled and captured."""
        rules, state = self.rules, self.envs.game
        action = self.policy(rules.game.observe(rules.config, state), batch.legal(rules, state))
        envs, step = batch.step(rules, self.envs, action)
        terminated, truncated = step.terminated.to(torch.int32), step.truncated.to(torch.int32)
        ending = Ending.TERMINATED.value * terminated + Ending.TRUNCATED.value * truncated
        fields = (step.episode.score, step.episode.length, step.won, ending)
        self.log.index_copy_(0, self.row, torch.stack([x.to(torch.int32) for x in fields]).unsqueeze(0))
        self.row.add_(1)
        assign(self.envs, envs)

    def read(self, rows: int, slot: Tensor, quota: Tensor | None) -> Tensor:
        """Return records of the games that ended in the last `rows` steps, within the slots' quotas; restart at row 0."""
        log = self.log[:rows]
        ended = log[:, 3] > 0
        # A game's number: all games its slot has finished by now, minus those that ended in this row or later.
        number = self.envs.played - ended.flip(0).cumsum(0).flip(0)
        counts = ended if quota is None else ended & (number < quota)
        row, column = counts.nonzero(as_tuple=True)
        self.row.zero_()
        fields = [slot[column], number[row, column], *(log[row, field, column] for field in range(4))]
        return torch.stack([x.to(torch.int64) for x in fields], 1).cpu()
