"""Evaluation and curricula on a GPU, graphed and compiled: the games of the CPU, played one for one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from redline import envs
from redline.run import evaluate_tensor_games as module
from redline.run.evaluate import evaluate, sampled
from redline.run.resolve import resolve
from redline.run.session import Session
from redline.run.settings import Settings

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
SMALL = {"width": 5, "height": 4, "start": "random"}


def erratic(obs: Tensor, legal: Tensor | None = None) -> Tensor:  # noqa: ARG001
    """Looks at every cell, in whole numbers: no rounding decides a move."""
    flat = obs.flatten(1).to(torch.int64)
    weights = torch.arange(1, flat.shape[1] + 1, device=obs.device) * 7919 % 1013
    return (flat * weights).sum(1) // 7 % 4


@pytest.mark.parametrize("max_steps", [0, 20_000])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("graph", [False, True], ids=["launched", "graph"])
def test_games_are_those_of_the_cpu(
    max_steps: int, compiled: bool, graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.compiler.reset()
    monkeypatch.setattr(module, "_COMPILE_AFTER", 32)
    rules, said = envs.make_rules("snake", SMALL), []
    expected = evaluate(rules, erratic, 64, torch.device("cpu"), max_steps=max_steps)
    found = evaluate(rules, erratic, 64, CUDA, max_steps=max_steps, compile=compiled, graph=graph, notify=said.append)
    assert said == []
    for name in ("scores", "lengths", "wins", "game_over", "finished"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


class Indifferent(torch.nn.Module):
    """All actions are as likely."""

    def forward(self, obs: Tensor, legal: Tensor | None = None) -> Tensor:  # noqa: ARG002
        return torch.zeros(len(obs), 4, device=obs.device)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("graph", [False, True], ids=["launched", "graph"])
def test_drawn_games_are_those_of_the_cpu(compiled: bool, graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    monkeypatch.setattr(module, "_COMPILE_AFTER", 32)
    rules, cpu = envs.make_rules("snake", SMALL), torch.device("cpu")
    expected = evaluate(rules, sampled(Indifferent(), cpu, 1), 64, cpu, max_steps=20_000)
    policy = sampled(Indifferent(), CUDA, 1)
    found = evaluate(rules, policy, 64, CUDA, max_steps=20_000, compile=compiled, graph=graph, notify=pytest.fail)
    assert torch.equal(found.lengths, expected.lengths)


PHASES = {
    "live": [{"name": "long", "from": 0.25, "to": 0.75, "env": {"long_start": 12, "reward_step": 0.25}}],
    "compiling again": [{"name": "hungry", "from": 0.25, "to": 0.75, "env": {"long_start": 12, "starvation": 4}}],
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kind", PHASES)
def test_graphs_follow_the_phases(kind: str, compiled: bool, tmp_path: Path) -> None:
    """Random play, so that no float decides: every game as on the CPU, through both changes of phase."""
    torch.compiler.reset()
    path, said = tmp_path / "phases.json", []
    path.write_text(json.dumps(PHASES[kind]))
    chosen: dict[str, Any] = {
        "env": "snake",
        "curriculum_file": str(path),
        "num_envs": 64,
        "batch_size": 16,
        "replay_capacity": 4800,
        "steps": 64 * 40,
        "backplay": 0.0,  # and not what suits either device
        "env_options": {"width": 4, "height": 4, "view": "planes"},
        "algo_options": {"hidden": (8,), "learning_starts": 10**6, "epsilon_high": 1.0, "epsilon_low": 1.0},
    }
    slow = Session(resolve(Settings(**chosen, device="cpu", compile=False)), lambda _: None)
    fast = Session(resolve(Settings(**chosen, device="cuda", compile=compiled)), said.append)
    slow.iterate(40)
    fast.iterate(40)
    for name, tensor in slow.collector.tensors().items():
        assert torch.equal(fast.collector.tensors()[name].cpu(), tensor) or tensor.is_floating_point(), name
    assert len(said) == 2
    assert all(text.startswith("Phase ") for text in said)
