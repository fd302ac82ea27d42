"""Memory without a name, weights that are never torn, and what a parent knows of an actor."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redline.collect import shared_weights
from redline.collect.actor_status import ACTIONS, ActorState, ActorStatus
from redline.collect.shared_memory import LINE, Memory, SharedLayout, fence
from redline.collect.shared_weights import SharedWeights
from redline.core.errors import UserError

SECONDS = min(float(os.environ.get("REDLINE_STRESS_SECONDS", "2")), 60)
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.fixture(params=["memory", "file"])
def _kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on systems that have files in memory without a name, and as on others."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if request.param == "file":
        monkeypatch.delattr(os, "memfd_create", raising=False)
    elif not hasattr(os, "memfd_create"):
        pytest.skip("needs memfd_create")


@pytest.mark.fault("C10")
@pytest.mark.usefixtures("_kind")
def test_memory_has_no_name_and_goes(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    memory = Memory.create(10_000)
    assert os.fstat(memory.fd).st_nlink == 0
    assert list(tmp_path.iterdir()) == []
    view = memory.array(96, (4, 2), np.float32)
    assert not view.any()
    view[:] = 7
    assert (memory.array(96, (8,), np.float32) == 7).all()
    with pytest.raises((TypeError, ValueError)):
        memory.array(9_996, (2,), np.float32)
    fd = memory.fd
    memory.close()
    memory.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    with pytest.raises(ValueError, match="closed"):
        memory.array(0, (1,), np.uint8)
    assert (view == 7).all()  # as long as it is looked at
    del view
    if before:
        assert len(os.listdir("/proc/self/fd")) == before


def test_memory_forgotten_is_given_back() -> None:
    memory = Memory.create(100)
    fd = memory.fd
    del memory
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


CHILD = """
import json, sys
from redline.collect.shared_memory import SharedLayout, Memory
job = json.loads(sys.argv[1])
memory = Memory.attach(job["fd"], job["size"])
views = SharedLayout.from_json(job["layout"]).views(memory, job["offset"])
views["answer"][...] = views["numbers"].sum()
print(views["answer"].dtype, views["numbers"].shape)
"""


@pytest.mark.usefixtures("_kind")
def test_a_child_attaches_and_leaves_without_a_word(tmp_path: Path) -> None:
    """By the descriptor and a description in JSON; it closes nothing, and its views live to the end."""
    layout = SharedLayout({"numbers": ((3, 2), np.int16), "answer": ((), np.float64)})
    memory = Memory.create(LINE + layout.bytes)
    views = layout.views(memory, LINE)
    views["numbers"][:] = 5
    job = {"fd": memory.fd, "size": memory.size, "layout": layout.to_json(), "offset": LINE}
    child = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(job)],
        pass_fds=[memory.fd],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert (child.returncode, child.stderr) == (0, "")
    assert child.stdout == "float64 (3, 2)\n"
    assert views["answer"] == 30
    memory.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fault("C11")
def test_too_little_memory_is_refused_before_any_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=999))
    monkeypatch.setattr(os, "memfd_create", taken.append, raising=False)
    with pytest.raises(UserError, match=r"1,000 bytes of shared memory, of which 999 are free"):
        Memory.create(1000)
    assert not taken


@pytest.mark.fault("C11")
def test_too_small_a_disk_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delattr(os, "memfd_create", raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=999))
        with pytest.raises(UserError, match=rf"1,000 bytes of shared disk in {tmp_path}, of which 999 are free"):
            Memory.create(1000)

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(UserError, match="1,000 bytes"):
        Memory.create(1000)
    assert list(tmp_path.iterdir()) == []


def test_what_is_attached_must_be_large_enough() -> None:
    memory = Memory.create(100)
    with pytest.raises(ValueError, match="holds 100 bytes; expected 101"):
        Memory.attach(os.dup(memory.fd), 101)


kinds = st.tuples(st.lists(st.integers(0, 4), max_size=3), st.sampled_from(["?", "u1", "<i2", "<f4", "<i8", "<f8"]))


@given(st.dictionaries(st.text(max_size=4), kinds, max_size=6))
def test_fields_lie_apart(fields: dict[str, Any]) -> None:
    layout = SharedLayout(fields)
    again = SharedLayout.from_json(json.loads(json.dumps(layout.to_json())))
    assert (again.fields, again.offsets, again.bytes) == (layout.fields, layout.offsets, layout.bytes)
    memory = Memory.create(2 * LINE + layout.bytes)
    views, raw = layout.views(memory, LINE), memory.array(0, (memory.size,), np.uint8)
    for name, view in views.items():
        assert (view.shape, view.dtype) == layout.fields[name]
        assert view.ctypes.data % 64 == 0
        raw[:] = 0
        view[...] = 1
        assert np.count_nonzero(raw) == np.count_nonzero(np.frombuffer(view.tobytes(), np.uint8))
        assert all(not other.any() for key, other in views.items() if key != name)
    assert not raw[:LINE].any()
    assert not raw[-LINE:].any()
    with pytest.raises(ValueError, match="multiple"):
        layout.views(memory, 64)


def test_nobody_waits_in_a_fence() -> None:
    """However many threads are in one, and also where a signal is handled in the middle of one."""
    counted = []

    def often() -> None:
        for _ in range(2000):
            fence()
        counted.append(1)

    threads = [threading.Thread(target=often, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(counted) == 4
    before = signal.signal(signal.SIGALRM, lambda *_: fence())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        often()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def weights(size: int, buffers: int = 2) -> tuple[Memory, SharedWeights]:
    memory = Memory.create(SharedWeights.layout(size, buffers).bytes)
    return memory, SharedWeights(memory, 0, size, buffers, check=True)


def test_weights_and_their_versions() -> None:
    memory, writer = weights(24)
    reader = SharedWeights(memory, 0, 24)
    into = np.zeros((3, 2), np.float32)
    assert reader.fetch(into) is None
    assert reader.version == -1
    for version in (0, 1, 5, 6):
        array = np.full((2, 3), version, np.float32)
        writer.publish(array, version)
        assert reader.fetch(into, version) is None
        assert reader.fetch(into, version - 1) == version == reader.version
        assert (into == version).all()
        assert reader.checksum == writer.checksum == zlib.crc32(array.tobytes())
    for version in (6, 5, -1):
        with pytest.raises(ValueError, match="expected more than 6"):
            writer.publish(into, version)
    with pytest.raises(ValueError, match="28 bytes; expected 24"):
        writer.publish(np.zeros(7, np.float32), 7)
    with pytest.raises(ValueError, match="contiguous"):
        reader.fetch(np.zeros((2, 6), np.float32)[:, ::2], 0)
    assert reader.fetch(into) == 6


def test_weights_that_were_changed_are_found() -> None:
    _, writer = weights(8)
    writer.publish(np.arange(8, dtype=np.uint8), 1)
    writer._data[:, 3] += 1
    with pytest.raises(RuntimeError, match="torn weights"):
        writer.fetch(np.zeros(8, np.uint8))


@pytest.mark.fault("C9")
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=6), st.integers(2, 3))
def test_fetching_while_weights_are_published(meddling: list[tuple[int, bool]], buffers: int) -> None:
    """Before and after copying so many versions, and another in part. What was overwritten is copied again."""
    memory, writer = weights(8, buffers)
    reader, plan = SharedWeights(memory, 0, 8, buffers, check=True), iter(meddling)
    writer.publish(np.full(8, 1, np.uint8), 1)
    happening = False

    def publish() -> None:
        writer.publish(np.full(8, writer.version + 1, np.uint8), writer.version + 1)

    def happen() -> None:
        nonlocal happening
        if happening:  # the fences of what happens
            return
        happening = True
        count, in_part = next(plan, (0, False))
        for _ in range(count):
            publish()
        if in_part:
            with mock.patch.object(zlib, "crc32", side_effect=InterruptedError), pytest.raises(InterruptedError):
                publish()
        happening = False

    into = np.zeros(8, np.uint8)
    with mock.patch.object(shared_weights, "fence", happen):
        version = reader.fetch(into)
    expected, retries, plan = 1, -1, iter(meddling)
    newest, begun = 1, buffers
    while begun >= buffers:
        expected, retries = newest, retries + 1
        (before, in_part), (after, in_part_after) = next(plan, (0, False)), next(plan, (0, False))
        newest += before + after
        begun = max(before + in_part, before + after + in_part_after)
    assert (version, reader.retries) == (expected, retries)
    assert (into == expected).all()


@pytest.fixture
def forked() -> Iterator[Callable[[Callable[[], None]], int]]:
    """Other processes, which do not outlive the test."""
    pids = []

    def start(work: Callable[[], None]) -> int:
        pid = os.fork()
        if not pid:
            try:
                work()
            finally:
                os._exit(1)
        pids.append(pid)
        return pid

    yield start
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.fault("C9")
@forks
@pytest.mark.timeout(SECONDS + 60)
def test_weights_race(forked: Callable[[Callable[[], None]], int]) -> None:
    """Whatever is fetched is one of the versions published, whole, and none older than the one before."""
    memory, reader = weights(4 * 50_000)

    def work() -> None:
        writer = SharedWeights(Memory.attach(os.dup(memory.fd), memory.size), 0, reader.size)
        array = np.zeros(50_000, np.float32)
        while True:
            array[:] = writer.version + 1
            writer.publish(array, writer.version + 1)

    forked(work)
    into = np.zeros(50_000, np.float32)
    last, fetched, until = -1, 0, time.monotonic() + SECONDS
    while time.monotonic() < until:
        version = reader.fetch(into, last)
        if version is None:
            os.sched_yield()
            continue
        assert version > last
        assert (into == version).all()
        assert zlib.crc32(into.data) == reader.checksum
        last, fetched = version, fetched + 1
    print(f"{last:,} versions, {fetched:,} fetched, {reader.retries:,} times overtaken")
    assert fetched > 20


@pytest.mark.fault("C9")
@forks
def test_who_publishes_is_killed(forked: Callable[[Callable[[], None]], int]) -> None:
    """In the middle of it: the version before stays, and another goes on."""
    memory, reader = weights(16)
    reader.publish(np.full(16, 3, np.uint8), 3)

    def work() -> None:
        writer = SharedWeights(memory, 0, 16)
        with mock.patch.object(zlib, "crc32", side_effect=lambda _: time.sleep(60)):
            writer.publish(np.full(16, 4, np.uint8), 4)

    pid = forked(work)
    while not (reader._data == 4).any():
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    into = np.zeros(16, np.uint8)
    assert reader.fetch(into) == 3
    assert (into == 3).all()
    reader.publish(np.full(16, 4, np.uint8), 4)
    assert reader.fetch(into, 3) == 4
    assert (into == 4).all()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The time, which a test sets."""
    now = [1_000]
    monkeypatch.setattr(time, "monotonic_ns", lambda: now[0])
    return now


