"""OnPolicyLearner: train on a rollout of all environments in shuffled minibatches, then discard it. Shared by PPO and PQN."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from abc import abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from redline.algos import network_config
from redline.algos.learner import MAX_MICRO_BATCHES, Learner
from redline.algos.metrics import explained_variance, read_means
from redline.algos.optimizer import Optimizer, annealed_discount, linear
from redline.algos.rollout import RolloutBuffer, max_truncations
from redline.core import random
from redline.core.errors import UserError
from redline.core.records import Spec, Transition
from redline.engine.runtime import Runtime
from redline.engine.stages import Stage, Stages
from redline.envs.batch import Rules


@dataclass(frozen=True)
class OnPolicyConfig(network_config.NetworkConfig):
    """Options that on-policy learners share."""

    rollout_steps: int = 32  # steps of every environment between two updates
    epochs: int = 2  # passes over each rollout
    batch_size: int = 0  # samples per gradient step; 0: an eighth of a rollout
    learning_rate: float = 1e-3  # at the start of training
    learning_rate_end: float = 1e-4  # at the end of training; linear in between
    gamma: float = 0.99  # discount
    gamma_end: float | None = None  # at the end of training, linear in 1 / (1 - gamma); none: constant
    max_grad_norm: float = 0.5  # gradients are clipped to this norm

    def __post_init__(self) -> None:
        super().__post_init__()
        self.expect(("rollout_steps", "epochs"), "at least 1", lambda x: x >= 1)
        self.expect(("gamma",), "a number from 0 to 1", lambda x: 0 <= x <= 1)
        self.expect(("gamma_end",), "a number from 0 to below 1, or none", lambda x: x is None or 0 <= x < 1)
        if self.gamma_end is not None:
            self.expect(("gamma",), "below 1 where gamma_end is set", lambda x: x < 1)
        self.expect(("learning_rate", "max_grad_norm"), "a number above 0", lambda x: x > 0)
        self.expect(("batch_size", "learning_rate_end"), "0 or more", lambda x: x >= 0)


RESUME_FIXED = (*network_config.NETWORK_RESUME_FIXED, "gamma", "rollout_steps")
_MAX_COMPILED_STEPS = 128  # longer rollouts compute their targets eagerly
_MINIBATCHES = 8  # per epoch, by default
C = TypeVar("C", bound=OnPolicyConfig)
N = TypeVar("N", bound=nn.Module)


def fill_defaults(config: C, num_envs: int, requested: Collection[str]) -> tuple[C, dict[str, str]]:
    """Return the config with a batch size that divides the rollout, unless one was `requested`, and the reason."""
    if "batch_size" not in requested and num_envs * config.rollout_steps % max(config.batch_size, 1):
        config = dataclasses.replace(config, batch_size=0)
    return fill_batch_size(config, num_envs)


def fill_batch_size(config: C, num_envs: int) -> tuple[C, dict[str, str]]:
    """Return the config with an eighth of the rollout for a batch size of 0, and the reason."""
    if config.batch_size:
        return config, {}
    filled = dataclasses.replace(config, batch_size=_minibatch(max(num_envs, 1) * config.rollout_steps))
    return filled, {"batch_size": "an eighth of a rollout"}


def samples_per_step(config: OnPolicyConfig, num_envs: int, accumulate: int) -> float:
    """Return the number of times the learner trains on each environment step."""
    del num_envs, accumulate
    return float(config.epochs)


def memory_bytes(config: OnPolicyConfig, spec: Spec, state_bytes: int, num_envs: int) -> dict[str, int]:
    """Return the approximate bytes of the rollout, keyed by the option that sets its size."""
    sample = math.prod(spec.obs_shape) * spec.obs_dtype.itemsize + spec.num_actions * spec.masked + 42
    return {"rollout_steps": num_envs * (config.rollout_steps * sample + state_bytes)}


class OnPolicyLearner(Learner):
    """Collect a rollout, compute a target for each sample, and train `epochs` times on shuffled minibatches.

    A subclass defines `select_actions`, `state_values`, `compute_targets`, `loss` and `model`.
    """

    config: OnPolicyConfig
    optimizer: Optimizer
    metrics: tuple[str, ...] = ("loss",)
    scheduled = True  # the learning rate follows `progress`
    averages_gradients = True
    needs_frame_stack = True  # to bootstrap from observations of final states

    def __init__(
        self,
        rules: Rules,
        config: OnPolicyConfig,
        state: Any,
        num_envs: int,
        seed: int,
        runtime: Runtime,
        accumulate: int,
        net: nn.Module,
        outputs: tuple[str, ...],
    ) -> None:
        """Arguments of Learner, and net: the network to train; outputs: the algorithm's POLICY_OUTPUTS, `value` first."""
        super().__init__(rules, config, state, num_envs, seed, runtime, accumulate)
        if config.gamma_end is not None and self.spec.afterstates:
            raise UserError(
                "gamma_end is set, but with afterstates the discount is part of the network. Remove gamma_end."
            )
        self._check_batch_size()
        device = runtime.device
        self.net = net
        self.rollout = RolloutBuffer(rules, state, num_envs, config.rollout_steps, outputs, device)
        self.rollout_steps, self.samples_per_update = config.rollout_steps, config.batch_size * accumulate
        self.updates_per_iteration = config.epochs * (self.rollout.size // self.samples_per_update)
        if not config.batch_norm:  # it needs the whole batch at once
            self.max_micro_batches = min(config.batch_size, MAX_MICRO_BATCHES)
        self.learning_rate = torch.tensor(config.learning_rate, device=device)
        self.optimizer = Optimizer(net, self.learning_rate, config.max_grad_norm, runtime)
        self.behaviour_network = in_precision(net, runtime.amp_dtype)  # `before_iteration` copies the weights
        self.targets = torch.zeros(self.rollout.size, device=device)  # one per sample, for its value
        self.order = torch.zeros(self.rollout.size, dtype=torch.int64, device=device)  # shuffled sample numbers
        self.shuffled = torch.zeros((), dtype=torch.int64, device=device)  # () int64: epochs so far
        self.metric_sums = torch.zeros(len(self.metrics), device=device)  # since the last log point
        # The compiler unrolls the loop over the steps: a long rollout would take minutes to compile.
        self._short = config.rollout_steps <= _MAX_COMPILED_STEPS
        self._compute_targets = runtime.compile(self.compute_targets) if self._short else self.compute_targets
        self._shuffle = runtime.compile(self.shuffle)
        self._loss, self._apply = runtime.compile(self.loss), runtime.compile(self.apply)

    def _check_batch_size(self) -> None:
        config, num_envs, accumulate = self.config, self.num_envs, self.accumulate
        size = config.rollout_steps * num_envs
        if size % (config.batch_size * accumulate) == 0:
            return
        steps = f"the {size:,} steps that {num_envs:,} environments play in a rollout of {config.rollout_steps}"
        if size % accumulate:
            raise UserError(f"accumulate is {accumulate}; expected a divisor of {steps}.")
        group = type(self).__module__.rpartition(".")[2]
        times = f" times accumulate {accumulate}" if accumulate > 1 else ""
        raise UserError(
            f"{group}.batch_size is {config.batch_size:,}{times}; expected a divisor of {steps}, such as "
            f"{_nearest_divisor(size // accumulate, config.batch_size):,}."
        )

    # ------------------------------------------------------------------------------------------ defined by the algorithm

    @abstractmethod
    def state_values(self, state: Any) -> Tensor:
        """Return the values (M,) float32 of M game States."""

    @abstractmethod
    def compute_targets(self) -> None:
        """Write `targets` from the rollout, and set this update's learning rate."""

    @abstractmethod
    def loss(self, index: Tensor, batch: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the loss () and the `metrics` (M,) of the samples `index` (B,) int64.

        batch: all samples of the gradient step if `index` is only a part of them. Losses and metrics of the parts must add up
        to those of the gradient step, so means over `index` are divided by `part_count(index, batch)`.
        """

    def share_targets(self) -> None:
        """Exchange statistics of the targets with the other ranks; called after `compute_targets` if there are any."""

    def share_batches(self) -> None:
        """Exchange statistics of the batches in `order` with the other ranks; called once per epoch if there are any."""

    @abstractmethod
    def model(self) -> dict[str, Tensor]:
        """Return all weights by name."""

    # ------------------------------------------------------------------------------------------------------------ acting

    @torch.no_grad()
    def before_iteration(self) -> None:
        """Copy the trained weights to the behaviour network."""
        if self.behaviour_network is not self.net:
            torch._foreach_copy_(list(self.behaviour_network.parameters()), list(self.net.parameters()))

    @property
    def acting_network(self) -> nn.Module:
        return self.net

    def record_actions(self, obs: Tensor, legal: Tensor | None, action: Tensor, outputs: tuple[Tensor, ...]) -> None:
        """Write one step of all environments to the rollout."""
        self.rollout.write_actions(obs, legal, action, outputs)
        self.acted += 1

    def ingest(self, transition: Transition) -> None:
        """Write the outcome of the actions to the rollout."""
        self.rollout.write_step(transition.step)

    def forget(self, lost: Tensor) -> None:
        self.rollout.forget(lost, self.predictions)

    # ---------------------------------------------------------------------------------------------------------- learning

    def update(self) -> None:
        """Train on the rollout, `epochs` times."""
        self._compute_targets()
        if self.several_ranks:
            self.share_targets()
        for _ in range(self.config.epochs):
            self._shuffle()
            if self.several_ranks:
                self.share_batches()
            for start in range(0, self.rollout.size, self.samples_per_update):
                batch = self.order[start : start + self.samples_per_update]
                gradients, metrics = self.within_memory(functools.partial(self.gradients, batch))
                gradients, metrics = self.average_over_ranks(gradients, metrics)
                self.record_metrics(metrics)
                self._apply(gradients)

    def gradients(self, batch: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the gradients and metrics of the samples `batch` (B,) int64, computed part by part."""
        parts = batch.split(-(-self.config.batch_size // self.micro_batches))
        total: tuple[Tensor, ...] = ()
        sums: Tensor | None = None
        for index in parts:
            loss, metrics = self._loss(index, batch if len(parts) > 1 else None)
            gradients = self.optimizer.gradient(loss)
            total = tuple(torch._foreach_add(total, gradients)) if total else gradients
            sums = metrics if sums is None else sums + metrics
        assert sums is not None
        return total, sums

    def record_metrics(self, metrics: Tensor) -> None:
        """Add the metrics (M,) of a gradient step to the sums; called just before the step is taken."""
        self.metric_sums += metrics

    @classmethod
    def states_evaluated(cls, rules: Rules, config: OnPolicyConfig, num_envs: int) -> int:
        return num_envs * (max_truncations(rules, config.rollout_steps) + 1)

    @property
    def stages(self) -> Stages:
        return {
            "before_iteration": Stage("weights copy", compiled=False),
            "_compute_targets": Stage("targets", compiled=self._short),
            "_shuffle": Stage("shuffle"),
            "_loss": Stage("forward"),
            "optimizer.gradient": Stage("backward", compiled=False),
            "_apply": Stage("optimizer"),
        }

    @property
    def predictions(self) -> Tensor:
        """Values predicted while acting, to compare with the targets: (T * N,) float32."""
        return self.rollout.outputs["value"]

    def rollout_returns(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return reward, value (T, N), bootstrap_value (N,) and done (T, N): the arguments of the functions in `returns`."""
        rollout = self.rollout
        values = self.state_values(rollout.bootstrap_states)
        reward, bootstrap_value = rollout.bootstrapped_rewards(values, self.discount(), self.predictions)
        return reward, rollout.steps(rollout.outputs["value"]), bootstrap_value, rollout.steps(rollout.done)

    def discount(self) -> float | Tensor:
        """Return gamma at this point of training."""
        start, end = self.config.gamma, self.config.gamma_end
        return start if end is None else annealed_discount(start, end, self.progress)

    def update_learning_rate(self) -> None:
        """Set the learning rate for this point of training."""
        self.learning_rate.copy_(linear(self.config.learning_rate, self.config.learning_rate_end, self.progress))

    @torch.no_grad()
    def shuffle(self) -> None:
        """Draw a new order of all samples."""
        number = torch.arange(self.order.shape[0], device=self.order.device)
        draws = random.bits(self.own_key(random.fold(self.key, 2 * self.shuffled + 1)), number)
        self.order.copy_(torch.sort(draws, stable=True).indices)  # stable: draws may be equal
        self.shuffled += 1

    @torch.no_grad()
    def apply(self, gradients: tuple[Tensor, ...]) -> None:
        """Take a gradient step."""
        self.optimizer.step(gradients)

    def read_metrics(self, updates: int) -> dict[str, float]:
        """Return the means over the last `updates` gradient steps and reset them."""
        sums = dict(zip(self.metrics, self.metric_sums.unbind(), strict=True))
        # The buffers still hold the last rollout, so this adds nothing to the update itself.
        explained = {"explained_variance": float(explained_variance(self.predictions, self.targets))}
        return read_means(sums, updates) | explained | self.optimizer.read_metrics(updates)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return the complete training state between two iterations: every tensor needed to continue exactly, in groups."""
        counters = {"key": self.key, "acted": self.acted, "shuffled": self.shuffled}
        return {"model": self.model(), "optim": self.optimizer.tensors(), "rng": counters}


def part_count(index: Tensor, batch: Tensor | None) -> float:
    """Return the number of parts of the size of `index` in `batch`; None: `index` is the whole batch."""
    return 1 if batch is None else len(batch) / len(index)


def in_precision(net: N, dtype: torch.dtype | None) -> N:
    """Return a copy of `net` with weights in `dtype`, to avoid converting them while acting; `net` itself if dtype is None."""
    if dtype is None:
        return net
    converted = copy.deepcopy(net).requires_grad_(False)
    network_config.share_buffers(converted, net)  # statistics are shared, not copied
    for module in converted.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            module.to(dtype)
    return converted


def _minibatch(size: int) -> int:
    """Return a divisor of `size`: an eighth of it if that is a whole number."""
    return size // math.gcd(size, _MINIBATCHES)


def _nearest_divisor(size: int, wanted: int) -> int:
    """Return the divisor of `size` nearest to `wanted`, the larger of two."""
    small = [k for k in range(1, math.isqrt(size) + 1) if size % k == 0]
    return min({*small, *(size // k for k in small)}, key=lambda k: (abs(k - wanted), -k))
