"""Actor processes: what they play reaches learners whole and in order, and they are replaced when they fail."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from faulty_runs import ENV, HERE, Sessions, check_memory, command

from redline import algos
from redline.collect.actor_collector import ActorCollector
from redline.collect.actor_supervisor import ActorsLost
from redline.core.errors import UserError
from redline.run.resolve import resolve
from redline.run.session import Session
from redline.run.settings import Settings

TOYS = str(Path(__file__).parents[1] / "envs")
SMALL: dict[str, dict[str, Any]] = {
    "dqn": {"hidden": (32,), "learning_starts": 64, "batch_size": 32, "replay_capacity": 4000, "epsilon_steps": 500},
    "ppo": {"hidden": (32,), "rollout_steps": 16, "batch_size": 64, "learning_rate": 1e-2},
    "pqn": {
        "hidden": (32,),
        "rollout_steps": 16,
        "batch_size": 64,
        "learning_rate": 3e-3,
        "q_lambda": 0.3,
        "gamma": 0.5,
    },
}
REMEMBERS = {"learning_starts": 10**6, "n_step": 2, "gamma": 0.5}  # and does not learn
BOTH = pytest.mark.parametrize("inference", ["actors", "central"])


TOP = (
    "inference",
    "drop_oldest",
    "publish",
    "env_options",
    "backplay",
    "num_envs",
)  # settings, no options of algorithms
pytestmark = pytest.mark.usefixtures("faulty")


@pytest.fixture(autouse=True)
def _toys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TOYS)


class Collecting:
    """Makes sessions with actors; named arguments are settings or options of the algorithm."""

    def __init__(self, sessions: Sessions) -> None:
        self.sessions, self.messages = sessions, sessions.messages

    def __call__(self, env: str = ENV, algo: str = "dqn", actors: int = 1, **more: Any) -> Session:
        settings = {name: more.pop(name) for name in TOP if name in more}
        return self.sessions(env, algo, actors=actors, algo_options=SMALL[algo] | more, **settings)


@pytest.fixture
def collecting(sessions: Sessions) -> Collecting:
    return Collecting(sessions)


@BOTH
@pytest.mark.parametrize("num_envs", [1, 5])
def test_what_is_played_arrives(collecting: Collecting, inference: str, num_envs: int) -> None:
    session = collecting(inference=inference, num_envs=num_envs, actors=1 if num_envs == 1 else 2, **REMEMBERS)
    session.iterate(100)
    check_memory(session)
    assert isinstance(session.collector, ActorCollector)
    played = session.collector.episode_stats.read()
    assert played["episodes"] == 20 * num_envs
    assert played["length"] == 5
    measures = session.collector.metrics()
    assert measures["drops"] == 0
    assert {f"queue_{actor}" for actor in range(1, len(session.collector.shared.statuses) + 1)} <= set(measures)
    assert not collecting.messages


@BOTH
def test_a_rollout_is_in_order(collecting: Collecting, inference: str) -> None:
    session = collecting(algo="ppo", inference=inference, num_envs=3, actors=2, rollout_steps=16, batch_size=48)
    session.collector.start(session.progress)
    collector, seen, ingest = session.collector, [], session.collector._ingest

    def look() -> None:
        seen.append((collector.state.obs.tolist(), collector.final_obs.tolist()))
        ingest()

    collector._ingest = look
    for _ in range(3):
        session._play()
        obs, ended = session.learner.rollout.obs.view(16, 3, 3), session.learner.rollout.done.view(16, 3)
        for row in range(15):
            for env_index in range(3):
                now, then = obs[row, env_index].tolist(), obs[row + 1, env_index].tolist()
                over = bool(ended[row, env_index])
                assert over == (now[1] == 4)
                assert then[:2] == ([now[0] + 1, 0] if over else [now[0], now[1] + 1])
        assert torch.isfinite(session.learner.rollout.outputs["logp"]).all()
        assert (session.learner.rollout.outputs["logp"] < 0).all()
        assert (
            session.learner.rollout.reward.tolist() == session.learner.rollout.action.tolist()
        )  # an action earns its number
    assert len(seen) == 48
    for now, then in ((a, b) for obs_of, final in seen for a, b in zip(obs_of, final, strict=True)):
        assert then == [now[0], now[1] + 1, now[2]]  # also where the episode ended


@pytest.mark.parametrize(
    ("algo", "inference"), [(algo, ("actors", "central")[i % 2]) for i, algo in enumerate(algos.names())]
)
def test_every_algorithm_learns(collecting: Collecting, algo: str, inference: str) -> None:
    more = {"n_step": 1} if algo == "dqn" else {}
    session = collecting("gym:toys:ToyMatch-v0", algo, num_envs=8, inference=inference, publish=1, **more)
    best = 0.0
    for _ in range(60):
        session.iterate(20 if algo == "dqn" else 4)
        session.progress = min(session.progress + 0.05, 1.0)
        best = max(best, session.collector.episode_stats.read().get("score", 0.0))
        if best > 6.8:
            break
    assert best > 6.8
    collector = session.collector
    assert isinstance(collector, ActorCollector)
    assert collector.metrics()["policy_lag"] <= collector.capacity + collector.staging.capacity


@BOTH
def test_new_weights_reach_whoever_plays(collecting: Collecting, inference: str) -> None:
    session = collecting(algo="ppo", inference=inference, num_envs=4, rollout_steps=16, batch_size=64)
    session.iterate(1)
    collector = session.collector
    assert isinstance(collector, ActorCollector)
    assert session.learner.rollout.outputs["value"].abs().max() > 0
    with torch.no_grad():
        for weight in session.learner.net.parameters():
            weight.zero_()
        session.learner.net.mean.fill_(3.5)
    collector.on_update(0.0)
    for _ in range(20):
        session._play()
        if (session.learner.rollout.outputs["value"] == 3.5).all():
            break
    assert (session.learner.rollout.outputs["value"] == 3.5).all()
    assert session.learner.rollout.outputs["logp"].tolist() == pytest.approx(
        [-0.6931472] * 64, abs=1e-5
    )  # two actions, equally likely


@pytest.mark.fault("C9")
@BOTH
def test_checksums_hold_where_they_are_asked_for(
    collecting: Collecting, monkeypatch: pytest.MonkeyPatch, inference: str
) -> None:
    """Of every row here, and of weights in the actor."""
    monkeypatch.setenv("REDLINE_CHECK", "1")
    session = collecting(algo="ppo", inference=inference, env_options={"restarts": 0}, rollout_steps=16, batch_size=64)
    session.iterate(8)
    collector = session.collector
    assert isinstance(collector, ActorCollector)
    assert all(ring.spec.check for ring in collector.shared.rings)
    assert not collecting.messages
    if inference == "actors":
        with monkeypatch.context() as patch:
            patch.setattr(zlib, "crc32", lambda *_: 12345)
            collector.on_update(0.0)  # published with a checksum that is not theirs
        with pytest.raises(ActorsLost, match="torn weights"):
            session.iterate(50)


def test_a_continued_run_goes_on_with_its_share(collecting: Collecting) -> None:
    session = collecting(algo="pqn", inference="actors")
    session.plan = dataclasses.replace(session.plan, settings=dataclasses.replace(session.plan.settings, steps=None))
    session.progress = 0.75
    session.collector.start(session.progress)
    assert isinstance(session.collector, ActorCollector)
    assert session.collector.shared.control.progress == 0.75


def test_actors_are_told_to_practise(collecting: Collecting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redline.envs.gym_game.GymGame.CAN_RESTORE", True)
    session = collecting(algo="ppo", backplay=0.999)
    session.iterate(3)
    times = session.learner.rollout.obs.view(16, 4, 3)[:, :, 1]
    assert set(times.flatten().tolist()) == {3, 4}, "an episode has five steps, of which these are practised"
    assert len(session.collector.episode_stats.ended) == 4, "the first of each environment"


@pytest.mark.fault("C9")
def test_versions_only_grow_and_lag_is_bounded(collecting: Collecting) -> None:
    session = collecting(algo="ppo", inference="actors", num_envs=4, rollout_steps=16, batch_size=64)
    seen: list[int] = []
    collector = session.collector
    assert isinstance(collector, ActorCollector)
    step = collector.step

    def note() -> None:
        step()
        seen.append(int(collector.staging.arrays["version"][collector.staging.position - 1][0]))

    collector.step = note  # type: ignore[method-assign]
    session.iterate(12)
    assert seen == sorted(seen)
    assert len(set(seen)) > 3
    most = -(-(collector.capacity + collector.staging.capacity) // 16) + 1
    assert all(row // 16 + 1 - version <= most for row, version in enumerate(seen))


FAILURES = {
    "raise": ("raised an exception", "ArithmeticError: the emulator is on fire"),
    "reset": ("raised an exception", "ArithmeticError: the emulator is on fire"),
    "exit": ("ended with exit status 7", ""),
    "kill": ("was ended by SIGKILL", ""),
    "segfault": ("was ended by SIGSEGV", "string_at"),
    "hang": ("hung for more than 1 seconds", "_fail"),
}


@pytest.mark.fault("C1", "C2", "C3")
@pytest.mark.parametrize(("how", "inference"), [(how, ("actors", "central")[i % 2]) for i, how in enumerate(FAILURES)])
def test_a_failing_actor_is_named_and_replaced(
    collecting: Collecting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str, inference: str
) -> None:
    monkeypatch.setenv("FAULTY", how)
    monkeypatch.setenv("FAULTY_FLAG", str(tmp_path / "flag"))
    actors = 2 if how in ("raise", "reset") else 1  # with another that goes on, and alone
    session = collecting(inference=inference, env_options={"timeout": 1.0}, actors=actors, num_envs=4, **REMEMBERS)
    session.iterate(150)
    check_memory(session, 1000)
    what, said = FAILURES[how]
    reports = collecting.sessions.reports
    assert len(reports) == 1
    text = reports[0]
    assert what in text
    assert said in text
    assert ENV in text
    assert "seed" in text
    assert "last actions: " in text
    assert "1 of 20" in text
    actions = text.split("last actions: ")[1].split(".")[0].split(", ")
    assert 5 <= len(actions) <= 32
    assert set(actions) <= {"0", "1"}
    assert session.collector.metrics()["restarts"] == 1


@pytest.mark.fault("C2")
def test_a_failure_is_seen_within_two_seconds(collecting: Collecting) -> None:
    session = collecting(inference="actors", **REMEMBERS)
    session.iterate(10)
    collector = session.collector
    assert isinstance(collector, ActorCollector)
    victim = collector.shared.statuses[0].pid
    os.kill(victim, signal.SIGKILL)
    busy = os.getloadavg()[0] > (os.cpu_count() or 1)
    began = time.monotonic()
    while not collecting.messages:
        assert time.monotonic() - began < (20 if busy else 2)  # other tests may hold the cores
        time.sleep(0.01)
    assert "SIGKILL" in collecting.messages[0]


@pytest.mark.fault("C4")
def test_actors_that_always_fail_end_the_run(collecting: Collecting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULTY", "exit")
    session = collecting(inference="actors", env_options={"restarts": 1}, **REMEMBERS)
    with pytest.raises(ActorsLost, match=r"failed 2 times, 1 are allowed \(--env.restarts\)"):
        session.iterate(10_000)


@pytest.mark.fault("C4")
def test_a_storm_of_failures_ends_the_run(collecting: Collecting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redline.collect.restart_budget.STORM", 2)
    monkeypatch.setenv("FAULTY", "exit")
    session = collecting(inference="actors", env_options={"restarts": 100}, **REMEMBERS)
    with pytest.raises(ActorsLost, match="2 times within 60 seconds"):
        session.iterate(10_000)


@pytest.mark.fault("C14")
def test_an_environment_that_differs_in_actors_is_refused(
    collecting: Collecting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULTY", "differ")
    monkeypatch.setenv("FAULTY_PARENT", str(os.getpid()))
    session = collecting(inference="actors", **REMEMBERS)
    with pytest.raises(UserError, match=r"Actor 1 of 1 .*shape \[4\] in the actor, \[3\] in the learner"):
        session.iterate(1)


def test_where_actors_cannot_start_all_is_played_in_this_process(collecting: Collecting) -> None:
    import faulty
    import gymnasium

    gymnasium.register("OnlyHere-v0", faulty.Faulty)  # no actor knows it
    try:
        session = collecting("gym:OnlyHere-v0", inference="actors", **REMEMBERS)
        session.iterate(50)
        check_memory(session)
        assert len(collecting.messages) == 1
        assert "Playing in this process: actors cannot start" in collecting.messages[0]
        assert "OnlyHere" in collecting.messages[0]
    finally:
        del gymnasium.registry["OnlyHere-v0"]


@pytest.mark.fault("C7")
def test_a_slow_learner_makes_actors_wait(collecting: Collecting) -> None:
    session = collecting(inference="actors", **REMEMBERS)
    session.iterate(5)
    collector = session.collector
    assert isinstance(collector, ActorCollector)
    ring, deadline = collector.shared.rings[0], time.monotonic() + 20
    while ring.available() < collector.capacity:
        assert time.monotonic() < deadline, "the ring never fills"
        time.sleep(0.01)
    written = ring.written
    time.sleep(0.2)
    assert ring.written == written
    session.iterate(300)
    check_memory(session)
    assert collector.metrics()["drops"] == 0


@pytest.mark.fault("C7")
def test_or_they_overwrite_the_oldest(collecting: Collecting) -> None:
    session = collecting(inference="actors", drop_oldest=True, **REMEMBERS)
    session.iterate(1)
    ring, capacity = session.collector.shared.rings[0], session.collector.capacity
    for _ in range(4):
        session.iterate(40)
        written, deadline = ring.written, time.monotonic() + 20
        while ring.written < written + 2 * capacity:
            assert time.monotonic() < deadline, "the actor waits"
            time.sleep(0.01)
    session.iterate(40)
    check_memory(session, 1000)
    assert session.collector.metrics()["drops"] > 0


@pytest.mark.fault("C8")
def test_a_starved_learner_waits(collecting: Collecting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULTY_SLOW", "0.005")
    monkeypatch.setattr("redline.collect.row_staging._LONG_WAIT_NS", 1e6)  # a millisecond, instead of ten seconds
    session = collecting(inference="actors", **REMEMBERS)
    session.iterate(20)
    session.collector.metrics()
    session.iterate(20)
    assert session.collector.metrics()["learner_wait"] > 0.8
    assert "Waiting for the environments: no actor has delivered a step for ten seconds." in collecting.messages


@pytest.mark.fault("C2")
def test_breaks_are_cut_wherever_they_lie(collecting: Collecting) -> None:
    """After a reader that was overtaken: a gap, and among the rows that follow the first of a new process."""
    session = collecting(drop_oldest=True, inference="actors", num_envs=2, **REMEMBERS)
    collector = session.collector
    assert isinstance(collector, ActorCollector)
    ring, part = collector.shared.rings[0], collector.staging.parts[0]
    for number in range(2 * collector.capacity):
        row = ring.open()
        assert row is not None
        row["score"][:] = row["final_obs"][:] = number
        ring.commit()
        if number == 1:
            collector.staging.move(0, 2, 0)
    assert part["score"][:2, 0].tolist() == [0, 1]
    assert part["final_obs"][:2, 0, 0].tolist() == [0, 1]
    part["truncated"][:] = part["episode_start"][:] = False
    part["final_obs"][:] = -1
    collector.staging.breaks[0].append(ring.written - 2)
    rows = ring.available()
    collector.staging.move(0, rows, 1)
    newest = 2 * collector.capacity - 1
    assert part["score"][1 : rows + 1, 0].tolist() == list(range(newest - rows + 1, newest + 1))
    expected = [0, rows - 2]  # before the gap, and before the new process
    assert np.flatnonzero(part["truncated"][: rows + 1, 0]).tolist() == expected
    assert np.flatnonzero(part["episode_start"][: rows + 1, 0]).tolist() == [row + 1 for row in expected]
    # What was seen last of the old process is known, and of the newest row, which may yet turn out to be one's last.
    known = np.flatnonzero(part["final_obs"][:, 0, 0] >= 0).tolist()
    assert known == [rows - 2, rows]
    assert part["final_obs"][known, 0, 0].tolist() == [newest - 2, newest]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no processor affinity on this system")
def test_cores_are_given_back(collecting: Collecting) -> None:
    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    session = collecting(inference="actors", **REMEMBERS)
    session.iterate(2)
    assert len(os.sched_getaffinity(0)) == max(1, len(before) - 1)
    session.stop_playing()
    assert os.sched_getaffinity(0) == before
    assert torch.get_num_threads() == threads


def script(body: str, **environment: str) -> subprocess.Popen[str]:
    source = f"import sys\nsys.path[:0] = [{HERE!r}]\n" + textwrap.dedent(body)
    return subprocess.Popen(
        [sys.executable, "-c", source],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
        start_new_session=True,
    )


TRAIN = """
    import torch
    from redline.run.resolve import resolve
    from redline.run.settings import Settings
    from redline.run.session import Session
    settings = Settings("gym:faulty:Faulty-v0", "ppo", num_envs=4, actors=2, device="cpu", steps=10**6, inference="actors",
                        algo_options={"hidden": (8,), "rollout_steps": 16, "batch_size": 64})
    session = Session(resolve(settings), print)
    session.iterate(2)
    print(*[status.pid for status in session.collector.shared.statuses], flush=True)
