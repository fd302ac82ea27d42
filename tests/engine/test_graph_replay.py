"""CUDA graphs on a CPU: a stand-in that records operations on tensors and repeats exactly those, so that numbers drawn by
Python, shapes chosen by the host and tensors made anew show as they would on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from redline.engine import fast
from redline.run.plan import Plan
from redline.run.resolve import resolve
from redline.run.session import Session
from redline.run.settings import Settings


class RecordedGraph(TorchDispatchMode):
    """Records every operation with its tensors; `replay` repeats them into the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []
        self.just_captured = False  # a real capture runs nothing, this one did: its first replay is done already

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        del types
        options = options or {}
        result = function(*arguments, **options)
        self.operations.append((function, arguments, options, result))
        return result

    def replay(self) -> None:
        if self.just_captured:
            self.just_captured = False
            return
        with torch.no_grad():
            for function, arguments, options, result in self.operations:
                used = {
                    x.untyped_storage().data_ptr() for x in tree_leaves((arguments, options)) if isinstance(x, Tensor)
                }
                again = function(*arguments, **options)
                for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(old, Tensor) and old.untyped_storage().data_ptr() not in used:
                        old.copy_(new)


@contextlib.contextmanager
def capture(graph: RecordedGraph, stream: Any, capture_error_mode: str) -> Iterator[None]:
    del stream, capture_error_mode
    with graph:
        yield
    graph.just_captured = True


@pytest.fixture(autouse=True)
def recorded_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(wait_stream=lambda _: None)
    monkeypatch.setattr(fast, "_side_stream", lambda _: stream)
    for name, value in {
        "CUDAGraph": RecordedGraph,
        "graph": capture,
        "current_device": lambda: 0,
        "current_stream": lambda: stream,
        "stream": lambda _: contextlib.nullcontext(),
        "set_stream": lambda _: None,
        "synchronize": lambda *_: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)


def plan_of(algo: str, graph: bool) -> Plan:
    options = {
        "dqn": {
            "hidden": (8,),
            "learning_starts": 32,
            "batch_size": 8,
            "n_step": 1,
            "replay_capacity": 8 * 64,
            "noisy": True,
        },
        "ppo": {"hidden": (8,), "rollout_steps": 2},
        "pqn": {"hidden": (8,), "rollout_steps": 2},
    }[algo]
    settings = Settings(
        "snake",
        algo=algo,
        num_envs=8,
        device="cpu",
        compile=False,
        curriculum=False,
        time_limit=9,
        env_options={"width": 5, "height": 5},
        algo_options=options,
    )
    plan = resolve(settings)
    object.__setattr__(plan, "graph", graph)  # which is refused without a GPU
    return plan


@pytest.mark.fault("D8")
@pytest.mark.parametrize("algo", ["dqn", "ppo", "pqn"])
def test_replays_train_as_eager_iterations(algo: str) -> None:
    ours, theirs = (Session(plan_of(algo, graph), pytest.fail) for graph in (True, False))
    for session in (ours, theirs):
        session.iterate(12 if algo == "dqn" else 7)
    graph: Any = ours._collect_and_learn
    assert graph.calls > fast._WARM_UP + 2, "some iterations were replays"
    for group, tensors in theirs.tensors().items():
        for name, x in tensors.items():
            assert torch.equal(ours.tensors()[group][name], x), f"{group}.{name} differs"


@pytest.mark.fault("D8")
def test_every_replay_draws_other_samples() -> None:
    """Batches, and actions of a policy that explores, differ from replay to replay."""
    session = Session(plan_of("dqn", graph=True), pytest.fail)
    learner: Any = session.learner
    drawn: list[Tensor] = []
    table = torch.zeros(8, dtype=torch.int64)
    draw = learner.memory.ring.draw

    def note(*arguments: Any) -> Any:
        samples = draw(*arguments)
        table.copy_(samples.row * 8 + samples.env_index)
        return samples

    learner.memory.ring.draw = note
    session.iterate(10)
    for _ in range(6):
        session.iterate(1)
        drawn.append(table.clone())
    graph: Any = session._collect_and_learn
    assert graph.calls > fast._WARM_UP + len(drawn), "these were replays"
    assert len({tuple(x.tolist()) for x in drawn}) == len(drawn)


def test_a_number_of_the_host_is_frozen() -> None:
    """The stand-in can fail: what Python counts stays as it was captured."""
    total, steps = torch.zeros(()), [0]

    def add() -> None:
        steps[0] += 1
        total.add_(steps[0])

    graph = fast.Graph(add, True, pytest.fail)
    for _ in range(8):
        graph()
    assert total == 1 + 2 + 3 + 5 * 4
