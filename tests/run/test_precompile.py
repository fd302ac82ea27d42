"""Learning while another process compiles: eager until it has ended, the same numbers, no harm if it fails or is stopped."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from test_train import newest, tiny, words

from redline.run import plan as plans
from redline.run import precompile
from redline.run import train as loop
from redline.run.device_choice import cache_file, remember
from redline.run.opening import opening_lines
from redline.run.plan import Plan
from redline.run.resolve import resolve
from redline.run.session import Session
from redline.run.signals import StopSignals

PATIENCE = 800.0  # seconds, on a busy machine


class Compiled:
    """As torch.compile, which leaves functions as they are. `calls` are those of compiled functions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        monkeypatch.setattr(torch, "compile", self.compile)

    def compile(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        del options

        def call(*arguments: Any) -> Any:
            self.calls.append(function.__name__)
            return function(*arguments)

        return call


class Stuck:
    """As Precompilation, finished when it is told so."""

    made: list[Stuck]

    def __init__(
        self, plan: Plan, notify: Callable[[str], None], report: Callable[[str], None], skip: tuple[str, ...] = ()
    ) -> None:
        del notify
        self.skip = skip
        self.plan, self.finished, self.closed = plan, False, False
        report("step, function 1 of 3")
        self.made.append(self)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> list[Stuck]:
    Stuck.made = []
    monkeypatch.setattr("redline.run.session.Precompilation", Stuck)
    return Stuck.made


def same(ours: Session, theirs: Session) -> bool:
    return all(
        torch.equal(x, ours.tensors()[group][name])
        for group, tensors in theirs.tensors().items()
        for name, x in tensors.items()
    )


def test_a_session_learns_while_it_is_compiled_and_then_switches(
    tmp_path: Path, stuck: list[Stuck], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in for compiled code is the same function: every iteration must be done exactly once."""
    compiled, reports = Compiled(monkeypatch), []
    session = Session(resolve(tiny(tmp_path, compile=True)), pytest.fail, reports.append, may_overlap=True)
    session.iterate(20)
    assert session.updates > 10, "it waits for the compiler"
    assert session.compiling
    assert compiled.calls == []
    assert reports == ["step, function 1 of 3"]
    theirs, resumed = (Session(resolve(tiny(tmp_path)), pytest.fail) for _ in range(2))
    resumed.load({g: {n: x.clone() for n, x in t.items()} for g, t in session.tensors().items()}, session.counters())
    stuck[0].finished = True
    session.iterate(1)
    assert stuck[0].closed
    assert session.compiling, "nothing compiled has run yet"
    session.iterate(3)
    assert not session.compiling
    assert set(compiled.calls) == {"step", "loss", "apply"}
    assert reports[1:] == [f"{name}, function {i} of at most 5" for i, name in enumerate(("step", "loss", "apply"), 1)]
    for other in (theirs, resumed):
        other.iterate(session.iterations - other.iterations)
        assert same(session, other)
    session.close()


@pytest.mark.fault("D7")
def test_a_compiler_that_fails_is_told_by_the_run_itself(
    tmp_path: Path, stuck: list[Stuck], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        del function, options
        raise RuntimeError("no working compiler\nand a page more")

    monkeypatch.setattr(torch, "compile", broken)
    notes: list[str] = []
    session = Session(resolve(tiny(tmp_path, compile=True)), notes.append, may_overlap=True)
    stuck[0].finished = True
    session.iterate(20)
    assert not session.compiling
    assert notes == ["Running without compilation: torch.compile failed (RuntimeError: no working compiler)."]
    theirs = Session(resolve(tiny(tmp_path)), pytest.fail)
    theirs.iterate(20)
    assert same(session, theirs)


def test_time_counts_from_the_first_compiled_update(
    tmp_path: Path, stuck: list[Stuck], monkeypatch: pytest.MonkeyPatch
) -> None:
    Compiled(monkeypatch)
    iterate, eager = Session.iterate, []

    def watched(self: Session, count: int, *rest: Any) -> None:
        iterate(self, count, *rest)
        stuck[0].finished = self.updates > 20
        if self.compiling:
            eager.append(self.updates)

    monkeypatch.setattr(Session, "iterate", watched)
    result = loop.train(tiny(tmp_path, compile=True, minutes=0.005, eval_episodes=0)).result
    assert eager[-1] > 0, "nothing was learned before"
    assert result["updates"] > eager[-1]
    training = result["seconds"] - result["preparation_seconds"]
    assert training >= 0.3, "the time before counts"
    stages = result["start_seconds"]
    assert {"Building games and networks", "Preparing the first update", "Compiling", "Compiling step"} <= stages.keys()
    assert result["preparation_seconds"] >= stages["Compiling"]
    assert newest(tmp_path).state["session"]["updates"] == result["updates"]


@pytest.mark.fault("D7")
def test_a_signal_meanwhile_saves_what_was_learned(
    tmp_path: Path, stuck: list[Stuck], monkeypatch: pytest.MonkeyPatch
) -> None:
    iterate = Session.iterate
    with StopSignals(lambda _: None) as signals:

        def watched(self: Session, *rest: Any) -> None:
            iterate(self, *rest)
            if self.updates:
                signals.caught = "SIGTERM"

        monkeypatch.setattr(Session, "iterate", watched)
        settings = tiny(tmp_path, compile=True, minutes=5.0, eval_episodes=0)
        result = loop.train(settings, signals=signals).result
    assert (result["stopped_by"], result["start_seconds"]) == ("SIGTERM", {})
    assert newest(tmp_path).state["session"]["updates"] == result["updates"] > 0
    assert stuck[0].closed
    monkeypatch.setattr(Session, "iterate", iterate)
    again = loop.train(tiny(tmp_path, steps=result["env_steps"] + 64, eval_episodes=0)).result
    assert again["updates"] > result["updates"]


def test_runs_that_must_repeat_are_compiled_before_they_learn(tmp_path: Path, stuck: list[Stuck]) -> None:
    plan = resolve(tiny(tmp_path, compile=True))
    assert plan.starts_uncompiled
    for changes in ({"steps": 1000}, {"deterministic": True}, {"compile": False}, {"replay": "pinned"}):
        other = resolve(tiny(tmp_path, **{"compile": True} | changes))
        assert not other.starts_uncompiled, changes
        assert not Session(other, pytest.fail, may_overlap=True).compiling, changes
    assert not Session(plan, pytest.fail).compiling, (
        "only training begins so; a benchmark would measure the wrong thing"
    )
    assert stuck == []


SHARED = """
import json, sys
from redline.run.opening import opening_lines
from redline.run.plan import Plan
from redline.run.resolve import resolve
from redline.run.session import Session
from redline.run.settings import Settings

def fail(message):
    raise SystemExit(message)

Plan.shares_compilation = True
options = {"num_envs": 8, "batch_size": 8, "replay_capacity": 80, "device": "cpu", "steps": 1000, "run_dir": sys.argv[1]}
algo = {"hidden": (8,), "learning_starts": 16}
plan = resolve(Settings("toy_game", "dqn", compile=True, algo_options=algo, **options))
session = Session(plan, fail, may_overlap=True)
first = session._precompilation
while not session.updates:
    session.iterate(1)
while not first.finished:
    pass
session.close()
second = Session(plan, fail, may_overlap=True)  # remembered: no other process
from torch._dynamo.utils import counters
found = {name: counters["aot_autograd"][f"autograd_cache_{name}"] for name in ("hit", "miss", "bypass")}
print(json.dumps(found | {"begun": first._begun, "again": second._precompilation._process is not None}))
second.close()
"""


@pytest.mark.timeout(900)
def test_the_other_process_compiles_what_this_one_then_finds(tmp_path: Path) -> None:
    """With the real compiler, as on a GPU: each process compiles a part; what the other compiles comes from the disk."""
    folders = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SHARED, str(tmp_path / "run")],
        env=os.environ | folders | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == {"hit": 2, "miss": 1, "bypass": 0, "begun": ["loss", "apply"], "again": False}


def test_a_plan_on_a_gpu_is_compiled_by_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_CORES_TO_SHARE", 1)
    plan = dataclasses.replace(resolve(tiny(tmp_path, compile=True, steps=1000)), device=torch.device("cuda", 0))
    assert plan.shares_compilation
    tuned = dataclasses.replace(plan.settings, compile_mode="max-autotune")
    repeated = dataclasses.replace(plan.settings, deterministic=True)
    for other in ({"compile": False}, {"settings": tuned}, {"settings": repeated}, {"device": torch.device("cpu")}):
        assert not dataclasses.replace(plan, **other).shares_compilation, other
    assert not plan.starts_uncompiled, "a run of so many steps must repeat"
    timed = dataclasses.replace(plan, settings=dataclasses.replace(plan.settings, steps=None))
    assert timed.starts_uncompiled
    assert "One update comes before." in opening_lines(timed)[-1]
    monkeypatch.setattr(plans, "_CORES_TO_SHARE", 10_000)
    assert not plan.shares_compilation
    assert not timed.starts_uncompiled


def test_a_session_for_a_gpu_learns_once_and_then_compiles_with_another_process(
    tmp_path: Path, stuck: list[Stuck], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step of the games is compiled here, at once: it takes longer than what learns, and nothing waits for the other."""
    compiled = Compiled(monkeypatch)
    monkeypatch.setattr(Plan, "shares_compilation", True)
    monkeypatch.setattr(Stuck, "wait_for", lambda self, name: self.asked.append(name), raising=False)
    monkeypatch.setattr(Stuck, "asked", [], raising=False)
    session = Session(resolve(tiny(tmp_path, compile=True)), pytest.fail, may_overlap=True)
    [learns] = stuck
    assert learns.skip == ("step",)
    while not session.updates:
        session.iterate(1)
    assert session.compiling
    assert compiled.calls == []
    session.iterate(1)
    assert not session.compiling
    assert set(compiled.calls) == {"step", "loss", "apply"}
    assert learns.asked == ["step", "loss", "apply"]
    assert not learns.closed
    learns.finished = True
    session.iterate(1)
    assert learns.closed
    session.close()


def test_a_run_waits_for_what_the_other_process_compiles_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompile, "_WAIT", 0.1)
    slept: list[float] = []
    monkeypatch.setattr(
        precompile.time, "sleep", lambda seconds: (slept.append(seconds), threading.Event().wait(seconds))
    )
    precompilation = object.__new__(precompile.Precompilation)
    precompilation._notify, precompilation._skip, precompilation._begun = pytest.fail, ("step",), ["loss", "apply"]
    precompilation._process, precompilation._ends = subprocess.Popen(["sleep", "60"], start_new_session=True), math.inf
    try:
        for function in ("step", "loss"):  # skipped; compiled
            precompilation.wait_for(function)
        assert not slept
        precompilation.wait_for("shuffle")  # not begun in time
        assert slept
        precompilation._ends = time.monotonic() + 0.2
        precompilation.wait_for("apply")  # at work, until patience ends
        assert precompilation.finished
    finally:
        precompilation.close()


@pytest.fixture
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """A plan that was never compiled."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return resolve(tiny(tmp_path / "run", compile=True))


@pytest.mark.fault("D7")
def test_a_process_that_is_killed_is_told_once(cold: Plan) -> None:
    notes: list[str] = []
    precompilation = precompile.Precompilation(cold, notes.append, pytest.fail)
    assert not precompilation.finished
    process = precompilation._process
    assert process
    process.kill()
    wait_for(precompilation)
    precompilation.close()
    precompilation.close()
    assert notes == ["The process that compiles was ended by SIGKILL; functions are compiled in this one."]


@pytest.mark.fault("D7")
def test_the_other_process_ends_with_this_one(cold: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    precompilation = precompile.Precompilation(cold, pytest.fail, pytest.fail)
    process = precompilation._process
    assert process
    monkeypatch.setattr(precompilation, "_ends", 0.0)
    assert precompilation.finished, "a compiler that hangs would keep the run uncompiled for ever"
    precompilation.close()
    assert process.poll() is not None
    assert precompilation.finished


@pytest.mark.fault("D7")
def test_the_other_process_ends_when_the_run_is_killed(tmp_path: Path) -> None:
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "XDG_CACHE_HOME": str(tmp_path)}
    settings = tiny(tmp_path / "run", compile=True, minutes=5.0, eval_episodes=0)
    command = [sys.executable, "-m", "redline", *words(settings)]
    with subprocess.Popen(command, env=os.environ | caches, stderr=subprocess.DEVNULL) as run:
        ends = time.monotonic() + PATIENCE
        while not (tmp_path / "run" / "metrics.jsonl").exists():
            assert run.poll() is None
            assert time.monotonic() < ends
            time.sleep(0.1)
        others = psutil.Process(run.pid).children()
        assert len(others) == 1, "compiled within a second, or not at all"
        run.kill()
    while (
        others[0].is_running() and others[0].status() != psutil.STATUS_ZOMBIE
    ):  # nobody may wait for it in a container
        assert time.monotonic() < ends
        time.sleep(0.1)


@pytest.mark.fault("D7")
def test_without_a_process_functions_are_compiled_here(cold: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_process(*arguments: Any, **options: Any) -> Any:
        del arguments, options
        raise OSError("Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", no_process)
    notes: list[str] = []
    assert precompile.Precompilation(cold, notes.append, pytest.fail).finished
    assert notes == ["Compiling in this process, as no other could be started: Resource temporarily unavailable."]


def test_a_plan_is_compiled_again_where_anything_changed(
    cold: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = precompile._key(cold)
    assert precompile._key(resolve(dataclasses.replace(cold.settings, seed=1))) == key
    assert precompile._key(resolve(dataclasses.replace(cold.settings, num_envs=32))) != key
    source = tmp_path / "game.py"
    source.write_text("")
    monkeypatch.setattr(sys.modules[cold.rules.game.step.__module__], "__file__", str(source))
    changed = precompile._key(cold)
    os.utime(source, (1, 1))
    assert len({key, changed, precompile._key(cold)}) == 3
    monkeypatch.setattr(subprocess, "Popen", pytest.fail)
    remember(cache_file("compiled"), precompile._key(cold), str(tmp_path))
    assert precompile.Precompilation(cold, pytest.fail, pytest.fail).finished
    remember(cache_file("compiled"), precompile._key(cold), str(tmp_path / "deleted"))
    with pytest.raises(pytest.fail.Exception):
        precompile.Precompilation(cold, pytest.fail, pytest.fail)


def wait_for(precompilation: precompile.Precompilation) -> None:
    ends = time.monotonic() + PATIENCE
    while not precompilation.finished:
        assert time.monotonic() < ends
        time.sleep(0.1)
