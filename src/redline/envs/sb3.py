"""SB3VecEnv: Redline's games as a vectorized environment for Stable-Baselines3.

envs = SB3VecEnv(redline.make("snake", num_envs=64))
PPO("MlpPolicy", envs).learn(100_000)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from redline.core.errors import UserError
from redline.envs import batch
from redline.envs.env import Env
from redline.envs.gymnasium_adapter import (
    Array,
    OnIllegal,
    check_legal,
    checked_actions,
    draw,
    episode_stats,
    game_spaces,
    known_on_illegal,
    to_numpy,
)

try:
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import VecEnv
except ModuleNotFoundError as missing:
    raise UserError("Stable-Baselines3 is not installed; install it with: pip install redline[sb3]") from missing

Indices = int | Iterable[int] | None


class SB3VecEnv(VecEnv):
    """Wraps an Env as a Stable-Baselines3 VecEnv; observations, rewards and dones are NumPy arrays.

    The first `reset` uses the seed passed to `seed`, or else the Env's; a later `reset` without a new seed starts the next
    episode of every environment. The info of an environment whose episode ended holds `terminal_observation`,
    `TimeLimit.truncated`, `episode` (r, l, score) and `is_success` (won).

    on_illegal: "play" applies the game's rules to an illegal action (Tetris: the game ends), "raise" raises InvalidAction.
    """

    def __init__(self, env: Env, render_mode: str | None = None, on_illegal: OnIllegal = "play") -> None:
        self.env, self.render_mode, self.on_illegal = env, render_mode, known_on_illegal(on_illegal)
        self._actions = torch.zeros(env.num_envs, dtype=torch.int64)
        super().__init__(env.num_envs, *game_spaces(env.spec))

    def reset(self) -> Array:
        seed = self._seeds[0]  # SB3 counts up from it for each environment; one seed covers all of them here
        if seed is None and self.env.state is not None:
            every = torch.ones(self.num_envs, dtype=torch.bool, device=self.env.device)
            self.env.state = batch.next_episode(self.env.rules, self.env.state, every)
            obs = self.env.observe()
        else:
            obs = self.env.reset(seed)
        self._reset_seeds()
        self._reset_options()
        return to_numpy(obs)

    def step_async(self, actions: Array) -> None:
        checked = checked_actions(actions, self.num_envs, self.env.spec.num_actions)
        state, legal = self.env.state, None
        if self.on_illegal == "raise" and state is not None:
            legal = batch.legal(self.env.rules, state.game)
        if legal is not None:
            check_legal(checked, to_numpy(legal))
        self._actions = torch.as_tensor(checked)

    def step_wait(self) -> tuple[Array, Array, Array, list[dict[str, Any]]]:
        step = self.env.step(self._actions)
        truncated = to_numpy(step.truncated)
        dones = to_numpy(step.terminated) | truncated
        infos: list[dict[str, Any]] = [{"TimeLimit.truncated": False} for _ in range(self.num_envs)]
        if dones.any():
            stats, won, final_obs = episode_stats(step.episode), to_numpy(step.won), to_numpy(step.final_obs)
            for env_index in np.flatnonzero(dones):
                infos[env_index] = {
                    "TimeLimit.truncated": bool(truncated[env_index]),
                    "terminal_observation": final_obs[env_index].copy(),
                    "episode": {name: values[env_index].item() for name, values in stats.items()},
                    "is_success": bool(won[env_index]),
                }
        return to_numpy(step.obs), to_numpy(step.reward), dones, infos

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def get_images(self) -> list[Array | None]:
        envs = self.env.state
        if self.render_mode != "rgb_array" or envs is None:
            return [None] * self.num_envs
        return list(draw(self.env.rules, envs.game, self.render_mode))

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """Return an attribute of the Env (or `render_mode`) for each environment; `action_masks` is for sb3-contrib."""
        if attr_name == "action_masks":
            return [self.action_masks for _ in self._get_indices(indices)]
        value = self.render_mode if attr_name == "render_mode" else getattr(self.env, attr_name)
        return [value for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:  # noqa: ARG002
        raise UserError(
            f"set_attr('{attr_name}') is not possible: the environments are one batch and share their settings."
        )

    def env_method(
        self, method_name: str, *method_args: Any, indices: Indices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Return a row of `action_masks` for each environment; other methods raise AttributeError."""
        if method_name != "action_masks" or method_args or method_kwargs:
            raise AttributeError(
                f"An environment has no method '{method_name}', only 'action_masks' without arguments."
            )
        masks = self.action_masks()
        return [masks[env_index] for env_index in self._get_indices(indices)]

    def action_masks(self) -> Array:
        """Return the action masks (N, A) bool: True where an action is legal now."""
        return to_numpy(self.env.legal())

    def env_is_wrapped(self, wrapper_class: type[Any], indices: Indices = None) -> list[bool]:
        """Return True for Monitor: SB3 checks for it to find out whether infos hold `episode`, and they do."""
        return [wrapper_class is Monitor for _ in self._get_indices(indices)]
