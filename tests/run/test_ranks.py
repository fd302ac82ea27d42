"""Several ranks, started by torchrun with gloo: the same gradients as one process, one writer, and agreement on everything.

Starting ranks takes seconds, so that all tests but those that kill or stop a rank share two starts, see ranks_worker.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks_worker import ITERATIONS, LEARNERS, RUN, learn, plan_of
from safetensors.torch import load_file
from torch import Tensor

import redline
from redline.core import random
from redline.engine.launch import Launch, launched
from redline.replay.ring import Draw
from redline.run.checkpoint import Checkpoints
from redline.run.options import build
from redline.run.session import Session
from redline.run.settings import Settings
from redline.run.train import train

HERE = Path(__file__).parent
LIMIT = 240  # seconds for one start of ranks, on a machine that may be very busy


def torchrun(ranks: int, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script with so many ranks on this machine; words: options of torchrun, the script and its own options."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the results of two ranks that did every job."""
    folder = tmp_path_factory.mktemp("two")
    jobs = ("exchanges", "gradients", "bad_gradient", "shares", "other_seeds", "other_weights")
    ended = torchrun(
        2,
        str(HERE / "ranks_worker.py"),
        str(folder),
        *jobs,
        "uninterrupted",
        "continued",
        "command",
        "evaluated",
        "uneven",
    )
    assert ended.returncode == 0, ended.stderr
    return folder


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the gradients of four ranks."""
    folder = tmp_path_factory.mktemp("four")
    ended = torchrun(4, str(HERE / "ranks_worker.py"), str(folder), "gradients")
    assert ended.returncode == 0, ended.stderr
    return folder


def results(folder: Path, job: str) -> list[Any]:
    """Return the results of a job by rank."""
    return [json.loads((folder / f"{job}-{rank}.json").read_text()) for rank in range(2)]


# ---- the same gradients


def same_batches(session: Session, ranks: int) -> None:
    """Let one process put the samples into batches that `ranks` ranks would put there together.

    Each of those shuffles, or draws from, its own environments with its own random stream.
    """
    learner: Any = session.learner
    own_envs = learner.num_envs // ranks

    def shuffle() -> None:
        key = random.fold(learner.key, 2 * learner.shuffled + 1)
        number = torch.arange(learner.rollout.size // ranks, device=key.device)
        orders = [torch.sort(random.bits(random.fold(key, r), number), stable=True).indices for r in range(ranks)]
        whole = [x // own_envs * learner.num_envs + r * own_envs + x % own_envs for r, x in enumerate(orders)]
        batches = [x.view(-1, learner.samples_per_update // ranks) for x in whole]
        learner.order.copy_(torch.cat(batches, 1).flatten())
        learner.shuffled += 1

    def draw(key: Tensor, size: int) -> Draw:
        ring = learner.memory.ring
        parts = [type(ring).draw_uniformly(narrow, random.fold(key, r), size // ranks) for r in range(ranks)]
        env_index = torch.cat([part.env_index + r * own_envs for r, part in enumerate(parts)])
        return Draw(torch.cat([part.row for part in parts]), env_index, None)

    if hasattr(learner, "rollout"):
        learner._shuffle = shuffle
    else:
        narrow = _Narrow(learner.memory.ring, own_envs)
        learner.memory.ring.draw = draw


class _Narrow:
    """A replay ring that looks as if it had fewer environments."""

    def __init__(self, ring: Any, num_envs: int) -> None:
        self.ring, self.num_envs = ring, num_envs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ring, name)


@pytest.mark.parametrize("name", LEARNERS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_have_the_gradients_of_one_process(name: str, ranks: int, two: Path, four: Path) -> None:
    session = Session(plan_of(name), pytest.fail)
    same_batches(session, ranks)
    expected = learn(session, ITERATIONS.get(name, 2))
    for rank in range(ranks):
        own = torch.load((two if ranks == 2 else four) / f"{name}-{rank}.pt")
        assert own.keys() == expected.keys()
        assert own["gradients"].shape == expected["gradients"].shape
        assert own["gradients"].abs().amax() > 1e-3
        for key in expected:
            assert (own[key] - expected[key]).abs().amax() < 1e-5, key
            if rank:
                assert torch.equal(own[key], torch.load((two if ranks == 2 else four) / f"{name}-0.pt")[key])


def test_a_skipped_reduction_shows() -> None:
    """Batches of one rank alone have other gradients: the comparison above can fail."""
    whole, half = (Session(plan_of("ppo"), pytest.fail) for _ in range(2))
    same_batches(whole, 2)
    expected, own = learn(whole, 1), learn(half, 1)
    assert (own["gradients"] - expected["gradients"]).abs().amax() > 1e-3


@pytest.mark.fault("D3")
def test_a_bad_gradient_of_one_rank_is_skipped_by_all(two: Path) -> None:
    for result in results(two, "bad_gradient"):
        assert result == {"skipped": 8, "steps": 0}


# ---- exchanges


def test_exchanges(two: Path) -> None:
    first, second = results(two, "exchanges")
    for result in (first, second):
        assert result["gather"] == [{"rank": 0, "long": ""}, {"rank": 1, "long": "x" * 100}]
        assert result["broadcast"] == {"from": 0}
        assert result["lead"] == [0]
        assert result["mean_of"] == [[[0.5] * 3] * 2, [0.5, 2.0]]
        both = torch.cat([torch.arange(8.0).view(2, 4), torch.arange(8.0).view(2, 4) + 1000], 1)
        variance, mean = torch.var_mean(both, 1, correction=0)
        assert result["var_mean"] == [variance.tolist(), mean.tolist()]
        assert result["broadcast_tensor"] == [0, 1, 2, 3]
    assert first["led error"] == ["It is wrong.", 2, False]
    assert second["led error"] == ["It is wrong.", 2, True]
    assert set(map(tuple, first["gather_tensor"].values())) == {(0.0, 1.0)}
    assert set(map(tuple, second["gather_tensor"].values())) == {()}
    assert (first["gather_empty"], second["gather_empty"]) == (2, 0)
    assert (first["pass_tensor"], second["pass_tensor"]) == (None, [0, 1, 2, 3])


def test_torchrun_is_recognised_by_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert launched() is None
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert launched() is None  # a leftover of another program
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert launched() == Launch(3, 4, 1, 2)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert launched() is None


# ---- starting


@pytest.mark.fault("G8")
def test_numbers_that_ranks_cannot_share_are_refused(two: Path) -> None:
    for messages in results(two, "shares"):
        assert messages["envs"] == "num_envs is 15; expected a multiple of 2, the number of ranks, such as 14."
        assert messages["batch"] == "ppo.batch_size is 3; expected a multiple of 2, the number of ranks, such as 2."
        assert messages["auto"].startswith("replay_capacity is 'auto'; with several ranks give a number")
        assert messages["impossible"].startswith("ppo.gamma is 7")


@pytest.mark.fault("I3")
def test_ranks_that_differ_are_refused(two: Path) -> None:
    for messages in results(two, "shares"):
        assert messages["option"].startswith(
            "The ranks of this run differ in algo_options.gamma: rank 0 has 0.9, rank 1 0.91."
        )
    for job, difference in (
        ("other_seeds", "seed: rank 0 has 0, rank 1 1."),
        ("other_weights", "the tensors of model"),
    ):
        first, second = results(two, job)
        assert (first["code"], second["code"]) == (2, 2)
        assert f"redline: The ranks of this run differ in {difference}" in first["err"]
        assert second["err"] == ""  # said once


# ---- one writer


@pytest.mark.fault("I5")
def test_rank_0_alone_writes_and_speaks(two: Path) -> None:
    first, second = results(two, "command")
    assert (first["code"], second["code"]) == (0, 0)
    assert (second["out"], second["err"]) == ("", "")
    assert "2 ranks (gloo): 16 environments, 8 a rank; batch 16, 8 a rank." in first["err"]
    result = json.loads(first["out"])
    assert result["env_steps"] == 512
    assert result["settings"]["ranks"] == 2
    assert "score_mean" in result
    folder = two / "c"
    steps = [json.loads(line)["env_steps"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps))
    assert steps[-1] == 512
    assert {path.name for path in folder.iterdir()} == {
        ".lock",
        "config.json",
        "metrics.jsonl",
        "result.json",
        "checkpoints",
    }
    (checkpoint,) = (folder / "checkpoints").glob("ckpt-*")
    assert len(load_file(checkpoint / "envs.safetensors")["key"]) == 16
    assert json.loads((checkpoint / "manifest.json").read_text())["world_size"] == 2


@pytest.mark.fault("I6")
def test_episodes_may_end_on_one_rank_only(two: Path) -> None:
    first, second = results(two, "uneven")
    assert (first["code"], second["code"]) == (0, 0), first["err"]
    result = json.loads(first["out"])
    assert result["env_steps"] == 256
    assert result["episodes"] == 128  # all of rank 0, whose two environments end in every step


# ---- interruptions


def weights(run_dir: Path) -> dict[str, Tensor]:
    """Return all tensors of the newest checkpoint."""
    newest = max((run_dir / "checkpoints").glob("ckpt-*"))
    groups = {path.stem: load_file(path) for path in newest.glob("*.safetensors")}
    return {f"{group}.{name}": x for group, tensors in groups.items() for name, x in tensors.items()}


def assert_same_end(run_dir: Path, reference: Path) -> None:
    own, expected = weights(run_dir), weights(reference)
    assert own.keys() == expected.keys()
    assert all(torch.equal(own[name], x) for name, x in expected.items())
    steps = [json.loads(line)["env_steps"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps))


def test_every_rank_continues_with_its_own_replay_memory(two: Path) -> None:
    assert_same_end(two / "parts", two / "straight")
    replay = [
        load_file(max((two / "parts/checkpoints").glob("ckpt-*")) / f"replay_{rank}.safetensors") for rank in range(2)
    ]
    assert not torch.equal(replay[0]["step"], replay[1]["step"])  # of other environments


@pytest.mark.fault("I5")
def test_rank_0_evaluates_on_time_and_training_is_the_same(two: Path) -> None:
    first, second = results(two, "evaluated")
    assert (first["env_steps"], first["stopped_by"]) == (second["env_steps"], second["stopped_by"]) == (2560, "steps")
    records = [json.loads(line) for line in (two / "e/metrics.jsonl").read_text().splitlines()]
    scores = {record["env_steps"]: record["eval_score"] for record in records if "eval_score" in record}
    assert list(scores) == [640, 1280, 1920, 2560]
    best = Checkpoints(two / "e").best()
    assert best
    assert best.manifest["score"] == max(scores.values())
    assert redline.evaluate(two / "e", 4, "cpu")["score_mean"] == scores[2560] == first["score_mean"]
    own, expected = weights(two / "e"), weights(two / "run")
    assert own.keys() == expected.keys()
    assert all(torch.equal(own[name], x) for name, x in expected.items())


@pytest.mark.fault("I1")
def test_sigterm_to_one_rank_stops_all_with_a_checkpoint(tmp_path: Path, two: Path) -> None:
    run_dir = tmp_path / "run"
    ended = torchrun(2, str(HERE / "ranks_injected.py"), str(run_dir), INJECT="1 term 6")
    assert ended.returncode == 1, ended.stderr  # of torchrun, for any failure
    printed = ended.stderr
    result = json.loads((run_dir / "result.json").read_text())
    assert result["stopped_by"] == "SIGTERM"
    assert 0 < result["env_steps"] < RUN["steps"]
    assert "exitcode  : 75" in printed
    assert [Path(f"{run_dir}-code-{rank}").read_text() for rank in range(2)] == ["75", "75"]
    ended = torchrun(2, str(HERE / "ranks_injected.py"), str(run_dir))
    assert ended.returncode == 0, ended.stderr
    assert f"Continuing {run_dir} from ckpt-{result['env_steps']:012d}" in ended.stderr
    assert_same_end(run_dir, two / "run")


@pytest.mark.fault("I2")
def test_a_killed_rank_restarts_all_from_the_last_checkpoint(tmp_path: Path, two: Path) -> None:
    run_dir = tmp_path / "run"
    ended = torchrun(2, "--max-restarts=1", str(HERE / "ranks_injected.py"), str(run_dir), INJECT="1 kill 12")
    assert ended.returncode == 0, ended.stderr
    assert f"Continuing {run_dir} from ckpt-" in ended.stderr
    assert_same_end(run_dir, two / "run")


@pytest.mark.fault("I4", "F10")
def test_one_process_continues_a_run_of_two_ranks(two: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir = two / "run"
    before = weights(run_dir)
    run = train(build(Settings, {"env": "snake", **RUN, "steps": RUN["steps"] + 256, "run_dir": str(run_dir)}, ""))
    assert run.result["env_steps"] == RUN["steps"] + 256
    printed = capfd.readouterr().err
    assert "This run was saved by 2 ranks and continues with one process; games and weights go on." in printed
    after = weights(run_dir)
    assert before.keys() == after.keys()
    played = [name for name in after if name.endswith("played")]
    assert all((after[name] >= before[name]).all() for name in played)  # the games went on
    manifest = json.loads((max((run_dir / "checkpoints").glob("ckpt-*")) / "manifest.json").read_text())
    assert manifest["world_size"] == 1


@pytest.mark.fault("I4", "F10")
def test_a_replay_memory_of_two_ranks_is_filled_again_by_one(two: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sys.path.insert(0, str(HERE))
    settings = {"num_envs": 4, "actors": 0, "device": "cpu", "algo": "dqn", "algo_options": {"learning_starts": 32}}
    name = "gym:ranks_worker:Uneven-v0"
    train(build(Settings, {"env": name, **settings, "steps": 320, "eval_episodes": 0, "run_dir": str(two / "u")}, ""))
    assert (
        "The replay memory cannot be divided anew: it is filled again before learning goes on."
        in capfd.readouterr().err
    )


@pytest.mark.fault("F10")
def test_another_number_of_environments_is_refused(two: Path) -> None:
    from redline.core.errors import UserError

    settings = {"env": "snake", **RUN, "num_envs": 32, "run_dir": str(two / "run")}
    with pytest.raises(UserError, match="num_envs was 16, now 32"):
        train(build(Settings, settings, ""))
