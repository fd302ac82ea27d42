"""Exported agents choose as the agent does, for every kind of network; int8 is measured and refused if it plays worse."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

import redline
from redline import cli
from redline.core.errors import UserError
from redline.run.agent import Agent, build_agent
from redline.run.resolve import resolve
from redline.run.session import Session
from redline.run.settings import Settings
from redline.tools import export
from redline.tools.export import Samples, check, collect_samples, need

# Name -> environment, its options, algorithm, its options: every kind of network and of output.
NETWORKS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "mlp": ("snake", {}, "ppo", {"net": "mlp", "hidden": (24,)}),
    "two mlps": ("snake", {}, "ppo", {"separate": True, "hidden": (16, 16)}),
    "cnn": ("snake", {"view": "wrapped"}, "ppo", {"net": "cnn", "channels": (8, 8), "hidden": (16,)}),
    "resnet": ("snake", {"view": "wrapped"}, "pqn", {"net": "resnet", "channels": (8,), "hidden": (16,)}),
    "afterstates": ("tetris", {}, "ppo", {"hidden": (16,)}),
    "distribution": ("snake", {}, "dqn", {"distribution": "quantile", "dueling": True, "hidden": (16,)}),
    "masked planes": ("tetris", {"view": "planes"}, "dqn", {"hidden": (16,)}),
}


def untrained(env: str, env_options: dict[str, Any], algo: str, algo_options: dict[str, Any]) -> Agent:
    """An agent with random weights: what an export must reproduce does not depend on training."""
    settings = Settings(
        env,
        algo,
        num_envs=8,
        device="cpu",
        compile=False,
        threads=1,
        env_options=env_options,
        algo_options=algo_options,
    )
    with closing(Session(resolve(settings), pytest.fail)) as session:
        model = {name: x.clone() for name, x in session.tensors()["model"].items()}
        plan = session.plan
    config = {"env": env, "algo": algo, "algo_options": vars(plan.algo_config)}
    return build_agent(Path("unused"), config, plan.rules, model, 0, torch.device("cpu"))


@pytest.mark.parametrize("kind", NETWORKS)
def test_every_network_chooses_the_same_in_onnx(kind: str, tmp_path: Path) -> None:
    agent = untrained(*NETWORKS[kind])
    samples = collect_samples(agent)
    assert len(samples.obs) == len(samples.legal) == 1000
    record = export.export(agent, tmp_path / "agent.onnx", "onnx", samples)
    assert record["checked"] == 1000
    assert record["largest_difference"] < 1e-3
    assert record["ties"] < 10
    action, scores = export.onnx_runner(tmp_path / "agent.onnx")(samples.obs[:1], samples.legal[:1])
    assert action.shape == (1,)
    assert scores.shape == (1, samples.legal.shape[1])


def exit_code(words: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small agent, trained for a moment."""
    folder = tmp_path_factory.mktemp("export") / "run"
    options = {"width": 5, "height": 5}
    redline.train(
        "snake",
        steps=4096,
        num_envs=64,
        device="cpu",
        compile=False,
        eval_episodes=8,
        eval_every=2048,
        env_options=options,
        algo_options={"hidden": (16,), "rollout_steps": 16},
        run_dir=str(folder),
    )
    return folder


