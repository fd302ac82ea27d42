"""What learners from fresh play have in common: a rollout of all environments, learned from in shuffled minibatches, then forgotten.

    environment 0  environment 1  …  environment N-1
0     s a r   s a r       s a r     Rows are written while playing, one a step. After `rollout` of them targets are
1     s a r   s a r       s a r     computed backwards in time, and all are drawn `epochs` times in a new order.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from abc import abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from redline.algos import networks
from redline.algos.learner import Learner
from redline.algos.metrics import read_means
from redline.algos.optimizer import Optimizer, linear
from redline.core import random
from redline.core.errors import UserError
from redline.core.records import Spec, Transition, map_record
from redline.engine.runtime import Runtime
from redline.envs.batch import Rules


@dataclass(frozen=True)
class OnPolicyConfig(networks.NetworkConfig):
    """Settings that such learners share."""

    rollout_steps: int = 32  # steps every environment plays between two updates
    epochs: int = 2  # times each of them is learned from
    batch_size: int = 0  # samples a gradient step; 0: an eighth of what is played between two updates
    learning_rate: float = 1e-3  # at the start of training
    learning_rate_end: float = 1e-4  # at its end; in between on a straight line
    gamma: float = 0.99
    gamma_end: float | None = None  # at the end of training, on a straight line of 1 / (1 - gamma); none: the same
    max_grad_norm: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        self.expect(("rollout_steps", "epochs"), "at least 1", lambda x: x >= 1)
        self.expect(("gamma",), "a number from 0 to 1", lambda x: 0 <= x <= 1)
        self.expect(("gamma_end",), "a number from 0 to below 1, or none", lambda x: x is None or 0 <= x < 1)
        if self.gamma_end is not None:
            self.expect(("gamma",), "below 1 where gamma_end is set", lambda x: x < 1)
        self.expect(("learning_rate", "max_grad_norm"), "a number above 0", lambda x: x > 0)
        self.expect(("batch_size", "learning_rate_end"), "0 or more", lambda x: x >= 0)


RESUME_FIXED = (*networks.NETWORK_RESUME_FIXED, "gamma", "rollout_steps")  # a continued run must keep these
_UNROLLED = 128  # steps of a rollout up to which returns are compiled
_SELDOM = 32  # steps between two truncations of a environment by the game itself that are reckoned with
_PARTS = 8  # minibatches an epoch, where nothing else is asked for
C = TypeVar("C", bound=OnPolicyConfig)
N = TypeVar("N", bound=nn.Module)


def fill_defaults(config: C, num_envs: int, requested: Collection[str]) -> tuple[C, dict[str, str]]:
    """Return the config with a batch size that divides the rollout, unless one was `requested`, and the reason."""
    if "batch_size" not in requested and num_envs * config.rollout_steps % max(config.batch_size, 1):
        config = dataclasses.replace(config, batch_size=0)
    return fill_batch_size(config, num_envs)


def samples_per_step(config: OnPolicyConfig, num_envs: int, accumulate: int) -> float:
    """Return how often the learner trains on each environment step."""
    del num_envs, accumulate
    return float(config.epochs)


def fill_batch_size(config: C, num_envs: int) -> tuple[C, dict[str, str]]:
    """Return the config with an eighth of the rollout for a batch size of 0, and the reason."""
    if config.batch_size:
        return config, {}
    filled = dataclasses.replace(config, batch_size=_divisor(max(num_envs, 1) * config.rollout_steps))
    return filled, {"batch_size": "an eighth of what is played between two updates"}


def memory_bytes(config: OnPolicyConfig, spec: Spec, state_bytes: int, num_envs: int) -> dict[str, int]:
    """About what the learner will allocate, by the setting that decides it. `state_bytes` are those of one State."""
    inputs = math.prod(spec.obs_shape)
    sample = inputs * spec.obs_dtype.itemsize + spec.num_actions * spec.masked + 40
    rows = spec.obs_shape[0] if spec.afterstates else 1
    return {
        "rollout_steps": num_envs * (config.rollout_steps * sample + state_bytes),
        "batch_size": config.batch_size * (8 * inputs + 8 * rows * sum(config.hidden)),
    }


class OnPolicyLearner(Learner):
    """What does not depend on what is learned. Between two updates every environment plays `rollout_steps` steps."""

    config: OnPolicyConfig
    metrics: tuple[str, ...] = ("loss",)
    scheduled = True  # the learning rate follows `progress`
    needs_frame_stack = True

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
    ) -> None:
        """`state` (N, …) is an example of the game's State of all environments."""
        super().__init__(rules, config, state, num_envs, seed, runtime, accumulate)
        spec = self.spec
        if config.gamma_end is not None and spec.afterstates:
            raise UserError("gamma_end is set; with afterstates the discount is part of the network. Leave it away.")
        self.net = net
        self.rollout_steps, self.samples_per_update = config.rollout_steps, config.batch_size * accumulate
        size = config.rollout_steps * num_envs
        if size % self.samples_per_update:
            algo = type(self).__module__.rpartition(".")[2]
            if size % accumulate:
                raise UserError(
                    f"accumulate is {accumulate}; expected a divisor of the {size:,} steps that {num_envs:,} environments "
                    f"play in a rollout of {config.rollout_steps}."
                )
            times = f" times accumulate {accumulate}" if accumulate > 1 else ""
            raise UserError(
                f"{algo}.batch_size is {config.batch_size:,}{times}; expected a divisor of the {size:,} steps that "
                f"{num_envs:,} environments play in a rollout of {config.rollout_steps}, such as "
                f"{_divisor(size // accumulate):,}."
            )
        self.updates_per_iteration = config.epochs * (size // self.samples_per_update)
        device = runtime.device
        self.rate = torch.tensor(config.learning_rate, device=device)
        self.optimizer = Optimizer(net, self.rate, config.max_grad_norm, runtime)
        self.player = in_precision(net, runtime.amp_dtype)  # plays; `before` gives it the weights learned
        self.shuffled = torch.zeros((), dtype=torch.int64, device=device)  # epochs so far

        # What was played since the last update, row after row of all environments. It is written whole before it is read, so no
        # checkpoint needs it.
        self.row = torch.zeros((), dtype=torch.int64, device=device)
        self.obs = torch.zeros(size, *spec.obs_shape, dtype=spec.obs_dtype, device=device)
        self.legal = torch.ones(size, spec.num_actions, dtype=torch.bool, device=device) if spec.masked else None
        self.action = torch.zeros(size, dtype=torch.int64, device=device)
        self.ended = torch.zeros(size, dtype=torch.bool, device=device)
        self.value, self.reward, self.target = (torch.zeros(size, device=device) for _ in range(3))
        self.neutral = self.value  # targets from which nothing is learned
        self.order = torch.zeros(size, dtype=torch.int64, device=device)
        # States whose value is asked for in `update`: for every environment those in which it was cut short, up to `cuts` of them,
        # then the one it stopped in. A environment that is cut short more often learns nothing from those steps.
        limits = [limit for limit in (rules.time_limit, spec.limit) if limit] + [_SELDOM] * spec.truncates
        self.cuts = -(-config.rollout_steps // min(limits)) if limits else 0
        self.cut = torch.zeros(num_envs, dtype=torch.int64, device=device)  # times in this rollout
        self.truncated = torch.zeros(size, dtype=torch.bool, device=device)
        self.finals = map_record(lambda x: x.new_zeros((self.cuts + 1) * num_envs, *x.shape[1:]), state)
        if spec.frames > 1:
            stacked = {k: getattr(self.finals, k) for k in rules.game.STACKED}  # type: ignore[attr-defined]
            stacked = {k: x.unsqueeze(1).repeat_interleave(spec.frames, 1) for k, x in stacked.items()}
            self.finals = self.finals._replace(**stacked)

        totals = torch.zeros(len(self.metrics), device=device)
        self.totals, self.sums = totals, dict(zip(self.metrics, totals.unbind(), strict=True))  # since the last log
        # Returns are computed step by step: written out, a long rollout would take minutes to compile.
        self._prepare = runtime.compile(self.prepare) if config.rollout_steps <= _UNROLLED else self.prepare
        self._shuffle = runtime.compile(self.shuffle)
        self._loss, self._apply = runtime.compile(self.loss), runtime.compile(self.apply)

    # ------------------------------------------------------------------------------------- what a learner must say

    @abstractmethod
    def value_of(self, state: Any) -> Tensor:
        """What States are worth, (N,) float32."""

    @abstractmethod
    def prepare(self) -> None:
        """Compute `target`, and this update's learning rate, from the rollout."""

    @abstractmethod
    def loss(self, index: Tensor, whole: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Of the samples numbered `index` (B,) int64: the loss () and what is measured, in the order of `metrics`.

        `whole` is the batch that they are a part of, where gradients are accumulated.
        """

    # ------------------------------------------------------------------------------------------------------- playing

    @torch.no_grad()
    def before_iteration(self) -> None:
        """What plays has the weights that were learned."""
        if self.player is not self.net:
            torch._foreach_copy_(list(self.player.parameters()), list(self.net.parameters()))

    @property
    def acting_network(self) -> nn.Module:
        return self.net

    def record_actions(self, obs: Tensor, legal: Tensor | None, action: Tensor, outputs: tuple[Tensor, ...]) -> Tensor:
        """Write what a row was played from; returns where it lies, (N,) int64."""
        slot: Tensor = self.row * self.num_envs + torch.arange(self.num_envs, device=obs.device)
        self.obs.index_copy_(0, slot, obs)
        if self.legal is not None:
            assert legal is not None
            self.legal.index_copy_(0, slot, legal)
        self.action.index_copy_(0, slot, action)
        self.value.index_copy_(0, slot, outputs[0])
        self.acted += 1
        return slot

    def ingest(self, transition: Transition) -> None:
        """Remember what came of the actions."""
        step = transition.step
        env_index = torch.arange(self.num_envs, device=step.reward.device)
        slot = self.row * self.num_envs + env_index
        self.reward.index_copy_(0, slot, step.reward)
        self.ended.index_copy_(0, slot, step.terminated | step.truncated)
        self.truncated.index_copy_(0, slot, step.truncated)
        kept = torch.where(step.truncated, self.cut.clamp(max=self.cuts), self.cuts) * self.num_envs + env_index
        for name, states in self.finals._asdict().items():
            if name not in self.rules.game.HIDDEN:
                states.index_copy_(0, kept, getattr(step.final_state, name))
        self.cut += step.truncated
        self.row.copy_((self.row + 1) % self.config.rollout_steps)

    def played(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The rollout's reward and value (T, N), the value (N,) of where it stopped, and ended (T, N).

        An episode cut short has the value of where it was cut in its last reward.
        """
        shape = (self.config.rollout_steps, self.num_envs)
        reward, value, ended, truncated = (x.view(shape) for x in (self.reward, self.value, self.ended, self.truncated))
        worth = self.value_of(self.finals).view(-1, self.num_envs)
        if self.cuts:
            number = truncated.to(torch.int64).cumsum(0) - 1  # of the environment's cuts
            ahead = self.discount() * worth.gather(0, number.clamp(0, self.cuts - 1))
            known = torch.where(number < self.cuts, reward + ahead, self.neutral.view(shape))
            reward = torch.where(truncated, known, reward)
            self.cut.zero_()
        return reward, value, worth[-1], ended

    # ------------------------------------------------------------------------------------------------------ learning

    def update(self) -> None:
        """Learn from the rollout, `epochs` times."""
        self._prepare()
        part = self.config.batch_size
        for _ in range(self.config.epochs):
            self._shuffle()
            for start in range(0, self.order.shape[0], self.samples_per_update):
                total: tuple[Tensor, ...] = ()
                whole = self.order[start : start + self.samples_per_update]
                for index in whole.split(part):
                    loss, measured = self._loss(index, whole if self.accumulate > 1 else None)
                    gradients = self.optimizer.gradient(loss)
                    total = tuple(torch._foreach_add(total, gradients)) if total else gradients
                    self.totals += measured
                self._apply(total)

    def discount(self) -> float | Tensor:
        """Of a step, at this point of training: how far ahead it looks, 1 / (1 - gamma) steps, grows evenly."""
        start, end = self.config.gamma, self.config.gamma_end
        return start if end is None else 1 - 1 / linear(1 / (1 - start), 1 / (1 - end), self.progress)

    def follow_schedule(self) -> None:
        """This update's learning rate."""
        self.rate.copy_(linear(self.config.learning_rate, self.config.learning_rate_end, self.progress))

    @torch.no_grad()
    def shuffle(self) -> None:
        """A new order of all samples."""
        number = torch.arange(self.order.shape[0], device=self.order.device)
        draws = random.bits(random.fold(self.key, 2 * self.shuffled + 1), number)
        self.order.copy_(torch.sort(draws, stable=True).indices)  # stable: draws may be equal
        self.shuffled += 1

    @torch.no_grad()
    def apply(self, gradients: tuple[Tensor, ...]) -> None:
        """A gradient step."""
        self.optimizer.step(gradients)

    def read_metrics(self, updates: int) -> dict[str, float]:
        """Means over the last `updates`, which start again."""
        return read_means(self.sums, updates) | {"skipped_updates": int(self.optimizer.skipped)}

    @abstractmethod
    def model(self) -> dict[str, Tensor]:
        """All weights, by name."""

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Everything that decides what comes next, between two iterations, in groups."""
        counters = {"key": self.key, "acted": self.acted, "shuffled": self.shuffled}
        return {"model": self.model(), "optim": self.optimizer.tensors(), "rng": counters}


def in_precision(net: N, dtype: torch.dtype | None) -> N:
    """A copy of the network whose products are in `dtype` without a conversion; itself where there is none."""
    if dtype is None:
        return net
    found = copy.deepcopy(net).requires_grad_(False)
    for mine, original in zip(found.modules(), net.modules(), strict=True):
        for name, buffer in original.named_buffers(recurse=False):  # statistics are shared, not copied
            setattr(mine, name, buffer)
        if isinstance(mine, nn.Linear | nn.Conv2d):
            mine.to(dtype)
    return found


def _divisor(size: int) -> int:
    """A divisor of `size`: the eighth of it where that is whole."""
    return size // math.gcd(size, _PARTS)
