"""Backplay for tensor games: start some games shortly before the environment's last loss, so that rare failures recur.

Every environment keeps two snapshots, `steps` apart. When it loses, the older one, `steps` to twice as many steps back,
becomes the state to start from. It is the same game with the same random stream; play from there on may differ. Such a game
is truncated after BACKPLAY_LENGTH times `steps`: what follows is met in whole games.
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
    """Games at one moment. Each (N, …)."""

    game: Any  # the game's State
    episode: Episode


class Backplay(NamedTuple):
    """Snapshots of N environments."""

    newer: Snapshot
    older: Snapshot
    since: Tensor  # (N,) int32: steps since the newer snapshot
    lost: Snapshot  # the older snapshot at the last loss
    known: Tensor  # (N,) bool: there was a loss
    left: Tensor  # (N,) int32: steps left of a backplay; 0: a whole game is played


def init_backplay(envs: EnvState) -> Backplay:
    """Return snapshots of games that have just started."""
    now, zero = Snapshot(envs.game, envs.episode), torch.zeros_like(envs.played)
    newer, older, lost = (map_record(torch.clone, now) for _ in range(3))
    return Backplay(newer, older, zero, lost, zero.to(torch.bool), zero.clone())


def step_backplay(
    envs: EnvState, snapshots: Backplay, step: Step, fraction: float, steps: int
) -> tuple[EnvState, Backplay]:
    """Return environments and snapshots after a `step`.

    Of the environments whose game ended, the given fraction starts from the snapshot before its last loss, if there was one.
    """
    ended = step.terminated | step.truncated
    loses = step.terminated & ~step.won
    lost, known = where(loses, snapshots.older, snapshots.lost), snapshots.known | loses
    draw = random.uniform(random.bits(random.fold(envs.key, -envs.played), 0))  # games use the streams from 0 up
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
