"""The fast paths: each is a switch, each falls back to eager, says why once, and the run is still right."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from redline.core import random
from redline.core.errors import UserError
from redline.core.records import Events, Hardware, Spec, map_record
from redline.engine import fast
from redline.envs.batch import Rules
from redline.replay.windows import ending_of
from redline.run.plan import Plan
from redline.run.resolve import resolve
from redline.run.session import Session
from redline.run.settings import Settings

# ---- Compilation


def broken_compile(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """As torch.compile where there is no C++ compiler: fine at first, an error with the first call."""
    del function, options

    def call(*arguments: Any) -> Any:
        del arguments
        raise RuntimeError("no working compiler\nand a page more of this")

    return call


def test_functions_are_handed_back_when_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", pytest.fail)

    def double(x: int) -> int:
        return 2 * x

    assert fast.Compiler(False, pytest.fail)(double) is double


def test_a_compiled_function_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def compile_(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        asked.append(options)
        return lambda *arguments: ("compiled", function(*arguments))

    monkeypatch.setattr(torch, "compile", compile_)
    call = fast.Compiler(True, pytest.fail)(lambda x: x + 1)
    assert [call(1), call(2)] == [("compiled", 2), ("compiled", 3)]
    assert len(asked) == 1
    assert asked[0]["fullgraph"], "a function compiled in parts could fail half way, with some of its writes done"
    assert asked[0]["dynamic"] is False


@pytest.mark.fault("D7")
def test_compilation_that_fails_is_told_once_for_all_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", broken_compile)
    notes: list[str] = []
    compiler = fast.Compiler(True, notes.append)
    calls: list[str] = []

    def named(name: str) -> Callable[[int], int]:
        def function(x: int) -> int:
            calls.append(name)
            return 10 * x

        return compiler(function)

    first, second = named("first"), named("second")
    assert [first(1), second(2), first(3), second(4)] == [10, 20, 30, 40]
    assert named("third")(5) == 50
    assert calls == ["first", "second", "first", "second", "third"], "each call must happen exactly once"
    assert notes == ["Running without compilation: torch.compile failed (RuntimeError: no working compiler)."]


@pytest.mark.fault("D7")
def test_a_torch_that_will_not_compile_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a Python it does not know, torch.compile itself raises."""

    def refuse(*arguments: Any, **options: Any) -> Any:
        del arguments, options
        raise RuntimeError("torch.compile is not supported on Python 3.99+")

    monkeypatch.setattr(torch, "compile", refuse)
    notes: list[str] = []
    compiler = fast.Compiler(True, notes.append)
    first, second = compiler(lambda x: x + 1), compiler(lambda x: x + 2)
    assert (first(1), second(1)) == (2, 3)
    assert len(notes) == 1
    assert "not supported on Python 3.99" in notes[0]


def test_kernels_that_cannot_be_combined_are_compiled_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class InductorError(Exception):
        pass

    def compile_function(function: Any, **settings: Any) -> Any:
        def call(*arguments: Any) -> Any:
            if settings["options"].get("combo_kernels"):
                raise InductorError("Topological sort failed!")
            return function(*arguments)

        return call

    monkeypatch.setattr(torch, "compile", compile_function)
    compiler = fast.Compiler(True, pytest.fail, torch.device("cuda"))
    double = compiler(lambda x: 2 * x)
    assert [double(2), double(3)] == [4, 6]
    assert compiler.enabled


def test_what_was_compiled_before_another_failed_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    working = ["first"]

    def sometimes(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return (lambda: "compiled") if working.pop() == "first" else broken_compile(function, **options)

    monkeypatch.setattr(torch, "compile", sometimes)
    notes: list[str] = []
    compiler = fast.Compiler(True, notes.append)
    first = compiler(lambda: "eager")
    assert first() == "compiled"
    working.append("second")
    second = compiler(lambda: "eager")
    assert [second(), first(), second()] == ["eager", "compiled", "eager"]
    assert len(notes) == 1


def test_an_error_of_the_user_is_no_failed_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)

    def impossible() -> None:
        raise UserError("That cannot be.")

    with pytest.raises(UserError, match="That cannot be"):
        fast.Compiler(True, pytest.fail)(impossible)()


