"""The cache of compiled functions on disk: used for graphs with autocast, and never for other code or options."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from redline.engine import fast


@pytest.mark.timeout(900)
def test_what_torch_keeps_on_disk_is_keyed_by_code_and_options() -> None:
    """The same function again is read from disk, autocast and all; other code or another option never is."""
    from torch._dynamo.utils import counters
    from torch._inductor.utils import fresh_cache

    x = torch.randn(8, 8)

    def loss(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (x @ x).sum()

    def other_loss(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return (x @ x).sum()

    def run(function: Callable[[Tensor], Tensor], unroll: int = 8) -> tuple[Tensor, dict[str, int]]:
        torch.compiler.reset()
        counters.clear()
        options = fast.CompilerOptions(unroll=unroll)
        result = fast.Compiler(True, pytest.fail, options=options)(function)(x)
        found = counters["aot_autograd"]
        return result, {name: found[f"autograd_cache_{name}"] for name in ("hit", "miss", "bypass")}

    with fresh_cache():
        first, counts = run(loss)
        assert counts == {"hit": 0, "miss": 1, "bypass": 0}
        again, counts = run(loss)
        assert counts == {"hit": 1, "miss": 0, "bypass": 0}
        assert torch.equal(first, again)
        assert run(other_loss)[1]["hit"] == 0, "taken for other code"
        assert run(loss, unroll=4)[1]["hit"] == 0, "taken for other options"
