"""Ranks on a GPU: NCCL inside of captured iterations, and several ranks that share one GPU through gloo."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "run"))  # ranks_worker
from ranks_worker import LEARNERS, learn, plan_of
from test_ranks import same_batches, torchrun

from redline.engine import distributed
from redline.engine.launch import Launch
from redline.run.session import Session

pytestmark = pytest.mark.gpu
WORKER = Path(__file__).parents[1] / "run" / "ranks_worker.py"


def free_port() -> str:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return str(server.getsockname()[1])


def flat_weights(session: Session) -> torch.Tensor:
    """Return all weights of the network as one vector.

    Detached: a graph of gradients that is kept ties the weights to its stream, and nothing can be captured on another.
    """
    return torch.cat([x.detach().flatten().to(torch.float64) for x in session.learner.acting_network.parameters()])


@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_the_all_reduce_of_nccl_is_part_of_the_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, since NCCL wants a GPU for each: captured and eager iterations move the weights alike.

    Not bit for bit: the order of sums differs, and Adam makes steps of full length from gradients that are mere rounding.
    """
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", free_port())
    messages: list[str] = []
    with closing(distributed.connect(Launch(0, 1), "cuda", 60)) as ranks:
        assert ranks.active
        assert ranks.backend == "nccl"
        moves = []
        for graph in (True, False):
            plan = dataclasses.replace(plan_of(name, ranks, "cuda"), graph=graph)
            with closing(Session(plan, messages.append)) as session:
                before = flat_weights(session)
                session.iterate(16)
                session.synchronize()
                assert messages == []
                if graph:
                    captured: Any = session._collect_and_learn
                    assert captured.graph is not None
                moves.append(flat_weights(session) - before)
        assert (moves[0] - moves[1]).norm() < 0.05 * moves[1].norm()


def test_two_ranks_share_a_gpu(tmp_path: Path) -> None:
    """Their gradients, through gloo and the host, are those of one process."""
    ended = torchrun(2, str(WORKER), str(tmp_path), "gradients", DEVICE="cuda:0")
    assert ended.returncode == 0, ended.stderr
    for name in LEARNERS:
        with closing(Session(plan_of(name, device="cuda"), pytest.fail)) as session:
            same_batches(session, 2)
            expected = learn(session, 1 if name != "dqn" else 12)
        for rank in range(2):
            own = torch.load(tmp_path / f"{name}-{rank}.pt", map_location="cuda")
            steps = len(expected["gradients"])
            assert (own["gradients"][:steps] - expected["gradients"]).abs().amax() < 1e-4, name


def test_training_says_that_ranks_share_a_gpu(tmp_path: Path) -> None:
    words = [
        "-m",
        "redline",
        "train",
        "snake",
        "--num-envs",
        "256",
        "--steps",
        "100k",
        "--no-compile",
        "--device",
        "cuda:0",
    ]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *words]
    folder = ["--run-dir", str(tmp_path / "run"), "--eval-episodes", "0"]
    ended = subprocess.run([*command, *folder], env={**os.environ}, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    assert "2 ranks (gloo): 256 environments, 128 a rank;" in ended.stderr
    assert "Ranks share a GPU" in ended.stderr
    assert "outside of CUDA graphs" in ended.stderr
