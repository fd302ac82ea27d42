"""In page-locked host memory; batches are copied to the device ahead of time.

Checkpoints include the whole memory. A resumed run draws the same samples as an uninterrupted one, except with CPU
environments: these restart with new episodes, and the memory is filled again.
"""

from __future__ import annotations

import torch

from redline.replay.contract import Location, Replay, ReplayRequest, TransitionBytes
from redline.replay.host_replay import HostReplay
from redline.replay.record_storage import RecordStorage
from redline.replay.row_layout import RowLayout, record_bytes
from redline.replay.transfer import page_locked_zeros
from redline.replay.windows import STEP_FIELD

LOCATION = Location.HOST


def make(request: ReplayRequest) -> Replay:
    """Return a replay memory in page-locked host memory, or in ordinary memory if there is no GPU."""
    return HostReplay(request, lambda entries, layout: PinnedRecords(request, entries, layout))


def bytes_per_transition(state_bytes: int) -> TransitionBytes:
    """Return the estimated size of one record, and of its copy while a checkpoint is written."""
    size = record_bytes(state_bytes, STEP_FIELD)
    return TransitionBytes(host=size, snapshot=size)


class PinnedRecords(RecordStorage):
    """Records in page-locked memory, which a GPU copies without the CPU; in ordinary memory if that fails."""

    def __init__(self, request: ReplayRequest, entries: int, layout: RowLayout) -> None:
        self.records = page_locked_zeros(
            (entries, layout.size), torch.uint8, request.device, request.notify, request.pin_memory
        )
        self.rows = entries // request.num_envs
