"""DQN: Q-learning from replay, with the extensions of Rainbow and Munchausen as options.

Follows double DQN (van Hasselt et al. 2016) with n-step returns, a Huber loss and gradient clipping. Left out: frame stacking
(the environment stacks frames), reward clipping (rewards are options of the game) and one epsilon shared by all environments
(each has its own final epsilon, as in Ape-X, so that the replay memory holds both careful and exploratory play). Dueling splits
the output only: value and advantages share all hidden layers. Noisy networks draw noise once per step for all environments and
samples instead of thousands of times. The options are in `dqn_options`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from redline import replay
from redline.algos import dqn_options, learner, networks
from redline.algos.exploration import epsilon_greedy, epsilon_ladder
from redline.algos.metrics import batch_mean, read_means
from redline.algos.network_config import share_buffers
from redline.algos.noisy import draw_noise
from redline.algos.optimizer import Optimizer, annealed_discount, flatten, linear
from redline.algos.td_targets import distributional_losses, td_targets
from redline.core import random
from redline.core.errors import UserError
from redline.core.records import Batch, PolicyInput, Spec, Transition
from redline.engine.runtime import Runtime
from redline.engine.stages import Stage, Stages
from redline.envs.batch import Rules
from redline.replay.contract import Replay, ReplayRequest

Config = dqn_options.Config
RESUME_FIXED = dqn_options.RESUME_FIXED
PRESETS = dqn_options.PRESETS


def memory_bytes(config: Config, spec: Spec, state_bytes: int, num_envs: int) -> dict[str, int]:
    """Return the approximate bytes of the replay memory on the device, keyed by the option that sets its size."""
    del spec, num_envs
    memory = replay.load(config.replay).memory_bytes(config.replay_capacity, state_bytes, config.prioritized)
    return {"replay_capacity": int(memory.device)}


def samples_per_step(config: Config, num_envs: int, accumulate: int) -> float:
    """Return the average number of times the learner trains on each environment step."""
    return config.updates * config.batch_size * accumulate / (num_envs * config.train_every)


def epsilon(config: Config, env_steps: Tensor, env_index: Tensor, num_envs: int) -> Tensor:
    """Return epsilon per environment, (N,) float32, after `env_steps` () steps of all environments together."""
    fraction = env_steps.to(torch.float32) / max(config.epsilon_steps, 1)
    return epsilon_ladder(config.epsilon_start, config.epsilon_high, config.epsilon_low, fraction, env_index, num_envs)


@torch.no_grad()
def select_actions(config: Config, net: nn.Module, policy_input: PolicyInput) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return epsilon-greedy actions (N,) int64, with one draw of noise for all environments, and no outputs."""
    rate = epsilon(config, policy_input.acted * policy_input.num_envs, policy_input.env_index, policy_input.num_envs)
    key = random.fold(policy_input.key, 2 * policy_input.draw)
    if config.noisy:
        draw_noise(net, random.fold(key, -1))
    values: Tensor = net(policy_input.obs, policy_input.legal)
    return epsilon_greedy(values, policy_input.legal, rate, key, policy_input.env_index), ()


def acting_network(spec: Spec, config: Config) -> networks.ValueNet:
    """Return a network for `select_actions`."""
    return build_network(spec, config, seed=0)


def build_network(spec: Spec, config: Config, seed: int) -> networks.ValueNet:
    """Return a value network with the config's options and initial weights drawn from `seed`."""
    sigma = config.noisy_sigma if config.noisy else None
    return networks.build(spec, config, seed, config.gamma, config.dueling, config.kind, sigma)


