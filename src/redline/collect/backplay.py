"""Backplay for tensor games: start some games shortly before the environment's last loss, so that rare failures recur.

Every environment keeps two snapshots, `steps` apart. When it loses, the older one, `steps` to 2 * `steps` steps old,
becomes the starting state. The game and its random stream are the same, but the actions may differ. Such a game is
truncated after BACKPLAY_LENGTH * `steps` steps: later states occur in whole games.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from redline.core import random
from redline.core.records import Episode, Step, map_record, where
from redline.envs.batch import EnvState
from redline.envs.gym_envs import BACKPLAY_LENGTH


class Snapshot(NamedTuple):
    """Saved states of N games. Each (N, …)."""

    game: Any  # the game's State
    episode: Episode


class Backplay(NamedTuple):
    """Snapshots of N environments."""

    newer: Snapshot
    older: Snapshot
    since: Tensor  # (N,) int32: steps since the newer snapshot
    lost: Snapshot  # the older snapshot at the time of the last loss
    known: Tensor  # (N,) bool: the environment has lost before, so that `lost` is set
    left: Tensor  # (N,) int32: remaining steps of a backplay game; 0: a whole game is played


def init_backplay(envs: EnvState) -> Backplay:
    """Return the snapshots of environments whose games have just started."""
    now, zero = Snapshot(envs.game, envs.episode), torch.zeros_like(envs.played)
    newer, older, lost = (map_record(torch.clone, now) for _ in range(3))
    return Backplay(newer, older, zero, lost, zero.to(torch.bool), zero.clone())


def step_backplay(
    envs: EnvState, snapshots: Backplay, step: Step, fraction: float, steps: int
) -> tuple[EnvState, Backplay]:
    """Return environments and snapshots after a `step`.

    Where a game ended, the next one starts from the snapshot before the environment's last loss, if there was one, with
    probability `fraction`.
    """
    ended = step.terminated | step.truncated
    loses = step.terminated & ~step.won
    lost, known = where(loses, snapshots.older, snapshots.lost), snapshots.known | loses
    draw = random.uniform(random.bits(random.fold(envs.key, -envs.played), 0))  # games use streams 0, 1, 2, …
    restarts = ended & known & (draw < fraction)
    now = where(restarts, lost, Snapshot(envs.game, envs.episode))
    since = torch.where(ended, 0, snapshots.since + 1)
    due = since >= steps
    after = Backplay(
        newer=where(ended | due, now, snapshots.newer),
        older=where(ended, now, where(due, snapshots.newer, snapshots.older)),
        since=torch.where(due, 0, since),
        lost=lost,
        known=known,
        left=torch.where(ended, torch.where(restarts, BACKPLAY_LENGTH * steps, 0), (snapshots.left - 1).clamp(min=0)),
    )
    return envs._replace(game=now.game, episode=now.episode), after
