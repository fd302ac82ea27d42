"""PQN: Q-learning on fresh rollouts, without replay and without a target network.

Follows Gallici et al. 2024: Peng's Q(lambda) returns over rollouts of many environments, and a network with layer
normalisation, which keeps training stable. Differences: Adam instead of RAdam, and a separate final epsilon for each
environment, as in DQN, so that every batch holds both careful and exploratory play.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from redline.algos import networks, on_policy
from redline.algos.bodies import Body
from redline.algos.exploration import epsilon_greedy, epsilon_ladder
from redline.algos.metrics import batch_mean
from redline.algos.network_config import gather
from redline.algos.on_policy import OnPolicyConfig, OnPolicyLearner, part_count
from redline.algos.on_policy import fill_defaults as fill_defaults
from redline.algos.on_policy import memory_bytes as memory_bytes
from redline.algos.on_policy import samples_per_step as samples_per_step
from redline.algos.returns import q_lambda_returns
from redline.core import random
from redline.core.records import PolicyInput, Spec
from redline.engine.runtime import Runtime
from redline.envs.batch import Rules, legal


@dataclass(frozen=True)
class Config(OnPolicyConfig):
    """Options of PQN."""

    learning_rate: float = 5e-4
    learning_rate_end: float = 2e-5
    max_grad_norm: float = 10.0
    layer_norm: bool = True
    q_lambda: float = 0.65  # 0: one-step returns; 1: rewards to the end of the rollout
    epsilon_start: float = 1.0  # epsilon of every environment at the start
    epsilon_high: float = 0.1  # final epsilon of the most exploratory environment
    epsilon_low: float = 0.001  # final epsilon of the most careful environment
    exploration: float = 0.1  # fraction of training until the final epsilon
    dueling: bool = False  # split outputs into state value and advantages

    def __post_init__(self) -> None:
        super().__post_init__()
        rates = ("epsilon_start", "epsilon_high", "epsilon_low", "exploration")
        self.expect(("q_lambda", *rates), "a number from 0 to 1", lambda x: 0 <= x <= 1)


RESUME_FIXED = (*on_policy.RESUME_FIXED, "dueling")
POLICY_OUTPUTS = ("value", "chosen")  # the value of the best action, the value of the chosen one


def epsilon(config: Config, progress: Tensor, env_index: Tensor, num_envs: int) -> Tensor:
    """Return epsilon per environment, (N,) float32, at this point of training."""
    fraction = progress / max(config.exploration, 1e-8)
    return epsilon_ladder(config.epsilon_start, config.epsilon_high, config.epsilon_low, fraction, env_index, num_envs)


@torch.no_grad()
def select_actions(config: Config, net: nn.Module, policy_input: PolicyInput) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return epsilon-greedy actions (N,) int64 and POLICY_OUTPUTS, (N,) float32 each."""
    values: Tensor = net(policy_input.obs, policy_input.legal)
    key = random.fold(policy_input.key, 2 * policy_input.draw)
    rate = epsilon(config, policy_input.progress, policy_input.env_index, policy_input.num_envs)
    action = epsilon_greedy(values, policy_input.legal, rate, key, policy_input.env_index)
    return action, (max_value(values, policy_input.legal), gather(values, action))


def max_value(values: Tensor, legal: Tensor | None) -> Tensor:
    """Return the value (N,) of the best action of values (N, A); 0 in a state without legal actions."""
    best = values.amax(1)
    return best if legal is None else torch.where(legal.any(1), best, 0.0)


def acting_network(spec: Spec, config: Config) -> networks.ValueNet:
    """Return a network for `select_actions`."""
    return networks.build(spec, config, seed=0, gamma=config.gamma, dueling=config.dueling)


class Learner(OnPolicyLearner):
    """A Q-network trained towards Q(lambda) returns."""

    config: Config
    net: Body | networks.Afterstates
    metrics = ("loss", "q_mean", "td_error")

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
        config, _ = on_policy.fill_batch_size(config, num_envs)
        spec = rules.game.spec(rules.config)
        net = networks.build(spec, config, seed, config.gamma, config.dueling).to(runtime.device)
        super().__init__(rules, config, state, num_envs, seed, runtime, accumulate, net, POLICY_OUTPUTS)

    def policy(self, obs: Tensor, legal: Tensor | None = None) -> Tensor:
        """Return the greedy actions (N,) int64."""
        with torch.no_grad(), self.runtime.autocast():
            values: Tensor = self.net(obs, legal)
        return values.argmax(1)

    def select_actions(self, policy_input: PolicyInput) -> tuple[Tensor, tuple[Tensor, ...]]:
        with self.runtime.autocast():
            return select_actions(self.config, self.behaviour_network, policy_input)

    @torch.no_grad()
    def state_values(self, state: Any) -> Tensor:
        obs, allowed = self.rules.game.observe(self.rules.config, state), legal(self.rules, state)
        with self.runtime.autocast():
            values: Tensor = self.behaviour_network(obs, allowed)
        return max_value(values, allowed)

    @property
    def predictions(self) -> Tensor:
        return self.rollout.outputs["chosen"]

    @torch.no_grad()
    def compute_targets(self) -> None:
        """Compute the returns of the rollout and set the learning rate."""
        returns = q_lambda_returns(*self.rollout_returns(), self.discount(), self.config.q_lambda)
        self.targets.copy_(returns.flatten())
        self.update_learning_rate()

    def loss(self, index: Tensor, batch: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return half the mean squared TD error, and the metrics."""
        parts = part_count(index, batch)
        with self.runtime.autocast():
            values = self.net.chosen(self.rollout.observations(index), self.rollout.action[index])
        td_error = values - self.targets[index]
        loss = 0.5 * batch_mean(td_error.square()) / parts
        with torch.no_grad():
            metrics = torch.stack([batch_mean(values), batch_mean(td_error.abs())]) / parts
        return loss, torch.cat([loss.detach().unsqueeze(0), metrics])

    def current_metrics(self) -> dict[str, float]:
        """Return the mean epsilon of the environments."""
        env_index = torch.arange(self.total_envs, device=self.progress.device)
        return {"epsilon": float(epsilon(self.config, self.progress, env_index, self.total_envs).mean())}

    def model(self) -> dict[str, Tensor]:
        return dict(self.net.state_dict())


def policy_network(spec: Spec, config: Config, model: dict[str, Tensor]) -> nn.Module:
    """Return the greedy network of a checkpoint's model group: forward(obs (N, …), legal=None) -> values (N, A)."""
    net = acting_network(spec, config)
    net.load_state_dict(model)
    return net.eval()
