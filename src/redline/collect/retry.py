"""Practice: games begun some moves before the lane's last loss. What goes wrong seldom is met often.

Of every lane two moments are kept, `steps` apart; when it loses, the older one, `steps` to twice as many moves back, is where
that game is practised from. It is the same game with the same random stream; what is played from there on may differ. Practice
is cut short after four times `steps`: what follows is met in whole games.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from redline.core import random
from redline.core.records import Episode, Step, map_record, where
from redline.envs.batch import Lanes
from redline.envs.host import PRACTICE


class Moment(NamedTuple):
    """Where games stood. Each (N, …)."""

    game: Any  # the game's State
    episode: Episode


class Moments(NamedTuple):
    """Those kept of N lanes."""

    newer: Moment
    older: Moment
    since: Tensor  # (N,) int32: steps since the newer one
    lost: Moment  # before the last loss
    known: Tensor  # (N,) bool: there was one
    left: Tensor  # (N,) int32: steps of practice to come; 0: a whole game is played


def keep(lanes: Lanes) -> Moments:
    """From the start of all games on."""
    now, zero = Moment(lanes.game, lanes.episode), torch.zeros_like(lanes.played)
    newer, older, lost = (map_record(torch.clone, now) for _ in range(3))
    return Moments(newer, older, zero, lost, zero.to(torch.bool), zero.clone())


def go_back(lanes: Lanes, moments: Moments, step: Step, share: float, steps: int) -> tuple[Lanes, Moments]:
    """Lanes after a `step`; those whose game ended practise, that `share` of them, where they know a loss."""
    ended = step.terminated | step.truncated
    fails = step.terminated & ~step.won
    lost, known = where(fails, moments.older, moments.lost), moments.known | fails
    draw = random.uniform(random.bits(random.fold(lanes.key, -lanes.played), 0))  # games have the streams from 0 on
    again = ended & known & (draw < share)
    now = where(again, lost, Moment(lanes.game, lanes.episode))
    since = torch.where(ended, 0, moments.since + 1)
    due = since >= steps
    after = Moments(
        newer=where(ended | due, now, moments.newer),
        older=where(ended, now, where(due, moments.newer, moments.older)),
        since=torch.where(due, 0, since),
        lost=lost,
        known=known,
        left=torch.where(ended, torch.where(again, PRACTICE * steps, 0), (moments.left - 1).clamp(min=0)),
    )
    return lanes._replace(game=now.game, episode=now.episode), after
