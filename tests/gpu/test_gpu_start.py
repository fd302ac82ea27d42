"""The start on a GPU: what was compiled once is read from disk, in mixed precision too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from redline.run.resolve import resolve
from redline.run.session import Session
from redline.run.settings import Settings

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


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
    assert (
        counts[0]["bypass"] <= 1
    )  # the loss: torch keeps no graph with an autograd function, as a dense layer with its ReLU is
    assert counts[1] == {"hit": counts[0]["miss"], "miss": 0, "bypass": counts[0]["bypass"]}
    for name, x in models[0].items():
        torch.testing.assert_close(models[1][name], x, rtol=1e-2, atol=1e-3, msg=f"{name} differs")
