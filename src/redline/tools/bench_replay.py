"""Benchmark replay memories, including other libraries': samples per second, delivered to the device with observations."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TextIO

import numpy as np
import torch
from torch import Tensor

from redline import recipes, replay
from redline.core import random
from redline.core.records import Episode, Spec, Step
from redline.engine import fast, hardware
from redline.envs import batch, make_rules
from redline.envs.batch import Rules
from redline.games import load as load_game
from redline.replay.contract import Replay, ReplayRequest
from redline.run import options
from redline.run.progress import quantity
from redline.tools.bench import rate, rates
from redline.tools.bench_figures import Figure, shown, summarize
from redline.tools.bench_options import BenchRequest

SHAPE = (4, 14, 7)  # of observations that are stored themselves, as in other libraries
ALPHA = 0.6
_NUM_ENVS = 1024  # at most


class Frame(NamedTuple):
    """A State that is its own observation."""

    frame: Tensor  # (N, 4, 14, 7) uint8


def frames() -> Rules:
    """Return rules whose States are their own observations, for comparison with other libraries. Not a game."""
    spec = Spec(SHAPE, torch.uint8, (1.0,) * SHAPE[0], 255, 4, "points")
    game: Any = SimpleNamespace(
        name="frames", State=Frame, HIDDEN=(), observe=lambda _, state: state.frame, spec=lambda _: spec
    )
    return Rules(game, None, 0)


class Loop:
    """A full memory that is sampled repeatedly; with priorities, each sample's priorities are updated too."""

    def __init__(self, memory: Replay, request: ReplayRequest, compiler: fast.Compiler, graph: bool) -> None:
        device, num_envs = request.device, request.num_envs
        self.memory, self.request = memory, request
        self.writes = memory.lead > 0  # batches drawn ahead arrive when rows are written
        self.key, self.number = random.seed_key(1, device), torch.zeros((), dtype=torch.int64, device=device)
        false, zeros = torch.zeros(num_envs, dtype=torch.bool, device=device), torch.zeros(num_envs, device=device)
        self.step = Step(zeros, false, false, false, request.state, Episode(zeros, zeros, zeros))
        self.action = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self.batch: tuple[Tensor | None, ...] = ()
        self._sample, self._write = compiler(self.sample), compiler(self.write)
        self._update_priorities = compiler(memory.update_priorities)
        self._fill()
        self._graph = fast.Graph(self.iteration, graph, compiler.notify)

    def _fill(self) -> None:
        write = self._write if self.writes else self.write  # compile it only if it is part of the measurement
        for _ in range(self.memory.rows):
            self.memory.before_iteration()
            write()
            self.memory.after_iteration()

    @torch.no_grad()
    def sample(self) -> tuple[Tensor | None, ...]:
        self.number += 1
        size = self.request.batch_size
        return tuple(self.memory.sample(random.fold(self.key, self.number), size, 0.4, self.number))

    @torch.no_grad()
    def write(self) -> None:
        self.memory.write(self.request.state, self.action, self.step)

    @torch.no_grad()
    def iteration(self) -> None:
        if self.writes:
            self._write()
        self.batch = self._sample()
        if self.request.alpha is not None:
            _, _, reward, *_, place = self.batch
            assert reward is not None
            self._update_priorities(place, reward + 1.0)  # any number can stand in for an error

    def call(self) -> None:
        self.memory.before_iteration()
        self._graph()
        self.memory.after_iteration()


def bench_replay(request: BenchRequest, out: TextIO) -> dict[str, Any]:
    """Measure samples per second by replay kind, sampling and batch size: 1-step, a full memory of `capacity` transitions."""
    env, capacity, sizes, device = request.env, request.capacity, request.batch, hardware.pick_device(request.device)
    config = options.build(load_game(env).Config, request.env_options, "env.")
    rows: list[dict[str, Any]] = []
    print(f"samples/s, {capacity:,} transitions, 1-step, observations included ({device})", file=out)
    header = "  " + f"{'stored':<8}{'replay':<8}{'sampling':<13}" + "".join(f"{size:>16,}" for size in sizes)
    print(header, file=out, flush=True)
    kinds = replay.names()
    if request.replay is not None:
        replay.check(request.replay)
        kinds = [request.replay]
    with tempfile.TemporaryDirectory(dir=request.folder) as scratch:
        for stored in (env, "frames"):
            rules = frames() if stored == "frames" else make_rules(env, vars(config))
            for kind in kinds:
                for alpha in (None, ALPHA):
                    row: dict[str, Any] = {"stored": stored, "where": kind, "prioritized": alpha is not None}
                    label = f"{stored:<8}{kind:<8}{'prioritized' if alpha else 'uniform':<13}"
                    print("  " + label, end="", file=out, flush=True)
                    for size in sizes:
                        row[str(size)] = _measure(rules, kind, alpha, size, device, request, Path(scratch) / "replay")
                        print(f"{shown(row[str(size)]):>16}", end="", file=out, flush=True)
                    print(file=out, flush=True)
                    rows.append(row)
    peers: dict[str, dict[str, float]] = {}
    compared = {} if request.quick or request.replay else _peers()
    for name, measure in compared.items():
        try:
            peers[name] = {str(size): measure(size, capacity, request.seconds) for size in sizes}
        except Exception as error:  # a failing peer library must not lose Redline's figures
            print(f"  {name:<29}does not run here: {str(error).splitlines()[0][:100]}", file=out, flush=True)
            continue
        print(f"  {name:<29}" + "".join(f"{quantity(x):>16}" for x in peers[name].values()), file=out, flush=True)
    settings = {"device": device.type, "compile": request.compile is not False, "capacity": capacity}
    settings |= {"env_options": dict(request.env_options)}
    return settings | {"rows": rows, "peers": peers, "peers_store": f"{SHAPE} uint8 on the CPU"}


