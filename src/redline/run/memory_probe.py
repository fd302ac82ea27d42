"""Measure how much memory a plan's learner needs per sample and per environment, using small numbers of them.

The plan's learner collects and updates with two small sizes on the plan's device. Allocations grow linearly with the size, so
two measurements give the bytes for any size and any network: activations, gradients, sampled observations, target networks,
temporaries. Nothing is compiled, which would take a minute; instead, tensors that compiled code would not create are not
counted.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from redline import replay
from redline.algos.learner import Learner
from redline.collect.device_collector import DeviceCollector
from redline.core.records import Episode, PolicyInput, Step, Transition, leaves, map_record
from redline.engine import fast
from redline.engine.out_of_memory import free_caches
from redline.envs import Rules, batch
from redline.run.plan import Plan

_ROLLOUT_STEPS = 4  # of a probed on-policy learner, so that its batch is larger than the number of bootstrap states
_CPU_SIZES, _GPU_SIZES = (32, 96), (512, 1536)  # environments or samples; multiples of _ROLLOUT_STEPS
_GROWTH, _LARGEST = 4, 1 << 15  # samples of further measurements


@dataclass(frozen=True)
class Line:
    """Bytes as a linear function of a size."""

    fixed: float
    each: float

    def at(self, size: int) -> int:
        """Return the bytes for a size."""
        return max(0, round(self.fixed + self.each * size))


@dataclass(frozen=True)
class Probe:
    """Bytes allocated on the device at the peak of each stage, not counting the learner's buffers."""

    weights: int  # networks, optimizer and everything else that does not depend on sizes
    collect: Line  # by environments
    evaluate: Line  # by states: a forward pass without gradients
    gradient: Line  # by samples of a batch, or of a micro-batch
    step: int  # a gradient step of a small batch: what the optimizer needs
    convolutions: bool = False  # whether the network has any


class LiveBytes(TorchDispatchMode):
    """Count the bytes of all live tensors created by operations.

    compiled: leave out the results of pointwise operations, unless they are larger than their arguments. The compiler
    fuses them into the operation before or after, so that about one tensor remains for each product, reduction or
    selection.
    """

    def __init__(self, compiled: bool = False) -> None:
        super().__init__()
        self.compiled = compiled
        self.live = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        fused = self.compiled and torch.Tag.pointwise in func.tags and result.numel() <= _largest(args)
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._count(value.untyped_storage(), fused)
        return result

    def _count(self, storage: torch.UntypedStorage, fused: bool) -> None:
        """Count a storage when it first appears; one that is fused away has no bytes, nor do its views."""
        key = storage._cdata
        if key in self._known:
            return
        size = 0 if fused else storage.nbytes()

        def freed(_: Any) -> None:
            del self._known[key]
            self.live -= size

        self._known[key] = weakref.ref(storage, freed)
        self.live += size
        self.peak = max(self.peak, self.live)


def _largest(arguments: Any) -> int:
    """Return the number of elements of the largest tensor among the arguments."""
    return max((x.numel() for x in tree_leaves(arguments) if isinstance(x, torch.Tensor)), default=0)


def measure(function: Callable[[], Any], compiled: bool = False) -> tuple[int, int]:
    """Return the bytes that a call of `function` needs at its peak, and those that its result keeps allocated.

    Tensors are counted instead of reading a GPU allocator's statistics: for a few samples, cuDNN's workspaces are several
    times larger than the tensors, but do not grow with the batch.
    """
    with LiveBytes(compiled) as counter:
        result = function()
    peak, live = counter.peak, counter.live
    del result
    return peak, live


_probes: dict[str, Probe] = {}  # of this process, keyed by everything they depend on


def measure_plan(plan: Plan) -> Probe:
    """Return the memory needs of the plan's learner. Passes on its exceptions; takes about a second the first time."""
    steps = min(getattr(plan.algo_config, "rollout_steps", 1), _ROLLOUT_STEPS)
    decisive = plan.settings.env, plan.rules, plan.algo.name, _small(plan, 1, 1, steps)
    key = repr((*decisive, plan.precision, plan.device, plan.compile, plan.backplay))
    if key not in _probes:
        _probes[key] = _measure_plan(plan)
    return _probes[key]


def _measure_plan(plan: Plan) -> Probe:
    sizes = _GPU_SIZES if plan.device.type == "cuda" else _CPU_SIZES
    states = [_measure_states(plan, size) for size in sizes]
    updates = [_measure_update(plan, size) for size in sizes]
    weights, step = updates[0].weights, updates[0].step
    gradient = _line(sizes, [update.gradient for update in updates])
    # With few samples, the peak is at the gradients of the weights; with many, at the activations.
    while 16 * gradient.fixed > gradient.each * sizes[1] and sizes[1] < _LARGEST:
        sizes = sizes[1], _GROWTH * sizes[1]
        updates = [updates[1], _measure_update(plan, sizes[1])]
        gradient = _line(sizes, [update.gradient for update in updates])
    free_caches()
    first = _GPU_SIZES if plan.device.type == "cuda" else _CPU_SIZES
    return Probe(
        weights=weights,
        collect=_line(first, [collect for collect, _ in states]),
        evaluate=_line(first, [evaluate for _, evaluate in states]),
        gradient=gradient,
        step=step,
        convolutions=updates[0].convolutions,
    )


