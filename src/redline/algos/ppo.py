"""PPO: clipped policy gradients from what was just played.

Follows Schulman et al. 2017 with generalised advantage estimation, advantages normalised a batch at a time and returns
normalised by running statistics. Left out: clipping of the value loss (it did not help in Andrychowicz et al. 2021), reward
clipping (rewards are set in the game's options) and recurrent networks (observations say all but a few ticks). With a target KL
the rest of an update is computed but not taken: a captured iteration has a fixed length.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from redline.algos import networks, on_policy
from redline.algos.on_policy import OnPolicyConfig, OnPolicyLearner
from redline.algos.on_policy import fill_defaults as fill_defaults
from redline.algos.on_policy import memory_bytes as memory_bytes
from redline.algos.on_policy import samples_per_step as samples_per_step
from redline.algos.optimizer import flatten, linear
from redline.core import random
from redline.core.records import PolicyInput, Spec
from redline.engine.runtime import Runtime
from redline.envs.batch import Rules, legal


@dataclass(frozen=True)
class Config(OnPolicyConfig):
    """Settings of PPO."""

    gae_lambda: float = 0.95
    clip_range: float = 0.2  # a probability may change by this share before it stops counting
    value_coef: float = 0.5
    entropy_coef: float = 0.01  # at the start of training
    entropy_end: float = 0.001  # at its end
    target_kl: float = (
        0.0  # an update that moved the policy farther than this learns no more from its rollout; 0: no limit
    )
    ema_decay: float = (
        0.0  # share kept of the average of all weights so far, a gradient step; it plays greedily. 0: none
    )
    separate: bool = False  # policy and value are networks of their own

    def __post_init__(self) -> None:
        super().__post_init__()
        self.expect(("gae_lambda",), "a number from 0 to 1", lambda x: 0 <= x <= 1)
        self.expect(("ema_decay",), "a number from 0 to below 1", lambda x: 0 <= x < 1)
        self.expect(("clip_range",), "a number above 0", lambda x: x > 0)
        self.expect(("value_coef", "entropy_coef", "entropy_end", "target_kl"), "0 or more", lambda x: x >= 0)


RESUME_FIXED = (*on_policy.RESUME_FIXED, "separate", "ema_decay")
_AVERAGE = "ema."  # before the names of averaged weights in a checkpoint


def gae(reward: Tensor, value: Tensor, next_value: Tensor, ended: Tensor, gamma: float | Tensor, lam: float) -> Tensor:
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


def normalised(advantages: Tensor, among: Tensor | None = None) -> Tensor:
    """To mean 0 and deviation 1 `among` others, if given; equal ones to 0, whatever rounding leaves of them. (B,)."""
    spread, mean = torch.std_mean(advantages if among is None else among, correction=0)
    return (advantages - mean) / (spread + 1e-5 * (1 + mean.abs()))


def policy_loss(logp: Tensor, old_logp: Tensor, advantages: Tensor, clip_range: float) -> Tensor:
    """The clipped surrogate, to be made small: () from three of (B,)."""
    ratio = (logp - old_logp).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_range, 1 + clip_range) * advantages).mean()


STOCHASTIC = True  # actions are drawn from logits
POLICY_OUTPUTS = ("value", "logp")  # what is said of each action besides it: the state's value, its log-probability


@torch.no_grad()
def select_actions(config: Config, net: nn.Module, policy_input: PolicyInput) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Actions (N,) int64 drawn from the policy, and OUTPUTS, (N,) float32 each."""
    del config
    logits, value = net(policy_input.obs, policy_input.legal)
    actions = logits.shape[1]
    number = policy_input.env_index.unsqueeze(1) * actions + torch.arange(actions, device=logits.device)
    noise = random.gumbel(random.bits(random.fold(policy_input.key, 2 * policy_input.draw), number))
    action: Tensor = (logits + noise).argmax(1)
    return action, (value, networks.gather(logits.log_softmax(1), action))


def acting_network(spec: Spec, config: Config) -> networks.ActorCritic:
    """What plays: `behave` is asked with it."""
    return networks.build_actor_critic(spec, config, 0, config.gamma, config.separate)