def test_status_tells_what_an_actor_does_and_for_how_long(clock: list[int]) -> None:
    memory = Memory.create(ActorStatus.layout(4).bytes)
    actor, parent = ActorStatus(memory, 0, 4), ActorStatus(memory, 0, 4)
    actor.begin()
    assert (parent.pid, parent.state, parent.since_ns) == (os.getpid(), ActorState.STARTING, 1_000)
    timed = [
        (5_000, ActorState.STEPPING, 5_000, 0, 0),  # starting was neither
        (5_300, ActorState.STEPPING, 5_300, 300, 0),
        (5_310, ActorState.NEEDS_ACTIONS, 5_310, 310, 0),
        (5_390, ActorState.NEEDS_ACTIONS, 5_310, 310, 0),  # it still waits
        (5_410, ActorState.NEEDS_ROOM, 5_410, 310, 100),
        (5_500, ActorState.STEPPING, 5_500, 310, 190),
    ]
    for now, state, since, busy, wait in timed:
        clock[0] = now
        actor.enter(state)
        assert (parent.state, parent.since_ns, parent.busy_ns, parent.wait_ns) == (state, since, busy, wait)
    actor.steps += 8
    actor.steps += 8
    actor.episodes, actor.version, actor.env_index = 2, 7, 3
    assert (parent.steps, parent.episodes, parent.version, parent.env_index) == (16, 2, 7, 3)
    actor.begin()
    assert (parent.state, parent.steps, parent.busy_ns) == (ActorState.STARTING, 16, 310)


@given(st.lists(st.booleans(), max_size=90))
def test_status_remembers_the_last_actions_of_each_environment(turns: list[bool]) -> None:
    """Of two groups of environments that take turns."""
    memory = Memory.create(ActorStatus.layout(5).bytes)
    actor, parent = ActorStatus(memory, 0, 5), ActorStatus(memory, 0, 5)
    taken: list[list[int]] = [[] for _ in range(5)]
    for policy_input, second in enumerate(turns):
        num_envs = range(2, 5) if second else range(2)
        actions = [10 * policy_input + env_index for env_index in num_envs]
        actor.record_actions(np.array(actions), num_envs.start)
        for env_index, action in zip(num_envs, actions, strict=True):
            taken[env_index].append(action)
    assert [parent.last_actions(env_index) for env_index in range(5)] == [actions[-ACTIONS:] for actions in taken]
    actor.begin()
    assert parent.last_actions(4) == []
