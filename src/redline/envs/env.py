"""Env: N copies of a tensor game on a device, tensors in, tensors out; `make` builds one by name."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from redline.core.errors import UserError
from redline.core.records import Episode, Spec
from redline.envs import batch
from redline.envs.batch import EnvState, Rules
from redline.envs.gym_make import PREFIX
from redline.envs.rules import CPU_ENVS, make_rules

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class EnvStep(NamedTuple):
    """Result of `Env.step`, with the same structure, shapes and dtypes at every step. Each (N, …)."""

    obs: Tensor  # next observation; where the episode ended, the first of the next episode
    reward: Tensor  # float32
    terminated: Tensor  # bool: the game ended; do not bootstrap
    truncated: Tensor  # bool: a time limit ended the episode; bootstrap from final_obs
    won: Tensor  # bool: terminated by winning
    final_obs: Tensor  # observation before any reset; equals obs where the episode continues
    episode: Episode  # length, score and return so far, including this step; final where the episode ended


class Env:
    """N copies of a game on one device, with same-step auto-reset.

    With a given seed, environment i plays the same episodes for the same actions, whatever the batch size and device.
    """

    def __init__(
        self,
        rules: Rules,
        num_envs: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
        validate: bool | None = None,
    ) -> None:
        """`validate`: check the range of every action; None: on a CPU only, since on a GPU the check synchronizes."""
        if num_envs < 1:
            raise UserError(f"num_envs is {num_envs}; expected at least 1 environment.")
        self.rules, self.num_envs, self.device, self.seed = rules, num_envs, available_device(device), seed
        self.validate = self.device.type == "cpu" if validate is None else validate
        self.state: EnvState | None = None

    @property
    def spec(self) -> Spec:
        """Observation shape and dtype, number of actions and other properties of the game."""
        return self.rules.game.spec(self.rules.config)

    @torch.no_grad()
    def reset(self, seed: int | None = None) -> Tensor:
        """Start the first episode of every environment and return the observations (N, …)."""
        self.seed = self.seed if seed is None else seed
        env_index = torch.arange(self.num_envs, device=self.device)
        self.state = batch.reset(self.rules, batch.env_keys(self.seed, env_index))
        return self.observe()

    @torch.no_grad()
    def step(self, action: Tensor) -> EnvStep:
        """Step every environment with action (N,) integer; one whose episode ends resets in the same step."""
        state = self._started("step")
        self.state, step = batch.step(self.rules, state, self._checked(action).to(self.device))
        final_obs = self.rules.game.observe(self.rules.config, step.final_state)
        return EnvStep(self.observe(), step.reward, step.terminated, step.truncated, step.won, final_obs, step.episode)

    @torch.no_grad()
    def observe(self) -> Tensor:
        """Return the current observations (N, …)."""
        return self.rules.game.observe(self.rules.config, self._started("observe").game)

    @torch.no_grad()
    def legal(self) -> Tensor:
        """Return the action mask (N, A) bool: True where an action is legal now."""
        return self.rules.game.legal(self.rules.config, self._started("legal").game)

    def _started(self, method: str) -> EnvState:
        if self.state is None:
            raise UserError(f"{method} was called before reset; call reset first.")
        return self.state

    def _checked(self, action: Any) -> Tensor:
        """Return `action` as a tensor; raise UserError for a wrong shape or dtype, or a value out of range."""
        actions = torch.as_tensor(action)
        if actions.shape != (self.num_envs,):
            raise UserError(f"step expects actions of shape ({self.num_envs},), got {tuple(actions.shape)}.")
        if actions.dtype not in _INTEGERS:
            raise UserError(f"step expects integer actions, got {str(actions.dtype).removeprefix('torch.')}.")
        if self.validate:
            last = self.spec.num_actions - 1
            wrong = ((actions < 0) | (actions > last)).nonzero()
            if len(wrong):
                index = int(wrong[0])
                raise UserError(
                    f"Action {int(actions[index])} of environment {index} is out of range; expected 0 to {last}."
                )
        return actions


def make(
    name: str | ModuleType,
    num_envs: int = 1,
    device: torch.device | str = "cpu",
    seed: int = 0,
    time_limit: int = 0,
    validate: bool | None = None,
    **options: Any,
) -> Env:
    """Return an Env of `num_envs` games, as in `make("snake", num_envs=4096, device="cuda", seed=0, width=7)`.

    name: a built-in game, the import name of a module that defines one (in the current folder or on the Python path),
        or the module itself.
    time_limit: steps after which an episode is truncated; 0: none.
    validate: check the range of every action; by default on a CPU only.
    options: the game's own options, such as `width`.
    """
    if isinstance(name, str) and name.partition(":")[0] in CPU_ENVS:
        gymnasium_call = f"gymnasium.make({name.removeprefix(PREFIX)!r})"
        own_call = f"redline.envs.load_game({name!r}).make(config)"
        call = gymnasium_call if name.startswith(PREFIX) else own_call
        raise UserError(f"{name} is a CPU environment, not a tensor game; make it with {call}.")
    return Env(make_rules(name, options, time_limit), num_envs, device, seed, validate)


def available_device(device: torch.device | str) -> torch.device:
    """Return the torch.device; raise UserError if this machine does not have it."""
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UserError(f"device is {device!r}; expected cpu, cuda, cuda:1 or mps.") from error
    count = torch.cuda.device_count() if chosen.type == "cuda" else int(torch.backends.mps.is_available())
    if chosen.type in ("cuda", "mps") and (chosen.index or 0) >= count:
        available = "no such GPU" if not count else f"{count} GPU{'s' * (count > 1)}"
        raise UserError(f"device is '{chosen}', but torch {torch.__version__} sees {available} here; use device='cpu'.")
    return chosen
