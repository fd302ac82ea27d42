"""The content of a checkpoint, validated and copied to host memory, so that training continues while it is written."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from redline.run.atomic_files import DTYPES
from redline.run.manifest import GROUP

RESUME_LEVELS = ("L0", "L1", "L2", "L3")
_SLACK = 1 << 20  # bytes of headers, folders and manifest, added when checking whether a checkpoint fits on the disk


@dataclass(frozen=True)
class Snapshot:
    """The arguments of a save, copied to memory that training does not modify."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: bytes
    score: float | None
    resume_level: str

    @property
    def bytes_needed(self) -> int:
        return _SLACK + len(self.state) + sum(t.nbytes for group in self.tensors.values() for t in group.values())


def check_arguments(step: int, tensors: Mapping[str, Mapping[str, Tensor]], resume_level: str) -> None:
    """Raise the caller's mistakes here instead of in the writer thread."""
    if not 0 <= step < 10**18:
        raise ValueError(f"step is {step}; expected 0 to 10**18 - 1")
    if resume_level not in RESUME_LEVELS:
        raise ValueError(f"resume_level is {resume_level!r}; expected one of {', '.join(RESUME_LEVELS)}")
    for group, named in tensors.items():
        if not GROUP.fullmatch(group):
            raise ValueError(f"the group name {group!r} is not a lower-case word of letters, digits and underscores")
        for name, tensor in named.items():
            if not isinstance(name, str) or name == "__metadata__":
                raise ValueError(f"group {group} has a tensor named {name!r}, which safetensors cannot store")
            if tensor.dtype not in DTYPES or tensor.layout is not torch.strided:
                raise ValueError(f"'{name}' of group {group} is {tensor.dtype}, {tensor.layout}: it cannot be stored")


def check_finite(snapshot: Snapshot) -> None:
    """Raise ValueError for weights that are NaN or infinite: no run could continue from them."""
    groups = {group: snapshot.tensors.get(group, {}) for group in ("model", "optim")}
    if bad := first_not_finite(groups):
        raise ValueError(f"the weight '{bad}' has NaN or infinite values")


def first_not_finite(groups: Mapping[str, Mapping[str, Tensor]]) -> str:
    """Return the name of the first tensor with NaN or infinite values, or an empty string. Waits for the device once."""
    floats = [(name, x) for named in groups.values() for name, x in named.items() if x.is_floating_point()]
    if not floats:
        return ""
    finite = torch.stack([torch.isfinite(tensor).all() for _, tensor in floats]).tolist()
    return next((name for (name, _), good in zip(floats, finite, strict=True) if not good), "")


def copy_to_host(tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """Return contiguous CPU copies in separate memory. Copies from a GPU run concurrently, through pinned memory."""
    streams = set()

    def copy(tensor: Tensor) -> Tensor:
        if tensor.device.type == "cuda":
            with suppress(RuntimeError):  # memory cannot be pinned: use the slow copy below
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                streams.add(torch.cuda.current_stream(tensor.device))
                return host.copy_(tensor.detach(), non_blocking=True)
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())

    copies = {group: {name: copy(tensor) for name, tensor in named.items()} for group, named in tensors.items()}
    for stream in streams:
        stream.synchronize()
    return copies
