"""Ranks: the processes of one run started by torchrun, and the collective operations between them.

Tensors of the hot loop (gradients, statistics) are exchanged by NCCL if every rank has its own GPU, else by gloo. Small
records and checkpoints are exchanged between hosts, always by gloo, as JSON and plain bytes: nothing is pickled. Collective
methods must be called by all ranks in the same order; a rank that does not answer within the timeout, or whose connection
breaks, raises RankLost in the others.

A process that torchrun did not start is `SINGLE`: it exchanges nothing, and every method returns its own values.
"""

from __future__ import annotations

import json
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from redline.core.errors import UserError
from redline.engine import hardware
from redline.engine.launch import Launch, launched

_POLL_SECONDS = 0.001  # interval for polling a GPU that may wait for another rank
_MEET_SECONDS = 0.02  # interval for polling which ranks have arrived
_CPU = torch.device("cpu")


class RankLost(UserError):
    """Another rank has exited or does not answer. This rank must stop; the run can resume from its last checkpoint."""

    exit_code = 75


class ReportedByLeader(UserError):
    """An error of rank 0, which has printed it; the other ranks exit silently with the same exit code."""

    reported = True

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Ranks:
    """All ranks of a run, seen from this one."""

    rank: int = 0
    size: int = 1
    local_size: int = 1  # ranks on this machine
    device: torch.device = _CPU  # of this rank
    shares_device: bool = False  # another rank uses the same GPU
    timeout: float = 0.0  # seconds to wait for the other ranks
    control: dist.ProcessGroup | None = None  # gloo, for records on the host; None: this is the only process
    data: dist.ProcessGroup | None = None  # for tensors of the hot loop

    @property
    def active(self) -> bool:
        """Whether ranks exchange anything: False in a process that torchrun did not start."""
        return self.control is not None

    @property
    def leads(self) -> bool:
        """Whether this rank writes logs and checkpoints and talks to the user."""
        return self.rank == 0

    @property
    def backend(self) -> str:
        """Backend for tensors of the hot loop, nccl or gloo; empty if nothing is exchanged."""
        return str(dist.get_backend(self.data)) if self.data is not None else ""

    @property
    def captures(self) -> bool:
        """Whether exchanges of tensors can be captured in a CUDA graph: NCCL's can; gloo's go through the host."""
        return self.backend in ("", "nccl")

    # ---------------------------------------------------------------------------------------- tensors of the hot loop

    def mean_(self, tensor: Tensor) -> Tensor:
        """Replace a contiguous floating-point tensor by its mean over all ranks, and return it."""
        if not self.active:
            return tensor
        with self._contact():
            if tensor.device.type == "cpu" or self.backend == "nccl":
                dist.all_reduce(tensor, group=self.data)
            else:  # gloo needs host memory
                on_host = tensor.cpu()
                dist.all_reduce(on_host, group=self.data)
                tensor.copy_(on_host)
        return tensor.div_(self.size)

    def mean_of(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the mean of each float32 tensor over all ranks, exchanged together in one flat buffer."""
        if not self.active:
            return tuple(tensors)
        flat = self.mean_(torch.cat([tensor.flatten() for tensor in tensors]))
        parts = flat.split([tensor.numel() for tensor in tensors])
        return tuple(part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True))

    def var_mean(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        """Return variance and mean over the last axis of `samples` (…, B) and over all ranks, like torch.var_mean."""
        variance, mean = torch.var_mean(samples.to(torch.float64), dim=-1, correction=0)
        moments = self.mean_(torch.stack([mean, variance + mean.square()]))  # float64, against cancellation below
        mean, square = moments
        return (square - mean.square()).clamp(min=0).to(samples.dtype), mean.to(samples.dtype)

    def wait_for_device(self) -> None:
        """Wait until the GPU has finished; raise RankLost if that takes longer than the timeout.

        A captured exchange with a lost rank never ends, and nothing else would detect it.
        """
        if not self.active or self.device.type != "cuda":
            return
        event = torch.cuda.Event()
        event.record()
        deadline = time.monotonic() + self.timeout
        while not event.query():
            if time.monotonic() > deadline:
                raise self._lost(f"the GPU has waited for {self.timeout:g} seconds")
            time.sleep(_POLL_SECONDS)

    # ------------------------------------------------------------------------------------------- records of the host

    def gather(self, record: Any) -> list[Any]:
        """Return the JSON records of all ranks, by rank."""
        if not self.active:
            return [record]
        own = _to_bytes(record)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        with self._contact():
            dist.all_gather(sizes, torch.tensor([len(own)]), group=self.control)
            longest = int(max(sizes))
            padded = torch.cat([own, own.new_zeros(longest - len(own))])
            texts = [torch.zeros_like(padded) for _ in range(self.size)]
            dist.all_gather(texts, padded, group=self.control)
        return [_from_bytes(text[: int(size)]) for text, size in zip(texts, sizes, strict=True)]

    def broadcast(self, record: Any) -> Any:
        """Return the JSON record of rank 0 on all ranks; the argument is ignored on the others."""
        if not self.active:
            return record
        text = _to_bytes(record if self.leads else None)
        size = torch.tensor([len(text)])
        with self._contact():
            dist.broadcast(size, 0, group=self.control)
            text = text if self.leads else torch.zeros(int(size), dtype=torch.uint8)
            dist.broadcast(text, 0, group=self.control)
        return _from_bytes(text)

    def lead(self, function: Callable[[], Any]) -> Any:
        """Call `function` on rank 0 and return its result, on other ranks as JSON values; a UserError stops all ranks."""
        if not self.active:
            return function()
        if self.leads:
            try:
                result = function()
            except UserError as error:
                self.broadcast({"error": str(error), "code": error.exit_code})
                raise
            self.broadcast({"result": result})
            return result
        outcome = self.broadcast(None)
        if "error" in outcome:
            raise ReportedByLeader(outcome["error"], outcome["code"])
        return outcome["result"]

    # ------------------------------------------------------------------------------------------ tensors of checkpoints

    def gather_tensor(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which must have equal shapes, on rank 0's CPU; an empty list on other ranks."""
        own = tensor.detach().cpu().contiguous()
        if not self.active:
            return [own]
        copies = [torch.empty_like(own) for _ in range(self.size)] if self.leads else []
        if not own.numel():
            return copies
        with self._contact():
            dist.gather(_bytes_of(own), [_bytes_of(x) for x in copies] or None, 0, group=self.control)
        return copies

    def broadcast_tensor(self, tensor: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the CPU tensor of rank 0 on all ranks; `tensor` is None on the others."""
        own = torch.empty(tuple(shape), dtype=dtype) if tensor is None else tensor.contiguous()
        if self.active and own.numel():
            with self._contact():
                dist.broadcast(_bytes_of(own), 0, group=self.control)
        return own

    def pass_tensor(self, tensor: Tensor | None, to: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Send a CPU tensor, given on rank 0, to rank `to`; return it on rank `to`, and None on the others."""
        if to == 0 or self.rank not in (0, to):
            return tensor if to == 0 else None  # `tensor` is None on the other ranks
        with self._contact():
            if self.leads:
                assert tensor is not None
                dist.send(_bytes_of(tensor.contiguous()), to, group=self.control)
                return None
            own = torch.empty(tuple(shape), dtype=dtype)
            dist.recv(_bytes_of(own), 0, group=self.control)
            return own

    # ----------------------------------------------------------------------------------------------------------- ending

    def close(self) -> None:
        """Leave the other ranks."""
        if self.active:
            dist.destroy_process_group()

    @contextmanager
    def _contact(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # base class of all errors of torch.distributed
            text = re.sub(r"^\[[^]]*\]\s*", "", str(error).strip())  # remove the source location in torch
            raise self._lost(text.partition("\n")[0].partition(". ")[0][:200] or type(error).__name__) from error

    def _lost(self, reason: str) -> RankLost:
        return RankLost(
            f"Rank {self.rank} has lost the other ranks ({reason}). The run continues from its last checkpoint with the same "
            "command; torchrun --max-restarts=N does so by itself."
        )


SINGLE = Ranks()


def join(wanted_device: str, timeout: float) -> Ranks:
    """Return the Ranks of this process's run, after connecting to the others; SINGLE if torchrun did not start it."""
    launch = launched()
    return SINGLE if launch is None else connect(launch, wanted_device, timeout)


def connect(launch: Launch, wanted_device: str, timeout: float) -> Ranks:
    """Connect to the other ranks at MASTER_ADDR and MASTER_PORT, choose the backend, and return the Ranks.

    timeout: in seconds.
    """
    from torch.distributed.distributed_c10d import PrefixStore  # not in every build of torch
    from torch.distributed.rendezvous import rendezvous

    device = pick_device(wanted_device, launch.local_rank)
    limit = timedelta(seconds=timeout)
    try:
        store, _, _ = next(rendezvous("env://", launch.rank, launch.size, timeout=limit))
        store = PrefixStore(_meet(store, launch, timeout), store)
        dist.init_process_group("gloo", store=store, rank=launch.rank, world_size=launch.size, timeout=limit)
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"Rank {launch.rank} could not meet the other {launch.size - 1} ranks: {str(error).splitlines()[0]}. Check that "
            "every machine can reach the rendezvous endpoint of torchrun."
        ) from error
    control = dist.group.WORLD
    alone = Ranks(launch.rank, launch.size, launch.local_size, device, False, timeout, control, control)
    places = alone.gather([socket.gethostname(), str(device)])
    kinds = {torch.device(place).type for _, place in places}
    if len(kinds) > 1:
        dist.destroy_process_group()
        raise UserError(
            f"Some ranks would train on {' and some on '.join(sorted(kinds))}; set --device for all of them."
        )
    shared = kinds == {"cuda"} and len({tuple(place) for place in places}) < len(places)
    data = control
    if kinds == {"cuda"} and not shared and dist.is_nccl_available():
        torch.cuda.set_device(device)
        data = dist.new_group(backend="nccl", timeout=limit)
    return Ranks(launch.rank, launch.size, launch.local_size, device, shared, timeout, control, data)


def _meet(store: Any, launch: Launch, timeout: float) -> str:
    """Return a name shared by all ranks of this start, and by no earlier start.

    torchrun keeps its store when it restarts the ranks, and gloo would find the addresses of processes that have exited. So
    every rank sends a random name; rank 0 answers every greeting, including old ones, until all ranks have accepted.
    """
    own = secrets.token_hex(8)
    if launch.rank:
        store.set(f"redline/hello/{launch.rank}", own)
        name = str(store.get(f"redline/welcome/{own}").decode())  # waits for it
        store.set(f"redline/accept/{name}/{launch.rank}", "")
        return name
    missing, deadline = set(range(1, launch.size)), time.monotonic() + timeout
    while missing:
        for rank in sorted(missing):
            if store.check([f"redline/accept/{own}/{rank}"]):
                missing.remove(rank)
            elif store.check([f"redline/hello/{rank}"]):
                store.set(f"redline/welcome/{store.get(f'redline/hello/{rank}').decode()}", own)
        if time.monotonic() > deadline:
            raise RuntimeError(f"rank {min(missing)} has not come within {timeout:g} seconds")
        time.sleep(_MEET_SECONDS)
    return own


def pick_device(wanted: str, local_rank: int) -> torch.device:
    """Return the device of a rank: for `auto` and `cuda` the GPU with its local rank, shared if there are too few."""
    device = hardware.pick_device(wanted)
    if device.type == "cuda" and wanted in ("auto", "cuda"):
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    return device


def _to_bytes(record: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(record, default=str).encode()), dtype=torch.uint8)


def _from_bytes(text: Tensor) -> Any:
    return json.loads(text.numpy().tobytes())


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return a view of a contiguous tensor as bytes, because gloo does not support every dtype."""
    return tensor.view(-1).view(torch.uint8)
