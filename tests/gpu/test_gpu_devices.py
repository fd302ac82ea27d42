"""The choice of a device where there are two: captured as in training, and without a trace in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from redline import algos
from redline.run import device_choice
from redline.run.settings import Settings

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was measured before; a graph that cannot be captured is an error here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(device_choice, "_ignore", pytest.fail)
    torch.zeros(8, 8, device="cuda") @ torch.zeros(8, 8, device="cuda")  # starting CUDA is no part of the choice


@pytest.mark.alone
@pytest.mark.parametrize("algo", algos.names())
def test_a_gpu_is_chosen_and_remembered(game_name: str, algo: str) -> None:
    before = torch.cuda.memory_allocated()
    plan = device_choice.decide(Settings(game_name, algo))
    assert plan.device.type == "cuda"
    assert plan.reasons["device"].startswith("measured before compilation: cpu ")
    assert torch.cuda.memory_allocated() - before < 128 * 2**20  # workspaces of libraries
    again = device_choice.decide(
        Settings(game_name, algo), lambda plan: pytest.fail(f"{plan.device} is measured again")
    )
    assert again.reasons == plan.reasons


def test_without_graphs_a_few_games_are_slower_there() -> None:
    """What is measured is how it will be run: launches from the host cost a GPU what they cost."""
    small = Settings("snake", num_envs=8, batch_size=8, device="cuda")
    graphed = device_choice.samples_per_second(device_choice.resolve(small))
    launched = device_choice.samples_per_second(device_choice.resolve(Settings(**vars(small) | {"graph": False})))
    assert graphed > 1.5 * launched
