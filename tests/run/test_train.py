"""The loop from outside: what a run folder holds, where a run stops, and that a continued run is the straight one."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import forked
import redline
from redline import cli
from redline.algos import dqn
from redline.cli.command import COMMANDS
from redline.cli.parse import parse
from redline.core import faults
from redline.core.errors import StorageError, UserError
from redline.run import budget, final_evaluation, trainer
from redline.run import train as loop
from redline.run.checkpoint import Checkpoint, RunLock, read_checkpoint
from redline.run.metrics_log import Metrics
from redline.run.resolve import resolve
from redline.run.session import Session
from redline.run.settings import Settings, from_words

SOURCE = Path(__file__).parents[2] / "src"
HALF, FULL = 320, 640  # environment steps; an iteration is 16
GROUPS = {"model", "optim", "rng", "envs", "replay"}


def tiny(path: Path, algo: dict[str, Any] | None = None, **changes: Any) -> Settings:
    """A run of a second. Its memory of 30 rows is written over, and its games die, starve and hit the time limit."""
    options = {"hidden": (16, 16), "learning_starts": 64, "learning_rate": 1e-3, "epsilon_steps": 400}
    # Schedules would follow the number of steps, which the parts of a run differ in.
    options |= {"gamma": 0.97, "gamma_end": None, "learning_rate_end": None} | (algo or {})
    settings = {
        "env": "snake",
        "run_dir": str(path),
        "num_envs": 16,
        "batch_size": 16,
        "replay_capacity": 480,
        "n_step": 3,
        "backplay": 0.0,
        "time_limit": 12,
        "device": "cpu",
        "compile": False,
        "curriculum": False,
        "eval_episodes": 4,
        "env_options": {"width": 4, "height": 4, "starvation": 9},
        "algo_options": options,
    }
    return Settings(**settings | changes)


def words(settings: Settings) -> list[str]:
    """The same on the command line."""
    found = ["train", settings.env]
    for group, options in (("", vars(settings)), ("env.", settings.env_options), ("dqn.", settings.algo_options)):
        for name, value in options.items():
            if name not in ("env", "env_options", "algo_options") and (value is not None or group):
                text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
                found.append(f"--{group}{name.replace('_', '-')}={text}")
    return found


def go(path: Path, **changes: Any) -> dict[str, Any]:
    return loop.train(tiny(path, **changes)).result


def exit_code(settings: Settings) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main(words(settings))
    assert isinstance(end.value.code, int)
    return end.value.code


def newest(path: Path) -> Checkpoint:
    return read_checkpoint(path / "checkpoints" / (path / "checkpoints" / "LATEST").read_text().strip())


def checkpoints(path: Path) -> list[str]:
    return sorted(name for name in os.listdir(path / "checkpoints") if name.startswith("ckpt-"))


def name(steps: int) -> str:
    return f"ckpt-{steps:012d}"


def metrics(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def differences(one: Checkpoint, other: Checkpoint) -> list[str]:
    """Names of the tensors that are not the same bit for bit."""
    assert one.tensors.keys() == other.tensors.keys() == GROUPS
    found = []
    for group, tensors in one.tensors.items():
        assert tensors.keys() == other.tensors[group].keys()
        for key, tensor in tensors.items():
            twin = other.tensors[group][key]
            if tensor.dtype != twin.dtype or not torch.equal(tensor, twin):
                found.append(f"{group}: {key}")
    return found


def assert_same_run(path: Path, straight: Path) -> None:
    """Bit for bit the same state, and the same counts in state and metrics."""
    one, other = newest(path), newest(straight)
    assert (one.step, one.state["session"], one.state["episodes"]) == (
        other.step,
        other.state["session"],
        other.state["episodes"],
    )
    assert differences(one, other) == []
    logs, straight_logs = metrics(path), metrics(straight)
    for key in ("env_steps", "updates", "samples_trained"):
        assert logs[-1][key] == straight_logs[-1][key]
    assert sum(log["episodes"] for log in logs) == sum(log["episodes"] for log in straight_logs)
    assert [log["env_steps"] for log in logs] == sorted({log["env_steps"] for log in logs})


def at_log(monkeypatch: pytest.MonkeyPatch, steps: int, act: Any) -> None:
    """Call `act` after the first log record of at least `steps` steps."""
    write, done = Metrics.write, []

    def noisy(self: Metrics, record: dict[str, Any]) -> None:
        write(self, record)
        if record["env_steps"] >= steps and not done:
            done.append(True)
            act()

    monkeypatch.setattr(Metrics, "write", noisy)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without a break, to compare with. Read only."""
    path = tmp_path_factory.mktemp("straight") / "run"
    go(path, steps=FULL)
    return path


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that stopped half-way. Read only: copy it."""
    path = tmp_path_factory.mktemp("half") / "run"
    go(path, steps=HALF)
    return path


@pytest.fixture
def run(half: Path, tmp_path: Path) -> Path:
    """A run folder of one's own, half trained."""
    return Path(shutil.copytree(half, tmp_path / "run"))


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """A test must not leave switches on."""
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    yield
    faults.arm("")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


