"""Throughput of replay memories: samples a second delivered to the device, observations made; peers beside ours."""

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

from redline import recipes
from redline.core import random
from redline.core.records import Episode, Spec, Step
from redline.engine import fast, hardware
from redline.envs import batch, make_rules
from redline.envs.batch import Rules
from redline.games import load as load_game
from redline.replay.host_ring import HostReplayRing, Pinned
from redline.replay.memmap import OnDisk
from redline.replay.priority import UNIT
from redline.replay.ring import ReplayRing
from redline.replay.row_layout import RowLayout
from redline.replay.transfer import Storage
from redline.run import options
from redline.run.progress import quantity
from redline.tools.bench import rate
from redline.tools.bench_options import BenchRequest

SHAPE = (4, 14, 7)  # of the observations that are stored as they are, for comparison with others
ALPHA = 0.6


class Frame(NamedTuple):
    """A State that is its own observation."""

    frame: Tensor  # (N, 4, 14, 7) uint8


def frames() -> Rules:
    """Not a game: observations are stored, as other replay memories do."""
    spec = Spec(SHAPE, torch.uint8, (1.0,) * SHAPE[0], 255, 4, "points")
    game: Any = SimpleNamespace(State=Frame, HIDDEN=(), observe=lambda _, state: state.frame, spec=lambda _: spec)
    return Rules(game, None, 0)


class Loop:
    """A memory that is full, sampled again and again; with `alpha` the priorities of each sample are set, too."""

    def __init__(
        self, ring: ReplayRing, state: Any, size: int, compiler: fast.Compiler, graph: bool, writes: bool = False
    ) -> None:
        device = ring.device
        self.ring, self.size, self.state, self.writes = ring, size, state, writes
        self.key, self.number = random.seed_key(1, device), torch.zeros((), dtype=torch.int64, device=device)
        num_envs = ring.num_envs
        no, nothing = torch.zeros(num_envs, dtype=torch.bool, device=device), torch.zeros(num_envs, device=device)
        self.step = Step(nothing, no, no, no, state, Episode(nothing, nothing, nothing))
        self.action = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self.out: Any = None
        ring.written.fill_(ring.rows)
        if ring.priorities is not None:
            drawable = ring.num_envs * (ring.rows - ring.n_step)
            ring.priorities.set_span(ring.written * 0, drawable, torch.full_like(ring.priorities.highest, UNIT))
        ring.loaded()
        self._sample, self._write = compiler(self.sample), compiler(self.write)
        self._learned = compiler(ring.update_priorities)
        self._graph = fast.Graph(self.iteration, graph, compiler.notify)

    @torch.no_grad()
    def sample(self) -> tuple[Tensor | None, ...]:
        self.number += 1
        return tuple(self.ring.sample(random.fold(self.key, self.number), self.size, 0.4, self.number))

    @torch.no_grad()
    def write(self) -> None:
        self.ring.write(self.state, self.action, self.step)

    @torch.no_grad()
    def iteration(self) -> None:
        if self.writes:
            self._write()
        self.out = self._sample()
        if self.ring.priorities is not None:
            self._learned(self.out[-1], self.out[2] + 1.0)  # rewards as errors: any number will do

    def call(self) -> None:
        self.ring.before()
        self._graph()
        self.ring.after()


