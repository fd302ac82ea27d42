"""Double DQN with replay.

Follows van Hasselt et al. 2016 with n-step returns, a Huber loss and gradient clipping. Left out: frame stacking (games are
Markov), reward clipping (rewards are set in the game's options), annealed random exploration for every environment alike
(each environment keeps its own epsilon, as in Ape-X, so that careful and bold play are both in the memory). Dueling splits
the output only: value and advantages share all hidden layers. Switches: distributions of returns (C51 and QR-DQN), Munchausen
rewards, noisy networks (one draw for all environments and samples of a step); PRESETS names combinations of them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from redline import replay
from redline.algos import layers, networks
from redline.algos import learner as base
from redline.algos.distribution import Categorical, Kind, Quantile
from redline.algos.exploration import epsilon_ladder
from redline.algos.metrics import read_means
from redline.algos.optimizer import Optimizer, flatten, linear
from redline.core import random, select
from redline.core.errors import UserError
from redline.core.records import Batch, PolicyInput, Spec, Transition
from redline.engine.runtime import Runtime
from redline.envs.batch import Rules
from redline.replay.contract import Replay, ReplayRequest

_SHARES = ("gamma", "tau", "epsilon_start", "epsilon_high", "epsilon_low", "priority_alpha", "priority_beta")


@dataclass(frozen=True)
class Config(networks.NetworkConfig):
    """Settings of DQN."""

    batch_size: int = 512  # transitions a gradient step
    updates: int = 1  # gradient steps an iteration (an iteration steps every environment once)
    learning_rate: float = 1e-3
    learning_rate_end: float | None = None  # at the end of training, on a straight line; none: the same
    gamma: float = 0.97
    n_step: int = 3
    double: bool = True  # the online network chooses, the target network judges
    dueling: bool = False
    distribution: Literal["none", "categorical", "quantile"] = "none"  # learn how returns are spread: C51, QR-DQN
    atoms: int = 51  # of a distribution: fixed returns, or quantiles
    v_min: float = -10.0  # lowest return of a categorical distribution
    v_max: float = 10.0  # highest one
    munchausen: bool = False  # likely actions earn more, and soft values follow (Vieillard et al. 2020); without double
    munchausen_alpha: float = 0.9  # share of the scaled log-probability that is earned
    munchausen_tau: float = 0.03  # temperature: an action worth so much less is about a third as likely
    munchausen_clip: float = -1.0  # lowest scaled log-probability
    noisy: bool = False  # explore by noise in the weights (Fortunato et al. 2018), beside epsilon
    noisy_sigma: float = 0.5  # of it, at first
    huber: float = 1.0  # errors beyond this count linearly
    max_grad_norm: float = 10.0
    target_period: int = 1  # gradient steps between updates of the target network
    tau: float = 0.01  # share of the online weights taken over then; 1 is a hard copy
    epsilon_start: float = 1.0
    epsilon_high: float = 0.1  # the boldest environment's share of random moves in the end
    epsilon_low: float = 0.001  # the most careful one's
    epsilon_steps: int = 1_000_000  # environment steps from start to end
    replay: str = replay.DEFAULT  # kind of replay memory; `redline list` shows them
    replay_capacity: int = 1_000_000  # transitions
    prioritized: bool = False  # draw what was judged wrongly more often (Schaul et al. 2016)
    priority_alpha: float = 0.5  # how much more often: 0 not at all, 1 in proportion to the error
    priority_beta: float = 0.4  # how much of the bias is undone at the start of training; all of it at the end
    learning_starts: int = 50_000  # environment steps before the first gradient step

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("batch_size", "updates", "n_step", "target_period", "replay_capacity"):
            if getattr(self, name) < 1:
                raise UserError(f"dqn.{name} is {getattr(self, name)}; expected at least 1.")
        for name in (*_SHARES, "munchausen_alpha"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"dqn.{name} is {getattr(self, name)}; expected a number from 0 to 1.")
        for name in ("learning_rate", "huber", "max_grad_norm", "munchausen_tau"):
            if not getattr(self, name) > 0:
                raise UserError(f"dqn.{name} is {getattr(self, name)}; expected a number above 0.")
        if self.learning_rate_end is not None and not self.learning_rate_end >= 0:
            raise UserError(f"dqn.learning_rate_end is {self.learning_rate_end}; expected 0 or more, or none.")
        replay.check(self.replay)
        if self.distribution not in ("none", "categorical", "quantile"):
            raise UserError(f"dqn.distribution is '{self.distribution}'; expected none, categorical, quantile.")
        if self.atoms < 2:
            raise UserError(f"dqn.atoms is {self.atoms}; expected at least 2.")
        if not -math.inf < self.v_min < self.v_max < math.inf:
            raise UserError(f"dqn.v_min is {self.v_min}; expected a number below dqn.v_max, {self.v_max}.")
        if not self.munchausen_clip <= 0:
            raise UserError(f"dqn.munchausen_clip is {self.munchausen_clip}; expected 0 or less.")
        if not 0 <= self.noisy_sigma < math.inf:
            raise UserError(f"dqn.noisy_sigma is {self.noisy_sigma}; expected 0 or more.")
        if self.munchausen and self.double:
            raise UserError(
                "dqn.munchausen is on; expected dqn.double off with it: soft values weigh all actions, there is no chosen one "
                "to judge. Add --no-dqn.double."
            )

    @property
    def kind(self) -> Kind | None:
        """Of distribution; None: only the mean is learned."""
        if self.distribution == "none":
            return None
        quantiles = Quantile(self.atoms, self.huber)
        return quantiles if self.distribution == "quantile" else Categorical(self.atoms, self.v_min, self.v_max)


_NETWORK = ("dueling", "distribution", "atoms", "v_min", "v_max", "noisy")
# A continued run must keep these.
RESUME_FIXED = (
    *networks.NETWORK_RESUME_FIXED,
    *_NETWORK,
    "n_step",
    "gamma",
    "replay",
    "replay_capacity",
    "prioritized",
)

# Combinations of options that go well together, by name. What is asked for besides wins over them.
PRESETS: dict[str, dict[str, Any]] = {
    "plain": {"double": True},
    "rainbow": {  # Hessel et al. 2018
        "distribution": "categorical",
        "double": True,
        "dueling": True,
        "n_step": 3,
        "prioritized": True,
        "noisy": True,
    },
    "modern": {  # after Clark et al. 2024 (Beyond the Rainbow), with uniform replay
        "distribution": "quantile",
        "atoms": 32,
        "munchausen": True,
        "double": False,
        "layer_norm": True,
        "n_step": 3,
    },
}


def memory_bytes(config: Config, spec: Spec, state_bytes: int, num_envs: int) -> dict[str, int]:
    """About what the learner will allocate on the device, by the setting that decides it.

    `state_bytes` are those of the fields of one State that observations read.
    """
    del num_envs
    inputs = 4 * math.prod(spec.obs_shape)
    memory = replay.load(config.replay).memory_bytes(config.replay_capacity, state_bytes, config.prioritized)
    pairs = 0 if config.distribution == "none" else config.atoms * (config.atoms + 4 * spec.num_actions)
    return {"batch_size": config.batch_size * 4 * (inputs + pairs), "replay_capacity": int(memory.device)}


def samples_per_step(config: Config, num_envs: int, accumulate: int) -> float:
    """Return how often the learner trains on each environment step, on average."""
    return config.updates * config.batch_size * accumulate / num_envs


def epsilon(config: Config, env_steps: Tensor, env_index: Tensor, num_envs: int) -> Tensor:
    """Share of random moves of each environment, (N,) float32: the ladder is reached after epsilon_steps."""
    done = env_steps.to(torch.float32) / max(config.epsilon_steps, 1)
    return epsilon_ladder(config.epsilon_start, config.epsilon_high, config.epsilon_low, done, env_index, num_envs)


def td_targets(config: Config, batch: Batch, online: Any, target: Any) -> Tensor:
    """What the value of (obs, action) should be, (B,): the networks judge the best legal action of next_obs."""
    if config.munchausen:
        values: Tensor = target(batch.next_obs, batch.next_legal)
        policy, reward = munchausen(config, batch, target(batch.obs), values)
        return reward + going_on(batch) * (policy * values).sum(1)
    chooser = online if config.double else target
    values = chooser(batch.next_obs, batch.next_legal)
    best = values.argmax(1)
    following = target.chosen(batch.next_obs, best) if config.double else networks.gather(values, best)
    return batch.reward + going_on(batch) * following


def distribution_losses(config: Config, batch: Batch, online: Any, target: Any) -> tuple[Tensor, Tensor]:
    """As `td_targets`, of distributions: the mean values of (obs, action) and their losses, both (B,)."""
    kind: Kind = online.kind
    taken = batch.action.view(-1, 1, 1).expand(-1, 1, kind.atoms)
    outputs = online.outputs(batch.obs).gather(1, taken).squeeze(1)
    with torch.no_grad():
        following = target.outputs(batch.next_obs)
        values = networks.masked(kind.expected(following), batch.next_legal)
        reward = batch.reward
        if config.munchausen:
            policy, reward = munchausen(config, batch, target(batch.obs), values)
        else:
            best = (online(batch.next_obs, batch.next_legal) if config.double else values).argmax(1)
            policy = F.one_hot(best, values.shape[1])
        mixture = kind.mixed(following, policy)
    return kind.expected(outputs), kind.losses(outputs, mixture, reward, going_on(batch))


def going_on(batch: Batch) -> Tensor:
    """Discounts (B,). A state without a legal action, as below a ceiling that came down, is worth nothing."""
    return batch.discount if batch.next_legal is None else torch.where(batch.next_legal.any(1), batch.discount, 0.0)


def munchausen(config: Config, batch: Batch, values: Tensor, next_values: Tensor) -> tuple[Tensor, Tensor]:
    """The soft policy in next_obs (B, A), and the rewards with what Munchausen DQN adds to them (B,).

    The target network's values (B, A) in obs and in next_obs give the soft policies. The action taken earns alpha times its
    scaled log-probability, clipped; where the game goes on, the policy's scaled entropy is earned too, which together with the
    mean of next_values makes the soft value. Over n steps only the first action earns so: of the steps between, the memory
    hands out the rewards, not what was seen.
    """
    tau = config.munchausen_tau
    earned = tau * networks.gather((values / tau).log_softmax(1), batch.action)
    log_policy = (next_values / tau).log_softmax(1)
    policy = log_policy.exp()
    entropy = -(policy * log_policy).sum(1)
    reward = batch.reward + config.munchausen_alpha * earned.clamp(min=config.munchausen_clip)
    return policy, reward + going_on(batch) * tau * entropy


POLICY_OUTPUTS: tuple[str, ...] = ()  # what is said of each action besides it


@torch.no_grad()
def select_actions(config: Config, net: nn.Module, policy_input: PolicyInput) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Actions (N,) int64: epsilon-greedy, each environment with its own epsilon, all with one noise; and OUTPUTS."""
    rate = epsilon(config, policy_input.acted * policy_input.num_envs, policy_input.env_index, policy_input.num_envs)
    key = random.fold(policy_input.key, 2 * policy_input.draw)
    explore = random.uniform(random.bits(key, 2 * policy_input.env_index)) < rate
    draw = random.bits(key, 2 * policy_input.env_index + 1)
    if config.noisy:
        layers.draw_noise(net, random.fold(key, -1))
    values: Tensor = net(policy_input.obs, policy_input.legal)
    anything = (
        random.below(draw, values.shape[1]) if policy_input.legal is None else select.draw(policy_input.legal, draw)
    )
    return torch.where(explore, anything, values.argmax(1)), ()