def _line(sizes: tuple[int, int], peaks: list[int]) -> Line:
    """Return the line through two measurements."""
    each = max(0.0, (peaks[1] - peaks[0]) / (sizes[1] - sizes[0]))
    return Line(max(0.0, peaks[1] - each * sizes[1]), each)


class _Update(NamedTuple):
    """Bytes of an update with one batch."""

    weights: int  # of the learner before it, without its buffers
    gradient: int  # at the peak of computing gradients
    step: int  # at the peak of the update
    convolutions: bool


def _measure_update(plan: Plan, samples: int) -> _Update:
    """Return the bytes of an update with one batch of `samples` samples."""
    steps = min(getattr(plan.algo_config, "rollout_steps", 1), _ROLLOUT_STEPS)
    num_envs = samples // steps
    config = _small(plan, num_envs, num_envs * steps, steps)
    made: list[tuple[Learner, batch.EnvState]] = []
    _, live = measure(lambda: made.append(_make(plan, num_envs, config)))
    learner, envs = made[0]
    buffers = plan.algo.memory_bytes(config, learner.spec, _stored_bytes(plan.rules, envs.game), num_envs)
    games = sum(x.nbytes for x in leaves(envs).values())
    for _ in range(_rows(config)):
        learner.ingest(_idle(envs.game, num_envs))
    step = gradient = measure(learner.update)[0]
    if learner.max_micro_batches > 1:
        peaks: list[int] = []

        def recorded(compute: Callable[[], Any]) -> Any:
            peaks.append(_peak(plan, compute))
            return compute()

        learner.within_memory = recorded  # type: ignore[method-assign]
        learner.update()
        gradient = max(peaks)
    optimizer = getattr(learner, "optimizer", None)  # an external learner may lack one
    convolutions = any(p.dim() == 4 for p in getattr(optimizer, "parameters", ()))
    learner.close()
    return _Update(max(0, live - games - sum(buffers.values())), gradient, step, convolutions)


@torch.no_grad()
def _measure_states(plan: Plan, num_envs: int) -> tuple[int, int]:
    """Return the peak bytes of one step of all environments, and of evaluating one state of each."""
    rules, device = plan.rules, plan.device
    learner, envs = _make(plan, num_envs, _small(plan, num_envs, num_envs, 1))
    spec = learner.spec
    obs = torch.zeros(num_envs, *spec.obs_shape, dtype=spec.obs_dtype, device=device)
    legal = torch.ones(num_envs, spec.num_actions, dtype=torch.bool, device=device) if spec.masked else None
    index, acted = torch.arange(num_envs, device=device), learner.acted
    policy_input = PolicyInput(obs, legal, learner.key, index, num_envs, acted, acted, learner.progress)
    learner.before_iteration()
    learner.select_actions(policy_input)  # the first call on a device may allocate more
    evaluate = obs.nbytes + _peak(plan, lambda: learner.select_actions(policy_input))
    collect = evaluate
    if not rules.game.ON_CPU:
        collector = DeviceCollector(rules, learner, envs, plan.backplay, plan.backplay_steps)
        collect = _peak(plan, collector.step)
    learner.close()
    return collect, evaluate


def _make(plan: Plan, num_envs: int, config: Any) -> tuple[Learner, batch.EnvState]:
    """Return a learner of the plan with `num_envs` environments and the options `config`, and the environments."""
    runtime = fast.runtime(plan.device, plan.precision, fast.Compiler(False, _ignore), plan.run_dir)
    envs = batch.reset(plan.rules, batch.env_keys(0, torch.arange(num_envs, device=plan.device)))
    return plan.algo.Learner(plan.rules, config, envs.game, num_envs, 0, runtime), envs


def _peak(plan: Plan, function: Callable[[], Any]) -> int:
    """Return the peak bytes of a call; if the plan compiles it, without the tensors that fusion removes."""
    return measure(function, plan.compile)[0]


def _small(plan: Plan, num_envs: int, batch_size: int, rollout_steps: int) -> Any:
    """Return the plan's algorithm options, reduced to one update with one batch and a minimal replay memory."""
    small = {
        "batch_size": batch_size,
        "rollout_steps": rollout_steps,
        "epochs": 1,
        "updates": 1,
        "learning_starts": 0,
        "replay": replay.DEFAULT,
        "replay_capacity": num_envs * 64,
    }
    return dataclasses.replace(plan.algo_config, **{k: v for k, v in small.items() if k in plan.algo.options})


def _rows(config: Any) -> int:
    """Return the steps needed before a replay memory can be sampled; 0 without one."""
    return getattr(config, "n_step", 1) + 2 if hasattr(config, "replay") else 0


def _idle(state: Any, num_envs: int) -> Transition:
    """Return a step of all environments in which nothing happens."""
    device = state[0].device
    no = torch.zeros(num_envs, dtype=torch.bool, device=device)
    count, zero = torch.zeros(num_envs, dtype=torch.int32, device=device), torch.zeros(num_envs, device=device)
    step = Step(zero, no, no, no, map_record(torch.clone, state), Episode(count, count, zero))
    return Transition(state, torch.zeros(num_envs, dtype=torch.int64, device=device), step)


def _stored_bytes(rules: Rules, state: Any) -> int:
    """Return the bytes of one State, without fields that observations never read."""
    fields = state._asdict().items()
    return sum(x.nbytes // len(x) for name, x in fields if name not in rules.game.HIDDEN)


def _ignore(message: str) -> None:
    del message