def bench_replay(wanted: BenchRequest, out: TextIO) -> dict[str, Any]:
    """Samples a second by place, way of drawing and batch size; n = 1, a full memory of `capacity` transitions."""
    env, capacity, batch, place = wanted.env, wanted.capacity, wanted.batch, hardware.pick_device(wanted.device)
    chosen = options.build(load_game(env).Config, wanted.env_options, "env.")
    compiles = wanted.compile is not False
    rows: list[dict[str, Any]] = []
    print(f"samples/s, {capacity:,} transitions, one step each, observations made ({place})", file=out)
    print("  " + f"{'stored':<8}{'where':<8}{'drawn':<13}" + "".join(f"{size:>12,}" for size in batch), file=out)
    with tempfile.TemporaryDirectory(dir=wanted.folder) as scratch:
        for what in (env, "frames"):
            rules = frames() if what == "frames" else make_rules(env, vars(chosen))
            for where in ("device", "pinned", "memmap"):
                for alpha in (None, ALPHA):
                    row: dict[str, Any] = {"stored": what, "where": where, "prioritized": alpha is not None}
                    label = f"{what:<8}{where:<8}{'by priority' if alpha else 'uniform':<13}"
                    print("  " + label, end="", file=out, flush=True)
                    for size in batch:
                        row[str(size)] = _measure(
                            rules, where, alpha, size, capacity, wanted.seconds, place, compiles, Path(scratch)
                        )
                        print(f"{quantity(row[str(size)]):>12}", end="", file=out, flush=True)
                    print(file=out)
                    rows.append(row)
    peers: dict[str, dict[str, float]] = {}
    for name, measure in _peers().items():
        try:
            peers[name] = {str(size): measure(size, capacity, wanted.seconds) for size in batch}
        except Exception as error:  # theirs, and no reason to lose our own figures
            print(f"  {name:<29}does not run here: {str(error).splitlines()[0][:100]}", file=out, flush=True)
            continue
        print(f"  {name:<29}" + "".join(f"{quantity(x):>12}" for x in peers[name].values()), file=out, flush=True)
    return {"capacity": capacity, "rows": rows, "peers": peers, "peers_store": f"{SHAPE} uint8 on the CPU"}


def _measure(
    rules: Rules,
    where: str,
    alpha: float | None,
    size: int,
    capacity: int,
    seconds: float,
    device: torch.device,
    compiles: bool,
    scratch: Path,
) -> float:
    torch._dynamo.reset()
    num_envs = min(1024, max(1, capacity // 64))
    state = _example(rules, num_envs, device)
    options = recipes.compiler_options(rules.game)
    compiler = fast.Compiler(compiles, _say, device, options)
    graph = device.type == "cuda"
    if where == "device":
        ring = ReplayRing(rules, state, capacity, 1, 0.99, finals=1, alpha=alpha)
        return size * rate(Loop(ring, state, size, compiler, graph).call, seconds, device)

    def storage(entries: int, layout: RowLayout) -> Storage:
        if where == "pinned":
            return Pinned(entries, layout, num_envs, device, _say)
        return OnDisk(scratch / "file", entries, layout, num_envs, _say)

    key = random.seed_key(2, device)
    threaded = None if device.type == "cuda" else True
    how: dict[str, Any] = {"alpha": alpha, "finals": 1, "notify": _say, "threaded": threaded}
    host = HostReplayRing(rules, state, capacity, 1, 0.99, key, size, 1, storage, **how)
    host.storage.records.random_(0, 2)  # pages that were never written would all be the same one
    try:
        return size * rate(Loop(host, state, size, compiler, graph, writes=True).call, seconds, device)
    finally:
        host.close()
        shutil.rmtree(scratch / "file", ignore_errors=True)


def _example(rules: Rules, num_envs: int, device: torch.device) -> Any:
    if rules.game.State is Frame:
        return Frame(torch.randint(0, 2, (num_envs, *SHAPE), device=device).to(torch.uint8))
    return batch.reset(rules, batch.env_keys(0, torch.arange(num_envs, device=device))).game


def _say(text: str) -> None:
    print(f"\n{text}", flush=True)


def _peers() -> dict[str, Callable[[int, int, float], float]]:
    """Other people's memories, where they are installed: each measures samples a second on the CPU."""
    found: dict[str, Callable[[int, int, float], float]] = {}
    if importlib.util.find_spec("stable_baselines3"):
        found["SB3 ReplayBuffer"] = _sb3
    if importlib.util.find_spec("torchrl"):
        found["TorchRL uniform"] = lambda *how: _torchrl(*how, prioritized=False, memmap=False)
        found["TorchRL memmap"] = lambda *how: _torchrl(*how, prioritized=False, memmap=True)
        found["TorchRL by priority"] = lambda *how: _torchrl(*how, prioritized=True, memmap=False)
    return found


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
        found = buffer.sample()
        if prioritized:
            found["td_error"] = found["reward"] + 1.0
            buffer.update_tensordict_priority(found)

    return size * rate(call, seconds, torch.device("cpu"))