def acting_network(spec: Spec, config: Config) -> networks.ValueNet:
    """What plays: `behave` is asked with it."""
    sigma = config.noisy_sigma if config.noisy else None
    return networks.build(spec, config, 0, config.gamma, config.dueling, config.kind, sigma)


class Learner(base.Learner):
    """Four verbs: act, ingest, update, state_dict."""

    metrics = ("loss", "q_mean")
    rollout_steps = 1
    config: Config

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
        """`state` (N, …) is an example of the game's State of all environments."""
        super().__init__(rules, config, state, num_envs, seed, runtime, accumulate)
        spec, device = self.spec, runtime.device
        self.samples_per_update = config.batch_size * accumulate
        self.updates_per_iteration = config.updates
        # Only beta and the learning rate follow the share of training done; epsilon has its own clock.
        self.scheduled = config.prioritized or config.learning_rate_end is not None
        self.rate = torch.tensor(config.learning_rate, device=device)
        if config.munchausen and spec.masked:
            raise UserError(
                "dqn.munchausen is on; expected a game in which every action is legal: the memory does not know which ones "
                "were when an action was taken. Leave it off."
            )
        sigma = config.noisy_sigma if config.noisy else None
        self.online = networks.build(spec, config, seed, config.gamma, config.dueling, config.kind, sigma).to(device)
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.memory = self._make_memory(rules, state)  # after all that may be refused: it may be a file
        rate = config.learning_rate if config.learning_rate_end is None else self.rate
        self.optimizer = Optimizer(self.online, rate, config.max_grad_norm, runtime)
        self.target_flat = flatten(self.target)
        self.updated = torch.zeros((), dtype=torch.int64, device=device)  # gradient steps so far
        self.sums = {name: torch.zeros((), device=device) for name in self.metrics}  # since the last log
        self._loss, self._apply = runtime.compile(self.loss), runtime.compile(self.apply)
        self._rank = runtime.compile(torch.no_grad()(self.memory.update_priorities))

    def _make_memory(self, rules: Rules, state: Any) -> Replay:
        config, runtime = self.config, self.runtime
        request = ReplayRequest(
            rules=rules,
            state=state,
            capacity=config.replay_capacity,
            n_step=config.n_step,
            gamma=config.gamma,
            alpha=config.priority_alpha if config.prioritized else None,
            key=random.fold(self.key, -1),
            batch_size=config.batch_size,
            batches_per_iteration=config.updates * self.accumulate,
            folder=runtime.folder,
            notify=runtime.notify,
        )
        return replay.load(config.replay).make(request)

    def before_iteration(self) -> None:
        """Have ready what is learned from."""
        self.memory.before_iteration()

    def after_iteration(self) -> None:
        """Take away what was played."""
        self.memory.after_iteration()

    def adapt(self, saved: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """A checkpoint's memory as it fits into this one's."""
        return self.memory.adapt(saved)

    def loaded(self) -> bool:
        """Go on from a memory that was filled from outside; False: it is empty."""
        return self.memory.loaded()

    def interrupt(self) -> bool:
        """Mark the newest transitions as the last of their episodes."""
        return self.memory.interrupt()

    def close(self) -> None:
        """Let go of the memory."""
        self.memory.close()

    def policy(self, obs: Tensor, legal: Tensor | None = None) -> Tensor:
        """Greedy actions (N,) int64, without noise. legal (N, A) bool, None: all are."""
        if self.config.noisy:
            layers.draw_noise(self.online, None)
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
        """Count a turn of all environments; what it was played from is remembered with what came of it."""
        del obs, legal, action, outputs
        self.acted += 1

    def ingest(self, transition: Transition) -> None:
        """Remember one step of all environments."""
        self.memory.write(transition.state, transition.action, transition.step)

    def clear(self) -> None:
        """Start with an empty memory."""
        self.memory.clear()

    def ready(self, iterations: int) -> bool:
        """Whether to learn after an iteration that finds so many in memory."""
        return (
            iterations * self.num_envs >= self.config.learning_starts
            and iterations > self.config.n_step + self.memory.lead
        )

    def loss(self, part: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Mean loss of the sample numbered `part` () int64, the mean value of the actions taken, and of each transition
        its place in a memory with priorities and its error (of distributions: its loss), both (B,).
        """
        config, key = self.config, random.fold(self.key, 2 * part + 1)
        beta = config.priority_beta + (1.0 - config.priority_beta) * self.progress
        batch = self.memory.sample(key, config.batch_size, beta, part)
        if config.noisy:
            layers.draw_noise(self.online, random.fold(key, -1))
            layers.draw_noise(self.target, random.fold(key, -2))
        if config.kind is None:
            with self.runtime.autocast():
                values = self.online.chosen(batch.obs, batch.action)
                with torch.no_grad():
                    targets = td_targets(config, batch, self.online, self.target)
            losses, errors = F.huber_loss(values, targets, reduction="none", delta=config.huber), values - targets
        else:
            with self.runtime.autocast():
                values, losses = distribution_losses(config, batch, self.online, self.target)
            errors = losses
        errors = torch.where(batch.weight > 0, errors.detach(), 0.0)
        loss, mean_value = (losses * batch.weight).mean(), values.detach().mean()
        return loss / self.accumulate, mean_value / self.accumulate, batch.place, errors

    def update(self) -> None:
        """The gradient steps of an iteration."""
        for _ in range(self.config.updates):
            self.gradient_step()

    def gradient_step(self) -> None:
        """One gradient step, and the target network's."""
        total: tuple[Tensor, ...] = ()
        for part in range(self.accumulate):
            loss, mean_value, place, errors = self._loss(self.updated * self.accumulate + part)
            gradients = self.optimizer.gradient(loss)
            total = tuple(torch._foreach_add(total, gradients)) if total else gradients
            self.sums["loss"] += loss.detach()
            self.sums["q_mean"] += mean_value
            if place is not None:
                self._rank(place, errors)
        self._apply(total)

    @torch.no_grad()
    def apply(self, gradients: tuple[Tensor, ...]) -> None:
        """Step the online network, then move the target: by tau every target_period steps, not after a skipped one."""
        if self.config.learning_rate_end is not None:
            self.rate.copy_(linear(self.config.learning_rate, self.config.learning_rate_end, self.progress))
        stepped = self.optimizer.step(gradients)
        self.updated += 1
        due = stepped & (self.updated % self.config.target_period == 0)
        self.target_flat.lerp_(self.optimizer.flat, torch.where(due, self.config.tau, 0.0))

    def read_metrics(self, updates: int) -> dict[str, float]:
        """Means over the last `updates`, which start again."""
        return read_means(self.sums, updates) | {"skipped_updates": int(self.optimizer.skipped)}

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Everything that decides what comes next, in groups."""
        model = {f"online.{k}": v for k, v in self.online.state_dict().items()}
        model |= {f"target.{k}": v for k, v in self.target.state_dict().items()}
        counters = {"key": self.key, "acted": self.acted, "updated": self.updated}
        return {"model": model, "optim": self.optimizer.tensors(), "rng": counters, "replay": self.memory.tensors()}


def policy_network(spec: Spec, config: Config, model: dict[str, Tensor]) -> nn.Module:
    """The greedy network of a checkpoint's model group, without noise: forward(obs (N, …), legal=None) -> values (N, A)."""
    net = networks.build(spec, config, seed=0, gamma=config.gamma, dueling=config.dueling, kind=config.kind)
    found = {k.removeprefix("online."): v for k, v in model.items() if k.startswith("online.")}
    net.load_state_dict({k: v for k, v in found.items() if not k.endswith("_sigma")})
    return net.eval()
