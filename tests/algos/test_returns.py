"""Returns on a CPU: the loop in NumPy has the bits of the loop over tensors, and compiled code calls it as one operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from redline.algos import returns

PAIRS = [(returns.gae, returns._gae), (returns.q_lambda_returns, returns._q_lambda)]


def rollout(steps: int, num_envs: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    reward, value = (torch.randn(steps, num_envs, generator=generator) for _ in range(2))
    done = torch.rand(steps, num_envs, generator=generator) < 0.2
    return reward, value, torch.randn(num_envs, generator=generator), done


@pytest.mark.parametrize(("function", "loop"), PAIRS)
@given(
    steps=st.integers(1, 40),
    num_envs=st.integers(1, 20),
    seed=st.integers(0, 99),
    gamma=st.floats(0.0, 1.0),
    decay=st.floats(0.0, 1.0),
    scheduled=st.booleans(),
)
def test_bits_of_the_loop_over_tensors(
    function: Callable[..., Tensor],
    loop: Callable[..., Tensor],
    steps: int,
    num_envs: int,
    seed: int,
    gamma: float,
    decay: float,
    scheduled: bool,
) -> None:
    discount = torch.tensor(gamma) if scheduled else gamma
    experience = rollout(steps, num_envs, seed)
    assert torch.equal(function(*experience, discount, decay), loop(*experience, discount, decay))


@pytest.mark.parametrize(("function", "loop"), PAIRS)
def test_the_compiler_sees_one_operator(function: Callable[..., Tensor], loop: Callable[..., Tensor]) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        del inputs
        graphs.append(graph)
        return graph.forward

    experience = rollout(32, 8, seed=1)
    compiled = torch.compile(lambda *x: function(*x, 0.99, 0.95), backend=backend, fullgraph=True, dynamic=False)
    assert torch.equal(compiled(*experience), loop(*experience, 0.99, 0.95))
    calls = [node for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert len(calls) == 2, "the discount as a tensor, and the operator"