@pytest.mark.fault("D7")
def test_a_session_whose_compilation_fails_trains_as_if_it_was_never_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", broken_compile)
    notes: list[str] = []
    ours, theirs = Session(tiny(compile=True), notes.append), Session(tiny(compile=False), pytest.fail)
    for session in (ours, theirs):
        session.iterate(20)
    assert len(notes) == 1
    assert_same(ours, theirs, exact=True)


# ---- Precision


def machine(device: str, bf16: bool = False) -> Hardware:
    return Hardware(device, "a machine", 2, 8.0, bf16, "g++")


@pytest.mark.parametrize(
    ("wanted", "hardware", "expected"),
    [
        ("auto", machine("cpu"), "fp32"),
        ("auto", machine("mps"), "fp32"),
        ("auto", machine("cuda:0", bf16=True), "bf16"),
        ("auto", machine("cuda:0", bf16=False), "fp16"),
        ("auto", dataclasses.replace(machine("cuda:0"), capability=(7, 5)), "fp16"),
        ("auto", dataclasses.replace(machine("cuda:0"), capability=(6, 1)), "fp32"),  # without tensor cores
        ("fp32", machine("cuda:1", bf16=True), "fp32"),
        ("tf32", machine("cuda:0"), "tf32"),
        ("bf16", machine("cpu"), "bf16"),
        ("fp16", machine("cuda:0"), "fp16"),
    ],
)
def test_precision_by_hardware(wanted: str, hardware: Hardware, expected: str) -> None:
    precision, why = fast.pick_precision(wanted, hardware)
    assert precision == expected
    assert (why == "asked for") == (wanted != "auto")
    assert why


def test_precisions_that_cannot_be() -> None:
    with pytest.raises(UserError, match=r"precision is 'fp8'; expected auto, fp32, tf32, bf16, fp16\."):
        fast.pick_precision("fp8", machine("cpu"))
    with pytest.raises(UserError, match=r"tf32 needs a CUDA device; cpu has none\. Take fp32\."):
        fast.pick_precision("tf32", machine("cpu"))


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", None), ("tf32", None), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_runtime_of_a_precision(precision: str, dtype: torch.dtype | None) -> None:
    compiler = fast.Compiler(False, pytest.fail)
    runtime = fast.runtime(torch.device("cpu"), precision, compiler)
    assert (runtime.device, runtime.amp_dtype, runtime.compile) == (torch.device("cpu"), dtype, compiler)
    if dtype is not torch.float16:
        with runtime.autocast():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == (dtype or torch.float32)


@pytest.fixture
def tf32_flags() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.usefixtures("tf32_flags")
@pytest.mark.parametrize(("precision", "rounds"), [("tf32", True), ("fp32", False), ("bf16", True)])
def test_float32_products_are_rounded_only_where_asked(precision: str, rounds: bool) -> None:
    fast.runtime(torch.device("cuda", 0), precision, fast.Compiler(False, pytest.fail))
    assert torch.backends.cuda.matmul.allow_tf32 == rounds
    assert torch.backends.cudnn.allow_tf32 == rounds