# ---- what a run leaves behind


def test_run_folder(straight: Path) -> None:
    assert {entry for entry in os.listdir(straight) if not entry.startswith(".")} == {
        "config.json",
        "metrics.jsonl",
        "result.json",
        "checkpoints",
    }
    config = json.loads((straight / "config.json").read_text())
    assert (config["env"], config["algo"], config["num_envs"], config["seed"]) == ("snake", "dqn", 16, 0)
    assert config["env_options"]["starvation"] == 9
    assert config["env_options"]["start_length"] == 3  # what was not asked for is there too
    assert config["algo_options"]["hidden"] == [16, 16]
    assert (config["precision"], config["compile"], config["device"], config["minutes"]) == ("fp32", False, "cpu", None)
    assert checkpoints(straight) == [name(FULL)]
    assert sorted(entry.name for entry in (straight / "checkpoints" / name(FULL)).iterdir()) == sorted(
        ["manifest.json", "state.json", *(f"{group}.safetensors" for group in GROUPS)]
    )


def test_result(straight: Path) -> None:
    result = json.loads((straight / "result.json").read_text())
    assert result["env_steps"] == FULL
    assert result["updates"] == (FULL - 64) // 16  # one an iteration once 64 steps are remembered
    assert result["samples_trained"] == 16 * result["updates"]
    assert result["stopped_by"] == "steps"
    assert result["run"] == str(straight)
    assert result["eval_episodes"] == 4
    assert result["episodes"] > FULL / 12 - 16  # none lasts longer than the time limit
    assert 0 < result["seconds"] < 300
    records = [json.loads(line) for line in (straight / "metrics.jsonl").read_text().splitlines()]
    first = next(record for record in records if record["updates"])
    training = result["seconds"] - result["preparation_seconds"]  # speeds are those of training alone
    assert result["preparation_seconds"] == pytest.approx(first["seconds"], abs=0.05)
    assert result["env_steps_per_second"] == pytest.approx((FULL - first["env_steps"]) / training, rel=0.01)
    samples = result["samples_trained"] - first["samples_trained"]
    assert result["samples_per_second"] == pytest.approx(samples / training, rel=0.01)
    assert result["seconds_to_first_update"] > 0
    assert result["score_min"] <= result["score_mean"] <= result["score_max"]
    assert 0 < result["length_mean"] <= 12
    assert {"format_version": 2} | result["settings"] == json.loads((straight / "config.json").read_text())


def test_metrics(straight: Path) -> None:
    logs = metrics(straight)
    assert len(logs) >= 2
    always = {"env_steps", "updates", "samples_trained", "seconds", "env_steps_per_second", "samples_per_second"}
    for log in logs:
        assert always | {"episodes", "memory_gb"} <= log.keys()
        assert ({"score", "score_max", "length", "reward", "win_rate", "truncated"} <= log.keys()) == (
            log["episodes"] > 0
        )
        assert all(math.isfinite(value) for value in log.values())
    for before, after in pairwise(logs):
        assert before["env_steps"] < after["env_steps"]
        assert before["seconds"] < after["seconds"]
        assert ({"loss", "q_mean", "skipped_updates"} <= after.keys()) == (after["updates"] > before["updates"])
    assert logs[-1]["env_steps"] == FULL
    assert logs[-1]["loss"] > 0
    result = json.loads((straight / "result.json").read_text())
    assert sum(log["episodes"] for log in logs) == result["episodes"]
    assert {key: logs[-1][key] for key in ("updates", "samples_trained")} == {
        key: result[key] for key in ("updates", "samples_trained")
    }


