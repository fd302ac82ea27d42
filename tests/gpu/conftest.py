"""What all tests on a GPU share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _no_denormals() -> Iterator[None]:
    """Round denormal numbers to 0 on the CPU. Weights of about 1e-30 are full of them, and x86 takes 100 times as long."""
    torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)
