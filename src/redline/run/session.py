"""A plan made into tensors: games, memory, learner, and the iteration that moves them all one step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from redline.collect.device import Collector
from redline.engine import fast
from redline.envs import batch
from redline.replay.ring import Ring
from redline.run.config import Plan


class Session:
    """Everything that trains, on its device. `iterate` is the hot loop: it never waits for the device."""

    def __init__(self, plan: Plan, notify: Callable[[str], None]) -> None:
        self.plan = plan
        config = plan.algo_config
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

    def _play_and_learn(self) -> None:
        self._collect()
        for _ in range(self.plan.algo_config.updates):
            self.learner.update()

    @property
    def env_steps(self) -> int:
        return self.iterations * self.plan.num_envs

    @property
    def samples_trained(self) -> int:
        return self.updates * self.learner.samples_per_update

    def iterate(self, count: int) -> None:
        """Play `count` steps in every environment, and learn after each once enough has been played."""
        config = self.plan.algo_config
        for _ in range(count):
            enough = self.env_steps >= config.learning_starts and self.iterations > config.n_step
            if enough:
                self._collect_and_learn()
                self.updates += config.updates
            else:
                self._collect_only()
            self.iterations += 1

    def synchronize(self) -> None:
        if self.plan.device.type == "cuda":
            torch.cuda.synchronize(self.plan.device)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """All state, in the groups of a checkpoint."""
        return {**self.learner.state_dict(), "envs": self.collector.tensors()}

    def load(self, groups: dict[str, dict[str, Tensor]], iterations: int, updates: int) -> None:
        """Take over a checkpoint's state, in place."""
        groups = dict(groups)
        self.collector.load(groups.pop("envs"))
        self.learner.load_state_dict(groups)
        self.iterations, self.updates = iterations, updates
