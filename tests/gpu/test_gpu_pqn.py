"""PQN on a GPU: eager, graphed, compiled; and what plays in reduced precision. Run with `make gpu-test`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from redline.run.resolve import resolve
from redline.run.session import Session
from redline.run.settings import Settings

pytestmark = pytest.mark.gpu
DEVICE = "cuda"  # tests/test_gpu_tests.py runs a test of this file on the CPU
NUM_ENVS, ROLLOUT, ITERATIONS = 256, 4, 10
WAYS = {"eager": (False, False), "graph": (False, True), "compiled+graph": (True, True)}


def session_of(device: str, way: str, precision: str = "fp32", algo: str = "pqn", **options: Any) -> Session:
    compiles, graphs = WAYS[way]
    if compiles:
        torch.compiler.reset()
    settings = Settings(
        env="snake",
        algo=algo,
        num_envs=NUM_ENVS,
        steps=NUM_ENVS * ROLLOUT * 100,
        seed=5,
        device=device,
        precision=precision,
        compile=compiles,
        graph=graphs,
        time_limit=10,
        env_options={"width": 7, "height": 7, "start": "random", "view": "planes"},
        algo_options={"rollout_steps": ROLLOUT, "epochs": 2, "batch_size": 128, "net": "mlp", "hidden": (32, 32)}
        | options,
    )
    return Session(resolve(settings), pytest.fail)


@pytest.mark.parametrize("way", WAYS)
def test_plays_what_the_cpu_plays(way: str) -> None:
    """With weights of 0 all values are equal: games, actions and orders are bit-identical, explored moves included."""
    still = {"learning_rate": 1e-60, "learning_rate_end": 0.0}  # 0 in float32
    ours, theirs = session_of(DEVICE, way, **still), session_of("cpu", "eager", **still)
    for session in (ours, theirs):
        session.learner.optimizer.flat.zero_()
        session.iterate(ITERATIONS)
    assert ours._collect_and_learn.graph is not None or way == "eager"
    for name, x in theirs.tensors()["envs"].items():
        assert torch.equal(ours.tensors()["envs"][name].cpu(), x), name
    for name in ("obs", "action", "done", "truncated"):
        assert torch.equal(getattr(ours.learner.rollout, name).cpu(), getattr(theirs.learner.rollout, name)), name
    for name in ("order", "acted", "shuffled", "targets"):
        assert torch.equal(getattr(ours.learner, name).cpu(), getattr(theirs.learner, name)), name
    assert theirs.learner.rollout.truncated.any()


def test_graphed_equals_eager() -> None:
    ours, theirs = session_of(DEVICE, "graph"), session_of(DEVICE, "eager")
    before = ours.learner.optimizer.flat.clone()
    for session in (ours, theirs):
        session.iterate(ITERATIONS)
    torch.testing.assert_close(ours.learner.optimizer.flat, theirs.learner.optimizer.flat, rtol=1e-3, atol=1e-4)
    assert torch.equal(ours.learner.rollout.action, theirs.learner.rollout.action)
    assert (ours.learner.optimizer.flat - before).abs().max() > 1e-3


@pytest.mark.parametrize("algo", ["ppo", "pqn"])
def test_low_precision_plays_what_was_learned_and_never_waits(algo: str) -> None:
    session = session_of(DEVICE, "compiled+graph", "bf16", algo)
    session.iterate(ITERATIONS)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        session.iterate(5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    learner = session.learner
    learner.before_iteration()
    with torch.no_grad(), learner.runtime.autocast():
        found, expected = learner.behaviour_network(learner.rollout.obs), learner.net(learner.rollout.obs)
    assert torch.equal(found[0], expected[0])
    assert learner.behaviour_network is not learner.net
