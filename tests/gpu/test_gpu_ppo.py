"""PPO on a GPU: eager, graphed, compiled, both. Run with `make gpu-test`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from redline.run.resolve import resolve
from redline.run.session import Session
from redline.run.settings import Settings

pytestmark = pytest.mark.gpu

DEVICE = "cuda"  # tests/test_gpu_tests.py runs a test of this file on the CPU
NUM_ENVS, ROLLOUT, ITERATIONS = 256, 4, 8
GRAPHED = 5  # iterations after which the graph replays


class Way(NamedTuple):
    """How an iteration runs."""

    compile: bool
    graph: bool


WAYS = {
    "eager": Way(compile=False, graph=False),
    "graph": Way(compile=False, graph=True),
    "compiled": Way(compile=True, graph=False),
    "compiled+graph": Way(compile=True, graph=True),
}
GAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "planes": ("snake", {"width": 7, "height": 7, "start": "random", "view": "planes"}),
    "practice": (
        "snake",
        {"width": 7, "height": 7, "start": "random", "view": "wrapped", "reward_starve": -2.0, "show_hunger": True},
    ),
    "masked": ("tetris", {"width": 5, "height": 8, "view": "planes"}),
    "afterstates": ("tetris", {"width": 5, "height": 8, "view": "afterstates"}),
}
BOARDS: dict[str, tuple[str, dict[str, Any]]] = {"boards": ("tetris", {"width": 5, "height": 8, "view": "boards"})}


def session_of(device: str, way: Way, game: str = "planes", precision: str = "fp32", **options: Any) -> Session:
    if way.compile:
        torch.compiler.reset()  # else sessions before this one count towards the limit of recompilations
    env, env_options = (GAMES | BOARDS)[game]
    settings = Settings(
        env=env,
        algo="ppo",
        num_envs=NUM_ENVS,
        steps=NUM_ENVS * ROLLOUT * 100,
        seed=5,
        device=device,
        precision=precision,
        compile=way.compile,
        graph=way.graph,
        backplay=0.8 if game == "practice" else 0.0,  # and not what suits either device
        backplay_steps=4,
        time_limit=20 if env == "snake" else 0,
        env_options=env_options,
        algo_options={"rollout_steps": ROLLOUT, "batch_size": 128, "epochs": 2, "hidden": (32, 32)} | options,
    )
    return Session(resolve(settings), pytest.fail)


def indifferent(session: Session) -> None:
    """All weights 0, where steps too small to see will leave them: every legal action is as likely as any other."""
    session.learner.optimizer.flat.zero_()


def played(session: Session) -> dict[str, Tensor]:
    """The games, and the rollout that was learned from last."""
    learner, rollout = session.learner, session.learner.rollout
    tensors = {f"envs.{name}": x for name, x in session.tensors()["envs"].items()}
    tensors |= {"obs": rollout.obs, "action": rollout.action, "done": rollout.done}
    tensors |= {"order": learner.order, "acted": learner.acted, "shuffled": learner.shuffled}
    return {name: x.detach().cpu().clone() for name, x in tensors.items()}


STILL = {"learning_rate": 1e-30, "learning_rate_end": 0.0}  # steps too small to see


@pytest.mark.parametrize("way", ["eager", "graph", "compiled"])  # compiled+graph: below, sharing a session
@pytest.mark.parametrize("game", GAMES)
def test_plays_what_the_cpu_plays(game: str, way: str) -> None:
    session = session_of(DEVICE, WAYS[way], game, **STILL)
    indifferent(session)
    session.iterate(ITERATIONS)
    assert_plays_what_the_cpu_plays(session, game)


def assert_plays_what_the_cpu_plays(ours: Session, game: str) -> None:
    """With weights of 0 a policy has no rounding: after ITERATIONS games, actions and orders are bit-identical."""
    theirs = session_of("cpu", WAYS["eager"], game, **STILL)
    indifferent(theirs)
    theirs.iterate(ITERATIONS)
    expected, found = played(theirs), played(ours)
    assert expected["envs.played"].sum() > NUM_ENVS // 4
    for name, x in expected.items():
        # Features are computed in float32: the last digit may differ.
        if x.is_floating_point():
            torch.testing.assert_close(found[name], x, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(found[name], x), f"{name} differs"
    assert ours.counters() == theirs.counters()
    metrics, reference = ours.read_metrics(ours.updates), theirs.read_metrics(theirs.updates)
    for name in ("loss", "entropy", "value_loss"):
        assert metrics[name] == pytest.approx(reference[name], rel=0.02, abs=1e-3)


@pytest.mark.parametrize("game", GAMES)
def test_graphed_equals_eager(game: str) -> None:
    """The same kernels in the same order: what is learned is the same too."""
    ours, theirs = (session_of(DEVICE, WAYS[way], game) for way in ("graph", "eager"))
    for session in (ours, theirs):
        session.iterate(ITERATIONS)
    assert ours._collect_and_learn.graph is not None
    torch.testing.assert_close(ours.learner.optimizer.flat, theirs.learner.optimizer.flat, rtol=1e-3, atol=1e-4)
    assert torch.equal(ours.learner.rollout.action, theirs.learner.rollout.action)
    assert (
        ours.learner.optimizer.flat - session_of(DEVICE, WAYS["eager"], game).learner.optimizer.flat
    ).abs().max() > 1e-3


@pytest.mark.parametrize("game", GAMES)
def test_compiled_and_graphed_play_is_exact_and_new_and_never_waits(
    game: str, looks_uniform: Callable[[Tensor], bool]
) -> None:
    """The games of the CPU, then iterations that never wait for the device, each with new actions: one session for all."""
    session = session_of(DEVICE, WAYS["compiled+graph"], game, **STILL)
    indifferent(session)
    session.iterate(ITERATIONS)
    assert session._collect_and_learn.graph is not None
    assert_plays_what_the_cpu_plays(session, game)
    torch.cuda.synchronize()
    rows = []
    for _ in range(20):
        torch.cuda.set_sync_debug_mode("error")
        try:
            session.iterate(1)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        rows.append(session.learner.rollout.action.view(ROLLOUT, NUM_ENVS).clone())
    actions = torch.cat(rows).cpu()
    assert len({tuple(row.tolist()) for row in actions}) == 20 * ROLLOUT, "a replay took the same actions again"
    if not session.learner.spec.masked:
        choices = session.learner.spec.num_actions
        counts = torch.bincount(actions.flatten(), minlength=choices)
        shares = counts / counts.sum()
        assert -(shares * shares.log()).sum() > 0.999 * math.log(choices)
        assert looks_uniform(counts)
        assert looks_uniform(torch.bincount((choices * actions[:-1] + actions[1:]).flatten(), minlength=choices**2))
    else:
        assert session.learner.rollout.legal.gather(1, session.learner.rollout.action.unsqueeze(1)).all()


def test_schedules_reach_a_captured_graph() -> None:
    session = session_of(DEVICE, WAYS["compiled+graph"], learning_rate=1e-3, learning_rate_end=1e-4)
    session.iterate(GRAPHED + 45)
    assert session._collect_and_learn.graph is not None
    assert session.learner.learning_rate.item() == pytest.approx(1e-3 + (1e-4 - 1e-3) * 0.49, rel=1e-5)


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
@pytest.mark.parametrize("game", ["planes", "afterstates", "boards"])
def test_precisions_train(game: str, precision: str) -> None:
    columns = {"net": "columns", "channels": (16, 16)} if game == "boards" else {}
    session = session_of(DEVICE, WAYS["graph"], game, precision=precision, **columns)
    weights = session.learner.optimizer.flat.clone()
    session.iterate(ITERATIONS)
    optimizer = session.learner.optimizer
    assert torch.isfinite(optimizer.flat).all()
    assert (optimizer.flat - weights).abs().max() > 1e-3, "nothing was learned"
    assert optimizer.skipped.item() < 10
    assert all(math.isfinite(x) for x in session.read_metrics(session.updates).values())
