"""A plan made into tensors: games, memory, learner, and the iteration that moves them all one step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from redline.collect.device import Collector
from redline.core.errors import UserError
from redline.core.records import leaves
from redline.engine import fast, hardware
from redline.envs import batch
from redline.replay.ring import Ring
from redline.run.checkpoint import copy_into
from redline.run.config import Plan


class Session:
    """Everything that trains, on its device. `iterate` is the hot loop: it never waits for the device."""

    def __init__(self, plan: Plan, notify: Callable[[str], None]) -> None:
        self.plan = plan
        config = plan.algo_config
        _check_memory(plan)
        compiler = fast.Compiler(plan.compile, notify)
        runtime = fast.runtime(plan.device, plan.precision, compiler)
        keys = batch.lane_keys(plan.settings.seed, torch.arange(plan.num_envs, device=plan.device))
        lanes = batch.reset(plan.rules, keys)
        memory = Ring(plan.rules, lanes.game, config.replay_capacity, config.n_step, config.gamma)
        spec = plan.rules.game.spec(plan.rules.config)
        self.learner = plan.algo.Learner(
            spec, config, memory, plan.num_envs, plan.settings.seed, runtime, plan.settings.accumulate
        )
        self.collector = Collector(plan.rules, self.learner, lanes)
        self._collect = compiler(self.collector.step)
        self._collect_only = fast.Graph(self._collect, plan.graph, notify)
        self._collect_and_learn = fast.Graph(self._play_and_learn, plan.graph, notify)
        # Host counters: how often each was launched. The device has its own; they never have to be compared.
        self.iterations = 0
        self.updates = 0
        self.remembered = 0  # iterations in the replay memory; fewer than all when it was not in the checkpoint

    def _play_and_learn(self) -> None:
        self._collect()
        for _ in range(self.plan.algo_config.updates):
            self.learner.update()

    @property
    def env_steps(self) -> int:
        return self.iterations * self.plan.num_envs

    @property
    def samples_trained(self) -> int:
        per_update: int = self.learner.samples_per_update
        return self.updates * per_update

    def iterate(self, count: int) -> None:
        """Play `count` steps in every environment, and learn after each once enough has been played."""
        config = self.plan.algo_config
        for _ in range(count):
            seen = self.remembered * self.plan.num_envs
            enough = seen >= config.learning_starts and self.remembered > config.n_step
            if enough:
                self._collect_and_learn()
                self.updates += config.updates
            else:
                self._collect_only()
            self.iterations += 1
            self.remembered += 1

    def read_metrics(self, updates: int) -> dict[str, float]:
        """Means of the learner's metrics over the last `updates`, which start again."""
        if not updates:
            return {}
        values = torch.stack(list(self.learner.sums.values())).tolist()
        for total in self.learner.sums.values():
            total.zero_()
        found = {name: value / updates for name, value in zip(self.learner.sums, values, strict=True)}
        return found | {"skipped_updates": int(self.learner.optimizer.skipped)}

    def synchronize(self) -> None:
        if self.plan.device.type == "cuda":
            torch.cuda.synchronize(self.plan.device)

    def tensors(self, replay: bool = True) -> dict[str, dict[str, Tensor]]:
        """All state, in the groups of a checkpoint; without `replay` the memory is left out."""
        groups = {**self.learner.state_dict(), "envs": self.collector.tensors()}
        if not replay:
            groups.pop("replay", None)
        return groups

    def counters(self) -> dict[str, int]:
        return {"iterations": self.iterations, "updates": self.updates, "remembered": self.remembered}

    def load(self, groups: Mapping[str, Mapping[str, Tensor]], counters: Mapping[str, int]) -> None:
        """Take over a checkpoint's state, in place: captured graphs and compiled functions keep reading it."""
        for group, tensors in self.tensors().items():
            if group in groups:
                copy_into(tensors, groups[group], what=group)
        self.iterations, self.updates = counters["iterations"], counters["updates"]
        self.remembered = counters["remembered"] if "replay" in groups else 0


def _check_memory(plan: Plan) -> None:
    """Refuse what cannot fit before anything is allocated, with the bytes it would need."""
    one = batch.reset(plan.rules, batch.lane_keys(0, torch.arange(1)))
    game = sum(x.numel() * x.element_size() for x in leaves(one).values())
    spec, config = plan.rules.game.spec(plan.rules.config), plan.algo_config
    inputs = 4 * math.prod(spec.obs_shape)
    needs = {
        "num_envs": plan.num_envs * (3 * game + inputs),  # the games, their successors, what the network sees
        "batch_size": config.batch_size * 4 * inputs,
        "replay_capacity": config.replay_capacity * game,
    }
    total, free = sum(needs.values()), hardware.free_bytes(plan.device)
    if total > free:
        name = max(needs, key=lambda key: needs[key])
        raise UserError(
            f"These settings need about {total / 1e9:,.1f} GB on {plan.device}, where {free / 1e9:,.1f} GB are free; "
            f"most of it is for {name}: take a smaller one."
        )
