"""ParallelEnvs: plays what one process plays, whatever the number of processes, and reports failures."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
import torch

from redline.collect.child_process import CannotStart
from redline.collect.parallel_envs import ParallelEnvs
from redline.core.errors import EnvsLost, UserError
from redline.envs import Rules, make_rules
from redline.envs.gym_envs import GymEnvs
from redline.envs.gym_game import GymGame
from redline.run import evaluate, evaluate_cpu_envs

CPU = torch.device("cpu")
HERE = str(Path(__file__).parent)
ENV = "gym:faulty:Faulty-v0"


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)
    for name in ("FAULTY", "FAULTY_FLAG", "FAULTY_AT", "FAULTY_SLOW"):
        monkeypatch.delenv(name, raising=False)


def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every environment is taken to be worth a process."""
    monkeypatch.setattr(GymGame, "step_seconds", lambda *_: 1.0)


def leaning(obs: torch.Tensor, legal: Any) -> torch.Tensor:
    assert legal is None
    return (obs[:, 2] > 0).to(torch.int64)


def children() -> list[int]:
    """Processes of environments that still run; a zombie has ended and only waits to be reaped."""
    running = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if "redline.collect.parallel_envs" in " ".join(process.cmdline()):
                running.append(process.pid)
    return running


def step_all(envs: Any, count: int, active: Any = None) -> None:
    envs.step(np.zeros(count, np.int64), np.ones(count, bool) if active is None else active)


@pytest.mark.parametrize("max_steps", [0, 640])
def test_it_does_not_matter_how_many_play(monkeypatch: pytest.MonkeyPatch, max_steps: int) -> None:
    rules = make_rules("gym:CartPole-v1", {"sticky": 0.25}, 120)
    alone = evaluate.evaluate(rules, leaning, 20, CPU, seed=3, max_steps=max_steps)
    slow(monkeypatch)
    made: list[int] = []

    class Counted(ParallelEnvs):
        def __init__(self, rules: Rules, count: int, time_limit: int, processes: int) -> None:
            made.append(processes)
            super().__init__(rules, count, time_limit, processes=3)  # shares of 5, 5 and 6 environments

    monkeypatch.setattr(evaluate_cpu_envs, "ParallelEnvs", Counted)
    monkeypatch.setattr(evaluate.hardware, "detect", lambda _: type("Machine", (), {"cores": 4}))
    together = evaluate.evaluate(rules, leaning, 20, CPU, seed=3, max_steps=max_steps)
    assert made == [4]
    assert alone.summary() == together.summary()
    assert alone.scores.tolist() == together.scores.tolist()
    assert len(set(alone.scores.tolist())) > 3
    assert not children()


def test_environments_that_are_not_active_wait() -> None:
    rules = make_rules(ENV, {})
    one = GymEnvs(rules.game, rules.config, 3)
    many = ParallelEnvs(rules, 3, 0, 2)
    try:
        for envs in (one, many):
            envs.reset(7)
            step_all(envs, 3, np.array([True, False, True]))
        assert many.obs.tolist() == one.obs.tolist()
        assert many.obs[:, 1].tolist() == [1, 0, 1]
        assert many.length.tolist() == [1, 0, 1]
    finally:
        many.close()
    many.close()
    assert not children()


FAILURES = {
    "raise": (UserError, "ArithmeticError: the emulator is on fire"),
    "exit": (EnvsLost, r"environments 0 to 1, ended with exit status 7"),
    "kill": (EnvsLost, r"environments 0 to 1, was ended by SIGKILL"),
    "nan": (UserError, r"returned nan as its observation\[2\] in step 2 of an episode"),
    "hang": (EnvsLost, r"hung for more than 0\.5 seconds \(--env\.timeout\)"),
    "helper": (EnvsLost, r"environments 0 to 1, was ended by SIGKILL"),
}


