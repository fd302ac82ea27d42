"""Double DQN with replay.

Follows van Hasselt et al. 2016 with n-step returns, a Huber loss and gradient clipping. Left out: frame stacking (games are
Markov), reward clipping (rewards are set in the game's options), annealed random exploration for every environment alike
(each environment keeps its own epsilon, as in Ape-X, so that careful and bold play are both in the memory). Dueling splits
the output only: value and advantages share all hidden layers.
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

from redline.algos import nets
from redline.algos.learner import Hooks
from redline.algos.metrics import read_means
from redline.algos.optim import Optimizer, flatten
from redline.core import random, select
from redline.core.errors import UserError
from redline.core.records import Batch, Hardware, Rollout, Runtime, Spec
from redline.envs.batch import Rules
from redline.replay.courier import Storage
from redline.replay.disk import OnDisk
from redline.replay.host import HostRing, Pinned
from redline.replay.layout import Layout
from redline.replay.priority import Priorities
from redline.replay.ring import Ring


@dataclass(frozen=True)
class Config(nets.NetConfig):
    """Settings of DQN."""

    batch_size: int = 512  # transitions a gradient step
    updates: int = 1  # gradient steps an iteration (an iteration steps every environment once)
    learning_rate: float = 1e-3
    gamma: float = 0.97
    n_step: int = 3
    double: bool = True  # the online network chooses, the target network judges
    dueling: bool = False
    huber: float = 1.0  # errors beyond this count linearly
    max_grad_norm: float = 10.0
    target_period: int = 1  # gradient steps between updates of the target network
    tau: float = 0.01  # share of the online weights taken over then; 1 is a hard copy
    epsilon_start: float = 1.0
    epsilon_high: float = 0.1  # the boldest environment's share of random moves in the end
    epsilon_low: float = 0.001  # the most careful one's
    epsilon_steps: int = 1_000_000  # environment steps from start to end
    replay: Literal["device", "pinned", "memmap"] = (
        "device"  # where they are remembered: there, in host memory, in a file
    )
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
        for name in ("gamma", "tau", "epsilon_start", "epsilon_high", "epsilon_low", "priority_alpha", "priority_beta"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"dqn.{name} is {getattr(self, name)}; expected a number from 0 to 1.")
        for name in ("learning_rate", "huber", "max_grad_norm"):
            if not getattr(self, name) > 0:
                raise UserError(f"dqn.{name} is {getattr(self, name)}; expected a number above 0.")


# A continued run must keep these.
FIXED = (*nets.NET_FIXED, "dueling", "n_step", "gamma", "replay", "replay_capacity", "prioritized")


def suggest(hardware: Hardware) -> dict[str, tuple[Any, str]]:
    """Settings that follow from the hardware, each with its reason. `num_envs` is the loop's, the rest are Config's."""
    if hardware.kind == "cuda":
        return {
            "num_envs": (16_384, "enough games to fill a GPU each step"),
            "batch_size": (16_384, "one large matrix product is faster than many small ones"),
            "hidden": ((256, 256), "a GPU multiplies wider layers at no cost"),
            "replay_capacity": (4_000_000, "about 120 bytes a transition on the device"),
            "epsilon_steps": (20_000_000, "a few seconds of play"),
        }
    return {
        "num_envs": (2_048, "enough games to hide the cost of a call, few enough to stay in the cache of a few cores"),
        "batch_size": (
            512,
            "a quarter of what is played: on a CPU a sample learned costs as much as four moves played",
        ),
        "hidden": ((64, 64), "matrix products are what a CPU's time goes to"),
        "replay_capacity": (500_000, "about 120 bytes a transition, 60 MB in a checkpoint"),
    }


def complete(config: Config, num_envs: int) -> tuple[Config, dict[str, str]]:
    """Nothing here follows from other settings."""
    del num_envs
    return config, {}


def memory_bytes(config: Config, spec: Spec, state_bytes: int, num_envs: int) -> dict[str, int]:
    """About what the learner will allocate on the device, by the setting that decides it.

    `state_bytes` are those of the fields of one State that observations read.
    """
    del num_envs
    inputs = 4 * math.prod(spec.obs_shape)
    held = Priorities.bytes_needed(config.replay_capacity) if config.prioritized else 0
    if config.replay == "device":
        held += int(config.replay_capacity * transition_bytes(config, state_bytes))
    return {"batch_size": config.batch_size * 4 * inputs, "replay_capacity": held}


def transition_bytes(config: Config, state_bytes: int) -> float:
    """Of one transition, where `replay` keeps them: its State, a sixteenth of one before a truncation, and its step."""
    if config.replay == "device":
        return state_bytes * 17 / 16 + 8.5
    return -(-(state_bytes + 8) // 16) * 16


def epsilon(config: Config, env_steps: Tensor, lanes: Tensor, num_envs: int) -> Tensor:
    """Share of random moves of each lane, (N,) float32: from start, linearly over epsilon_steps, to the lane's own end.

    The ends are spread geometrically from epsilon_high (lane 0) to epsilon_low (the last).
    """
    place = lanes.to(torch.float32) / max(num_envs - 1, 1)
    low = max(config.epsilon_low, 1e-8)  # a geometric ladder has no rung at 0
    end = config.epsilon_high * (low / max(config.epsilon_high, low)) ** place
    done = (env_steps.to(torch.float32) / max(config.epsilon_steps, 1)).clamp(max=1.0)
    return config.epsilon_start + (end - config.epsilon_start) * done


def td_targets(config: Config, batch: Batch, online: Any, target: Any) -> Tensor:
    """What the value of (obs, action) should be, (B,): the networks judge the best legal action of next_obs."""
    chooser = online if config.double else target
    values: Tensor = chooser(batch.next_obs, batch.next_legal)
    best = values.argmax(1)
    following = target.chosen(batch.next_obs, best) if config.double else nets.gather(values, best)
    if (
        batch.next_legal is not None
    ):  # a state without a legal action, as below a ceiling that came down, is worth nothing
        following = torch.where(batch.next_legal.any(1), following, 0.0)
    return batch.reward + batch.discount * following


class Learner(Hooks):
    """Four verbs: act, ingest, update, state_dict."""

    metrics = ("loss", "q_mean")
    horizon = 1  # steps every lane plays between two calls of update

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
        self.spec = spec = rules.game.spec(rules.config)
        self.config, self.num_envs = config, num_envs
        self.runtime, self.accumulate = runtime, accumulate
        device = runtime.device
        self.key = random.fold(random.seed_key(seed, device), -1)  # lanes count from 0: no game has this stream
        self.memory = self._make_memory(rules, state)
        self.scheduled = config.prioritized  # only beta follows the share of training done; epsilon has its own clock
        self.progress = torch.zeros((), device=device)  # that share
        self.online = nets.build(spec, config, seed, config.gamma, config.dueling).to(device)
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.optimizer = Optimizer(self.online, config.learning_rate, config.max_grad_norm, runtime)
        self.target_flat = flatten(self.target)
        self.acted = torch.zeros((), dtype=torch.int64, device=device)  # steps of every lane so far
        self.updated = torch.zeros((), dtype=torch.int64, device=device)  # gradient steps so far
        self.sums = {name: torch.zeros((), device=device) for name in self.metrics}  # since the last log
        self._loss, self._apply = runtime.compile(self.loss), runtime.compile(self.apply)
        self._rank = runtime.compile(torch.no_grad()(self.memory.learned))

    def _make_memory(self, rules: Rules, state: Any) -> Ring:
        config, runtime, lanes = self.config, self.runtime, self.num_envs
        alpha = config.priority_alpha if config.prioritized else None
        if config.replay == "device":
            return Ring(rules, state, config.replay_capacity, config.n_step, config.gamma, alpha=alpha)

        def storage(entries: int, layout: Layout) -> Storage:
            if config.replay == "pinned":
                return Pinned(entries, layout, lanes, runtime.device, runtime.notify)
            return OnDisk(runtime.folder, entries, layout, lanes, runtime.notify)

        return HostRing(
            rules,
            state,
            config.replay_capacity,
            config.n_step,
            config.gamma,
            key=random.fold(self.key, -1),
            batch_size=config.batch_size,
            batches=config.updates * self.accumulate,
            storage=storage,
            alpha=alpha,
            notify=runtime.notify,
        )

    def before(self) -> None:
        """Have ready what is learned from."""
        self.memory.before()

    def after(self) -> None:
        """Take away what was played."""
        self.memory.after()

    def adapt(self, replay: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """A checkpoint's memory as it fits into this one's."""
        return self.memory.adapt(replay)

    def loaded(self) -> bool:
        """Go on from a memory that was filled from outside; False: it is empty."""
        return self.memory.loaded()

    def close(self) -> None:
        """Let go of the memory."""
        self.memory.close()

    def policy(self, obs: Tensor, legal: Tensor | None = None) -> Tensor:
        """Greedy actions (N,) int64. legal (N, A) bool, None: all are."""
        with torch.no_grad(), self.runtime.autocast():
            values: Tensor = self.online(obs, legal)
        return values.argmax(1)

    def act(self, obs: Tensor, legal: Tensor | None = None) -> Tensor:
        """Actions (N,) int64 of the behaviour policy: epsilon-greedy, each lane with its own epsilon."""
        lane = torch.arange(self.num_envs, device=obs.device)
        rate = epsilon(self.config, self.acted * self.num_envs, lane, self.num_envs)
        key = random.fold(self.key, 2 * self.acted)
        explore = random.uniform(random.bits(key, 2 * lane)) < rate
        draw = random.bits(key, 2 * lane + 1)
        anything = random.below(draw, self.spec.num_actions) if legal is None else select.draw(legal, draw)
        self.acted += 1
        return torch.where(explore, anything, self.policy(obs, legal))

    def ingest(self, rollout: Rollout) -> None:
        """Remember one step of all lanes."""
        self.memory.write(rollout.state, rollout.action, rollout.step)

    @property
    def samples_per_update(self) -> int:
        return self.config.batch_size * self.accumulate

    @property
    def updates_per_iteration(self) -> int:
        return self.config.updates

    def forget(self) -> None:
        """Start with an empty memory."""
        self.memory.clear()

    def ready(self, remembered: int) -> bool:
        """Whether to learn after an iteration that finds so many in memory."""
        return (
            remembered * self.num_envs >= self.config.learning_starts
            and remembered > self.config.n_step + self.memory.lead
        )

    def loss(self, part: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Mean Huber loss of the sample numbered `part` () int64, the mean value of the actions taken, and of each
        transition its place in a memory with priorities and its error, both (B,).
        """
        beta = self.config.priority_beta + (1.0 - self.config.priority_beta) * self.progress
        batch = self.memory.sample(random.fold(self.key, 2 * part + 1), self.config.batch_size, beta, part)
        with self.runtime.autocast():
            values = self.online.chosen(batch.obs, batch.action)
            with torch.no_grad():
                targets = td_targets(self.config, batch, self.online, self.target)
        losses = F.huber_loss(values, targets, reduction="none", delta=self.config.huber)
        errors = torch.where(batch.weight > 0, (values - targets).detach(), 0.0)
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


def policy_net(spec: Spec, config: Config, model: dict[str, Tensor]) -> nn.Module:
    """The greedy network of a checkpoint's model group: forward(obs (N, …), legal=None) -> values (N, A)."""
    net = nets.build(spec, config, seed=0, gamma=config.gamma, dueling=config.dueling)
    prefix = "online."
    net.load_state_dict({k.removeprefix(prefix): v for k, v in model.items() if k.startswith(prefix)})
    return net.eval()
