"""Replay on a GPU: by priority, in page-locked memory and in a file; eager, graphed, compiled. Run with `make gpu-test`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from check_planes import check
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.core import random
from redline.replay.priority import Priorities
from redline.replay.transfer import AHEAD, DirectTransfer
from redline.run.resolve import resolve
from redline.run.session import Session
from redline.run.settings import Settings

pytestmark = pytest.mark.gpu
DEVICE = "cuda"  # tests/test_gpu_tests.py runs a test of this file on the CPU
CUDA, CPU = torch.device("cuda"), torch.device("cpu")
ITERATIONS = 40


def session_of(
    device: str, folder: Path, *, compile: bool, graph: bool, batch_size: int = 32, **options: Any
) -> Session:
    if compile:
        torch.compiler.reset()
    settings = Settings(
        env="snake",
        algo="dqn",
        num_envs=64,
        batch_size=batch_size,
        replay_capacity=64 * 24,
        steps=64 * 1000,
        seed=3,
        device=device,
        precision="fp32",
        compile=compile,
        graph=graph and device == "cuda",
        run_dir=str(folder),
        backplay=0.0,  # and not what suits either device
        env_options={"width": 5, "height": 4, "start": "random", "view": "planes"},
        algo_options={"hidden": (16,), "learning_starts": 64 * 8, "epsilon_high": 1.0, "epsilon_low": 1.0} | options,
    )
    return Session(resolve(settings), pytest.fail)


@pytest.mark.parametrize("way", ["eager", "graph", "compiled+graph"])
@pytest.mark.parametrize("replay", ["device", "pinned", "memmap"])
@pytest.mark.parametrize("prioritized", [False, True], ids=["uniform", "priority"])
def test_draws_and_stores_what_the_cpu_does(replay: str, prioritized: bool, way: str, tmp_path: Path) -> None:
    """Random play without learning (a rate too small to see): rows, draws and records are bit-identical."""
    options = {
        "replay": replay,
        "prioritized": prioritized,
        "priority_alpha": 0.0,
        "learning_rate": 1e-30,
        "updates": 2,
    }
    ours = session_of(DEVICE, tmp_path / "a", compile="compiled" in way, graph="graph" in way, **options)
    theirs = session_of("cpu", tmp_path / "b", compile=False, graph=False, **options)
    for session in (ours, theirs):
        session.iterate(ITERATIONS)
    assert ours.updates == theirs.updates > 0
    assert ours._collect_and_learn.graph is not None or "graph" not in way
    found, expected = ours.learner.memory.tensors(), theirs.learner.memory.tensors()
    assert found.keys() == expected.keys()
    for name in expected.keys() - {"histories"}:  # those of a file are random
        assert torch.equal(found[name].cpu(), expected[name]), name
    if replay != "device":
        torch.cuda.synchronize()
        assert torch.equal(ours.learner.memory.inbox.cpu(), theirs.learner.memory.inbox)
        assert isinstance(ours.learner.memory.transfer, DirectTransfer) == (replay == "pinned")
    if replay == "memmap":
        ours, theirs = (s.learner.memory.storage.records for s in (ours, theirs))  # type: ignore[assignment]
        assert torch.equal(ours, theirs)  # type: ignore[arg-type]


@pytest.mark.parametrize("prioritized", [False, True], ids=["uniform", "priority"])
def test_a_continued_run_is_sent_the_same_batches(prioritized: bool, tmp_path: Path) -> None:
    first, second = (
        session_of(DEVICE, tmp_path / name, compile=False, graph=True, replay="pinned", prioritized=prioritized)
        for name in "ab"
    )
    first.iterate(ITERATIONS)
    saved = {group: {k: x.clone() for k, x in tensors.items()} for group, tensors in first.tensors().items()}
    second.load(saved, first.counters())
    for session in (first, second):
        session.iterate(AHEAD)
        torch.cuda.synchronize()
    ours, theirs = first.learner.memory, second.learner.memory
    assert torch.equal(ours.inbox, theirs.inbox)
    assert ours.inbox.any()
    for name, tensor in ours.tensors().items():
        assert torch.equal(tensor, theirs.tensors()[name]), name


@pytest.mark.parametrize("top", [16, 1 << 16])
def test_priorities_are_the_same_on_both(top: int) -> None:
    trees = [Priorities(5000, device, top) for device in (CPU, CUDA)]
    for number in range(20):
        place = random.below(random.bits(random.seed_key(number), torch.arange(700)), 5000).unique()
        units = random.below(random.bits(random.seed_key(number + 100), place), 2**31 - 1).to(torch.int32)
        drawn = []
        for tree in trees:
            tree.set(place.to(tree.device), units.to(tree.device))
            tree.set_span(torch.tensor(number * 100, device=tree.device), 64, torch.zeros_like(tree.highest))
            drawn.append([x.cpu() for x in tree.draw(random.seed_key(number, tree.device), 999)])
        assert all(torch.equal(a, b) for a, b in zip(*drawn, strict=True))
        for a, b in zip(*(tree.levels for tree in trees), strict=True):
            assert torch.equal(a, b.cpu())


def test_an_iteration_with_host_memory_never_synchronises_the_device(tmp_path: Path) -> None:
    """The worker may wait for its own copies; the loop that launches must not."""
    session = session_of(DEVICE, tmp_path, compile=False, graph=True, replay="pinned", prioritized=True)
    session.iterate(ITERATIONS)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        session.iterate(20)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_states_of_a_single_word_compile(tmp_path: Path) -> None:
    """Tetris has a field of two bytes, gathered as one word: the compiler must be able to view it as two again."""
    torch.compiler.reset()
    settings = Settings(
        env="tetris",
        algo="dqn",
        num_envs=64,
        batch_size=64,
        replay_capacity=64 * 24,
        device=DEVICE,
        compile=True,
        run_dir=str(tmp_path),
        env_options={"width": 5, "height": 8, "view": "planes"},
        algo_options={"hidden": (16,), "learning_starts": 64 * 4},
    )
    session = Session(resolve(settings), pytest.fail)
    session.iterate(12)
    session.close()


@settings(max_examples=20, deadline=None)
@given(
    entries=st.integers(1, 500),
    count=st.integers(1, 3000),
    board=st.sampled_from([(4, 4), (4, 5), (6, 6), (10, 10), (20, 20), (40, 40)]),
    dtype=st.sampled_from([torch.uint8, torch.int8, torch.int16, torch.int32]),
    cells=st.sampled_from([torch.int16, torch.int32, torch.int64]),
)
def test_the_kernel_for_planes_equals_plain_operations(
    entries: int, count: int, board: tuple[int, int], dtype: torch.dtype, cells: torch.dtype
) -> None:
    check(entries, count, board, dtype, cells, DEVICE)


@pytest.mark.parametrize("compile", [False, True])
def test_samples_made_by_the_kernel_are_those_of_the_cpu(compile: bool, tmp_path: Path) -> None:
    ours, theirs = sessions_of_random_play(tmp_path)
    assert ours.learner.memory._planes is not None
    compare_samples(ours, theirs, 1000, compile)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("replay", ["pinned", "memmap"])
def test_samples_from_host_memory_are_those_of_the_cpu(replay: str, compile: bool, tmp_path: Path) -> None:
    compare_samples(*sessions_of_random_play(tmp_path, batch_size=1000, replay=replay), 1000, compile)


def sessions_of_random_play(folder: Path, **options: Any) -> tuple[Session, Session]:
    """Return sessions on the GPU and on the CPU that stored the same transitions, without learning from them."""
    options["learning_rate"] = 1e-30
    sessions = [session_of(name, folder / name, compile=False, graph=False, **options) for name in (DEVICE, "cpu")]
    for session in sessions:
        session.iterate(ITERATIONS)
    return sessions[0], sessions[1]


def compare_samples(ours: Session, theirs: Session, size: int, compile: bool) -> None:
    memory = ours.learner.memory
    sample = torch.compile(memory.sample, fullgraph=True) if compile else memory.sample
    found = sample(random.seed_key(1, DEVICE), size)
    expected = theirs.learner.memory.sample(random.seed_key(1), size)
    for name in ("obs", "next_obs", "action", "weight"):
        assert torch.equal(getattr(found, name).cpu(), getattr(expected, name)), name
    # Sums of several rewards are multiplied and added at once on one of the two.
    torch.testing.assert_close(found.reward.cpu(), expected.reward)
    assert found.obs.any()
    assert len(expected.obs.unique(dim=0)) > 100
