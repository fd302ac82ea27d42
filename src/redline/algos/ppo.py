"""PPO: clipped policy gradients from what was just played.

Follows Schulman et al. 2017 with generalised advantage estimation, advantages normalised a minibatch at a time and returns
normalised by running statistics. Left out: clipping of the value loss (it did not help in Andrychowicz et al. 2021), early
stopping by KL divergence (a captured iteration has a fixed length), reward clipping (rewards are set in the game's options)
and recurrent networks (observations say all but a few ticks).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from redline.algos import nets
from redline.algos.learner import Hooks
from redline.algos.metrics import read_means
from redline.algos.optim import Optimizer
from redline.core import random
from redline.core.errors import UserError
from redline.core.records import Hardware, Rollout, Runtime, Spec, assign, map_record
from redline.envs.batch import Rules, legal


@dataclass(frozen=True)
class Config(nets.NetConfig):
    """Settings of PPO."""

    rollout: int = 32  # steps every environment plays between two updates
    epochs: int = 2  # times each of them is learned from
    batch_size: int = 0  # samples a gradient step; 0: an eighth of what is played between two updates
    learning_rate: float = 1e-3  # at the start of training
    learning_rate_end: float = 1e-4  # at its end; in between on a straight line
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2  # a probability may change by this share before it stops counting
    value_coef: float = 0.5
    entropy_coef: float = 0.01  # at the start of training
    entropy_end: float = 0.001  # at its end
    max_grad_norm: float = 0.5
    separate: bool = False  # policy and value are networks of their own

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("rollout", "epochs"):
            if getattr(self, name) < 1:
                raise UserError(f"ppo.{name} is {getattr(self, name)}; expected at least 1.")
        for name in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"ppo.{name} is {getattr(self, name)}; expected a number from 0 to 1.")
        for name in ("learning_rate", "clip", "max_grad_norm"):
            if not getattr(self, name) > 0:
                raise UserError(f"ppo.{name} is {getattr(self, name)}; expected a number above 0.")
        for name in ("batch_size", "learning_rate_end", "value_coef", "entropy_coef", "entropy_end"):
            if not getattr(self, name) >= 0:
                raise UserError(f"ppo.{name} is {getattr(self, name)}; expected 0 or more.")


FIXED = (*nets.NET_FIXED, "separate", "gamma", "rollout")  # a continued run must keep these
_PARTS = 8  # minibatches an epoch, where nothing else is asked for


def suggest(hardware: Hardware) -> dict[str, tuple[Any, str]]:
    """Settings that follow from the hardware, each with its reason. `num_envs` is the loop's, the rest are Config's."""
    if hardware.kind == "cuda":
        return {
            "num_envs": (16_384, "enough games to fill a GPU each step"),
            "rollout": (32, "short rollouts of many games are learned from while they are fresh"),
            "epochs": (2, "new games cost little here: more of them beats learning twice as often from each"),
            "hidden": ((512, 512), "a GPU multiplies wider layers at little cost"),
        }
    return {
        "num_envs": (512, "enough games to share the cost of a step, few enough to learn from often"),
        "rollout": (32, "short rollouts of many games are learned from while they are fresh"),
        "epochs": (3, "playing is what a CPU's time goes to: each game is learned from three times"),
        "hidden": ((64, 64), "matrix products are what a CPU's time goes to"),
    }


def complete(config: Config, num_envs: int) -> tuple[Config, dict[str, str]]:
    """The settings that follow from others, filled in, and why."""
    if config.batch_size:
        return config, {}
    filled = dataclasses.replace(config, batch_size=_divisor(max(num_envs, 1) * config.rollout))
    return filled, {"batch_size": "an eighth of what is played between two updates"}


def memory_bytes(config: Config, spec: Spec, state_bytes: int, num_envs: int) -> dict[str, int]:
    """About what the learner will allocate, by the setting that decides it. `state_bytes` are those of one State."""
    inputs = math.prod(spec.obs_shape)
    sample = inputs * spec.obs_dtype.itemsize + spec.num_actions * spec.masked + 40
    rows = spec.obs_shape[0] if spec.afterstates else 1
    return {
        "rollout": num_envs * (config.rollout * sample + state_bytes),
        "batch_size": config.batch_size * (8 * inputs + 8 * rows * sum(config.hidden)),
    }


def gae(reward: Tensor, value: Tensor, next_value: Tensor, ended: Tensor, gamma: float, lam: float) -> Tensor:
    """Generalised advantage estimates (T, N) of reward, value and ended (T, N); next_value (N,) follows the last row.

    Nothing is seen across an end. An episode that was cut short has the value of where it was cut in its last reward.
    """
    found = []
    running = torch.zeros_like(next_value)
    for t in range(reward.shape[0] - 1, -1, -1):
        ahead = torch.where(ended[t], 0.0, gamma * (next_value + lam * running))
        running = reward[t] + ahead - value[t]
        found.append(running)
        next_value = value[t]
    return torch.stack(found[::-1])


def linear(start: float, end: float, progress: Tensor) -> Tensor:
    """From start to end as `progress` () goes from 0 to 1, and no farther."""
    return start + (end - start) * progress.clamp(0.0, 1.0)


def normalised(advantages: Tensor) -> Tensor:
    """To mean 0 and deviation 1; equal ones to 0, whatever rounding leaves of them. (B,)."""
    spread, mean = torch.std_mean(advantages, correction=0)
    return (advantages - mean) / (spread + 1e-5 * (1 + mean.abs()))


def policy_loss(logp: Tensor, old_logp: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """The clipped surrogate, to be made small: () from three of (B,)."""
    ratio = (logp - old_logp).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages).mean()


class Learner(Hooks):
    """Four verbs: act, ingest, update, state_dict. Between two updates every lane plays `horizon` steps."""

    metrics = ("loss", "policy_loss", "value_loss", "entropy", "clip_fraction", "approx_kl")
    scheduled = True  # learning rate and entropy bonus follow `progress`

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
        """`state` (N, …) is an example of the game's State of all lanes."""
        config, _ = complete(config, num_envs)
        self.spec = spec = rules.game.spec(rules.config)
        self.rules, self.config, self.num_envs = rules, config, num_envs
        self.runtime, self.accumulate = runtime, accumulate
        self.horizon, self.samples_per_update = config.rollout, config.batch_size * accumulate
        size = config.rollout * num_envs
        if size % self.samples_per_update:
            if size % accumulate:
                raise UserError(
                    f"accumulate is {accumulate}; expected a divisor of the {size:,} steps that {num_envs:,} environments "
                    f"play in a rollout of {config.rollout}."
                )
            times = f" times accumulate {accumulate}" if accumulate > 1 else ""
            raise UserError(
                f"ppo.batch_size is {config.batch_size:,}{times}; expected a divisor of the {size:,} steps that "
                f"{num_envs:,} environments play in a rollout of {config.rollout}, such as "
                f"{_divisor(size // accumulate):,}."
            )
        self.updates_per_iteration = config.epochs * (size // self.samples_per_update)
        device = runtime.device
        self.net = nets.build_actor_critic(spec, config, seed, config.gamma, config.separate).to(device)
        self.progress = torch.zeros((), device=device)  # share of training done, set from outside
        self.rate = torch.tensor(config.learning_rate, device=device)
        self.optimizer = Optimizer(self.net, self.rate, config.max_grad_norm, runtime)
        self.key = random.fold(random.seed_key(seed, device), -1)  # lanes count from 0: no game has this stream
        self.acted = torch.zeros((), dtype=torch.int64, device=device)  # steps of every lane so far
        self.shuffled = torch.zeros((), dtype=torch.int64, device=device)  # epochs so far

        # What was played since the last update, row after row of all lanes. It is written whole before it is read, so no
        # checkpoint needs it.
        self.row = torch.zeros((), dtype=torch.int64, device=device)
        self.obs = torch.zeros(size, *spec.obs_shape, dtype=spec.obs_dtype, device=device)
        self.legal = torch.ones(size, spec.num_actions, dtype=torch.bool, device=device) if spec.masked else None
        self.action = torch.zeros(size, dtype=torch.int64, device=device)
        self.ended = torch.zeros(size, dtype=torch.bool, device=device)
        names = ("logp", "value", "reward", "advantage", "target")
        self.logp, self.value, self.reward, self.advantage, self.target = (
            torch.zeros(size, device=device) for _ in names
        )
        self.order = torch.zeros(size, dtype=torch.int64, device=device)
        # Where episodes may be cut short, every step's final State is valued; else only the last one's is, in `update`.
        self.truncates = spec.truncates or rules.time_limit > 0
        self.final_value = torch.zeros(num_envs, device=device)
        self.final_state = map_record(torch.clone, state)

        totals = torch.zeros(len(self.metrics), device=device)
        self.totals, self.sums = totals, dict(zip(self.metrics, totals.unbind(), strict=True))  # since the last log
        self._prepare, self._shuffle = runtime.compile(self.prepare), runtime.compile(self.shuffle)
        self._loss, self._apply = runtime.compile(self.loss), runtime.compile(self.apply)

    def policy(self, obs: Tensor, legal: Tensor | None = None) -> Tensor:
        """The likeliest actions (N,) int64. legal (N, A) bool, None: all are."""
        with torch.no_grad(), self.runtime.autocast():
            logits: Tensor = self.net(obs, legal)[0]
        return logits.argmax(1)

    def act(self, obs: Tensor, legal: Tensor | None = None) -> Tensor:
        """Actions (N,) int64 drawn from the policy; what they were drawn from is remembered."""
        with torch.no_grad(), self.runtime.autocast():
            logits, value = self.net(obs, legal)
        lane = torch.arange(self.num_envs, device=obs.device)
        number = lane.unsqueeze(1) * self.spec.num_actions + torch.arange(self.spec.num_actions, device=obs.device)
        noise = gumbel(random.bits(random.fold(self.key, 2 * self.acted), number))
        action: Tensor = (logits + noise).argmax(1)
        slot = self.row * self.num_envs + lane
        self.obs.index_copy_(0, slot, obs)
        if self.legal is not None:
            assert legal is not None
            self.legal.index_copy_(0, slot, legal)
        self.action.index_copy_(0, slot, action)
        self.logp.index_copy_(0, slot, nets.gather(logits.log_softmax(1), action))
        self.value.index_copy_(0, slot, value)
        self.acted += 1
        return action

    def ingest(self, rollout: Rollout) -> None:
        """Remember what came of the actions; an episode cut short is credited with the value of where it was cut."""
        step = rollout.step
        reward = step.reward
        if self.truncates:
            self.final_value.copy_(self.value_of(step.final_state))
            reward = reward + torch.where(step.truncated, self.config.gamma * self.final_value, 0.0)
        else:
            assign(self.final_state, step.final_state)
        slot = self.row * self.num_envs + torch.arange(self.num_envs, device=reward.device)
        self.reward.index_copy_(0, slot, reward)
        self.ended.index_copy_(0, slot, step.terminated | step.truncated)
        self.row.copy_((self.row + 1) % self.config.rollout)

    @torch.no_grad()
    def value_of(self, state: Any) -> Tensor:
        """(N,) float32."""
        with self.runtime.autocast():
            value: Tensor = self.net(self.rules.game.observe(self.rules.config, state), legal(self.rules, state))[1]
        return value

    def forget(self) -> None:
        """Nothing outlives an update."""

    def ready(self, remembered: int) -> bool:
        """A rollout is all it takes."""
        del remembered
        return True

    def update(self) -> None:
        """Learn from the rollout, `epochs` times."""
        self._prepare()
        part = self.config.batch_size
        for _ in range(self.config.epochs):
            self._shuffle()
            for start in range(0, self.order.shape[0], self.samples_per_update):
                total: tuple[Tensor, ...] = ()
                for first in range(start, start + self.samples_per_update, part):
                    loss, measured = self._loss(self.order[first : first + part])
                    gradients = self.optimizer.gradient(loss)
                    total = tuple(torch._foreach_add(total, gradients)) if total else gradients
                    self.totals += measured
                self._apply(total)

    @torch.no_grad()
    def prepare(self) -> None:
        """Advantages and returns of the rollout, the statistics of returns, and this update's learning rate."""
        config, shape = self.config, (self.config.rollout, self.num_envs)
        final_value = self.final_value if self.truncates else self.value_of(self.final_state)
        reward, value, ended = (x.view(shape) for x in (self.reward, self.value, self.ended))
        advantage = gae(reward, value, final_value, ended, config.gamma, config.gae_lambda).flatten()
        target = advantage + self.value
        self.advantage.copy_(advantage)
        self.target.copy_(target)
        self.net.follow(target)
        self.rate.copy_(linear(config.learning_rate, config.learning_rate_end, self.progress))

    @torch.no_grad()
    def shuffle(self) -> None:
        """A new order of all samples."""
        number = torch.arange(self.order.shape[0], device=self.order.device)
        draws = random.bits(random.fold(self.key, 2 * self.shuffled + 1), number)
        self.order.copy_(torch.sort(draws, stable=True).indices)  # stable: draws may be equal
        self.shuffled += 1

    def loss(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Of the samples numbered `index` (B,) int64: the loss () and what is measured, in the order of `metrics`."""
        config = self.config
        with self.runtime.autocast():
            logits, value = self.net(self.obs[index], None if self.legal is None else self.legal[index])
        every_logp = logits.log_softmax(1)
        entropy = -(every_logp.exp() * every_logp).sum(1).mean()  # an illegal action has probability 0
        logp, old_logp = nets.gather(every_logp, self.action[index]), self.logp[index]
        surrogate = policy_loss(logp, old_logp, normalised(self.advantage[index]), config.clip)
        value_loss = 0.5 * ((value - self.target[index]) / self.net.deviation).square().mean()
        bonus = linear(config.entropy_coef, config.entropy_end, self.progress)
        loss = (surrogate + config.value_coef * value_loss - bonus * entropy) / self.accumulate
        with torch.no_grad():
            change = logp - old_logp
            ratio = change.exp()
            clipped = ((ratio - 1).abs() > config.clip).to(torch.float32).mean()
            kl = (ratio - 1 - change).mean()
            measured = torch.stack([surrogate, value_loss, entropy, clipped, kl]) / self.accumulate
        return loss, torch.cat([loss.detach().unsqueeze(0), measured])

    @torch.no_grad()
    def apply(self, gradients: tuple[Tensor, ...]) -> None:
        self.optimizer.step(gradients)

    def read_metrics(self, updates: int) -> dict[str, float]:
        """Means over the last `updates`, which start again."""
        return read_means(self.sums, updates) | {"skipped_updates": int(self.optimizer.skipped)}

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Everything that decides what comes next, between two iterations, in groups."""
        counters = {"key": self.key, "acted": self.acted, "shuffled": self.shuffled}
        return {"model": dict(self.net.state_dict()), "optim": self.optimizer.tensors(), "rng": counters}


def gumbel(random_bits: Tensor) -> Tensor:
    """Standard Gumbel noise (…) float32, -2.8 to 18.4: added to logits, the largest is a draw from their softmax."""
    exponential = -torch.log1p(-random.uniform(random_bits))  # of [0, 1): never infinite, may be 0
    return -exponential.clamp(min=1e-8).log()


class Policy(nn.Module):
    """The policy of an actor-critic network: forward(obs (N, …), legal=None) -> logits (N, A)."""

    def __init__(self, net: nets.ActorCritic) -> None:
        super().__init__()
        self.net = net

    def forward(self, obs: Tensor, legal: Tensor | None = None) -> Tensor:
        logits: Tensor = self.net(obs, legal)[0]
        return logits


def policy_net(spec: Spec, config: Config, model: dict[str, Tensor]) -> nn.Module:
    """The greedy network of a checkpoint's model group: forward(obs (N, …), legal=None) -> logits (N, A)."""
    net = nets.build_actor_critic(spec, config, 0, config.gamma, config.separate)
    net.load_state_dict(model)
    return Policy(net).eval()


def _divisor(size: int) -> int:
    """A divisor of `size`: the eighth of it where that is whole."""
    return size // math.gcd(size, _PARTS)