@pytest.mark.fault("D7")
def test_a_session_whose_compiler_fails_trains_as_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend raises while it compiles: nothing is done twice or lost, and the reason is told once."""
    torch.compiler.reset()
    notes: list[str] = []
    real = torch.compile

    def failing_backend(graph: Any, inputs: Any) -> Any:
        del graph, inputs
        raise ValueError("no code for this processor")

    def compile_(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        options.pop("options")
        return real(function, backend=failing_backend, **options)

    monkeypatch.setattr(torch, "compile", compile_)
    plan = dataclasses.replace(tiny(), rules=walk())
    ours = Session(dataclasses.replace(plan, compile=True), notes.append)
    theirs = Session(dataclasses.replace(plan, compile=False), pytest.fail)
    for session in (ours, theirs):
        session.iterate(12)
    assert len(notes) == 1
    assert notes[0].startswith("Running without compilation: torch.compile failed (")
    assert "no code for this processor" in notes[0]
    assert ours.updates > 0
    assert_same(ours, theirs, exact=True)


# ---- CUDA graphs, with a device made up: what runs while it captures is recorded, not done


class Device:
    """As much of torch.cuda as Graph asks for. `done` are the calls whose work was really done."""

    def __init__(self, fails: str = "") -> None:
        self.fails, self.capturing = fails, False
        self.done: list[str] = []
        self.recorded: list[str] = []
        self.main, self.side = (SimpleNamespace(wait_stream=lambda _: None) for _ in range(2))
        self.current = self.main

    def work(self, name: str = "work") -> None:
        if self.capturing and self.fails == "inside":
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        (self.recorded if self.capturing else self.done).append(name)

    @contextlib.contextmanager
    def graph(self, graph: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        assert stream is self.side, "warmed up elsewhere"
        if self.fails == "entering":
            raise RuntimeError("no memory for a graph")
        self.capturing, self.current = True, self.side
        try:
            yield
        finally:
            self.capturing = False
        if self.fails == "leaving":
            raise RuntimeError("capture was invalidated")
        self.current = self.main  # as in torch: not reached by a capture that was broken off
        graph.recorded = list(self.recorded)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Device:
        device = self

        class Captured:
            recorded: tuple[str, ...] = ()

            def replay(self) -> None:
                device.done += self.recorded

        monkeypatch.setattr(torch.cuda, "CUDAGraph", Captured)
        monkeypatch.setattr(torch.cuda, "graph", self.graph)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: self.side)  # noqa: ARG005
        monkeypatch.setattr(torch.cuda, "current_device", lambda: id(self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(self, "current", stream))
        monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        return self


def test_a_graph_switched_off_just_calls() -> None:
    device = Device()
    graph = fast.Graph(device.work, False, pytest.fail)
    assert graph.ready
    for count in range(1, 7):
        graph()
        assert device.done == ["work"] * count
    assert graph.graph is None


@pytest.mark.fault("D8")
def test_a_graph_warms_up_captures_and_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device().install(monkeypatch)
    graph = fast.Graph(device.work, True, pytest.fail)
    for count in range(1, 8):
        assert graph.ready == (count > fast._WARM_UP + 1)
        graph()
        assert device.done == ["work"] * count, f"call {count} must happen exactly once"
    assert device.recorded == ["work"], "captured once; the rest is replays"


@pytest.mark.fault("D7")
@pytest.mark.parametrize(
    ("fails", "why"),
    [
        ("entering", "RuntimeError: no memory for a graph"),
        ("inside", "RuntimeError: operation not permitted when stream is capturing"),
        ("leaving", "RuntimeError: capture was invalidated"),
    ],
)
def test_a_capture_that_fails_falls_back(fails: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(fails).install(monkeypatch)
    notes: list[str] = []
    graph = fast.Graph(device.work, True, notes.append)
    for count in range(1, 8):
        graph()
        assert device.done == ["work"] * count, f"call {count} must happen exactly once"
    assert notes == [f"Running without CUDA graphs: capture failed ({why})."]
    assert graph.ready
    assert device.current is device.main, "what follows would run on the stream of the capture"


def test_a_session_that_cannot_be_captured_trains_as_without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    Device("entering").install(monkeypatch)
    notes: list[str] = []
    ours = Session(dataclasses.replace(tiny(compile=False), graph=True), notes.append)
    theirs = Session(tiny(compile=False), pytest.fail)
    for session in (ours, theirs):
        session.iterate(20)
    assert set(notes) == {"Running without CUDA graphs: capture failed (RuntimeError: no memory for a graph)."}
    assert ours._collect_only.ready
    assert ours._collect_and_learn.ready
    assert_same(ours, theirs, exact=True)


# ---- A whole iteration


def tiny(**options: Any) -> Plan:
    algo: dict[str, Any] = {"hidden": (16, 16), "learning_starts": 32, "epsilon_steps": 400, "dueling": False}
    algo |= {"target_period": 2, "tau": 0.5}
    settings = Settings(
        env="snake",
        num_envs=8,
        batch_size=8,
        replay_capacity=8 * 40,
        n_step=2,
        seed=3,
        device="cpu",
        time_limit=9,
        curriculum=False,
        env_options={"width": 5, "height": 5},
        algo_options=algo,
    )
    return resolve(dataclasses.replace(settings, **options))


def assert_same(ours: Session, theirs: Session, exact: bool) -> None:
    """All integers are equal; floats are too, or nearly."""
    for group, tensors in theirs.tensors().items():
        for name, expected in tensors.items():
            found = ours.tensors()[group][name]
            if exact or not expected.is_floating_point():
                assert torch.equal(found, expected), f"{group}.{name} differs"
            else:
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=f"{group}.{name} differs")


class Walker(NamedTuple):
    """N walkers on a ring of CELLS, each with a goal. The rules of real games are compiled in tests/envs."""

    place: Tensor  # (N,) int8
    goal: Tensor  # (N,) int8
    key: Tensor  # (N,) int32


CELLS = 9


def walk() -> Rules:
    """Three actions: back, stay, on. The goal is worth 1 and ends the game, a step away from it costs a tenth."""

    def init(config: Any, key: Tensor) -> Walker:
        del config
        place, goal = (random.below(random.bits(key, number), CELLS).to(torch.int8) for number in range(2))
        return Walker(place, goal, key)

    def step(config: Any, state: Walker, action: Tensor) -> tuple[Walker, Tensor, Tensor, Events]:
        del config
        place = ((state.place + action - 1) % CELLS).to(torch.int8)
        won = place == state.goal
        reward = torch.where(won, 1.0, -0.1)
        return (
            Walker(place, state.goal, state.key),
            reward,
            won,
            Events(won.to(torch.int32), won, torch.zeros_like(won)),
        )

    def observe(config: Any, state: Walker) -> Tensor:
        del config
        cell = torch.arange(CELLS, device=state.place.device)
        return torch.stack([cell == x.unsqueeze(1) for x in (state.place, state.goal)], 1).to(torch.uint8)

    spec = Spec((2, CELLS), torch.uint8, (1.0, 1.0), 1, 3, "goals")
    functions = {"init": init, "step": step, "observe": observe, "spec": lambda _: spec}
    game = SimpleNamespace(State=Walker, HIDDEN=("key",), ON_CPU=False, name="walk", **functions)
    return Rules(game, None, time_limit=7)  # type: ignore[arg-type]


@pytest.mark.fault("D7")
def test_compiled_equals_eager() -> None:
    """Played and learned side by side: the same games, actions and memory, and losses that differ by rounding only.

    Then the trap of a compiled policy that never sees new weights: the weights are zeroed, and both must act so.
    """
    torch.compiler.reset()  # else functions compiled before this one count towards the limit of recompilations
    plans = (dataclasses.replace(tiny(compile=compiled), rules=walk()) for compiled in (True, False))
    ours, theirs = (Session(plan, pytest.fail) for plan in plans)
    for _ in range(5):
        losses = []
        for session in (ours, theirs):
            # After both kinds of iteration have run, nothing may be compiled again.
            with torch.compiler.set_stance("fail_on_recompile" if ours.updates and theirs.updates else "default"):
                session.iterate(10)
            losses.append(session.read_metrics(10)["loss"])
        assert losses[0] == pytest.approx(losses[1], rel=1e-3)
        assert_same(ours, theirs, exact=False)
    assert theirs.updates == 46
    assert ending_of(theirs.learner.memory.steps[:, 1]).unique().tolist() == [0, 1, 2]
    for session in (ours, theirs):
        session.learner.acted.fill_(10**9)  # long past all exploration, but for a thousandth
        session.learner.online.requires_grad_(False)
        session.learner.optimizer.flat.zero_()
        session.learner.online.dense.head.out.bias[2] = 1.0
        session._collect()
        newest = (session.learner.memory.written - 1) % session.learner.memory.rows
        actions = session.learner.memory.action.view(-1, 8)[newest]
        assert (actions == 2).sum() >= 7, "acting does not see the new weights"


class HostWatch(TorchFunctionMode):
    """Notes each call by which a device would wait for the host, or the host for the device."""

    asked = (torch.tensor, torch.as_tensor, torch.from_numpy, torch.nonzero, torch.equal, torch.is_nonzero)
    methods = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.found: list[str] = []
        self.banned = {*self.asked, *(getattr(Tensor, name) for name in self.methods)}

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        self.calls += 1
        if function in self.banned:
            self.found.append(function.__name__)
        return function(*arguments, **(options or {}))


def test_an_iteration_never_talks_to_the_host() -> None:
    """On a GPU each of these would be a wait, and would break a graph's capture. Here they can be seen without one."""
    session = Session(tiny(compile=False), pytest.fail)
    session.iterate(10)
    with HostWatch() as watch:
        session.iterate(3)
    assert watch.calls > 500
    assert watch.found == []
    with HostWatch() as watch:
        session.read_metrics(3)
        session.collector.episode_stats.read()
    assert watch.found, "the watch sees nothing: a log does read"


