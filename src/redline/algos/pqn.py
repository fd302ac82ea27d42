"""PQN: Q-learning from what was just played, without replay and without a target network.

Follows Gallici et al. 2024: returns Q(lambda) in Peng's form, computed backwards over a rollout of many environments, and a
network whose layers are normalised, which is what keeps it stable. Different here: Adam instead of RAdam, and, as in our
DQN, every environment has its own share of random moves in the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from redline.algos import networks, on_policy
from redline.algos.exploration import epsilon_ladder
from redline.algos.on_policy import OnPolicyConfig, OnPolicyLearner
from redline.algos.on_policy import fill_defaults as fill_defaults
from redline.algos.on_policy import memory_bytes as memory_bytes
from redline.algos.on_policy import samples_per_step as samples_per_step
from redline.core import random, select
from redline.core.records import PolicyInput, Spec
from redline.engine.runtime import Runtime
from redline.envs.batch import Rules, legal


@dataclass(frozen=True)
class Config(OnPolicyConfig):
    """Settings of PQN."""

    learning_rate: float = 5e-4
    learning_rate_end: float = 2e-5
    max_grad_norm: float = 10.0
    layer_norm: bool = True
    q_lambda: float = 0.65  # 0: one step, then the network's value; 1: what was earned to the end of the rollout
    epsilon_start: float = 1.0  # share of random moves
    epsilon_high: float = 0.1  # the boldest environment's in the end
    epsilon_low: float = 0.001  # the most careful one's
    exploration: float = 0.1  # share of training until then
    dueling: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        rates = ("epsilon_start", "epsilon_high", "epsilon_low", "exploration")
        self.expect(("q_lambda", *rates), "a number from 0 to 1", lambda x: 0 <= x <= 1)


RESUME_FIXED = (*on_policy.RESUME_FIXED, "dueling")


def q_returns(
    reward: Tensor, value: Tensor, next_value: Tensor, ended: Tensor, gamma: float | Tensor, lam: float
) -> Tensor:
    """Q(lambda) returns (T, N) of reward, value and ended (T, N); next_value (N,) follows the last row.

    `value` is that of the best action of each state. Nothing is seen across an end. An episode that was cut short has the
    value of where it was cut in its last reward.
    """
    found = []
    running = next_value
    for t in range(reward.shape[0] - 1, -1, -1):
        ahead = lam * running + (1 - lam) * next_value
        running = reward[t] + torch.where(ended[t], 0.0, gamma * ahead)
        found.append(running)
        next_value = value[t]
    return torch.stack(found[::-1])


def epsilon(config: Config, progress: Tensor, env_index: Tensor, num_envs: int) -> Tensor:
    """Share of random moves of each environment, (N,) float32: the ladder is reached after the share of training `exploration`."""
    done = progress / max(config.exploration, 1e-8)
    return epsilon_ladder(config.epsilon_start, config.epsilon_high, config.epsilon_low, done, env_index, num_envs)


POLICY_OUTPUTS = ("value", "chosen")  # what is said of each action besides it: the value of the best, and its own


@torch.no_grad()
def select_actions(config: Config, net: nn.Module, policy_input: PolicyInput) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Actions (N,) int64, epsilon-greedy, each environment with its own epsilon; and OUTPUTS, (N,) float32 each."""
    values: Tensor = net(policy_input.obs, policy_input.legal)
    key = random.fold(policy_input.key, 2 * policy_input.draw)
    rate = epsilon(config, policy_input.progress, policy_input.env_index, policy_input.num_envs)
    explore = random.uniform(random.bits(key, 2 * policy_input.env_index)) < rate
    draw = random.bits(key, 2 * policy_input.env_index + 1)
    anything = (
        random.below(draw, values.shape[1]) if policy_input.legal is None else select.draw(policy_input.legal, draw)
    )
    action = torch.where(explore, anything, values.argmax(1))
    return action, (_best(values, policy_input.legal), networks.gather(values, action))


def acting_network(spec: Spec, config: Config) -> networks.ValueNet:
    """What plays: `behave` is asked with it."""
    return networks.build(spec, config, seed=0, gamma=config.gamma, dueling=config.dueling)


class Learner(OnPolicyLearner):
    """Four verbs: act, ingest, update, state_dict."""

    net: networks.Net | networks.Afterstates
    config: Config
    metrics = ("loss", "q_mean", "epsilon")

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
        net = networks.build(spec, config, seed, config.gamma, config.dueling).to(runtime.device)
        super().__init__(rules, config, state, num_envs, seed, runtime, accumulate, net)
        self.neutral = torch.zeros_like(self.value)  # what the actions taken were thought to be worth

    def values(self, obs: Tensor, legal: Tensor | None) -> Tensor:
        """Of all actions (N, A) float32, the illegal ones far below."""
        with torch.no_grad(), self.runtime.autocast():
            values: Tensor = self.player(obs, legal)
        return values

    def policy(self, obs: Tensor, legal: Tensor | None = None) -> Tensor:
        """Greedy actions (N,) int64. legal (N, A) bool, None: all are."""
        with torch.no_grad(), self.runtime.autocast():
            values: Tensor = self.net(obs, legal)
        return values.argmax(1)

    def select_actions(self, policy_input: PolicyInput) -> tuple[Tensor, tuple[Tensor, ...]]:
        with self.runtime.autocast():
            return select_actions(self.config, self.player, policy_input)

    def record_actions(self, obs: Tensor, legal: Tensor | None, action: Tensor, outputs: tuple[Tensor, ...]) -> Tensor:
        """Write what a row was played from; returns where it lies, (N,) int64."""
        slot = super().record_actions(obs, legal, action, outputs)
        self.neutral.index_copy_(0, slot, outputs[1])
        return slot

    @torch.no_grad()
    def value_of(self, state: Any) -> Tensor:
        """(N,) float32."""
        allowed = legal(self.rules, state)
        return _best(self.values(self.rules.game.observe(self.rules.config, state), allowed), allowed)

    @torch.no_grad()
    def prepare(self) -> None:
        """Returns of the rollout, and this update's learning rate."""
        self.target.copy_(q_returns(*self.played(), self.discount(), self.config.q_lambda).flatten())
        self.follow_schedule()

    def loss(self, index: Tensor, whole: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See OnPolicy."""
        del whole
        with self.runtime.autocast():
            values = self.net.chosen(self.obs.index_select(0, index), self.action[index])
        loss = 0.5 * (values - self.target[index]).square().mean() / self.accumulate
        with torch.no_grad():
            env_index = torch.arange(self.num_envs, device=index.device)
            boldness = epsilon(self.config, self.progress, env_index, self.num_envs).mean()
            measured = torch.stack([values.mean(), boldness]) / self.accumulate
        return loss, torch.cat([loss.detach().unsqueeze(0), measured])

    def model(self) -> dict[str, Tensor]:
        """All weights, by name."""
        return dict(self.net.state_dict())


def _best(values: Tensor, legal: Tensor | None) -> Tensor:
    """The value of the best action (N,); a state without a legal one is worth nothing."""
    best = values.amax(1)
    return best if legal is None else torch.where(legal.any(1), best, 0.0)


def policy_network(spec: Spec, config: Config, model: dict[str, Tensor]) -> nn.Module:
    """The greedy network of a checkpoint's model group: forward(obs (N, …), legal=None) -> values (N, A)."""
    net = acting_network(spec, config)
    net.load_state_dict(model)
    return net.eval()
