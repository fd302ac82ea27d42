"""A trained agent, read back from its run folder."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

import redline
from redline.core.errors import StorageError, UserError
from redline.envs import Env
from redline.run.agent import load_agent
from redline.run.checkpoint import Checkpoints
from redline.run.resolve import resolve
from redline.run.session import Session
from redline.run.settings import Settings
from redline.run.train import Run, train

SETTINGS = Settings(
    env="snake",
    num_envs=16,
    batch_size=16,
    replay_capacity=2000,
    steps=480,
    device="cpu",
    compile=False,
    curriculum=False,
    eval_episodes=20,
    time_limit=30,
    env_options={"width": 5, "height": 4},
    algo_options={"hidden": (16, 16), "learning_starts": 64, "dueling": True, "learning_rate": 1e-4},
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("agent") / "run"
    return train(Settings(**vars(SETTINGS) | {"run_dir": str(path)}))


def test_act_takes_arrays_and_tensors_single_and_batched(run: Run) -> None:
    agent = redline.load(run, "cpu")
    obs = Env(agent.rules, 8, seed=3).reset()
    expected = agent.policy(obs)
    assert torch.equal(agent.act(obs), expected)
    assert agent.act(obs[0]).shape == ()
    assert agent.act(obs[0]) == expected[0]
    actions = agent.act(obs.numpy())
    assert (type(actions).__name__, actions.dtype, actions.tolist()) == ("ndarray", "int64", expected.tolist())
    one = agent.act(obs[1].numpy())
    assert type(one) is int
    assert one == expected[1]
    with pytest.raises(UserError, match=r"expects observations of shape .*, got \(3,\)"):
        agent.act(torch.zeros(3))


def test_act_hands_legal_actions_to_the_network(run: Run) -> None:
    class Net(torch.nn.Module):
        def forward(self, obs: torch.Tensor, legal: torch.Tensor | None = None) -> torch.Tensor:
            values = torch.tensor([0.0, 1.0, 3.0, 2.0]).expand(len(obs), 4)
            return values if legal is None else values.masked_fill(~legal, -1.0)

    agent = dataclasses.replace(load_agent(run.path, "cpu"), net=Net())
    obs = Env(agent.rules, 2).reset()
    assert agent.act(obs[0]) == 2
    assert agent.act(obs[0].numpy(), legal=[True, True, False, False]) == 1
    legal = torch.tensor([[True, False, False, True], [True, False, False, False]])
    assert agent.act(obs, legal).tolist() == [3, 0]


def test_the_agent_plays_as_the_learner_does(run: Run) -> None:
    session = Session(resolve(SETTINGS), print)
    found = Checkpoints(run.path).load()
    assert found is not None
    session.load(found.tensors, found.state["session"])
    agent = load_agent(run.path, "cpu")
    env = Env(agent.rules, 64, seed=9)
    obs, seen = env.reset(), set()
    for _ in range(30):
        action = agent.policy(obs)
        assert action.dtype == torch.int64
        assert torch.equal(action, session.learner.policy(obs))
        seen |= set(action.tolist())
        obs = env.step(action).obs
    assert len(seen) > 1  # an agent that always does the same would agree with much


def test_the_agent_is_not_the_untrained_network(run: Run) -> None:
    agent, fresh = load_agent(run.path, "cpu"), Session(resolve(SETTINGS), print).learner.online
    trained = dict(agent.net.named_parameters())
    assert trained.keys() == dict(fresh.named_parameters()).keys()
    assert all(not torch.equal(p, trained[name]) for name, p in fresh.named_parameters() if "weight" in name)


def test_what_it_was_trained_on_comes_along(run: Run) -> None:
    agent = load_agent(run.path, "cpu")
    assert (agent.rules.config.width, agent.rules.config.height, agent.rules.time_limit) == (5, 4, 30)
    assert agent.env_steps == 480
    assert not agent.net.training


def test_evaluation_agrees_with_the_one_at_the_end_of_training(run: Run) -> None:
    result = load_agent(run.path, "cpu").evaluate(20)
    names = ("score_mean", "score_ci95", "score_min", "score_max", "length_mean", "win_rate", "steps_per_win")
    assert {name: result[name] for name in names} == {name: run.result[name] for name in names}
    assert (result["episodes"], run.result["eval_episodes"]) == (20, 20)
    assert (result["env"], result["algo"], result["run"]) == ("snake", "dqn", str(run.path))
    assert result["settings"]["num_envs"] == 16


def test_python_interface(run: Run) -> None:
    by_run, by_path = (redline.evaluate(what, episodes=6, device="cpu", seed=3) for what in (run, str(run.path)))
    assert {**by_run, "seconds": 0} == {**by_path, "seconds": 0}
    assert (by_run["episodes"], by_run["env"]) == (6, "snake")


def test_observations_may_come_from_another_device(run: Run) -> None:
    """Watching plays on the CPU, whatever the agent runs on; `meta` stands in for a GPU."""

    class Net(torch.nn.Module):
        def forward(self, obs: torch.Tensor) -> torch.Tensor:
            return torch.zeros(len(obs), 4, device=obs.device)

    agent = dataclasses.replace(load_agent(run.path, "cpu"), net=Net(), device=torch.device("meta"))
    assert agent.policy(torch.zeros(2, 3, 4, 5)).device.type == "meta"


def test_the_newest_good_checkpoint_is_taken(run: Run, tmp_path: Path) -> None:
    path = shutil.copytree(run.path, tmp_path / "copy")
    good = path / "checkpoints" / f"ckpt-{480:012d}"
    bad = shutil.copytree(good, good.with_name(f"ckpt-{480:012d}.1"))
    (bad / "model.safetensors").write_bytes(b"damaged")
    assert load_agent(path, "cpu").env_steps == 480
    (good / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(StorageError, match=r"No checkpoint in .* can be read"):
        load_agent(path, "cpu")
    assert good.exists()  # a reader moves nothing


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"There is no run folder .*nowhere; train one with redline train") as error:
        load_agent(tmp_path / "nowhere")
    assert error.value.exit_code == 2


def test_a_file_is_no_run_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"There is no run folder"):
        load_agent(tmp_path / "file")


def test_not_a_run_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not a run folder: there is no config.json in it"):
        load_agent(tmp_path)


def test_no_checkpoint_yet(run: Run, tmp_path: Path) -> None:
    shutil.copy(run.path / "config.json", tmp_path)
    with pytest.raises(UserError, match=r"There is no checkpoint in .* yet"):
        load_agent(tmp_path)


def test_a_run_of_a_game_that_is_not_here(run: Run, tmp_path: Path) -> None:
    config = json.loads((run.path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"env": "chess"}))
    with pytest.raises(UserError, match=r"needs the game chess and .* start in the folder it was trained from, or add"):
        load_agent(tmp_path, trust=True)
