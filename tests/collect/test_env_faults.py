"""Environments that fail in every way, in this process and in actors: each is named, and the run goes on or stops."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import faulty_runs
import numpy as np
import pytest
import torch
from faulty_runs import ENV, Sessions, command

from redline.collect.actor_collector import ActorCollector
from redline.collect.sync_collector import SyncCollector
from redline.core.errors import EnvsLost, UserError
from redline.run.session import Session
from redline.run.settings import Settings
from redline.run.train import train

DQN = {"hidden": (8,), "learning_starts": 10**6, "batch_size": 32, "replay_capacity": 4000, "n_step": 2, "gamma": 0.5}
WHERE = pytest.mark.parametrize("actors", [0, 1], ids=["here", "actors"])
pytestmark = pytest.mark.usefixtures("faulty")


def dqn_session(sessions: Sessions, actors: int, **more: Any) -> Session:
    return sessions(actors=actors, algo_options=DQN, **more)


def check_memory(session: Session) -> None:
    assert faulty_runs.check_memory(session) > 0.9


# Exceptions: named, replaced, and nothing torn is learned from.


@pytest.mark.fault("C1")
@pytest.mark.parametrize("how", ["raise", "reset", "sysexit"])
@WHERE
def test_one_that_raises_is_named_and_made_anew(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str, actors: int
) -> None:
    monkeypatch.setenv("FAULTY", how)
    monkeypatch.setenv("FAULTY_FLAG", str(tmp_path / "flag"))
    session = dqn_session(sessions, actors)
    session.iterate(150)
    check_memory(session)
    (report,) = sessions.reports
    assert ENV in report
    assert ("the emulator gives up" if how == "sysexit" else "ArithmeticError: the emulator is on fire") in report
    assert "faulty.py" in report
    assert re.search(r"environment \d \(seed \d+\)", report)
    actions = report.split("last actions: ")[1].split(".")[0].split(", ")
    assert 5 <= len(actions) <= 32
    assert set(actions) <= {"0", "1"}
    assert "1 of 20" in report
    assert session.collector.metrics()["restarts"] == 1


@pytest.mark.fault("C1")
@pytest.mark.parametrize("algo", ["ppo", "pqn"])
def test_a_rollout_learns_nothing_from_a_step_that_failed(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, algo: str
) -> None:
    monkeypatch.setenv("FAULTY", "raise")
    monkeypatch.setenv("FAULTY_FLAG", str(tmp_path / "flag"))
    options = {"hidden": (8,), "rollout_steps": 32, "batch_size": 128, "gamma": 0.5}
    session = sessions(algo=algo, actors=0, algo_options=options)
    session._play()
    learner: Any = session.learner
    rollout = learner.rollout
    obs, done = rollout.obs.view(32, 4, 3), rollout.done.view(32, 4)
    assert done[22, 0]
    assert obs[22, 0, :2].tolist() == [4, 2], "the failing step was the third of its episode"
    assert obs[23, 0, :2].tolist() == [0, 0], "the new environment's first"
    assert not rollout.truncated.any()
    learner.compute_targets()
    errors = learner.targets - learner.predictions
    assert errors.view(32, 4)[22, 0] == 0
    assert (errors.view(32, 4)[:22, 0] != 0).all(), "all others teach something"
    assert session.collector.episode_stats.read()["episodes"] == 4 * 6 - 1


@pytest.mark.fault("C1", "C4")
def test_a_constructor_that_fails_is_tried_again(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """While the run goes on: an environment raises, and its first replacement cannot be made."""
    monkeypatch.setenv("FAULTY", "raise")
    monkeypatch.setenv("FAULTY_FLAG", str(tmp_path / "flag"))
    session = dqn_session(sessions, 0)
    monkeypatch.setenv("FAULTY_INITS", str(tmp_path / "inits"))
    monkeypatch.setenv("FAULTY_INIT_FAILS", "1 2")
    session.iterate(60)
    check_memory(session)
    assert len(sessions.reports) == 3
    assert "ConnectionError: the emulator is not there" in sessions.reports[1]
    assert "3 of 20" in sessions.reports[2]


@pytest.mark.fault("C1", "C4", "C5")
@WHERE
def test_one_that_always_raises_ends_the_run(sessions: Sessions, monkeypatch: pytest.MonkeyPatch, actors: int) -> None:
    monkeypatch.setenv("FAULTY", "raise")
    session = dqn_session(sessions, actors, env_options={"restarts": 2})
    with pytest.raises(EnvsLost, match=r"failed 3 times, 2 are allowed \(--env.restarts\)") as lost:
        session.iterate(10_000)
    assert lost.value.exit_code == 70


@pytest.mark.fault("C4")
def test_a_storm_of_failures_ends_the_run(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULTY", "raise")
    session = dqn_session(sessions, 0, env_options={"restarts": 1000})
    with pytest.raises(EnvsLost, match="this environment failed 5 times within 60 seconds"):
        session.iterate(10_000)


# Environments that only fail to be made in actors.


@pytest.mark.fault("C1")
def test_one_that_actors_cannot_make_is_played_here(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULTY", "init")
    monkeypatch.setenv("FAULTY_PARENT", str(os.getpid()))
    session = dqn_session(sessions, 1)
    session.iterate(50)
    check_memory(session)
    assert isinstance(session.collector, SyncCollector)
    (report,) = sessions.reports
    assert report.startswith("Playing in this process: actors cannot start")
    assert "ArithmeticError: the emulator is on fire" in report


@pytest.mark.fault("C1", "C2", "C3")
@pytest.mark.parametrize(
    ("how", "says"), [("init_kill", "was ended by SIGKILL"), ("init_hang", "hung for more than 1.5 seconds")]
)
def test_one_that_ends_or_hangs_actors_from_the_start_is_refused(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch, how: str, says: str
) -> None:
    """Neither tried again, which would take the same end, nor made in this process."""
    if how == "init_hang":
        monkeypatch.setattr("redline.collect.actor_supervisor.START_SECONDS", 0.5)
        monkeypatch.setenv("FAULTY_SLOW", "0")
    monkeypatch.setenv("FAULTY", how)
    monkeypatch.setenv("FAULTY_PARENT", str(os.getpid()))
    session = dqn_session(sessions, 1, env_options={"timeout": 1.0})
    with pytest.raises(UserError, match=f"Actor 1 of 1 .*{says} while it made its environments") as refused:
        session.iterate(1)
    assert not isinstance(refused.value, EnvsLost)


# Values that no learner can use.

INVALID = {
    "nan": r"returned nan as its observation\[2\] in step 3 of an episode",
    "infinite": r"returned inf as its observation\[2\] in step 3 of an episode",
    "nan_reward": "returned the reward nan in step 3 of an episode",
    "huge_reward": r"returned the reward -1e\+30 in step 3 of an episode, where finite numbers up to 1e\+08",
    "shape": r"returned an observation of float32 of shape \(2,\), but its observation_space is float32 of shape \(3,\)",
    "dtype": r"returned an observation of <U\d+ of shape \(3,\), but its observation_space is float32",
    "spaces": r"changed its observation_space from Box\(.*\(3,\).* to Box\(.*\(4,\)|observation of float32 of shape \(4,\)",
}


@pytest.mark.fault("D1", "D2", "C14", "G5")
@pytest.mark.parametrize("how", INVALID)
@WHERE
def test_values_that_no_learner_can_use_stop_the_run(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str, actors: int
) -> None:
    monkeypatch.setenv("FAULTY", how)
    monkeypatch.setenv("FAULTY_FLAG", str(tmp_path / "flag"))
    session = dqn_session(sessions, actors)
    with pytest.raises(EnvsLost, match=INVALID[how]) as lost:
        session.iterate(500)
    text = str(lost.value)
    assert re.search(rf"{ENV} \(environment [0-3]\)", text)
    assert re.search(r"environment \d \(seed \d+\); last actions: [01]", text)
    assert text.endswith("The run stops.")
    assert not sessions.reports, "it is not tried again"
    memory = session.learner.memory
    assert all(torch.isfinite(table).all() for table in memory.states.values())
    assert torch.isfinite(memory.reward).all()


@pytest.mark.fault("D1", "D2")
@pytest.mark.parametrize("how", ["nan", "infinite", "nan_reward", "huge_reward"])
@WHERE
def test_or_they_are_masked(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str, actors: int
) -> None:
    monkeypatch.setenv("FAULTY", how)
    monkeypatch.setenv("FAULTY_FLAG", str(tmp_path / "flag"))
    session = dqn_session(sessions, actors, env_options={"nonfinite": "mask", "bound": 1000.0})
    session.iterate(60)
    if isinstance(session.collector, ActorCollector):
        deadline = time.monotonic() + 20
        while not sessions.reports:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    memory = session.learner.memory
    assert all((table.abs() <= 1000).all() for table in memory.states.values())
    assert (memory.reward.abs() <= 1000).all()
    if how in ("infinite", "huge_reward"):
        largest = memory.states["obs"].max() if how == "infinite" else -memory.reward.min()
        assert largest == 1000
    (report,) = sessions.reports
    assert re.search(r"environment [0-3]\)\. Such values are masked", report)
    assert session.collector.metrics()["masked_values"] > 0
    stats = session.collector.episode_stats.read()
    assert np.isfinite([stats["score"], stats["reward"]]).all()


# Whole runs, by the command line.


@pytest.mark.fault("C1", "C4")
@pytest.mark.parametrize(("how", "says"), [("raise", "on fire"), ("nan", "returned nan")])
def test_a_run_whose_environments_are_lost_stops_with_a_checkpoint_and_70(tmp_path: Path, how: str, says: str) -> None:
    options = ("--actors", "0", "--env.restarts", "0", "--steps", "1M", "--json")
    out, err = (process := command(tmp_path, *options, FAULTY=how, FAULTY_AT="200")).communicate(timeout=240)
    assert process.returncode == 70, err
    assert says in err
    assert "last actions: " in err
    result = json.loads(out.splitlines()[-1])
    assert result["stopped_by"] == "envs"
    assert result["env_steps"] == 4 * 192, "all whole rollouts before"
    assert list((tmp_path / "checkpoints").glob("ckpt-*"))
    assert not (tmp_path / ".env-activity").exists()


def test_one_that_fails_in_the_last_evaluation_costs_the_score_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULTY", "raise")
    monkeypatch.setenv("FAULTY_AT", "70")  # training ends before, evaluation after
    small = {"hidden": (8,), "rollout_steps": 16, "batch_size": 64}
    settings = Settings(
        ENV, "ppo", num_envs=4, actors=0, device="cpu", steps=256, run_dir=str(tmp_path / "r"), eval_episodes=320,
        algo_options=small,
    )  # fmt: skip
    with pytest.raises(EnvsLost, match=r"on fire .* The agent is saved, without a score"):
        train(settings)
    monkeypatch.delenv("FAULTY")
    assert train(settings).result["eval_episodes"] == 320, "the same words repeat it"


@pytest.mark.fault("C2")
@pytest.mark.parametrize(("how", "code"), [("exit", 7), ("kill", -signal.SIGKILL)])
def test_one_that_ended_the_run_is_played_by_actors_from_then_on(tmp_path: Path, how: str, code: int) -> None:
    fault = {"FAULTY": how, "FAULTY_AT": "200"}
    first = command(tmp_path, "--steps", "20k", **fault)
    first.communicate(timeout=240)
    assert first.returncode == code
    second = command(tmp_path, "--steps", "2000", FAULTY_FLAG=str(tmp_path / "flag"), **fault)
    _, err = second.communicate(timeout=240)
    assert second.returncode == 0, err
    assert re.search(
        r"Playing in \d actors?: the process that trained this run before ended or hung while environment", err
    )
    assert "Restarted (1 of 20)" in err
    if how == "kill":
        return
    third = command(tmp_path, "--steps", "3000", "--actors", "0", "--json")
    out, err = third.communicate(timeout=240)
    assert third.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["settings"]["actors"] == 0
    assert not (tmp_path / ".env-activity").exists(), "an orderly end clears it"


@pytest.mark.fault("C3")
@pytest.mark.parametrize("how", ["hang", "hang_reset"])
def test_one_that_hangs_ends_the_run_with_a_diagnosis(tmp_path: Path, how: str) -> None:
    options = ("--actors", "0", "--env.timeout", "1.5", "--steps", "1M", "--checkpoint-minutes", "0.001")
    process = command(tmp_path, *options, FAULTY=how, FAULTY_AT="2000")
    _, err = process.communicate(timeout=240)
    assert process.returncode == 70, err
    assert f"{ENV} hung for more than 1.5 seconds (--env.timeout 1.5): environment 0 (seed " in err
    assert "last actions: " in err
    assert "time.sleep(1e6)" in err, "the line where it hangs"
    if how == "hang":
        newest = max(path.name for path in (tmp_path / "checkpoints").glob("ckpt-*"))
        assert f"{newest}: the same command continues from it." in err
    else:
        assert "Nothing was saved yet" in err
        return
    again = command(tmp_path, "--env.timeout", "60", "--steps", "12k")
    _, err = again.communicate(timeout=240)
    assert again.returncode == 0, err
    assert "ended or hung while environment 0 was stepped" in err


@pytest.mark.fault("C3", "B1")
def test_a_signal_ends_a_run_whose_environment_hangs(tmp_path: Path) -> None:
    options = (
        "--actors",
        "0",
        "--env.timeout",
        "1000",
        "--steps",
        "1M",
        "--checkpoint-minutes",
        "0.001",
        "--grace",
        "1",
    )
    process = command(tmp_path, *options, FAULTY="hang", FAULTY_AT="2000")
    activity, deadline, seen = tmp_path / ".env-activity", time.monotonic() + 60, b""
    while True:  # until it hangs: the same odd count for a while
        now = activity.read_bytes() if activity.exists() else b""
        if now and now == seen and now[8] % 2:
            break
        assert time.monotonic() < deadline
        seen = now
        time.sleep(1.5)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert "SIGTERM was received 1 seconds ago" in err
    assert "the same command continues from it" in err