def _measure(
    rules: Rules, kind: str, alpha: float | None, size: int, device: torch.device, bench: BenchRequest, folder: Path
) -> Figure:
    torch._dynamo.reset()
    num_envs = min(_NUM_ENVS, max(1, bench.capacity // 64))
    request = ReplayRequest(
        rules=rules,
        state=_example(rules, num_envs, device),
        capacity=bench.capacity,
        n_step=1,
        gamma=0.99,
        alpha=alpha,
        key=random.seed_key(2, device),
        batch_size=size,
        folder=folder,
        notify=_say,
    )
    compiler = fast.Compiler(bench.compile is not False, _say, device, recipes.compiler_options(rules.game))
    memory = replay.load(kind).make(request)
    try:
        loop = Loop(memory, request, compiler, graph=device.type == "cuda")
        return summarize([size * calls for calls in rates(loop.call, bench.seconds, device, bench.repeats)])
    finally:
        memory.close()
        shutil.rmtree(folder, ignore_errors=True)


def _example(rules: Rules, num_envs: int, device: torch.device) -> Any:
    if rules.game.State is Frame:
        return Frame(torch.randint(0, 2, (num_envs, *SHAPE), device=device).to(torch.uint8))
    return batch.reset(rules, batch.env_keys(0, torch.arange(num_envs, device=device))).game


def _say(text: str) -> None:
    print(f"\n{text}", flush=True)


def _peers() -> dict[str, Callable[[int, int, float], float]]:
    """Return benchmarks of other installed libraries, by name; each returns samples per second on the CPU."""
    peers: dict[str, Callable[[int, int, float], float]] = {}
    if importlib.util.find_spec("stable_baselines3"):
        peers["SB3 ReplayBuffer"] = _sb3
    if importlib.util.find_spec("torchrl"):
        peers["TorchRL uniform"] = lambda *sizes: _torchrl(*sizes, prioritized=False, memmap=False)
        peers["TorchRL memmap"] = lambda *sizes: _torchrl(*sizes, prioritized=False, memmap=True)
        peers["TorchRL prioritized"] = lambda *sizes: _torchrl(*sizes, prioritized=True, memmap=False)
    return peers


def _sb3(size: int, capacity: int, seconds: float) -> float:
    from gymnasium import spaces

    buffers = importlib.import_module("stable_baselines3.common.buffers")
    space = spaces.Box(0, 255, SHAPE, np.uint8)
    buffer = buffers.ReplayBuffer(capacity, space, spaces.Discrete(4), device="cpu", n_envs=1)
    buffer.observations[:], buffer.next_observations[:], buffer.full = 1, 1, True
    return size * rate(lambda: buffer.sample(size), seconds, torch.device("cpu"))


def _torchrl(size: int, capacity: int, seconds: float, *, prioritized: bool, memmap: bool) -> float:
    data, tensordict = importlib.import_module("torchrl.data"), importlib.import_module("tensordict")
    storage = (data.LazyMemmapStorage if memmap else data.LazyTensorStorage)(capacity)
    if prioritized:
        buffer = data.TensorDictPrioritizedReplayBuffer(alpha=ALPHA, beta=0.4, storage=storage, batch_size=size)
    else:
        buffer = data.TensorDictReplayBuffer(storage=storage, batch_size=size)
    frame = torch.ones(capacity, *SHAPE, dtype=torch.uint8)
    fields = {"observation": frame, "action": torch.zeros(capacity, dtype=torch.int64), "next": {"observation": frame}}
    fields |= {"reward": torch.zeros(capacity), "done": torch.zeros(capacity, dtype=torch.bool)}
    buffer.extend(tensordict.TensorDict(fields, batch_size=[capacity]))

    def call() -> None:
        samples = buffer.sample()
        if prioritized:
            samples["td_error"] = samples["reward"] + 1.0
            buffer.update_tensordict_priority(samples)

    return size * rate(call, seconds, torch.device("cpu"))
