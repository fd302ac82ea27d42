"""Lost games begun again some moves before the loss: what goes wrong seldom is practised often.

Of every lane two moments are kept, `steps` apart: a lost game goes on from the older one, `steps` to twice as many moves back
(or from its start). It is the same game, with the same random stream; only what is played from there on may differ.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from redline.core import random
from redline.core.records import Episode, Step, map_record, where
from redline.envs.batch import Lanes


class Moment(NamedTuple):
    """Where a game stood. Each (N, …)."""

    game: Any  # the game's State
    episode: Episode


class Moments(NamedTuple):
    """Those kept of N lanes."""

    newer: Moment
    older: Moment
    since: Tensor  # (N,) int32: steps since the newer one


def keep(lanes: Lanes) -> Moments:
    """From the start of all games on."""
    now = Moment(lanes.game, lanes.episode)
    newer, older = (map_record(torch.clone, now) for _ in range(2))
    return Moments(newer, older, torch.zeros_like(lanes.played))


def go_back(lanes: Lanes, moments: Moments, step: Step, share: float, steps: int) -> tuple[Lanes, Moments]:
    """Lanes after a `step`, that `share` of the lost ones some moves before the loss, and what is kept of them."""
    ended = step.terminated | step.truncated
    draw = random.uniform(random.bits(random.fold(lanes.key, -lanes.played), 0))  # games have the streams from 0 on
    again = step.terminated & ~step.won & (draw < share)
    now = where(again, moments.older, Moment(lanes.game, lanes.episode))
    since = torch.where(ended, 0, moments.since + 1)
    due = since >= steps
    begins = ended & ~again
    after = Moments(
        newer=where(ended | due, now, moments.newer),
        older=where(begins, now, where(due, moments.newer, moments.older)),
        since=torch.where(due, 0, since),
    )
    return lanes._replace(game=now.game, episode=now.episode), after
