"""Practice: games begun some moves before the environment's last loss. What goes wrong seldom is met often.

Of every environment two moments are kept, `steps` apart; when it loses, the older one, `steps` to twice as many moves back, is where
that game is practised from. It is the same game with the same random stream; what is played from there on may differ. Practice
is cut short after four times `steps`: what follows is met in whole games.
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
    """Where games stood. Each (N, …)."""

    game: Any  # the game's State
    episode: Episode


class Backplay(NamedTuple):
    """Those kept of N environments."""

    newer: Snapshot
    older: Snapshot
    since: Tensor  # (N,) int32: steps since the newer one
    lost: Snapshot  # before the last loss
    known: Tensor  # (N,) bool: there was one
    left: Tensor  # (N,) int32: steps of practice to come; 0: a whole game is played


def keep(envs: EnvState) -> Backplay:
    """From the start of all games on."""
    now, zero = Snapshot(envs.game, envs.episode), torch.zeros_like(envs.played)
    newer, older, lost = (map_record(torch.clone, now) for _ in range(3))
    return Backplay(newer, older, zero, lost, zero.to(torch.bool), zero.clone())


def go_back(envs: EnvState, snapshots: Backplay, step: Step, fraction: float, steps: int) -> tuple[EnvState, Backplay]:
    """Lanes after a `step`; those whose game ended practise, that `share` of them, where they know a loss."""
    ended = step.terminated | step.truncated
    fails = step.terminated & ~step.won
    lost, known = where(fails, snapshots.older, snapshots.lost), snapshots.known | fails
    draw = random.uniform(random.bits(random.fold(envs.key, -envs.played), 0))  # games have the streams from 0 on
    again = ended & known & (draw < fraction)
    now = where(again, lost, Snapshot(envs.game, envs.episode))
    since = torch.where(ended, 0, snapshots.since + 1)
    due = since >= steps
    after = Backplay(
        newer=where(ended | due, now, snapshots.newer),
        older=where(ended, now, where(due, snapshots.newer, snapshots.older)),
        since=torch.where(due, 0, since),
        lost=lost,
        known=known,
        left=torch.where(ended, torch.where(again, BACKPLAY_LENGTH * steps, 0), (snapshots.left - 1).clamp(min=0)),
    )
    return envs._replace(game=now.game, episode=now.episode), after
