"""A run folder from somebody else: it imports no code unless it is trusted, and leads nowhere outside itself."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch

from redline import cli
from redline.core.errors import StorageError, UserError
from redline.run import trust
from redline.run.agent import load_agent
from redline.run.atomic_files import Damaged
from redline.run.checkpoint import Checkpoints, RunLock
from redline.run.resume import check_state
from redline.run.run_folder import read_config
from redline.run.settings import Settings
from redline.run.train import Run, train

TINY = {"num_envs": 4, "steps": 128, "device": "cpu", "compile": False, "eval_episodes": 0, "actors": 0}
PAYLOAD = """
import pathlib, gymnasium
pathlib.Path(__file__).with_name("imported").touch()
gymnasium.register("payload/X-v0", entry_point="gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=9)
"""


@pytest.fixture(autouse=True)
def config_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep signing keys out of the home of whoever runs the tests."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return train(Settings("snake", "ppo", run_dir=str(tmp_path / "run"), curriculum=False, **TINY))


def rewrite(run_dir: Path, **fields: object) -> None:
    path = run_dir / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.fault("A12")
@pytest.mark.parametrize("command", [("eval",), ("watch", "--gif", "out.gif")], ids=lambda words: words[0])
def test_a_strangers_run_imports_nothing(
    run: Run,
    tmp_path: Path,
    command: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, *rest = command
    (tmp_path / f"payload_{name}.py").write_text(PAYLOAD)  # names differ, as what is imported is remembered
    monkeypatch.chdir(tmp_path)
    rewrite(run.path, env=f"gym:payload_{name}:payload/X-v0", env_options={})
    with pytest.raises(UserError) as refusal:
        cli.run([name, str(run.path), *rest])
    assert "does not carry your signature" in str(refusal.value)
    assert f"the module 'payload_{name}'" in str(refusal.value)
    assert "--trust" in str(refusal.value)
    assert not (tmp_path / "imported").exists()
    with pytest.raises(UserError, match="another version"):  # these weights do not fit that environment
        cli.run([name, str(run.path), *rest, "--trust"])
    assert (tmp_path / "imported").exists()


@pytest.mark.fault("A12")
@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"env": "gym:os:X-v0"}, "the module 'os' of gym:os:X-v0"),
        ({"env": "antigravity"}, "the game 'antigravity'"),
        ({"algo": "my_package.a2c"}, "the algorithm 'my_package.a2c'"),
        (
            {"env": "gym:GymV26Environment-v0", "env_options": {"kwargs": {"env_id": "payload:X-v0"}}},
            "the constructor arguments env_id of gym:GymV26Environment-v0",
        ),
    ],
)
def test_the_code_that_would_run_is_named(run: Run, fields: dict[str, object], part: str) -> None:
    rewrite(run.path, **fields)
    with pytest.raises(UserError, match="add --trust") as refusal:
        load_agent(run.path, "cpu")
    assert part in str(refusal.value)


def test_names_that_need_no_trust() -> None:
    for env in ("snake", "gym:CartPole-v1", "mario:1-1"):
        assert not trust.outside_code({"env": env, "algo": "ppo", "env_options": {"kwargs": {}}})


def test_runs_of_ones_own_are_signed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config_home: Path) -> None:
    (tmp_path / "payload.py").write_text(PAYLOAD)
    monkeypatch.chdir(tmp_path)
    run = train(Settings("gym:payload:payload/X-v0", "ppo", run_dir="mine", **TINY))
    assert load_agent(run.path, "cpu").config["env"] == "gym:payload:payload/X-v0"
    moved = shutil.move(run.path, tmp_path / "moved")
    load_agent(Path(moved), "cpu")
    key = config_home / "redline" / "signing-key"
    assert key.stat().st_mode & 0o777 == 0o600
    rewrite(Path(moved), algo="dqn")  # the names are signed together
    with pytest.raises(UserError, match="does not carry your signature"):
        load_agent(Path(moved), "cpu")
    rewrite(Path(moved), algo="ppo")
    load_agent(Path(moved), "cpu")
    key.chmod(0o666)  # anybody could have written it
    with pytest.raises(UserError, match="does not carry your signature"):
        load_agent(Path(moved), "cpu")


@pytest.mark.fault("A12")
def test_another_users_signature_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"env": "my_game", "algo": "ppo", "env_options": {}}
    signed = trust.signed(config)
    trust.check_trust(tmp_path, signed, trust=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "another"))
    for stranger in (signed, config, config | {"signature": ""}, config | {"signature": 3}):
        with pytest.raises(UserError, match="does not carry your signature"):
            trust.check_trust(tmp_path, stranger, trust=False)
    trust.signed(config)  # now that user has a key
    with pytest.raises(UserError, match="does not carry your signature"):
        trust.check_trust(tmp_path, signed, trust=False)


def test_without_a_home_runs_are_unsigned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/proc/nowhere")
    config = {"env": "my_game", "algo": "ppo", "env_options": {}}
    assert trust.signed(config) == config


@pytest.mark.fault("A12")
@pytest.mark.parametrize("name", [".lock", ".metrics.jsonl.part", "metrics.jsonl", "checkpoints", ".tmp-replay.bin"])
@pytest.mark.parametrize("kind", ["symbolic", "hard"])
def test_training_writes_through_no_link(tmp_path: Path, name: str, kind: str) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "run"
    victim.write_text("precious")
    folder.mkdir()
    if kind == "symbolic":
        (folder / name).symlink_to(victim)
    else:
        os.link(victim, folder / name)
    with pytest.raises(StorageError, match="has a link in it") as refusal:
        train(Settings("snake", "ppo", run_dir=str(folder), **TINY))
    assert name in str(refusal.value)
    assert victim.read_text() == "precious"


@pytest.mark.fault("A12")
def test_a_pipe_in_place_of_the_config_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(StorageError, match="not a regular file"):
        read_config(tmp_path)


@pytest.mark.fault("A12")
@pytest.mark.parametrize("text", ["[" * 100_000, " " * (17 << 20)], ids=["nested", "huge"])
def test_a_hostile_config_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(StorageError, match="could not be read"):
        read_config(tmp_path)


# ---- checkpoints whose digests are right and whose content is not


def save_again(run: Run, change: str) -> None:
    """Add a checkpoint of a later step to the run, complete but for one `change`."""
    good = Checkpoints(run.path).load()
    assert good
    tensors, state = {group: dict(named) for group, named in good.tensors.items()}, json.loads(json.dumps(good.state))
    match change.split():
        case ["no", group]:
            del tensors[group]
        case ["nan", name]:
            tensors["optim"][name] = torch.full_like(tensors["optim"][name], math.nan)
        case ["drop", name]:
            del state[name]
        case ["text", name]:
            state["session"][name] = "many"
    with RunLock(run.path) as lock, pytest.MonkeyPatch.context() as patch:
        patch.setattr("redline.run.checkpoint.check_finite", lambda _: None)  # as a stranger's program may write
        hashes = {name: good.manifest[name] for name in ("config_hash", "env_hash")}
        Checkpoints(run.path, lock=lock, **hashes).save(good.step + 64, tensors, state, background=False)


@pytest.mark.fault("A4")
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("no model", "it has no weights"),
        ("no rng", "it lacks rng.safetensors"),
        ("nan mean", "'mean' of optim.safetensors has NaN"),
        ("drop session", "no valid 'session.iterations'"),
        ("text iterations", "no valid 'session.iterations'"),
        ("drop seconds", "no valid 'seconds'"),
    ],
)
def test_training_continues_from_the_checkpoint_before(
    run: Run, change: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save_again(run, change)
    more = Settings("snake", "ppo", run_dir=str(run.path), curriculum=False, **TINY | {"steps": 2 * TINY["steps"]})
    result = train(more).result
    assert result["env_steps"] == 2 * run.result["env_steps"]
    messages = capsys.readouterr().err
    assert "is damaged and skipped" in messages
    assert sentence in messages


def test_an_agent_needs_weights(run: Run) -> None:
    save_again(run, "no model")
    assert load_agent(run.path, "cpu").env_steps == run.result["env_steps"]


def test_a_good_checkpoint_passes(run: Run) -> None:
    checkpoint = Checkpoints(run.path).load()
    assert checkpoint
    check_state(checkpoint)
    checkpoint.state["episodes"] = -1
    with pytest.raises(Damaged, match="episodes"):
        check_state(checkpoint)


@pytest.mark.fault("A12")
@pytest.mark.parametrize(
    ("option", "widths"), [("hidden", [60_000, 60_000]), ("hidden", [10**12]), ("channels", [9000, 9000])]
)
def test_layers_larger_than_the_saved_weights_take_no_memory(
    run: Run, option: str, widths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    algo_options = json.loads((run.path / "config.json").read_text())["algo_options"]
    rewrite(run.path, algo_options=algo_options | {option: widths})
    monkeypatch.setattr("redline.algos.ppo.policy_network", lambda *_: pytest.fail("the network was built"))
    with pytest.raises(UserError, match=rf"which cannot be layers of {option}"):
        load_agent(run.path, "cpu")