def test_a_session_goes_on_where_another_stopped() -> None:
    """The state of one loaded into another, even of another seed: from there on they are the same, bit for bit."""
    ours, theirs = Session(tiny(compile=False), pytest.fail), Session(tiny(compile=False, seed=4), pytest.fail)
    ours.iterate(25)
    theirs.load({g: {n: x.clone() for n, x in t.items()} for g, t in ours.tensors().items()}, ours.counters())
    before = map_record(torch.clone, ours.collector.envs)
    for session in (ours, theirs):
        session.iterate(15)
    assert not torch.equal(before.game.head, ours.collector.envs.game.head)
    assert_same(theirs, ours, exact=True)
    assert theirs.counters() == ours.counters() == {"iterations": 40, "updates": 36, "remembered": 40}


def test_without_the_memory_a_session_first_fills_it_again() -> None:
    ours, theirs = Session(tiny(compile=False), pytest.fail), Session(tiny(compile=False), pytest.fail)
    ours.iterate(25)
    theirs.load({g: dict(t) for g, t in ours.tensors(replay=False).items()}, ours.counters())
    theirs.iterate(4)
    assert (theirs.updates, ours.updates) == (21, 21), "it learned from rows that were never written"
    theirs.iterate(2)
    assert theirs.updates == 23
    assert theirs.learner.memory.written == 6


@pytest.mark.fault("F6")
def test_learning_waits_until_a_whole_window_is_written() -> None:
    """Two steps a window, and nothing asked for but to start at once: four rows are the first with a place to draw."""
    algo = {"hidden": (16, 16), "learning_starts": 0}
    session = Session(tiny(compile=False, algo_options=algo), pytest.fail)
    session.iterate(3)
    assert session.updates == 0
    session.iterate(1)
    assert (session.updates, session.learner.updated) == (1, 1)
    assert session.learner.memory.written - session.learner.memory.n_step == 2, "two rows to draw from"


@pytest.mark.fault("F6")
def test_learning_waits_for_the_steps_asked_for() -> None:
    session = Session(tiny(compile=False, algo_options={"hidden": (16, 16), "learning_starts": 73}), pytest.fail)
    session.iterate(10)  # 80 steps are played; when the tenth began, 72 were
    assert session.updates == 0
    session.iterate(2)
    assert session.updates == 2
    assert (session.env_steps, session.samples_trained) == (96, 16)
