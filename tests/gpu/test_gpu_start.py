"""The start on a GPU: what was compiled once is read from disk, in mixed precision too."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.engine.fast import Graph
from redline.run import plan
from redline.run.resolve import resolve
from redline.run.session import Session
from redline.run.settings import Settings

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
LEARNS = ["compute_targets", "shuffle", "loss", "apply"]


@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_compiled_functions_are_read_from_disk(algo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    options: dict[str, Any] = {"hidden": (32, 32)}
    options |= {"learning_starts": 1024} if algo == "dqn" else {"rollout_steps": 8}
    settings = Settings(
        "snake", algo, num_envs=128, batch_size=128, device=DEVICE, curriculum=False, compile=True, algo_options=options
    )
    counts, models = [], []
    for _ in range(2):
        torch.compiler.reset()
        counters.clear()
        session = Session(resolve(settings), pytest.fail)
        while session.updates < 8:
            session.iterate(1)
        session.synchronize()
        found = counters["aot_autograd"]
        counts.append({name: found[f"autograd_cache_{name}"] for name in ("hit", "miss", "bypass")})
        models.append({name: x.clone() for name, x in session.tensors()["model"].items()})
        session.close()
    assert counts[0]["hit"] == 0
    assert counts[0]["bypass"] <= 1  # a dense layer behind convolutions: torch keeps no graph with an autograd function
    assert counts[1] == {"hit": counts[0]["miss"], "miss": 0, "bypass": counts[0]["bypass"]}
    for name, x in models[0].items():
        torch.testing.assert_close(models[1][name], x, rtol=1e-2, atol=1e-3, msg=f"{name} differs")


@pytest.fixture
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """A plan that several processes may compile and none has."""
    monkeypatch.setattr(plan, "_CORES_TO_SHARE", 1)
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    torch.compiler.reset()
    options: dict[str, Any] = {"hidden": (32, 32), "rollout_steps": 8}
    sizes: dict[str, Any] = {"num_envs": 128, "batch_size": 128, "algo_options": options}
    return Settings("snake", "ppo", device=DEVICE, curriculum=False, compile=True, **sizes)


def test_two_processes_compile(cold: Settings) -> None:
    """The other process compiles the functions that learn; this one finds them and captures its graph as always."""
    from torch._dynamo.utils import counters

    counters.clear()
    session = Session(resolve(dataclasses.replace(cold, steps=1_000_000)), pytest.fail, may_overlap=True)
    other = session._precompilation
    assert other
    while session.iterations < 8:
        session.iterate(1)
    session.synchronize()
    assert other._begun == LEARNS
    found = counters["aot_autograd"]
    assert found["autograd_cache_miss"] == 1, "of the step, which this process compiles"
    assert found["autograd_cache_hit"] >= 3
    assert session.env_steps == 8 * 8 * 128
    session.close()


def test_a_run_learns_once_before_it_compiles(cold: Settings) -> None:
    """Eagerly and uncaptured; from then on by compiled functions in one captured graph."""
    session = Session(resolve(cold), pytest.fail, may_overlap=True)
    session.iterate(1)
    assert session.updates
    assert session.compiling
    assert not session.compiler.seconds
    session.iterate(8)
    session.synchronize()
    assert not session.compiling
    assert session.compiler.seconds.keys() == {"step", *LEARNS}
    assert isinstance(session._collect_and_learn, Graph)
    assert session._collect_and_learn.graph
    assert session.env_steps == 9 * 8 * 128
    assert all(torch.isfinite(x).all() for x in session.tensors()["model"].values())
    session.close()