"""


@pytest.mark.fault("C6")
@pytest.mark.parametrize("stuck", [False, True])
def test_actors_die_with_their_parent(stuck: bool) -> None:
    """Also when they are stuck in a step."""
    more = {"FAULTY": "hang", "FAULTY_AT": "90"} if stuck else {}
    process = script(TRAIN + "    session.iterate(10**6)\n", **more)
    assert process.stdout
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 2
    assert all(psutil.pid_exists(pid) for pid in pids)
    if stuck:
        time.sleep(1.0)  # until they are
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 20
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline, "actors outlived their parent"
        time.sleep(0.05)
    process.communicate()


@pytest.mark.fault("C12", "C13")
@pytest.mark.parametrize("end", ["session.close()", "pass"])
def test_a_script_ends_in_silence(end: str) -> None:
    """Closed or not, and without a guard for the main module."""
    process = script(TRAIN + f"    {end}\n")
    out, err = process.communicate(timeout=60)
    pids = [int(pid) for pid in out.split()]
    assert process.returncode == 0
    assert err == ""
    deadline = time.monotonic() + 20
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.fault("C4", "C5")
def test_a_run_whose_actors_are_lost_stops_with_a_checkpoint_and_70(tmp_path: Path) -> None:
    options = ("--actors", "1", "--env.restarts", "0", "--steps", "1M", "--json")
    process = command(tmp_path, *options, FAULTY="kill", FAULTY_AT="200")
    out, err = process.communicate(timeout=240)
    assert process.returncode == 70, err
    assert "was ended by SIGKILL" in err
    assert "Traceback" not in err
    result = json.loads(out.splitlines()[-1])
    assert result["stopped_by"] == "actors"
    assert result["env_steps"] >= 64
    assert list((tmp_path / "checkpoints").glob("ckpt-*"))


@pytest.mark.fault("B3")
def test_an_interrupt_of_all_processes_is_the_trainers(tmp_path: Path) -> None:
    process = command(tmp_path, "--actors", "1", "--minutes", "5")
    metrics = tmp_path / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    record = json.loads(metrics.read_text().splitlines()[-1])
    assert {"queue", "policy_lag", "actor_busy", "learner_wait", "reader_ms", "drops", "restarts"} <= set(record)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Actor" not in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (Settings("snake", actors=2), "actors is 2, but snake is played on the device"),
        (Settings("gym:CartPole-v1", actors=-1), "actors is -1; expected 0 to 16"),
        (Settings("gym:CartPole-v1", actors=9, num_envs=8), "actors is 9; expected 0 to 8"),
        (
            Settings("gym:CartPole-v1", actors=1, deterministic=True),
            "deterministic is on, but play of actors cannot be repeated",
        ),
        (Settings("gym:CartPole-v1", inference="central"), "inference is set, but there are no actors"),
        (Settings("snake", drop_oldest=True), "drop_oldest is set, but there are no actors"),
        (
            Settings("gym:CartPole-v1", inference="both", actors=1),
            "inference is 'both'; expected auto, actors or central",
        ),
        (Settings("gym:CartPole-v1", publish=-1, actors=1), "publish is -1"),
        (Settings("gym:CartPole-v1", env_options={"timeout": "0"}), "env.timeout is 0"),
        (Settings("gym:CartPole-v1", env_options={"restarts": "-1"}), "env.restarts is -1"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: Settings, says: str) -> None:
    with pytest.raises(UserError, match=says.replace("(", r"\(")):
        resolve(settings)


def test_environments_that_are_fast_are_played_in_step() -> None:
    plan = resolve(Settings("gym:CartPole-v1", device="cpu"))
    assert plan.actors == 0
    assert "µs" in plan.reasons["actors"]


def test_slow_ones_are_played_by_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULTY_SLOW", "0.01")
    plan = resolve(Settings(ENV, device="cpu", env_options={"sticky": "0.1"}))
    cores = plan.hardware.cores
    assert plan.actors == (min(cores, plan.num_envs) if cores <= 4 else min(cores - 1, plan.num_envs))
    assert plan.inference == ("actors" if plan.actors >= cores else "central")
    assert resolve(Settings(ENV, device="cpu", env_options={"sticky": "0.1"}, deterministic=True)).actors == 0