def test_it_learned(straight: Path, tmp_path: Path) -> None:
    """The weights of the checkpoint moved, by finite amounts."""
    fresh = Session(resolve(tiny(tmp_path)), print).learner.state_dict()["model"]
    trained = newest(straight).tensors["model"]
    assert all(torch.isfinite(tensor).all() for tensor in trained.values())
    assert all(not torch.equal(fresh[key], trained[key]) for key in fresh if key.endswith("weight"))


def test_python_interface(tmp_path: Path) -> None:
    settings = vars(tiny(tmp_path / "run", steps=32, eval_episodes=0))
    done = redline.train(**settings)
    assert done.path == tmp_path / "run"
    assert done.result["env_steps"] == 32
    assert "score_mean" not in done.result  # no evaluation was asked for
    with pytest.raises(UserError, match="There is no option stepz; did you mean 'steps'"):
        redline.train("snake", stepz=3)


# ---- where a run stops


def test_stops_at_the_steps(tmp_path: Path) -> None:
    assert go(tmp_path / "even", steps=96)["env_steps"] == 96
    result = go(tmp_path / "odd", steps=100, eval_episodes=0)
    assert (result["env_steps"], result["stopped_by"]) == (112, "steps")  # the first multiple of 16 that reaches 100


def test_stops_at_the_episodes(tmp_path: Path) -> None:
    result = go(tmp_path, episodes=30, eval_episodes=0)
    assert result["stopped_by"] == "episodes"
    counts = [log["episodes"] for log in metrics(tmp_path)]
    assert result["episodes"] == sum(counts) >= 30 > sum(counts[:-1])  # at the first log point that has them


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time that passes by playing alone: a tenth of a second an iteration."""
    now, iterate = [1000.0], Session.iterate

    def slow(self: Session, count: int, *rest: Any) -> None:
        iterate(self, count, *rest)
        now[0] += 0.1 * count

    monkeypatch.setattr(Session, "iterate", slow)
    for module in (trainer, budget):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    return now


def test_stops_after_the_minutes_and_counts_them_in_all(tmp_path: Path, clock: list[float]) -> None:
    result = go(tmp_path, minutes=0.05, eval_episodes=0)
    assert result["stopped_by"] == "minutes"
    assert 3.0 <= result["seconds"] < 4.0  # by the next log point, about a second away
    assert [log["seconds"] for log in metrics(tmp_path)] == pytest.approx([0.1, 0.5, 1.5, 2.5, 3.5])
    assert newest(tmp_path).state["preparation"] == pytest.approx(0.5)  # until the first update
    clock[0] += 500.0  # while nothing ran
    again = go(tmp_path, minutes=0.1, eval_episodes=0)
    preparation = newest(tmp_path).state["preparation"]
    assert preparation == pytest.approx(0.6)  # the memory is full: the first iteration updates
    assert 6.0 <= again["seconds"] - preparation < 7.0
    assert again["env_steps"] == result["env_steps"] + 16 * round(10 * (again["seconds"] - result["seconds"]))
    assert again["env_steps_per_second"] == pytest.approx(160)  # of this start
    assert go(tmp_path, minutes=0.1, eval_episodes=0)["env_steps"] == again["env_steps"]


def test_the_minutes_start_at_the_first_update(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compilation, here a minute in the first iteration, takes nothing from a budget of three seconds."""
    iterate = Session.iterate

    def compiling(self: Session, count: int, *rest: Any) -> None:
        clock[0] += 60.0 if self.iterations == 0 else 0.0
        iterate(self, count, *rest)

    straight = go(tmp_path / "straight", minutes=0.05, eval_episodes=0)
    monkeypatch.setattr(Session, "iterate", compiling)
    compiled = go(tmp_path / "compiled", minutes=0.05, eval_episodes=0)
    assert compiled["stopped_by"] == "minutes"
    assert compiled["updates"] >= 25
    assert compiled["seconds"] - 60 == pytest.approx(straight["seconds"], abs=1.0)
    progress = [log["seconds"] for log in metrics(tmp_path / "compiled")]
    assert progress[0] == pytest.approx(60.1)


