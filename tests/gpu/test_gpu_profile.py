"""Profiles on a GPU: stages inside a captured graph, planted faults that only a GPU has. Run with `make gpu-test`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import redline
from redline.engine.stages import IDLE, EventClock
from redline.run.resolve import resolve
from redline.run.session import Session
from redline.run.settings import Settings
from redline.tools.profile import profile
from redline.tools.profile_counters import count_synchronisations
from redline.tools.profile_report import KEYS
from redline.tools.profile_session import StagedSession, measure_run, measure_stages, warm_up

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

SMALL: dict[str, dict[str, Any]] = {
    "ppo": {"hidden": (64,), "net": "mlp", "rollout_steps": 8},
    "dqn": {"hidden": (64,), "net": "mlp", "batch_size": 1024, "replay_capacity": 65536, "learning_starts": 4096},
}


def settings_of(algo: str, graph: bool = True, **more: Any) -> Settings:
    return Settings(
        "snake",
        algo,
        num_envs=1024,
        steps=10**9,
        device="cuda",
        compile=False,
        graph=graph,
        algo_options=SMALL[algo],
        **more,
    )


def test_spans_follow_the_device() -> None:
    """A span that launches much work is charged with it, though the launch itself takes no time."""
    device = torch.device("cuda", torch.cuda.current_device())
    clock = EventClock(device)
    x = torch.randn(4096, 4096, device=device)
    for _ in range(3):
        x @ x
    torch.cuda.synchronize()
    clock.start()
    with clock.span("large"):
        for _ in range(100):
            x @ x
    with clock.span("small"):
        x[:8] @ x
    clock.stop()
    seconds = clock.read()
    assert seconds["large"] > 2 * seconds["small"] > 0  # other processes may use the GPU in between


def test_spans_inside_a_captured_graph() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    clock = EventClock(device)
    x = torch.randn(4096, 4096, device=device)
    y = torch.empty_like(x)
    torch.mm(x, x, out=y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with clock.span("large"):
            for _ in range(20):
                torch.mm(x, x, out=y)
        with clock.span("small"):
            y.add_(1)
    graph.replay()
    first = clock.read_captured()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    seconds = clock.read_captured()
    assert seconds.keys() >= {"large", "small"}
    assert sum(seconds.values()) == pytest.approx(start.elapsed_time(end) / 1e3, rel=0.1)
    assert seconds["large"] > 5 * seconds["small"] > 0
    assert first["large"] == pytest.approx(seconds["large"], rel=0.5)


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("algo", SMALL)
def test_stages_add_up_to_the_wall_clock(algo: str, graph: bool) -> None:
    session = StagedSession(resolve(settings_of(algo, graph)), pytest.fail)
    warm_up(session)
    measured = measure_stages(session, 1.0)
    session.close()
    assert measured.total == pytest.approx(measured.wall_seconds, rel=0.03)
    named = {"environment step", "observation", "inference", "replay write", "forward", "backward", "optimizer"}
    assert named <= measured.seconds.keys()
    if graph:
        assert sum(measured.seconds[name] for name in named) > 0.6 * (measured.total - measured.seconds[IDLE])


def test_a_session_never_synchronises() -> None:
    session = Session(resolve(settings_of("dqn")), pytest.fail)
    warm_up(session)
    measured = measure_run(session, 0.5)
    assert measured.synchronisations == 0
    assert measured.recompilations == 0
    x = torch.zeros((), device="cuda")
    assert count_synchronisations(lambda: [x.item() for _ in range(3)] and None, x.device) >= 3
    session.close()


def test_record_of_a_gpu_run() -> None:
    record = profile(settings_of("ppo"), 2.0, None, probes=0, notify=lambda _: None)
    for key, (kind, _) in KEYS.items():
        assert isinstance(record[key], kind), key
    assert record["memory"]["peak"] >= record["memory"]["allocated"] > 0
    assert 0 < record["flops"]["share"] < 1
    assert "captured as one CUDA graph" in record["timed_by"]


def loop(
    batch_size: int = 8192, reads: int = 0, copies: int = 0, pinned: bool = False, width: int = 1024
) -> redline.Profiler:
    """A training loop whose faults can be switched on: reads of a tensor, copies of many MB from the host."""
    device = torch.device("cuda", torch.cuda.current_device())
    net = nn.Sequential(nn.Linear(256, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8))
    net.to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    obs = torch.randn(batch_size, 256, device=device)
    host = torch.zeros(max(copies, 1) << 20, dtype=torch.uint8, pin_memory=pinned)
    inbox = torch.empty_like(host, device=device, pin_memory=False)
    profiler = redline.Profiler(device)
    for _ in range(40):
        with profiler.step(batch_size=batch_size):
            with profiler.span("copy"):
                if copies:
                    inbox.copy_(host, non_blocking=pinned)
            with profiler.span("forward"):
                loss = net(obs).square().mean()
                for _ in range(reads):
                    loss.item()
                    loss = loss + 0
            with profiler.span("backward"):
                optimizer.zero_grad()
                loss.backward()
            with profiler.span("optimizer"):
                optimizer.step()
    return profiler


def test_host_synchronisation_is_named() -> None:
    profiler = loop(reads=200)
    advice = profiler.advice()
    assert advice[0].cause == "host synchronisation"
    assert any("loss.item()" in line for line in profiler.report()["synchronising_lines"])


def test_pageable_copies_are_named_and_pinned_ones_help() -> None:
    profiler = loop(copies=256)
    before = profiler.report()
    assert profiler.measurement().device_busy, "the driver gives no kernel records: pageable copies cannot be seen"
    assert before["advice"][0]["cause"] == "pageable copies"
    after = loop(copies=256, pinned=True).report()
    predicted = before["advice"][0]["predicted_gain"]
    assert after["steps_per_second"] / before["steps_per_second"] - 1 >= (predicted - 1) / 2
    assert not any(advice["cause"] == "pageable copies" for advice in after["advice"])


def test_tiny_batch_is_named() -> None:
    assert loop(batch_size=16, width=128).advice()[0].cause == "tiny batch"


def test_a_healthy_loop_is_not_blamed() -> None:
    causes = {advice.cause for advice in loop(batch_size=65536).advice()}
    assert not causes & {"host synchronisation", "pageable copies", "tiny batch", "recompiling shapes"}
