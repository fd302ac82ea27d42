"""Packed agents: a small run folder that plays as the run does and cannot be continued; int8 and low rank nearly so."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from bench_scripts import load_script
from redline.core.errors import UserError
from redline.run.agent import load_agent
from redline.run.checkpoint import Checkpoints
from redline.run.run_folder import read_config
from redline.run.settings import from_words
from redline.run.train import train
from redline.tools import pack
from redline.tools.export import collect_samples
from redline.tools.model_card import model_card

TINY = {"steps": "1024", "num_envs": "16", "compile": "false", "eval_episodes": "0", "device": "cpu", "threads": "1"}
PPO = {"ppo.rollout_steps": "16", "ppo.batch_size": "64", "ppo.ema_decay": "0.9", "log_seconds": "0.01"}
CNN = {"ppo.net": "cnn", "ppo.channels": "8", "ppo.hidden": "64", "env.view": "wrapped"}
DQN = {"algo": "dqn", "batch_size": "16", "dqn.learning_starts": "200", "dqn.hidden": "16"}


def tiny(folder: Path, **words: str) -> Path:
    train(from_words("snake", TINY | {"run_dir": str(folder)} | words))
    return folder


@pytest.fixture(scope="module")
def cnn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("run") / "cnn", **PPO, **CNN)


@pytest.mark.parametrize(("words", "needed"), [(PPO, "ema"), (DQN, "online")], ids=["ppo", "dqn"])
def test_it_has_the_weights_of_the_policy_only(words: dict[str, str], needed: str, tmp_path: Path) -> None:
    run, out = tiny(tmp_path / "run", **words), tmp_path / "packed"
    agent = pack.pack(run, out)
    assert pack.folder_bytes(out) < pack.folder_bytes(run)
    checkpoint = Checkpoints(out).load()
    assert checkpoint
    assert checkpoint.tensors.keys() == {"model"}
    assert {name.partition(".")[0] for name in checkpoint.tensors["model"]} == {needed}
    trained = load_agent(run, "cpu")
    samples = collect_samples(trained, 64)
    assert torch.equal(agent.net(*samples), trained.net(*samples))
    assert agent.env_steps == trained.env_steps
    assert str(tmp_path) not in "".join(path.read_text() for path in out.glob("*.json*"))  # nobody's folders are shown


def test_an_agent_of_a_users_environment_is_packed_without_the_signature(tmp_path: Path) -> None:
    folder, out = tmp_path / "run", tmp_path / "packed"
    train(from_words("gym:toys:ToyMatch-v0", TINY | {"run_dir": str(folder)}))
    packed = pack.pack(folder, out)
    assert "signature" not in read_config(out)
    card = model_card(packed, {"run": "packed"})
    assert "redline watch packed --trust\nredline eval packed --trust --device cpu\n" in card
    assert "allows loading the module 'toys'" in card
    with pytest.raises(UserError, match="does not carry your signature"):
        pack.pack(out, tmp_path / "again")
    assert pack.pack(out, tmp_path / "again", trust=True).env_steps == packed.env_steps


def test_metrics_are_thinned(cnn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "POINTS", 2)
    before = (cnn / "metrics.jsonl").read_text().splitlines()
    assert len(before) > 2
    pack.pack(cnn, tmp_path / "out")
    after = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert len(after) <= 2
    assert set(after) < set(before)


def test_training_does_not_continue_from_it(cnn: Path, tmp_path: Path) -> None:
    out = tmp_path / "packed"
    pack.pack(cnn, out)
    with pytest.raises(UserError, match="packed agent"):
        tiny(out, **PPO, **CNN, steps="2048")
    assert load_agent(out, "cpu")  # nothing was moved


def test_only_a_packed_agent_is_replaced(cnn: Path, tmp_path: Path) -> None:
    pack.pack(cnn, tmp_path / "packed")
    pack.pack(cnn, tmp_path / "packed", int8=True)
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").touch()
    for out in (cnn, cnn.parent, other):
        with pytest.raises(UserError, match="is no packed agent"):
            pack.pack(cnn, out)
    assert load_agent(cnn, "cpu")
    assert (other / "thesis.tex").exists()


def test_int8_and_low_rank_are_small_and_close(cnn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "_STATES", 64 * 40)
    trained = load_agent(cnn, "cpu")
    samples = collect_samples(trained, 256)
    scores = trained.net(*samples)
    sizes = [pack.folder_bytes(pack.pack(cnn, tmp_path / "whole").path)]
    for name, rank, error in (("int8", 0, 0.02), ("low", 32, 0.1)):
        agent = pack.pack(cnn, tmp_path / name, int8=True, rank=rank)
        sizes.append(pack.folder_bytes(agent.path))
        assert not torch.equal(agent.net(*samples), scores)
        assert (agent.net(*samples) - scores).norm() < error * scores.norm()
    assert sizes == sorted(sizes, reverse=True)
    with pytest.raises(UserError, match="product of rank 65"):
        pack.pack(cnn, tmp_path / "high", rank=65)


def test_the_script_writes_a_model_card(
    cnn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, out = load_script("pack_agent"), tmp_path / "snake"
    words = ["pack_agent.py", str(cnn), str(out), "--command", "redline train snake", "--int8"]
    words += ["--hardware", "a CPU", "--episodes", "4", "--max-steps", "64"]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(script, "LIMIT", 100)
    with pytest.raises(SystemExit, match="more than 100 bytes"):
        script.main()
    card = (out / "README.md").read_text()
    assert "| command | `redline train snake` |" in card
    assert "| trained on | a CPU, fp32 |" in card
    assert "int8 with a scale for each row" in card
    assert f"redline watch {out}" in card
    assert "held-out games" in card
    assert re.search(r"score .* before, .* after", capsys.readouterr().out)