class Learner(OnPolicyLearner):
    """Four verbs: act, ingest, update, state_dict."""

    net: networks.ActorCritic
    config: Config
    metrics = ("loss", "policy_loss", "value_loss", "entropy", "clip_fraction", "approx_kl")

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
        config, _ = on_policy.fill_batch_size(config, num_envs)
        spec = rules.game.spec(rules.config)
        net = networks.build_actor_critic(spec, config, seed, config.gamma, config.separate).to(runtime.device)
        size = config.rollout_steps * num_envs
        self.logp, self.advantage = (torch.zeros(size, device=runtime.device) for _ in range(2))
        self.moved = torch.zeros((), device=runtime.device)  # how far this update moved the policy
        super().__init__(rules, config, state, num_envs, seed, runtime, accumulate, net)
        self.averaged = copy.deepcopy(self.net).requires_grad_(False) if config.ema_decay else None
        self.average_flat = flatten(self.averaged) if self.averaged is not None else None

    def policy(self, obs: Tensor, legal: Tensor | None = None) -> Tensor:
        """The likeliest actions (N,) int64. legal (N, A) bool, None: all are."""
        net = self.net if self.averaged is None else self.averaged
        with torch.no_grad(), self.runtime.autocast():
            logits: Tensor = net(obs, legal)[0]
        return logits.argmax(1)

    def select_actions(self, policy_input: PolicyInput) -> tuple[Tensor, tuple[Tensor, ...]]:
        with self.runtime.autocast():
            return select_actions(self.config, self.player, policy_input)

    def record_actions(self, obs: Tensor, legal: Tensor | None, action: Tensor, outputs: tuple[Tensor, ...]) -> Tensor:
        """Write what a row was played from; returns where it lies, (N,) int64."""
        slot = super().record_actions(obs, legal, action, outputs)
        self.logp.index_copy_(0, slot, outputs[1])
        return slot

    @torch.no_grad()
    def value_of(self, state: Any) -> Tensor:
        """(N,) float32."""
        with self.runtime.autocast():
            value: Tensor = self.player(self.rules.game.observe(self.rules.config, state), legal(self.rules, state))[1]
        return value

    @torch.no_grad()
    def prepare(self) -> None:
        """Advantages and returns of the rollout, the statistics of returns, and this update's learning rate."""
        advantage = gae(*self.played(), self.discount(), self.config.gae_lambda).flatten()
        target = advantage + self.value
        self.advantage.copy_(advantage)
        self.target.copy_(target)
        self.net.follow(target)
        self.moved.zero_()
        self.follow_schedule()

    def loss(self, index: Tensor, whole: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See OnPolicy. Advantages are normalised over the whole batch."""
        config = self.config
        with self.runtime.autocast():
            logits, value = self.net(self.obs.index_select(0, index), None if self.legal is None else self.legal[index])
        every_logp = logits.log_softmax(1)
        entropy = -(every_logp.exp() * every_logp).sum(1).mean()  # an illegal action has probability 0
        logp, old_logp = networks.gather(every_logp, self.action[index]), self.logp[index]
        advantage = normalised(self.advantage[index], None if whole is None else self.advantage[whole])
        surrogate = policy_loss(logp, old_logp, advantage, config.clip_range)
        value_loss = 0.5 * ((value - self.target[index]) / self.net.deviation).square().mean()
        bonus = linear(config.entropy_coef, config.entropy_end, self.progress)
        loss = (surrogate + config.value_coef * value_loss - bonus * entropy) / self.accumulate
        with torch.no_grad():
            change = logp - old_logp
            ratio = change.exp()
            clipped = ((ratio - 1).abs() > config.clip_range).to(torch.float32).mean()
            kl = (ratio - 1 - change).mean()
            if config.target_kl:
                self.moved.copy_(torch.maximum(self.moved, kl))
            measured = torch.stack([surrogate, value_loss, entropy, clipped, kl]) / self.accumulate
        return loss, torch.cat([loss.detach().unsqueeze(0), measured])

    @torch.no_grad()
    def apply(self, gradients: tuple[Tensor, ...]) -> None:
        """A gradient step, unless the policy has moved far enough; then the average of weights."""
        near = self.moved <= self.config.target_kl if self.config.target_kl else None
        self.optimizer.step(gradients, near)
        if self.average_flat is not None:
            self.average_flat.lerp_(self.optimizer.flat, 1.0 - self.config.ema_decay)

    def model(self) -> dict[str, Tensor]:
        """All weights, by name."""
        averages = {} if self.averaged is None else self.averaged.state_dict()
        return dict(self.net.state_dict()) | {_AVERAGE + name: weights for name, weights in averages.items()}


class Policy(nn.Module):
    """The policy of an actor-critic network: forward(obs (N, …), legal=None) -> logits (N, A)."""

    def __init__(self, net: networks.ActorCritic) -> None:
        super().__init__()
        self.net = net

    def forward(self, obs: Tensor, legal: Tensor | None = None) -> Tensor:
        logits: Tensor = self.net(obs, legal)[0]
        return logits


def policy_network(spec: Spec, config: Config, model: dict[str, Tensor]) -> nn.Module:
    """The greedy network of a checkpoint's model group: forward(obs (N, …), legal=None) -> logits (N, A)."""
    net = acting_network(spec, config)
    averages = {k.removeprefix(_AVERAGE): v for k, v in model.items() if k.startswith(_AVERAGE)}
    net.load_state_dict(averages or model)
    return Policy(net).eval()