def test_command_writes_files_and_a_model_card(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(export, "ALLOWED_LOSS", 1.0)  # an agent that was trained for a moment plays by chance
    assert exit_code(["export", str(run), "--int8", "--episodes", "32", "--json"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(record["int8"]["speedup"]) == {"1", "256"}
    assert 0 < record["int8"]["bytes"] < record["bytes"]
    card = Path(record["card"]).read_text()
    assert card.startswith("---\nlibrary_name: redline\n")
    assert f"{record['evaluation']['score_mean']:.2f} +/-" in card
    assert run_code(card, run / "export") == "(1,)"


def run_code(card: str, folder: Path) -> str:
    """Run the example in a model card in a program of its own; return what it prints."""
    code = card.split("```python\n")[1].split("```")[0]
    code += "import sys\nassert 'redline' not in sys.modules\nprint(tuple(action.shape))"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_torch_program_needs_no_redline(run: Path) -> None:
    assert exit_code(["export", str(run), "--format", "torch", "--episodes", "0", "--out", str(run / "torch")]) == 0
    card = (run / "torch" / "README.md").read_text()
    assert run_code(card, run / "torch") == "(1,)"


def test_export_of_another_checkpoint(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By its step and as the best: the file holds those weights, and the card names the step."""
    steps = {name: redline.load(run, "cpu", checkpoint=name).env_steps for name in ("newest", "best")}
    assert steps["newest"] == 4096
    env = redline.make("snake", num_envs=5, **redline.load(run, "cpu").env_options)
    obs, legal = env.reset(0), torch.ones(5, 3, dtype=torch.bool)
    for chosen, step, title in (
        ("2048", 2048, "step 2,048"),
        ("best", steps["best"], f"step {steps['best']:,} (best)"),
    ):
        out = tmp_path / chosen
        words = ["export", str(run), "--format", "torch", "--episodes", "0", "--out", str(out), "--checkpoint", chosen]
        assert exit_code([*words, "--json"]) == 0
        record = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert (record["env_steps"], record["checkpoint"]) == (step, chosen)
        scores = torch.export.load(out / "agent.pt2").module()(obs, legal)[1]
        agent = redline.load(run, "cpu", checkpoint=step)
        torch.testing.assert_close(scores, agent.net(obs, legal))
        assert f"| checkpoint | {title} |" in (out / "README.md").read_text()
    assert exit_code(["export", str(run), "--checkpoint", "17"]) == 2
    assert "checkpoint is '17'; expected newest, best or a step that was kept: 2048, 4096." in capsys.readouterr().err


def test_int8_that_plays_worse_is_refused_and_removed(
    run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = iter([10.0, 9.4])
    played = {"episodes": 8, "score_low": 0.0, "score_high": 1.0, "score_ci95": 0.1}
    monkeypatch.setattr(export, "score", lambda *_: played | {"score_mean": next(scores)})
    assert exit_code(["export", str(run), "--int8", "--episodes", "8", "--out", str(tmp_path)]) == 2
    assert "falls from 10.00 to 9.40, by 6.0 %" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["agent.onnx"]


@pytest.mark.fault("H7")
def test_a_file_that_chooses_otherwise_is_refused() -> None:
    samples = Samples(torch.zeros(4, 2), torch.ones(4, 2, dtype=torch.bool))
    scores = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [5.0, 4.0]])

    def ours(obs: torch.Tensor, legal: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        del obs, legal
        return scores.argmax(1), scores

    def tied(obs: torch.Tensor, legal: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        del obs, legal
        return torch.tensor([0, 1, 1, 0]), scores

    def wrong(obs: torch.Tensor, legal: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        del obs, legal
        return torch.tensor([0, 1, 0, 1]), scores

    assert check(ours, tied, samples) == {"ties": 1, "largest_difference": 0.0}
    with pytest.raises(UserError, match="in 1 of 4 states"):
        check(ours, wrong, samples)


@pytest.mark.fault("H7")
def test_a_missing_package_is_named_with_its_extra(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnx" else found(name))
    with pytest.raises(UserError, match="needs onnx"):
        need("onnx", "onnxruntime")
    assert exit_code(["export", str(run)]) == 2
    assert "pip install 'redline[export]'" in capsys.readouterr().err


def test_agent_acts_values_and_plays(run: Path) -> None:
    agent = redline.load(run, device="cpu")
    env = redline.make("snake", num_envs=4, **agent.env_options)
    obs = env.reset(0)
    assert agent.values(obs).shape == (4,)  # of an actor-critic: of the states
    assert isinstance(agent.values(obs[0].numpy()), np.ndarray)
    torch.manual_seed(0)
    drawn = torch.stack([agent.act(obs, sample=True) for _ in range(20)])
    assert len(drawn.unique()) > 1
    played = agent.play(env, episodes=6)
    assert len(played["returns"]) == played["episodes"] == 6
    single = gymnasium.make("redline/Snake-v0", **agent.env_options)
    assert agent.play(single, episodes=2)["length_mean"] >= 1
    with pytest.raises(UserError, match=r"redline\.make"):
        agent.play("snake")
