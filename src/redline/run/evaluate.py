"""Play on fixed held-out seeds, greedy unless actions are to be drawn, in parallel.

Counting the first games to finish would favour short ones. So each slot plays its quota of games to their end; or, where
games may be too long for that, every slot plays on until a budget of steps is spent, and the score per game over is
estimated from all that was played, finished or not.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from redline import recipes
from redline.collect.child_process import CannotStart
from redline.collect.parallel_envs import ParallelEnvs
from redline.core import random
from redline.core.errors import UserError
from redline.core.records import Ending, assign, map_record
from redline.engine import fast, hardware
from redline.envs import batch
from redline.envs.batch import Rules
from redline.envs.gym_envs import GymEnvs
from redline.envs.gym_game import WORTH_A_PROCESS, GymState, stacked
from redline.run.statistics import bootstrap, iqm, poisson_interval, share_interval

HELD_OUT = 0x4E1D_0000_0000  # above any training seed: evaluation never plays a training game
MAX_SEED = 2**46  # training seeds end here
_MAX_SLOTS = 4096
_HOST_SLOTS = 16  # CPU environments: enough to share the cost of asking the network
_LOOK_EVERY = 32  # steps between looks at what has ended: the only host synchronisation
_LOOK_EVERY_LONG = 256  # with a budget of steps
_COMPILE_AFTER = 256  # steps of a slot: shorter games are over before compiling would have paid

_TERMINATED, _TRUNCATED = Ending.TERMINATED.value, Ending.TRUNCATED.value
# Observations (N, …) and legal actions (N, A), None where all always are -> actions (N,) int64.
Policy = Callable[[Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class Evaluation:
    """What was played, game by game: those of slot 0 in their order, then those of slot 1, and so on. Each (E,)."""

    scores: Tensor  # float64; of a game that was still going on, as it stood
    lengths: Tensor  # float64
    wins: Tensor  # bool
    game_over: Tensor  # bool: terminated, so not truncated and not going on
    finished: Tensor  # bool: terminated or truncated
    stopped_by: str = "episodes"  # or max_steps

    def summary(self) -> dict[str, Any]:
        """Fields of `--json`.

        `score_mean` and its like are over all games begun, and so at most the truth where some were still going on.
        `score_censored` is the score per game over: unfinished games count with what they scored, and as no game over.
        It is what the mean would come to if every game were played out and a game's end were as likely at any score.
        `_low` and `_high` end a 95 % interval, None where one game says nothing of it; `score_ci95` is half its width.
        """
        count, scores = len(self.scores), self.scores.numpy()
        mean, middle = bootstrap(scores) if count > 1 else (None, None)
        wins = int(self.wins.sum())
        won, won_by = share_interval(wins, count)
        total, game_overs = float(self.scores.sum()), int(self.game_over.sum())
        fewest, most = poisson_interval(game_overs)
        return {
            "episodes": count,
            "finished": int(self.finished.sum()),
            "game_overs": game_overs,
            "eval_steps": int(self.lengths.sum()),
            "stopped_by": self.stopped_by,
            "score_mean": total / count,
            "score_ci95": (mean.high - mean.low) / 2 if mean else 0.0,
            "score_low": mean.low if mean else None,
            "score_high": mean.high if mean else None,
            "score_iqm": float(iqm(scores)),
            "score_iqm_low": middle.low if middle else None,
            "score_iqm_high": middle.high if middle else None,
            "score_median": float(np.median(scores)),
            "score_min": float(self.scores.min()),
            "score_max": float(self.scores.max()),
            "total_score": total,
            "score_censored": total / game_overs if game_overs else None,
            "score_censored_low": total / most if total >= 0 else total / fewest if fewest else None,
            "score_censored_high": total / most if total < 0 else total / fewest if fewest else None,
            "length_mean": float(self.lengths.mean()),
            "win_rate": wins / count,
            "win_rate_low": won.low,
            "win_rate_high": won.high,
            "win_rate_interval": won_by,
            "steps_per_win": float(self.lengths[self.wins].mean()) if wins else None,
        }


def greedy(net: nn.Module, device: torch.device) -> Policy:
    """The policy that takes the action of the highest value: observations of any device -> actions on `device`."""

    @torch.no_grad()
    def policy(obs: Tensor, legal: Tensor | None = None) -> Tensor:
        return _asked(net, device, obs, legal).argmax(1)

    return policy


def drawn(net: nn.Module, device: torch.device, seed: int) -> Policy:
    """The policy that draws an action with the probabilities of `net`, whose outputs are logits."""
    key, count = random.seed_key(seed, device), torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def policy(obs: Tensor, legal: Tensor | None = None) -> Tensor:
        logits = _asked(net, device, obs, legal)
        number = torch.arange(logits.numel(), device=device).view_as(logits)
        noise = random.gumbel(random.bits(random.fold(key, count), number))
        count.add_(1)
        return (logits + noise).argmax(1)

    return policy


def _asked(net: nn.Module, device: torch.device, obs: Tensor, legal: Tensor | None) -> Tensor:
    """What the network says of every action, (N, A)."""
    found: Tensor = net(obs.to(device)) if legal is None else net(obs.to(device), legal.to(device))
    return found


def evaluate_net(
    net: nn.Module,
    rules: Rules,
    device: torch.device,
    episodes: int,
    seed: int = 0,
    progress: Callable[[int], None] = lambda _: None,
    max_steps: int = 0,
    sample: bool = False,
) -> Evaluation:
    """`evaluate` of the greedy policy of `net`, which is on `device`, by the fastest means that device has.

    `sample`: of the policy that it describes, actions drawn.
    """
    machine = hardware.detect(device)
    compiles = machine.kind == "cuda" or (machine.kind == "cpu" and bool(machine.compiler))
    return evaluate(
        rules,
        drawn(net, device, seed) if sample else greedy(net, device),
        episodes,
        device,
        seed,
        progress,
        max_steps=max_steps,
        compile=compiles,
        graph=machine.kind == "cuda",
    )


@torch.no_grad()
def evaluate(
    rules: Rules,
    policy: Policy,
    episodes: int,
    device: torch.device,
    seed: int = 0,
    progress: Callable[[int], None] = lambda _: None,
    *,
    max_steps: int = 0,
    slot_steps: int = 0,
    compile: bool = False,
    graph: bool = False,
    notify: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
) -> Evaluation:
    """Play `episodes` games with `policy`, each to its end; `progress` hears how many have ended.

    With `max_steps` the slots, as many as `episodes`, play game after game until they have played so many steps together;
    `progress` hears how many steps that is. `slot_steps` only bounds a slot's quota of games: a slot that has played so
    many steps is stopped where it stands. With `compile` what lasts is compiled, with `graph` replayed: see `engine.fast`.
    """
    if episodes < 1:
        raise UserError(f"episodes is {episodes}; expected at least 1.")
    if max_steps < 0:
        raise UserError(f"max_steps is {max_steps}; expected 0 (play every game to its end) or a number of steps.")
    if not 0 <= seed < MAX_SEED:
        raise UserError(f"seed is {seed}; expected 0 to {MAX_SEED - 1:,}.")
    if rules.game.ON_CPU:
        return _evaluate_host(rules, policy, episodes, seed, progress, max_steps, slot_steps, notify)
    slots = min(episodes, _MAX_SLOTS)
    slot = torch.arange(slots, device=device)
    quota = episodes // slots + (slot < episodes % slots).to(torch.int32)
    limit = math.ceil(max_steps / slots) if max_steps else slot_steps  # steps a slot, 0: none
    look_every = _LOOK_EVERY_LONG if max_steps else _LOOK_EVERY
    compiler, compile_from = (
        fast.Compiler(compile, notify, device, recipes.compiler_options(rules.game)),
        0 if max_steps and limit > _COMPILE_AFTER else _COMPILE_AFTER,
    )
    envs = batch.reset(rules, batch.env_keys(HELD_OUT + seed, slot))
    found: list[Tensor] = []  # records of games, (·, 6) each: slot, number, score, length, won, how it ended
    steps = 0
    left = 1
    while left and (not limit or steps < limit):
        table = _Table(rules, policy, envs, look_every)
        compiled = compiler.enabled and steps >= compile_from
        play = fast.Graph(compiler(table.step) if compiled else table.step, graph, notify)
        while left and (not limit or steps < limit):
            rows = min(look_every, limit - steps) if limit else look_every
            for _ in range(rows):
                play()
            steps += rows
            found.append(table.read(rows, slot, None if max_steps else quota))
            envs = table.envs
            if max_steps:
                progress(min(steps * slots, max_steps))
            else:
                busy = envs.played < quota
                left = int((quota - envs.played).clamp(min=0).sum())
                progress(episodes - left)
                # Half the slots have nothing to do: go on with the others. What is compiled keeps its shapes.
                if not compiled and int(busy.sum()) <= len(busy) // 2:
                    envs, quota, slot = _keep(envs, busy), quota[busy], slot[busy]
                    break
            if compiler.enabled and not compiled and steps >= compile_from:
                break
    ended = torch.cat(found)
    # What goes on counts as it stands: left out, the games that are still to end, the longest, would be missing.
    going_on = envs.episode.length > 0
    if not max_steps:
        going_on = going_on & (envs.played < quota)
    none = torch.zeros_like(slot)
    fields = (slot, envs.played, envs.episode.score, envs.episode.length, none, none)
    ended = torch.cat([ended, torch.stack([x.to(torch.int64) for x in fields], 1)[going_on].cpu()])
    ended = ended[torch.argsort(ended[:, 0] * (1 + ended[:, 1].max()) + ended[:, 1])]
    _, _, score, length, won, how = ended.unbind(1)
    stopped_by = "max_steps" if max_steps or left else "episodes"
    return Evaluation(score.double(), length.double(), won > 0, how == _TERMINATED, how > 0, stopped_by)


def _evaluate_host(
    rules: Rules,
    policy: Policy,
    episodes: int,
    seed: int,
    progress: Callable[[int], None],
    max_steps: int,
    slot_steps: int,
    notify: Callable[[str], None],
) -> Evaluation:
    """The same with CPU environments. `slot_steps` bounds each game: it is cut there and the next one begins."""
    slots = min(episodes, _HOST_SLOTS)
    quota = episodes // slots + (np.arange(slots) < episodes % slots)
    limit = math.ceil(max_steps / slots) if max_steps else 0  # steps a slot, 0: none
    longest = min((x for x in (rules.time_limit, slot_steps) if x), default=0)
    envs = _open(rules, slots, longest, notify)
    # Of each slot its games: score, length, whether it was won, whether it was over, whether it was finished.
    found: list[list[tuple[float, float, bool, bool, bool]]] = [[] for _ in range(slots)]
    played, steps, busy = np.zeros(slots, np.int64), 0, np.ones(slots, bool)
    try:
        envs.reset(HELD_OUT + seed)
        frames, episode_start = rules.game.spec(rules.config).frames, torch.ones(slots, dtype=torch.bool)
        stack = torch.from_numpy(envs.obs).unsqueeze(1).repeat_interleave(frames, 1)
        while busy.any() and (not limit or steps < limit):
            stack = stacked(stack, torch.from_numpy(envs.obs), episode_start)
            obs = rules.game.observe(rules.config, GymState(stack if frames > 1 else stack[:, 0]))
            envs.step(policy(obs, None).cpu().numpy(), busy)
            steps += 1
            ended = envs.episode_over & busy
            episode_start = torch.from_numpy(envs.terminated | envs.truncated)
            for slot in np.flatnonzero(ended):
                cut = slot_steps and not envs.lost[slot] and envs.length[slot] == slot_steps
                ends = envs.won[slot], envs.lost[slot], not cut
                found[slot].append((envs.score[slot], envs.length[slot], *ends))
            played += ended
            if not max_steps:
                busy &= played < quota
            if max_steps and (steps % _LOOK_EVERY == 0 or steps == limit):
                progress(min(steps * slots, max_steps))
            elif not max_steps and ended.any():
                progress(int(played.sum()))
        going_on = busy & ~envs.episode_over & (envs.length > 0)
        for slot in np.flatnonzero(going_on):
            found[slot].append((envs.score[slot], envs.length[slot], False, False, False))
    finally:
        envs.close()
    score, length, *flags = np.array([game for games in found for game in games], dtype=np.float64).T
    scores, lengths, wins, game_over, finished = map(torch.from_numpy, (score, length, *(x > 0 for x in flags)))
    return Evaluation(scores, lengths, wins, game_over, finished, "max_steps" if max_steps else "episodes")


def _open(rules: Rules, slots: int, time_limit: int, notify: Callable[[str], None]) -> GymEnvs | ParallelEnvs:
    """In as many processes as there are cores, where a step costs more than to ask for it."""
    processes = min(hardware.detect(torch.device("cpu")).cores, slots)
    if processes > 1 and rules.game.step_seconds(rules.config) >= WORTH_A_PROCESS:  # type: ignore[attr-defined]
        try:
            return ParallelEnvs(rules, slots, time_limit, processes)
        except CannotStart as error:
            notify(f"Evaluation plays in this process alone: others cannot make the environment ({error}).")
    return GymEnvs(rules.game, rules.config, slots, time_limit)


def _keep(envs: batch.EnvState, mask: Tensor) -> batch.EnvState:
    """The environments where `mask` is True."""
    return map_record(lambda x: x[mask], envs)


class _Table:
    """N slots playing, in static buffers, and a record a step of what ended."""

    def __init__(self, rules: Rules, policy: Policy, envs: batch.EnvState, rows: int) -> None:
        self.rules, self.policy = rules, policy
        self.envs = map_record(torch.clone, envs)
        device, count = envs.key.device, len(envs.key)
        self.row = torch.zeros(1, dtype=torch.int64, device=device)
        # A row a step: score and length so far, won, how it ended. Nothing is added up over slots in a step.
        self.log = torch.zeros(rows, 4, count, dtype=torch.int32, device=device)

    @torch.no_grad()
    def step(self) -> None:
        rules, state = self.rules, self.envs.game
        action = self.policy(rules.game.observe(rules.config, state), batch.legal(rules, state))
        envs, step = batch.step(rules, self.envs, action)
        how = _TERMINATED * step.terminated.to(torch.int32) + _TRUNCATED * step.truncated.to(torch.int32)
        fields = (step.episode.score, step.episode.length, step.won, how)
        self.log.index_copy_(0, self.row, torch.stack([x.to(torch.int32) for x in fields]).unsqueeze(0))
        self.row.add_(1)
        assign(self.envs, envs)

    def read(self, rows: int, slot: Tensor, quota: Tensor | None) -> Tensor:
        """Records of the games that ended in the last `rows` steps, within the slots' quota; the next step is row 0."""
        log = self.log[:rows]
        ended = log[:, 3] > 0
        # The number of a game: those its slot has finished by now, less those that ended in this row or later.
        number = self.envs.played - ended.flip(0).cumsum(0).flip(0)
        counts = ended if quota is None else ended & (number < quota)
        row, place = counts.nonzero(as_tuple=True)
        self.row.zero_()
        chosen = [slot[place], number[row, place], *(log[row, field, place] for field in range(4))]
        return torch.stack([x.to(torch.int64) for x in chosen], 1).cpu()