def test_the_first_limit_counts(tmp_path: Path, clock: list[float]) -> None:
    assert go(tmp_path / "a", minutes=0.01, steps=10_000, eval_episodes=0)["stopped_by"] == "minutes"
    assert go(tmp_path / "b", minutes=9.0, steps=32, episodes=10**6, eval_episodes=0)["stopped_by"] == "steps"
    assert clock[0] < 1010


def test_checkpoints_in_between(tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[int] = []
    save = loop.Checkpoints.save

    def noted(self: Any, step: int, *arguments: Any, background: bool, **options: Any) -> None:
        saved.append(step if background else -step)
        save(self, step, *arguments, background=background, **options)
        self.wait()

    monkeypatch.setattr(loop.Checkpoints, "save", noted)
    go(tmp_path, minutes=0.08, checkpoint_minutes=0.03, eval_episodes=0)
    assert clock[0] == pytest.approx(1005.5)
    assert saved == [16 * 25, 16 * 45, -16 * 55]  # at 2.5 and 4.5 s, and the end
    assert checkpoints(tmp_path) == [name(16 * 25), name(16 * 45), name(16 * 55)]


def test_the_last_checkpoint_is_not_written_twice(tmp_path: Path, clock: list[float]) -> None:
    """A background save of the last step is still being written when the run ends."""
    faults.arm("slow@save:0.2s")
    go(tmp_path, minutes=0.03, checkpoint_minutes=0.04, eval_episodes=0)
    assert clock[0] == pytest.approx(1002.5)
    assert checkpoints(tmp_path) == [name(16 * 25)]


@pytest.mark.fault("A6")
def test_a_failing_background_save_stops_nothing(tmp_path: Path, clock: list[float], capsys: Any) -> None:
    faults.arm("raise@save.model:1")
    go(tmp_path, minutes=0.05, checkpoint_minutes=0.01, eval_episodes=0)
    assert checkpoints(tmp_path)[-1] == name(16 * 35)
    assert "was not written (injected fault at save.model)" in capsys.readouterr().err
    assert clock[0] == pytest.approx(1003.5)


# ---- continuing


def test_resume_equals_the_straight_run(run: Path, straight: Path) -> None:
    assert differences(newest(run), newest(straight)) != []
    result = go(run, steps=FULL)
    assert (result["env_steps"], result["stopped_by"]) == (FULL, "steps")
    assert_same_run(run, straight)
    expected = json.loads((straight / "result.json").read_text())
    for key in ("updates", "samples_trained", "episodes", "score_mean", "length_mean"):
        assert result[key] == expected[key]
    assert result["seconds"] > json.loads((run / "metrics.jsonl").read_text().splitlines()[-2])["seconds"]


@pytest.mark.fault("B4")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_interrupted_and_continued_equals_the_straight_run(
    number: signal.Signals, code: int, tmp_path: Path, straight: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    with monkeypatch.context() as patch:
        at_log(patch, 64, lambda: os.kill(os.getpid(), number))
        assert exit_code(tiny(tmp_path, steps=FULL)) == code
    result = json.loads((tmp_path / "result.json").read_text())
    assert 64 <= result["env_steps"] < FULL
    assert result["stopped_by"] == number.name
    assert "score_mean" not in result  # who interrupts does not wait for an evaluation
    assert checkpoints(tmp_path) == [name(result["env_steps"])]
    assert f"stopped by {number.name}" in capsys.readouterr().out
    assert exit_code(tiny(tmp_path, steps=FULL)) == 0
    assert_same_run(tmp_path, straight)


@pytest.mark.fault("B4")
def test_killed_and_continued_equals_the_straight_run(
    tmp_path: Path, straight: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps and metrics after the last checkpoint are lost, and made again the same."""

    class Kill(BaseException):
        pass

    def kill() -> None:
        raise Kill

    go(tmp_path, steps=64)
    with monkeypatch.context() as patch:
        at_log(patch, 128, kill)
        with pytest.raises(Kill):
            go(tmp_path, steps=FULL)
    assert metrics(tmp_path)[-1]["env_steps"] >= 128
    assert newest(tmp_path).step == 64
    go(tmp_path, steps=FULL)
    assert_same_run(tmp_path, straight)


@pytest.mark.fault("B1")
def test_a_stopped_process_leaves_a_checkpoint(tmp_path: Path) -> None:
    process = forked.start(*words(tiny(tmp_path / "run", steps=10**12)), "--json")
    log = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (log.exists() and log.read_text().count("\n") >= 3):
        assert process.poll() is None, process.communicate(1)
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "Traceback" not in err
    (line,) = out.splitlines()
    result = json.loads(line)
    assert result["stopped_by"] == "SIGTERM"
    assert newest(tmp_path / "run").step == result["env_steps"] == metrics(tmp_path / "run")[-1]["env_steps"]
    assert go(tmp_path / "run", steps=result["env_steps"] + 16)["env_steps"] == result["env_steps"] + 16


def files_of(path: Path) -> dict[str, bytes]:
    """Every file of a run folder but for the lock, which is held and released."""
    return {str(file): file.read_bytes() for file in path.rglob("*") if file.is_file() and file.name != ".lock"}


def test_a_finished_run_says_so_and_changes_nothing(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    before, result = files_of(run), json.loads((run / "result.json").read_text())

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("trained or evaluated")

    monkeypatch.setattr(Session, "__init__", never)
    monkeypatch.setattr(final_evaluation, "evaluate", never)
    assert go(run, steps=HALF, algo={"learning_rate": 0.5}) == result
    assert files_of(run) == before
    shown = capsys.readouterr().err
    assert f"This run is finished: it has reached its {HALF} steps. Nothing was changed." in shown
    assert "--steps" in shown
    assert f"redline eval {run}" in shown
    assert "Training snake" not in shown
    assert "Continuing" not in shown


def test_a_finished_run_without_its_result_is_described_by_its_checkpoint(run: Path) -> None:
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").unlink()
    described = go(run, steps=HALF)
    for key in ("env_steps", "updates", "samples_trained", "episodes", "stopped_by"):
        assert described[key] == result[key]
    assert not (run / "result.json").exists()


def test_an_interrupted_evaluation_leaves_no_old_result(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "score_mean" in json.loads((run / "result.json").read_text())

    def interrupted(*_: Any, progress: Any, **__: Any) -> None:
        progress(3)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)  # another thread may receive the signal; it interrupts this one a moment later

    monkeypatch.setattr(final_evaluation, "evaluate", interrupted)
    assert exit_code(tiny(run, steps=FULL)) == 130
    assert "Traceback" not in capsys.readouterr().err
    result = json.loads((run / "result.json").read_text())
    assert (result["env_steps"], result["stopped_by"]) == (FULL, "steps")
    assert "score_mean" not in result
    assert newest(run).step == FULL


def test_must_needs_a_checkpoint(tmp_path: Path, run: Path, capsys: Any) -> None:
    with pytest.raises(UserError, match="resume is 'must', but there is no checkpoint in"):
        go(tmp_path / "new", steps=HALF, resume="must")
    assert exit_code(tiny(tmp_path / "new", steps=HALF, resume="must")) == 2
    assert "resume is 'must'" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()  # nothing is left of a refused run
    assert go(run, steps=HALF + 16, resume="must", eval_episodes=0)["env_steps"] == HALF + 16


@pytest.mark.fault("A5")
def test_never_starts_anew_and_keeps_the_old_checkpoints(run: Path, capsys: Any) -> None:
    old = newest(run)
    result = go(run, steps=64, resume="never", seed=5, eval_episodes=0)
    assert result["env_steps"] == 64
    assert checkpoints(run) == [name(64)]
    kept = read_checkpoint(run / "checkpoints" / "aside-1" / name(HALF))
    assert differences(kept, old) == []
    assert "were moved to" in capsys.readouterr().err
    assert [log["env_steps"] for log in metrics(run)][-1] == 64
    assert json.loads((run / "config.json").read_text())["seed"] == 5


@pytest.mark.parametrize("resume", ["never", "path"])
def test_a_start_that_fails_moves_nothing(run: Path, resume: str) -> None:
    """Else the next plain start would find no checkpoint and begin from scratch."""
    if resume == "path":
        go(run, steps=HALF + 16, eval_episodes=0)
        resume = str(run / "checkpoints" / name(HALF))
    before = checkpoints(run)
    with pytest.raises(UserError, match=r"replay_capacity (is 20|was 480, now 20)"):
        go(run, steps=FULL, resume=resume, replay_capacity=20)
    assert checkpoints(run) == before


def test_resume_from_a_path(run: Path, straight: Path, tmp_path: Path) -> None:
    go(run, steps=HALF + 64, eval_episodes=0)
    assert checkpoints(run) == [name(HALF), name(HALF + 64)]
    result = go(run, steps=HALF + 32, resume=str(run / "checkpoints" / name(HALF)), eval_episodes=0)
    assert result["env_steps"] == HALF + 32
    assert checkpoints(run) == [name(HALF), name(HALF + 32)]
    assert os.listdir(run / "checkpoints" / "aside-1") == [name(HALF + 64)]
    assert metrics(run)[-1]["env_steps"] == HALF + 32
    # and into another folder, where it goes on to be the straight run
    go(tmp_path / "other", steps=FULL, resume=str(run / "checkpoints" / name(HALF)))
    assert differences(newest(tmp_path / "other"), newest(straight)) == []


def test_resume_from_a_path_into_another_folder_leaves_a_checkpoint_there(run: Path, tmp_path: Path) -> None:
    go(tmp_path / "other", steps=HALF, resume=str(run / "checkpoints" / name(HALF)), eval_episodes=0)
    assert checkpoints(tmp_path / "other") == [name(HALF)]


def test_wrong_paths_to_resume_from(run: Path, tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(UserError, match="resume is 'yes'; expected auto, must, never or the folder of a checkpoint"):
        go(run, steps=FULL, resume="yes")
    with pytest.raises(StorageError, match="is not a good checkpoint"):
        go(run, steps=FULL, resume=str(tmp_path))
    damaged = shutil.copytree(run / "checkpoints" / name(HALF), tmp_path / name(HALF))
    (damaged / "optim.safetensors").write_bytes(b"x")
    assert exit_code(tiny(run, steps=FULL, resume=str(damaged))) == 74
    assert "optim.safetensors" in capsys.readouterr().err
    assert checkpoints(run) == [name(HALF)]


@pytest.mark.fault("A11")
def test_a_checkpoint_of_another_run_is_refused(run: Path, tmp_path: Path) -> None:
    """Its tensors would fit: only the discount differs, in which its values were learned."""
    with pytest.raises(UserError, match="was made with another environment or network"):
        go(tmp_path / "other", steps=FULL, algo={"gamma": 0.5}, resume=str(run / "checkpoints" / name(HALF)))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"env": "chess"}, "holds a run of chess with dqn, not of snake with dqn; name another folder with --run-dir"),
        ({"algo": "ppo"}, "holds a run of snake with ppo, not of snake with dqn; name another folder with --run-dir"),
        ({"rules_version": 0}, "rules_version was 0, now "),
    ],
)
def test_the_folder_of_something_else_is_refused(
    run: Path, changes: dict[str, Any], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((run / "config.json").read_text()) | changes
    (run / "config.json").write_text(json.dumps(config))
    assert exit_code(tiny(run, steps=FULL)) == 2
    shown = capsys.readouterr().err
    assert sentence in shown
    assert "Training snake" not in shown  # refusals come first
    assert json.loads((run / "config.json").read_text()) == config
    assert checkpoints(run) == [name(HALF)]


@pytest.mark.fault("A11")
@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"seed": 1}, "seed was 0, now 1"),
        ({"num_envs": 8}, "num_envs was 16, now 8"),
        ({"time_limit": 13}, "time_limit was 12, now 13"),
        ({"n_step": 1}, "dqn.n_step was 3, now 1"),
        ({"replay_capacity": 960}, "dqn.replay_capacity was 480, now 960"),
        ({"algo": {"hidden": (8,)}}, r"dqn.hidden was \[16, 16\], now \[8\]"),
        ({"algo": {"gamma": 0.5}}, "dqn.gamma was 0.97, now 0.5"),
        ({"env_options": {"width": 5, "height": 4, "starvation": 9}}, "env.width was 4, now 5; dqn.v_max"),
        ({"env_options": {"width": 4, "height": 4}}, "env.starvation was 9, now "),
    ],
)
def test_a_changed_fixed_option_is_refused_and_named(
    run: Path, changes: dict[str, Any], difference: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=f"cannot be continued with these settings: {difference}") as error:
        go(run, steps=FULL, **changes)
    assert "--resume never" in str(error.value)
    assert "Training snake" not in capsys.readouterr().err
    assert checkpoints(run) == [name(HALF)]


@pytest.mark.fault("A11")
def test_a_changed_learning_rate_is_told_and_taken(
    run: Path, straight: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    go(run, steps=FULL, algo={"learning_rate": 0.1})
    assert "Continuing with dqn.learning_rate 0.1; it was 0.001." in capsys.readouterr().err
    assert any(difference.startswith("model: online") for difference in differences(newest(run), newest(straight)))
    assert json.loads((run / "config.json").read_text())["algo_options"]["learning_rate"] == 0.1


@pytest.mark.parametrize(("before", "now"), [(0.0, 0.5), (0.5, 0.0)])
def test_changed_practice_is_told_and_taken(
    tmp_path: Path, before: float, now: float, capsys: pytest.CaptureFixture[str]
) -> None:
    go(tmp_path, steps=HALF, backplay=before)
    go(tmp_path, steps=FULL, backplay=now)
    assert f"Continuing with backplay {now}; it was {before}." in capsys.readouterr().err
    assert json.loads((tmp_path / "config.json").read_text())["backplay"] == now


def test_without_the_memory_it_is_filled_before_learning_goes_on(tmp_path: Path) -> None:
    first = go(tmp_path, steps=HALF, save_replay=False, eval_episodes=0)
    saved = newest(tmp_path)
    assert saved.tensors.keys() == GROUPS - {"replay"}
    assert saved.manifest["resume_level"] == "L1"
    refilled = go(tmp_path, steps=HALF + 64, save_replay=False, eval_episodes=0)
    assert refilled["updates"] == first["updates"]  # learning_starts is 64: nothing to learn from yet
    assert newest(tmp_path).tensors["model"].keys() == saved.tensors["model"].keys()
    learned = go(tmp_path, steps=HALF + 64 + 80, save_replay=False, eval_episodes=0)
    assert learned["updates"] == first["updates"] + 1  # the memory was lost again
    assert learned["env_steps"] == HALF + 144


# ---- trouble


@pytest.mark.fault("A2")
def test_a_damaged_newest_checkpoint_is_passed_over(
    run: Path, straight: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    go(run, steps=HALF + 64, eval_episodes=0)
    path = run / "checkpoints" / name(HALF + 64) / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    go(run, steps=FULL)
    told = capsys.readouterr().err
    assert f"Checkpoint {name(HALF + 64)} is damaged and skipped" in told
    assert f"from {name(HALF)}" in told
    assert_same_run(run, straight)


@pytest.mark.fault("A5")
def test_only_damaged_checkpoints_are_no_reason_to_start_from_scratch(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "checkpoints" / name(HALF) / "model.safetensors").write_bytes(b"x")
    assert exit_code(tiny(run, steps=FULL)) == 74
    shown = capsys.readouterr().err
    assert "start anew with --resume never" in shown
    assert "Training snake" not in shown
    assert metrics(run)[-1]["env_steps"] == HALF


@pytest.mark.parametrize("text", ["{", "", "[]", '{"env": "snake"}'])
def test_a_damaged_config_loses_nothing(run: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "config.json").write_text(text)
    logs, saved = metrics(run), newest(run)
    assert exit_code(tiny(run, steps=FULL)) == 74
    assert "config.json" in capsys.readouterr().err
    assert (run / "config.json").read_text() == text
    assert metrics(run) == logs
    assert differences(newest(run), saved) == []


@pytest.mark.fault("H4")
def test_metrics_are_repaired(run: Path, straight: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"env_steps": HALF + 16, "episodes": 999}) + "\n")
        file.write('{"env_steps": 3')  # killed while it wrote
    go(run, steps=FULL)
    assert_same_run(run, straight)


@pytest.mark.fault("A9")
def test_a_folder_in_use_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLock(run):
        assert exit_code(tiny(run, steps=FULL)) == 74
    shown = capsys.readouterr().err
    assert f"is in use by process {os.getpid()}" in shown
    assert "Training snake" not in shown
    assert newest(run).step == HALF
    assert go(run, steps=HALF, eval_episodes=0)["env_steps"] == HALF  # and free again


@pytest.mark.fault("A8")
def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", tmp_path / "file" / "deeper" / "run"):
        assert exit_code(tiny(place, steps=FULL)) == 74
        assert f"{tmp_path / 'file'} is a file, not a folder" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.fault("A8")
@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o500)
    assert exit_code(tiny(tmp_path / "run", steps=FULL)) == 74
    assert "permission denied" in capsys.readouterr().err


@pytest.mark.fault("A6")
def test_a_full_disk_at_the_end_is_told(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    assert exit_code(tiny(run, steps=FULL)) == 74
    assert "no space left on device" in capsys.readouterr().err.lower()
    assert newest(run).step == HALF


@pytest.mark.fault("H5")
def test_a_closed_terminal_does_not_stop_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(f"nobody reads {text!r}")

    monkeypatch.setattr(sys, "stderr", Closed())
    assert go(tmp_path, steps=64, eval_episodes=0)["env_steps"] == 64
    assert newest(tmp_path).step == 64


@pytest.mark.fault("B7")
def test_outside_the_main_thread(tmp_path: Path) -> None:
    """Signals cannot be caught there; training goes all the same."""
    results: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: results.append(go(tmp_path, steps=64, eval_episodes=0)))
    thread.start()
    thread.join()
    assert [result["env_steps"] for result in results] == [64]


# ---- seeds and switches


def test_a_seed_repeats_and_two_differ(tmp_path: Path) -> None:
    paths = {key: tmp_path / key for key in ("one", "again", "other")}
    for key, path in paths.items():
        go(path, steps=160, seed=7 if key == "other" else 3, eval_episodes=0)
    one, again, other = (newest(path) for path in paths.values())
    assert differences(one, again) == []
    differing = differences(one, other)
    for group in ("model: online.dense.layers.0.weight", "rng: key", "envs: key", "replay: step"):
        assert group in differing


@pytest.mark.fault("D9")
def test_deterministic_runs_the_same(tmp_path: Path) -> None:
    try:
        go(tmp_path / "strict", steps=160, deterministic=True, eval_episodes=0)
    finally:
        torch.use_deterministic_algorithms(False)
    go(tmp_path / "plain", steps=160, eval_episodes=0)
    assert differences(newest(tmp_path / "strict"), newest(tmp_path / "plain")) == []


@pytest.mark.fault("D9")
def test_an_operation_that_is_not_deterministic_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence that names it, and torch's switch is off again; without --deterministic it is allowed."""
    update = dqn.Learner.update

    def with_put(learner: dqn.Learner) -> None:
        torch.zeros(4).put_(torch.tensor([1]), torch.ones(1))
        update(learner)

    monkeypatch.setattr(dqn.Learner, "update", with_put)
    with pytest.raises(UserError, match=r"deterministic is on, but put_ has no deterministic implementation on cpu;"):
        go(tmp_path / "strict", steps=160, deterministic=True, eval_episodes=0)
    assert not torch.are_deterministic_algorithms_enabled()
    go(tmp_path / "plain", steps=160, eval_episodes=0)


def test_accumulated_batches_count_as_samples(tmp_path: Path) -> None:
    result = go(tmp_path, steps=160, accumulate=3, eval_episodes=0)
    assert result["updates"] == 6
    assert result["samples_trained"] == 6 * 3 * 16


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    go(tmp_path, steps=96, tensorboard=True, eval_episodes=0)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    logs = metrics(tmp_path)
    assert [event.step for event in events.Scalars("train/n_updates")] == [log["env_steps"] for log in logs]
    assert [event.value for event in events.Scalars("train/n_updates")] == [log["updates"] for log in logs]
    assert {"train/loss", "train/td_error", "time/fps", "rollout/exploration_rate"} <= set(events.Tags()["scalars"])


def test_no_event_files_unless_asked_for(straight: Path) -> None:
    assert not (straight / "tensorboard").exists()


def test_settings_can_be_given_as_words(tmp_path: Path) -> None:
    """What the other tests give to the command line is what they give to Python."""
    settings = tiny(tmp_path, steps=FULL)
    request = parse("train", COMMANDS.load("train"), words(settings)[1:])
    given, expected = (
        resolve(from_words(request.arguments[0], request.options)).describe(),
        resolve(settings).describe(),
    )
    assert given | {"provenance": None} == expected | {"provenance": None}  # defaults spelled out are requests
