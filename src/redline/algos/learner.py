"""Learner: the abstract base class of all algorithms, with every member that the training loop and the collectors use.

Shapes: N environments, A actions, T steps of a rollout. Tensors live on `runtime.device`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from redline.algos.network_config import NetworkConfig
from redline.algos.optimizer import Optimizer
from redline.core import faults, random
from redline.core.errors import UserError
from redline.core.records import PolicyInput, Spec, Transition
from redline.engine import triton_use
from redline.engine.out_of_memory import free_caches, is_out_of_memory
from redline.engine.runtime import Runtime
from redline.engine.stages import Stages
from redline.envs.batch import Rules

T = TypeVar("T")
MAX_MICRO_BATCHES = 256  # per batch: with more, launching the kernels takes far longer than their arithmetic


class Learner(ABC):
    """Acts in N environments, ingests their transitions and updates its networks.

    The loop calls, in every iteration:

        before_iteration()
        rollout_steps times: act(obs, legal) and ingest(transition), or record_actions(...) and ingest(transition)
        update(), if ready(iterations)
        after_iteration()

    `act`, `record_actions`, `ingest` and `update` may be compiled and captured as a CUDA graph: they must not read a
    tensor on the host (`.item()`, `.cpu()`, `if tensor:`), must write results into tensors allocated in `__init__`, and
    must keep all shapes fixed.
    """

    # Class attributes that a subclass may override.
    metrics: tuple[str, ...] = ()  # names of the values that `read_metrics` averages
    scheduled: bool = False  # the loop writes the completed fraction of training to `progress` before each iteration
    averages_gradients: bool = (
        False  # whether `update` calls `average_over_ranks`, so that several ranks can train together
    )
    needs_frame_stack: bool = False  # `ingest` needs the whole frame stack in final states, not the newest frame only
    optimizer: Optimizer | None = (
        None  # skips non-finite gradients; if all are non-finite, the run restores earlier weights
    )

    # Attributes that a subclass sets in `__init__`.
    rollout_steps: int  # T: steps every environment plays between two calls of `update`
    samples_per_update: int  # samples in one gradient step
    updates_per_iteration: int  # gradient steps in one call of `update`

    # A batch is differentiated in this many parts, one after another: the same gradient in less memory. A learner that
    # supports it computes gradients with `within_memory` and raises the maximum above 1.
    micro_batches: int = 1
    max_micro_batches: int = 1

    def __init__(
        self,
        rules: Rules,
        config: Any,
        state: Any,
        num_envs: int,
        seed: int,
        runtime: Runtime,
        accumulate: int = 1,
    ) -> None:
        """Set the attributes all learners share. The loop constructs every learner with these arguments.

        rules: the game, its options and the time limit; `rules.game.observe(rules.config, state)` gives observations.
        config: an instance of the algorithm's Config.
        state: the game's State of all environments, a NamedTuple of (N, …) tensors, as an example of shapes and dtypes.
        seed: of weights and random streams.
        runtime: device, precision and compiler to use.
        accumulate: batches whose gradients are added up for one gradient step.
        """
        del state
        self.rules, self.config = rules, config
        self.spec: Spec = rules.game.spec(rules.config)
        self.num_envs, self.runtime, self.accumulate = num_envs, runtime, accumulate
        # With several ranks, this one steps environments first_env to first_env + num_envs - 1 of total_envs.
        self.ranks, self.several_ranks = runtime.ranks, runtime.ranks.active
        self.first_env, self.total_envs = self.ranks.rank * num_envs, self.ranks.size * num_envs
        device = runtime.device
        if runtime.amp_dtype is not None:
            triton_use.prepare(device, runtime.notify)
        # () int32: root of the learner's random streams. Environments use the streams 0 to N - 1.
        self.key: Tensor = random.fold(random.seed_key(seed, device), -1)
        self.acted: Tensor = torch.zeros((), dtype=torch.int64, device=device)  # () int64: steps of every environment
        self.progress: Tensor = torch.zeros((), device=device)  # () float32: fraction of training done, 0 to 1

    # ----------------------------------------------------------------------------------------------------------- acting

    def act(self, obs: Tensor, legal: Tensor | None = None) -> Tensor:
        """Return the behaviour policy's actions (N,) int64 for all environments and record them.

        obs: (N, *spec.obs_shape) of spec.obs_dtype. legal: (N, A) bool, None where every action is legal.
        """
        env_index = torch.arange(self.first_env, self.first_env + self.num_envs, device=obs.device)
        policy_input = PolicyInput(
            obs, legal, self.key, env_index, self.total_envs, self.acted, self.acted, self.progress
        )
        selected = self.select_actions(policy_input)
        if not isinstance(selected, tuple) or len(selected) != 2:
            raise UserError(
                f"select_actions of {type(self).__module__} returned {type(selected).__name__}; expected the pair actions "
                "(N,) int64 and a tuple of the POLICY_OUTPUTS: without outputs, return actions, ()."
            )
        action, outputs = selected
        self.record_actions(obs, legal, action, outputs)
        return action

    @property
    @abstractmethod
    def acting_network(self) -> nn.Module:
        """The network whose weights the behaviour policy uses; same structure as the algorithm's `acting_network(...)`."""

    @abstractmethod
    def select_actions(self, policy_input: PolicyInput) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return actions (N,) int64 and the algorithm's POLICY_OUTPUTS, (N,) float32 each."""

    @abstractmethod
    def record_actions(self, obs: Tensor, legal: Tensor | None, action: Tensor, outputs: tuple[Tensor, ...]) -> None:
        """Store the inputs and results of `select_actions` for one step of all environments, and add 1 to `acted`.

        Actor processes select actions themselves; their collector calls this instead of `act`.
        Shapes as in `act` and `select_actions`.
        """

    @abstractmethod
    def policy(self, obs: Tensor, legal: Tensor | None = None) -> Tensor:
        """Return the greedy actions (N,) int64. Shapes as in `act`."""

    # --------------------------------------------------------------------------------------------------------- learning

    @abstractmethod
    def ingest(self, transition: Transition) -> None:
        """Store the outcome of the actions recorded last: one step of all environments."""

    @abstractmethod
    def update(self) -> None:
        """Take the gradient steps of one iteration, `updates_per_iteration` of them."""

    def average_over_ranks(self, gradients: tuple[Tensor, ...], metrics: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the gradients and metrics (M,) of a gradient step, averaged over all ranks with equal weight."""
        if not self.several_ranks:
            return gradients, metrics
        *averaged, metrics = self.ranks.mean_of((*gradients, metrics))
        return tuple(averaged), metrics

    def own_key(self, key: Tensor) -> Tensor:
        """Return a key () int32 specific to this rank, for random numbers that are not drawn per environment."""
        return random.fold(key, self.ranks.rank) if self.several_ranks else key

    def within_memory(self, compute: Callable[[], T]) -> T:
        """Return compute(); if it runs out of memory, repeat it with twice as many micro-batches.

        compute: returns gradients and anything else a gradient step needs, and must be safe to repeat. During a graph
        capture the error is raised instead: nothing has run yet, so the whole capture can be repeated.
        """
        while True:
            try:
                spoil = faults.reach("gradient")
                result = compute()
                if spoil:
                    faults.spoil(result)
                return result
            except Exception as error:
                capturing = self.runtime.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
                if capturing or not is_out_of_memory(error) or self.micro_batches >= self.max_micro_batches:
                    raise
            self.split_batches()  # outside `except`: the error's traceback kept the failed attempt's tensors alive

    def split_batches(self) -> bool:
        """Free cached memory and double `micro_batches`; return False, changing nothing, if it is already at its maximum."""
        if self.micro_batches >= self.max_micro_batches:
            return False
        self.micro_batches = min(2 * self.micro_batches, self.max_micro_batches)
        free_caches()
        return True

    @property
    def stages(self) -> Stages:
        """Parts of `update` that `redline profile` times separately; everything else is timed as `update`."""
        return {}

    def ready(self, iterations: int) -> bool:
        """Return whether to call `update` in this iteration, with `iterations` iterations of experience collected before it."""
        del iterations
        return True

    @abstractmethod
    def read_metrics(self, updates: int) -> dict[str, float]:
        """Return the mean of each metric over the last `updates` gradient steps and reset the sums.

        Called at log points only; may wait for the device.
        """

    def current_metrics(self) -> dict[str, float]:
        """Return current values, such as epsilon. Called at every log point, even before the first update."""
        return {}

    @classmethod
    def states_evaluated(cls, rules: Rules, config: Any, num_envs: int) -> int:
        """Return the largest number of states a network evaluates at once without gradients, to estimate memory."""
        del rules, config
        return num_envs

    # ------------------------------------------------------------------------------------------------------------ saving

    @abstractmethod
    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return the complete training state between two iterations: every tensor needed to continue exactly, in groups.

        Groups: `model` (weights; read by `policy_network`), `optim`, `rng` (counters and keys) and, for learners with a
        replay memory, `replay`. Loading a checkpoint writes into these tensors, so they must not be copies.
        """

    def trained_state(self) -> dict[str, dict[str, Tensor]]:
        """Return the groups `model` and `optim` of `state_dict`. Called during training: override it if `state_dict` waits."""
        return {group: tensors for group, tensors in self.state_dict().items() if group in ("model", "optim")}

    def adapt(self, saved: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return a checkpoint's `replay` group, reshaped to fit this learner's."""
        return saved

    def loaded(self) -> bool:
        """Resume after a checkpoint was copied into `state_dict`. Return False if the replay memory is lost."""
        return True

    def resume_level(self, episodes: bool) -> str:
        """Return how much a checkpoint restores, depending on whether the collector restores running `episodes`.

        L3: everything, bit for bit; L2: all but the episodes or some transitions; L1: no transitions.
        """
        return "L3" if episodes else "L2"

    def interrupt(self) -> bool:
        """Prepare for new episodes in all environments: the newest transitions have no successors.

        Return False if the replay memory is lost.
        """
        return True

    def forget(self, lost: Tensor) -> None:  # noqa: B027 (optional)
        """Exclude the newest transition from learning where lost (N,) bool: the environment failed, so its outcome is unknown.

        It was ingested as a truncation without reward, in the state in which the action was taken. Called on the host.
        """

    def clear(self) -> None:  # noqa: B027 (optional)
        """Discard all experience collected so far."""

    # ------------------------------------------------------------- called on the host, outside compiled and captured code

    def before_iteration(self) -> None:  # noqa: B027 (optional)
        """Prepare an iteration."""

    def after_iteration(self) -> None:  # noqa: B027 (optional)
        """Finish an iteration."""

    def close(self) -> None:  # noqa: B027 (optional)
        """Release threads and files. No method is called afterwards."""


_COUNTS = {  # attribute -> meaning
    "rollout_steps": "the steps every environment plays between two updates",
    "samples_per_update": "the samples in one gradient step",
    "updates_per_iteration": "the gradient steps in one call of update",
}


def check_learner(learner: Learner) -> None:
    """Raise UserError, naming the member, if a learner lacks a count that the loop reads or the state_dict group `rng`."""
    for name, meaning in _COUNTS.items():
        value = getattr(learner, name, None)
        if not isinstance(value, int) or value < 1:
            problem = f"is {value!r}" if hasattr(learner, name) else "is missing"
            raise UserError(
                f"Learner.{name} of {type(learner).__module__} {problem}; expected a whole number above 0, {meaning}: "
                "set it in __init__."
            )
    if "rng" not in learner.state_dict():
        raise UserError(
            f"state_dict of {type(learner).__module__} has no group rng, so that a resumed run would repeat its random "
            'numbers; add "rng": {"key": self.key, "acted": self.acted}.'
        )


def check_ranks(learner: Learner, algo: str) -> None:
    """Raise UserError if this learner cannot train on several ranks together."""
    if not learner.several_ranks:
        return
    if not learner.averages_gradients:
        raise UserError(
            f"{algo} does not average its gradients over ranks; train it without torchrun, or let its update call "
            "average_over_ranks and set averages_gradients = True."
        )
    if isinstance(learner.config, NetworkConfig) and learner.config.batch_norm:
        raise UserError(
            "batch_norm is on, but every rank would normalise over its own part of the batch; turn it off, or train without "
            "torchrun."
        )


def check_acted(learner: Learner, before: int) -> None:
    """Raise UserError if `acted` still has its value `before` the iteration. Waits for the device."""
    if int(learner.acted) == before:
        raise UserError(
            f"record_actions of {type(learner).__module__} leaves Learner.acted at {before}, so that every step would draw the "
            "same random numbers; add self.acted += 1 to it."
        )