class Learner(learner.Learner):
    """Online and target network, trained on batches from a replay memory."""

    metrics = ("loss", "q_mean", "td_error")
    averages_gradients = True
    rollout_steps = 1
    config: Config
    optimizer: Optimizer

    def __init__(
        self,
        rules: Rules,
        config: Config,
        state: Any,
        num_envs: int,
        seed: int,
        runtime: Runtime,
        accumulate: int = 1,
    ) -> None:
        super().__init__(rules, config, state, num_envs, seed, runtime, accumulate)
        spec, device = self.spec, runtime.device
        self.samples_per_update = config.batch_size * accumulate
        self.updates_per_iteration = config.updates
        if not config.batch_norm:  # it needs the whole batch at once
            self.max_micro_batches = min(config.batch_size, learner.MAX_MICRO_BATCHES)
        # Only beta, the learning rate and the discount follow `progress`; epsilon counts environment steps.
        ends = (config.learning_rate_end, config.gamma_end)
        self.scheduled = config.prioritized or any(end is not None for end in ends)
        self.learning_rate = torch.tensor(config.learning_rate, device=device)
        self.discount = torch.tensor(config.gamma, device=device)  # () float32; with gamma_end, `sample` updates it
        if config.gamma_end is not None and spec.afterstates:
            raise UserError(
                "dqn.gamma_end is set, but with afterstates the discount is part of the network. Remove gamma_end."
            )
        if config.munchausen and spec.masked:
            raise UserError(
                "dqn.munchausen is on; expected a game in which every action is legal: the replay memory does not keep the "
                "legal actions of past states. Turn it off."
            )
        if config.munchausen and spec.afterstates and getattr(rules.game, "observe_afterstate", None) is not None:
            raise UserError(
                "dqn.munchausen is on; expected a game without observe_afterstate: samples have the chosen afterstate only, "
                "and soft values weigh all of them. Turn it off."
            )
        self.online = build_network(spec, config, seed).to(device)
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        if config.batch_norm:
            share_buffers(self.target, self.online)
        self.memory = self._make_memory(rules, state)  # after all checks, since it may create a file
        rate = config.learning_rate if config.learning_rate_end is None else self.learning_rate
        self.optimizer = Optimizer(self.online, rate, config.max_grad_norm, runtime)
        self.target_weights = flatten(self.target)
        self.updated = torch.zeros((), dtype=torch.int64, device=device)  # () int64: gradient steps so far
        self._metric_sums = torch.zeros(len(self.metrics), device=device)  # since the last log point
        self.metric_sums = dict(zip(self.metrics, self._metric_sums.unbind(), strict=True))  # views by name
        self._loss, self._apply = runtime.compile(self.loss), runtime.compile(self.apply)
        self._sample = runtime.compile(torch.no_grad()(self.sample))
        self._update_priorities = runtime.compile(torch.no_grad()(self.memory.update_priorities))

    def _make_memory(self, rules: Rules, state: Any) -> Replay:
        config, runtime = self.config, self.runtime
        request = ReplayRequest(
            rules=rules,
            state=state,
            capacity=config.replay_capacity,
            n_step=config.n_step,
            gamma=config.gamma if config.gamma_end is None else self.discount,
            alpha=config.priority_alpha if config.prioritized else None,
            key=self.own_key(random.fold(self.key, -1)),
            batch_size=config.batch_size,
            batches_per_iteration=config.updates * self.accumulate,
            folder=runtime.folder,
            notify=runtime.notify,
            pin_memory=runtime.pin_memory,
        )
        return replay.load(config.replay).make(request)

    def before_iteration(self) -> None:
        """Let the memory prepare the batches of this iteration."""
        self.memory.before_iteration()

    def after_iteration(self) -> None:
        """Let the memory store the transitions of this iteration."""
        self.memory.after_iteration()

    def adapt(self, saved: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return a checkpoint's replay memory, reshaped to fit this learner's."""
        return self.memory.adapt(saved)

    def loaded(self) -> bool:
        """Resume with the replay memory just loaded. Return False if it is empty."""
        return self.memory.loaded()

    def forget(self, lost: Tensor) -> None:
        self.memory.forget(lost)

    def resume_level(self, episodes: bool) -> str:
        """Return L3 only if checkpoints contain the replay memory: a file's rows may be overwritten before the run resumes."""
        if episodes:
            return "L3" if self.memory.in_checkpoints else "L2"
        return "L2" if self.memory.survives_interrupt else "L1"

    def interrupt(self) -> bool:
        """Mark the newest transitions as the last of their episodes."""
        return self.memory.interrupt()

    def close(self) -> None:
        """Release the memory."""
        self.memory.close()

    def policy(self, obs: Tensor, legal: Tensor | None = None) -> Tensor:
        """Return the greedy actions (N,) int64, without noise."""
        if self.config.noisy:
            draw_noise(self.online, None)
        with torch.no_grad(), self.runtime.autocast():
            values: Tensor = self.online(obs, legal)
        return values.argmax(1)

    @property
    def acting_network(self) -> nn.Module:
        return self.online

    def select_actions(self, policy_input: PolicyInput) -> tuple[Tensor, tuple[Tensor, ...]]:
        with self.runtime.autocast():
            return select_actions(self.config, self.online, policy_input)

    def record_actions(self, obs: Tensor, legal: Tensor | None, action: Tensor, outputs: tuple[Tensor, ...]) -> None:
        """Count a step of all environments; `ingest` stores observations with the outcome."""
        del obs, legal, action, outputs
        self.acted += 1

    def ingest(self, transition: Transition) -> None:
        """Write one step of all environments to the replay memory."""
        self.memory.write(transition.state, transition.action, transition.step)

    def clear(self) -> None:
        """Empty the replay memory."""
        self.memory.clear()

    def ready(self, iterations: int) -> bool:
        """Return whether an update is due and the memory holds learning_starts steps and at least one full n-step window."""
        return (
            (iterations + 1) % self.config.train_every == 0
            and iterations * self.total_envs >= self.config.learning_starts
            and iterations > self.config.n_step + self.memory.lead
        )

    def sample(self, number: Tensor) -> Batch:
        """Return batch `number` () int64, counted over all batches of the run."""
        config, key = self.config, random.fold(self.key, 2 * number + 1)
        if config.gamma_end is not None:
            self.discount.copy_(annealed_discount(config.gamma, config.gamma_end, self.progress))
        beta = config.priority_beta + (1.0 - config.priority_beta) * self.progress
        return self.memory.sample(self.own_key(key), config.batch_size, beta, number)

    def loss(self, number: Tensor, batch: Batch | None = None) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Return the loss () and the `metrics` (M,) of batch `number` () int64, then memory indices and TD errors, (B,) each.

        batch: a part of batch `number`; None samples the whole batch here. The losses and metrics of the parts add up to
        those of the gradient step. The indices are None unless the memory is prioritized; with return distributions, losses
        take the place of TD errors.
        """
        return self.batch_loss(number, self.sample(number) if batch is None else batch)

    def batch_loss(self, number: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Return the same as `loss`, for the transitions in `batch`."""
        config, key = self.config, random.fold(self.key, 2 * number + 1)
        if config.noisy:
            draw_noise(self.online, random.fold(key, -1))
            draw_noise(self.target, random.fold(key, -2))
        if config.kind is None:
            with self.runtime.autocast():
                values = self.online.chosen(batch.obs, batch.action)
                with torch.no_grad():
                    munchausen = config.munchausen_options
                    targets = td_targets(batch, self.online, self.target, config.double, munchausen)
            losses = F.huber_loss(values, targets, reduction="none", delta=config.huber)
            td_error = values - targets
        else:
            with self.runtime.autocast():
                values, losses = distributional_losses(
                    batch, self.online, self.target, config.double, config.munchausen_options
                )
            td_error = losses
        td_error = torch.where(batch.weight > 0, td_error.detach(), 0.0)
        parts = self.samples_per_update / len(batch.action)
        loss = batch_mean(losses * batch.weight) / parts
        means = torch.stack([batch_mean(values.detach()), batch_mean(td_error.abs())]) / parts
        return loss, torch.cat([loss.detach().unsqueeze(0), means]), batch.place, td_error

    def update(self) -> None:
        """Take the gradient steps of an iteration."""
        for _ in range(self.config.updates):
            self.gradient_step()

    def gradient_step(self) -> None:
        """Take one gradient step, over `accumulate` batches, and update the target network."""
        total: tuple[Tensor, ...] = ()
        sums: Tensor | None = None
        for part in range(self.accumulate):
            number = self.updated * self.accumulate + part
            gradients, metrics, place, td_error = self.within_memory(functools.partial(self.gradients, number))
            total = tuple(torch._foreach_add(total, gradients)) if total else gradients
            sums = metrics if sums is None else sums + metrics
            if place is not None:
                self._update_priorities(place, td_error)
        assert sums is not None
        total, sums = self.average_over_ranks(total, sums)
        self._metric_sums += sums
        self._apply(total)

    def gradients(self, number: Tensor) -> tuple[tuple[Tensor, ...], Tensor, Tensor | None, Tensor]:
        """Return the gradients, `metrics`, indices and TD errors of batch `number` () int64, from `micro_batches` parts."""
        if self.micro_batches == 1:
            loss, metrics, place, td_error = self._loss(number)
            return self.optimizer.gradient(loss), metrics, place, td_error
        batch = self._sample(number)
        size = -(-self.config.batch_size // self.micro_batches)
        total: tuple[Tensor, ...] = ()
        sums, td_errors = torch.zeros_like(self._metric_sums), []
        for start in range(0, self.config.batch_size, size):
            part = batch._make(None if x is None else x[start : start + size] for x in batch)
            loss, metrics, _, td_error = self._loss(number, part)
            gradients = self.optimizer.gradient(loss)
            total = tuple(torch._foreach_add(total, gradients)) if total else gradients
            sums += metrics
            td_errors.append(td_error)
        return total, sums, batch.place, torch.cat(td_errors)

    @torch.no_grad()
    def apply(self, gradients: tuple[Tensor, ...]) -> None:
        """Step the online network; every target_period steps, unless the step is skipped, move the target towards it by tau."""
        self.move_target(self.step_online(gradients))

    def step_online(self, gradients: tuple[Tensor, ...]) -> Tensor:
        """Step the online network; return () bool, False if the step was skipped."""
        if self.config.learning_rate_end is not None:
            self.learning_rate.copy_(linear(self.config.learning_rate, self.config.learning_rate_end, self.progress))
        stepped = self.optimizer.step(gradients)
        self.updated += 1
        return stepped

    def move_target(self, stepped: Tensor) -> None:
        """Move the target network towards the online network by tau if due. stepped: () bool, False if the step was skipped."""
        due = stepped & (self.updated % self.config.target_period == 0)
        self.target_weights.lerp_(self.optimizer.flat, torch.where(due, self.config.tau, 0.0))

    @property
    def stages(self) -> Stages:
        copies = Stage("host-device copies", compiled=False)
        return {
            "memory.before_iteration": copies,
            "memory.after_iteration": copies,
            "sample": Stage("sample"),
            "_sample": Stage("sample"),
            "batch_loss": Stage("forward"),
            "optimizer.gradient": Stage("backward", compiled=False),
            "_update_priorities": Stage("priorities"),
            "step_online": Stage("optimizer"),
            "move_target": Stage("target network"),
        }

    def read_metrics(self, updates: int) -> dict[str, float]:
        """Return the means over the last `updates` gradient steps and reset them."""
        return read_means(self.metric_sums, updates) | self.optimizer.read_metrics(updates)

    def current_metrics(self) -> dict[str, float]:
        """Return the mean epsilon of the environments and how full the memory is, from 0 to 1."""
        env_index = torch.arange(self.total_envs, device=self.acted.device)
        mean_epsilon = epsilon(self.config, self.acted * self.total_envs, env_index, self.total_envs).mean()
        written = self.memory.written
        fill = {} if written is None else {"replay_fill": min(int(written) / self.memory.rows, 1.0)}
        return {"epsilon": float(mean_epsilon)} | fill

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return the complete training state: every tensor needed to continue exactly, in groups."""
        counters = {"key": self.key, "acted": self.acted, "updated": self.updated}
        return self.trained_state() | {"rng": counters, "replay": self.memory.tensors()}

    def trained_state(self) -> dict[str, dict[str, Tensor]]:
        """Return the weights and the optimizer state, without waiting for the replay memory."""
        model = {f"online.{k}": v for k, v in self.online.state_dict().items()}
        model |= {f"target.{k}": v for k, v in self.target.state_dict().items()}
        return {"model": model, "optim": self.optimizer.tensors()}


def policy_network(spec: Spec, config: Config, model: dict[str, Tensor]) -> nn.Module:
    """Return the greedy network of a checkpoint's model group, without noise: forward(obs, legal=None) -> values (N, A)."""
    net = networks.build(spec, config, seed=0, gamma=config.gamma, dueling=config.dueling, kind=config.kind)
    online = {k.removeprefix("online."): v for k, v in model.items() if k.startswith("online.")}
    net.load_state_dict({k: v for k, v in online.items() if not k.endswith("_sigma")})
    return net.eval()