@pytest.mark.fault("C1", "C2")
@pytest.mark.parametrize("how", FAILURES)
def test_a_failure_is_reported(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setenv("FAULTY", how)
    monkeypatch.setenv("FAULTY_AT", "2")
    rules = make_rules(ENV, {"timeout": 0.5} if how == "hang" else {})
    processes = 2 if how == "helper" else 1  # a second one must not keep the first one's pipe open either
    envs = ParallelEnvs(rules, 2 * processes, 0, processes)
    kind, says = FAILURES[how]
    try:
        envs.reset(0)
        step_all(envs, 2 * processes)
        with pytest.raises(kind, match=says):
            step_all(envs, 2 * processes)
    finally:
        envs.close()
    assert not children()
    with pytest.raises(RuntimeError, match="step of gym:faulty:Faulty-v0 was called after close"):
        step_all(envs, 2 * processes)


@pytest.mark.fault("C12")
def test_environments_are_closed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FAULTY_CLOSED", str(tmp_path / "closed"))
    envs = ParallelEnvs(make_rules(ENV, {}), 2, 0, 1)
    made_here = len((tmp_path / "closed").read_text().splitlines())
    envs.reset(0)
    envs.close()
    assert len((tmp_path / "closed").read_text().splitlines()) == made_here + 2


@pytest.mark.fault("C14")
def test_an_environment_that_differs_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = make_rules(ENV, {})
    rules.game.spec(rules.config)
    monkeypatch.setenv("FAULTY", "differ")
    monkeypatch.setenv("FAULTY_PARENT", str(os.getpid()))
    with pytest.raises(UserError, match="shape"):
        ParallelEnvs(rules, 2, 0, 1)


def test_processes_that_end_at_once_are_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = make_rules(ENV, {})
    rules.game.spec(rules.config)
    descriptors = psutil.Process().num_fds()
    for program in ("/bin/false", "/no/such/program"):
        monkeypatch.setattr("redline.collect.parallel_envs.sys.executable", program)
        with pytest.raises(CannotStart):
            ParallelEnvs(rules, 2, 0, 2)
    assert psutil.Process().num_fds() == descriptors


def test_where_no_process_can_make_it_this_one_plays(monkeypatch: pytest.MonkeyPatch) -> None:
    import faulty

    if "SpreadOnlyHere-v0" not in gymnasium.registry:
        gymnasium.register("SpreadOnlyHere-v0", faulty.Faulty)  # no other process knows it
    rules = make_rules("gym:SpreadOnlyHere-v0", {})
    slow(monkeypatch)
    monkeypatch.setattr(evaluate.hardware, "detect", lambda _: type("Machine", (), {"cores": 2}))
    said: list[str] = []
    found = evaluate.evaluate(rules, leaning, 4, CPU, notify=said.append)
    assert len(found.scores) == 4
    assert len(said) == 1
    assert "in this process alone" in said[0]
    assert not children()


def test_fast_environments_are_played_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate_cpu_envs, "ParallelEnvs", pytest.fail)
    evaluate.evaluate(make_rules("gym:CartPole-v1"), leaning, 4, CPU)


@pytest.mark.fault("C6")
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process that is stuck outlives its parent")
def test_processes_die_with_their_parent() -> None:
    script = f"""
import sys, time; sys.path.insert(0, {HERE!r})
import numpy as np
from redline.collect.parallel_envs import ParallelEnvs
from redline.envs import make_rules
envs = ParallelEnvs(make_rules({ENV!r}, {{}}), 2, 0, 2)
envs.reset(0)
print(*(m.process.pid for m in envs.processes), flush=True)
for _ in range(2):
    envs.step(np.zeros(2, np.int64), np.ones(2, bool))
"""
    stuck = os.environ | {"FAULTY": "hang", "FAULTY_AT": "2"}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=stuck) as parent:
        assert parent.stdout
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        time.sleep(0.3)
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(psutil.pid_exists(pid) for pid in pids)
