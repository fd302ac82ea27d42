"""Options that all networks share, and operations on their outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from redline.core.errors import UserError

ILLEGAL = -1e9  # value or logit of an illegal action: finite, so that a state without legal actions gives no NaN


@dataclass(frozen=True)
class NetworkConfig:
    """Options of a network, part of every algorithm's Config."""

    net: Literal["auto", "mlp", "cnn", "resnet", "pixels", "columns"] = "auto"  # auto: mlp up to 512 inputs, else cnn
    hidden: tuple[int, ...] = (256, 256)  # widths of dense layers; after convolutions the last one only
    channels: tuple[int, ...] = (32, 64)  # per convolution, or stage of a resnet; pixels repeats the last
    stride: int = 2  # of every convolution but the first; 1 keeps the board size
    padding: bool = True  # surround boards with zeros; else each convolution of a cnn removes a cell on each side
    layer_norm: bool = False  # normalise the outputs of each layer
    batch_norm: bool = False  # normalise the convolutions of pixels over the batch, instead of each image by itself
    channels_last: bool = True  # convolve boards and images in the memory layout NHWC; else NCHW
    fused_mlp: bool = True  # compute an MLP of two hidden layers in one kernel, on GPUs that can
    fused_conv: bool = True  # compute the first convolution of a cnn in one kernel, on GPUs that can
    init: Literal["he", "orthogonal"] = "he"  # initial weights

    def __post_init__(self) -> None:
        networks = ("auto", "mlp", "cnn", "resnet", "pixels", "columns")
        for name, allowed in (("net", networks), ("init", ("he", "orthogonal"))):
            self.expect((name,), ", ".join(allowed), allowed.__contains__)
        self.expect(("hidden",), "layer widths, as in 256,256", lambda widths: min(widths, default=1) >= 1)
        self.expect(("channels",), "numbers of channels, as in 32,64", lambda widths: min(widths, default=0) >= 1)
        self.expect(("stride",), "at least 1", lambda x: x >= 1)

    def expect(self, names: tuple[str, ...], what: str, holds: Callable[[Any], bool]) -> None:
        """Raise UserError for the first option of `names` whose value fails `holds`; `what` describes the expected values."""
        for name in names:
            if not holds(value := getattr(self, name)):
                algo = type(self).__module__.rpartition(".")[2].removesuffix("_options")  # in a file of their own
                raise UserError(f"{algo}.{name} is {value}; expected {what}.")


_RESUME_FREE = ("init", "channels_last", "fused_mlp", "fused_conv")
NETWORK_RESUME_FIXED = tuple(
    field.name for field in dataclasses.fields(NetworkConfig) if field.name not in _RESUME_FREE
)


def share_buffers(copied: nn.Module, original: nn.Module) -> None:
    """Let a copy of a network share the original's buffers (running statistics) instead of having its own."""
    for module, source in zip(copied.modules(), original.modules(), strict=True):
        for name, buffer in source.named_buffers(recurse=False):
            setattr(module, name, buffer)


def masked(values: Tensor, legal: Tensor | None) -> Tensor:
    """Return values (B, A) with ILLEGAL where `legal` (B, A) is False; None: every action is legal."""
    return values if legal is None else torch.where(legal, values, ILLEGAL)


def gather(values: Tensor, action: Tensor) -> Tensor:
    """Return the entry of each row of values (B, A) at its action (B,) int64: (B,)."""
    return values.gather(1, action.unsqueeze(1)).squeeze(1)
