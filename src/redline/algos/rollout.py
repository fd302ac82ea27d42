"""RolloutBuffer: the steps that all environments played since the last update.

     env 0    env 1   …  env N-1
0    s a r    s a r      s a r      A row is written per step. After T rows the learner computes targets backwards in time
1    s a r    s a r      s a r      and trains on the samples, numbered row * N + environment; then writing starts over.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from redline.core.records import Spec, Step, map_record
from redline.envs.batch import Rules
from redline.replay.device import in_words

_STEPS_PER_TRUNCATION = 32  # assumed if the rules truncate without declaring after how many steps


def max_truncations(rules: Rules, rollout_steps: int) -> int:
    """Return the maximum number of truncations per environment and rollout whose final State is stored."""
    spec: Spec = rules.game.spec(rules.config)
    limits = [limit for limit in (rules.time_limit, spec.limit) if limit] + [_STEPS_PER_TRUNCATION] * spec.truncates
    return -(-rollout_steps // min(limits)) if limits else 0


class RolloutBuffer:
    """T steps of N environments in static tensors of T * N samples.

    Every rollout is written completely before it is read, so checkpoints do not contain it.
    """

    def __init__(
        self,
        rules: Rules,
        state: Any,
        num_envs: int,
        rollout_steps: int,
        outputs: tuple[str, ...],
        device: torch.device,
    ) -> None:
        """state: example of the game's State for all environments. outputs: the algorithm's POLICY_OUTPUTS."""
        self.rules, self.num_envs, self.rollout_steps = rules, num_envs, rollout_steps
        self.size = size = rollout_steps * num_envs  # samples
        spec: Spec = rules.game.spec(rules.config)
        self.row = torch.zeros((), dtype=torch.int64, device=device)  # () int64: the row to write
        self.obs = torch.zeros(size, *spec.obs_shape, dtype=spec.obs_dtype, device=device)
        # (T * N, A) bool, or None where every action is legal.
        self.legal = torch.ones(size, spec.num_actions, dtype=torch.bool, device=device) if spec.masked else None
        self.action = torch.zeros(size, dtype=torch.int64, device=device)
        self.outputs = {name: torch.zeros(size, device=device) for name in outputs}  # float32, by name
        self.reward = torch.zeros(size, device=device)  # float32
        self.done = torch.zeros(size, dtype=torch.bool, device=device)  # terminated or truncated
        self.truncated = torch.zeros(size, dtype=torch.bool, device=device)
        # States to bootstrap from, in rows of N: the states in which each environment was truncated, up to
        # max_truncations of them, then the state after its last step.
        self.max_truncations = max_truncations(rules, rollout_steps)
        self.truncations = torch.zeros(num_envs, dtype=torch.int64, device=device)  # (N,): in this rollout
        rows = self.max_truncations + 1
        self.bootstrap_states = map_record(lambda x: x.new_zeros(rows * num_envs, *x.shape[1:]), state)
        if spec.frames > 1:
            stacked = {k: getattr(self.bootstrap_states, k) for k in rules.game.STACKED}  # type: ignore[attr-defined]
            stacked = {k: x.unsqueeze(1).repeat_interleave(spec.frames, 1) for k, x in stacked.items()}
            self.bootstrap_states = self.bootstrap_states._replace(**stacked)

    def write_actions(self, obs: Tensor, legal: Tensor | None, action: Tensor, outputs: tuple[Tensor, ...]) -> None:
        """Write the first half of a row: obs (N, …), legal (N, A), action (N,) int64, outputs (N,) float32 each."""
        index: Tensor = self.row * self.num_envs + torch.arange(self.num_envs, device=obs.device)
        self.obs.index_copy_(0, index, obs)
        if self.legal is not None:
            assert legal is not None
            self.legal.index_copy_(0, index, legal)
        self.action.index_copy_(0, index, action)
        for buffer, output in zip(self.outputs.values(), outputs, strict=True):
            buffer.index_copy_(0, index, output)

    def write_step(self, step: Step) -> None:
        """Write the second half of a row, the outcome of the actions, and advance to the next row."""
        env_index = torch.arange(self.num_envs, device=step.reward.device)
        index = self.row * self.num_envs + env_index
        self.reward.index_copy_(0, index, step.reward)
        self.done.index_copy_(0, index, step.terminated | step.truncated)
        self.truncated.index_copy_(0, index, step.truncated)
        last = self.max_truncations
        slot = torch.where(step.truncated, self.truncations.clamp(max=last), last) * self.num_envs + env_index
        for name, states in self.bootstrap_states._asdict().items():
            if name not in self.rules.game.HIDDEN:
                states.index_copy_(0, slot, getattr(step.final_state, name))
        self.truncations += step.truncated
        self.row.copy_((self.row + 1) % self.rollout_steps)

    def forget(self, lost: Tensor, predictions: Tensor) -> None:
        """Make the error of the newest row, written as truncated, zero where lost (N,) bool: its return is the prediction.

        predictions: (T * N,), the predicted values of all samples.
        """
        newest = (self.row - 1) % self.rollout_steps
        index = newest * self.num_envs + torch.arange(self.num_envs, device=lost.device)
        self.reward.index_copy_(0, index, torch.where(lost, predictions[index], self.reward[index]))
        self.truncated.index_copy_(0, index, self.truncated[index] & ~lost)  # `done` stays: nothing follows
        self.truncations -= lost.to(torch.int64)

    def observations(self, index: Tensor) -> Tensor:
        """Return the observations (B, …) of the samples `index` (B,) int64."""
        if not self.obs.is_cuda:
            return self.obs.index_select(0, index)
        # In words of up to eight bytes: a GPU gathers a few wide numbers faster than many narrow ones.
        rows = in_words(self.obs)[index].flatten().view(self.obs.dtype)
        return rows.view(len(index), *self.obs.shape[1:])

    def steps(self, samples: Tensor) -> Tensor:
        """Return a view (T, N) of samples (T * N,)."""
        return samples.view(self.rollout_steps, self.num_envs)

    def bootstrapped_rewards(self, values: Tensor, gamma: float | Tensor, predictions: Tensor) -> tuple[Tensor, Tensor]:
        """Return rewards (T, N) and the value (N,) of the state after the last step; reset the count of truncations.

        values: of `bootstrap_states`. The reward of a truncated step includes gamma times the value of the state in which
        it was truncated. Nothing is learned from truncations of an environment beyond max_truncations: their reward is the
        prediction itself, from predictions (T * N,), so that the error is zero.
        """
        reward, values = self.steps(self.reward), values.view(-1, self.num_envs)
        if self.max_truncations:
            truncated = self.steps(self.truncated)
            number = truncated.to(torch.int64).cumsum(0) - 1  # of the environment's truncations, from 0
            following = gamma * values.gather(0, number.clamp(0, self.max_truncations - 1))
            known = number < self.max_truncations
            reward = torch.where(truncated, torch.where(known, reward + following, self.steps(predictions)), reward)
            self.truncations.zero_()
        return reward, values[-1]
