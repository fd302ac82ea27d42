"""Redline's games as Gymnasium environments: one class for one game, one for a batch, for every game there is.

    import redline
    env = gymnasium.make("redline/Snake-v0", width=7, render_mode="rgb_array")
    envs = gymnasium.make_vec("redline/Snake-v0", num_envs=64, device="cuda")

`info` holds `score` and `won`, and when an episode ends its result (`r`, `l`, `score`) under `episode_stats`.
(Not under `episode`: Gymnasium's RecordEpisodeStatistics refuses an environment that has taken that key.) In a game with
illegal actions `info["action_mask"]` (int8, 1: legal) tells which may be taken now; `action_space.sample` takes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsFloat

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.error import InvalidAction, ResetNeeded
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray
from torch import Tensor

from redline import games
from redline.core import random
from redline.core.errors import UserError
from redline.core.records import Episode, Spec, map_record, where
from redline.envs import batch
from redline.envs.batch import EnvState, Rules
from redline.envs.rules import make_rules

Array = NDArray[Any]
RENDER_MODES = ("rgb_array", "ansi")
_CELL_PIXELS = 24
_SEED_BITS = (1 << 64) - 1  # as many as a seed's key reads


class GameEnv(gymnasium.Env[Array, np.int64]):
    """One game. The step that ends an episode gives its last observation; `reset` then starts the next, never the same.

    `reset(seed=s)` starts the first episode of environment 0 of seed s: what `redline.make(game, seed=s)` plays in its environment 0.
    """

    metadata = {"render_modes": list(RENDER_MODES), "render_fps": 10}  # noqa: RUF012 (Gymnasium's own type)

    def __init__(
        self,
        game: str,
        *,
        device: torch.device | str = "cpu",
        time_limit: int = 0,
        render_mode: str | None = None,
        **options: Any,
    ) -> None:
        self._rules = make_rules(game, options, time_limit)
        self._device = torch.device(device)
        self.render_mode = _known_render_mode(render_mode)
        self._spec = self._rules.game.spec(self._rules.config)
        self.observation_space, self.action_space = game_spaces(self._spec)
        self._env_state: EnvState | None = None
        self._board: Any = None  # State to draw: the last of an ended episode until reset is called
        self._ended = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        if seed is not None or self._env_state is None:
            env_index = torch.zeros(1, dtype=torch.int64, device=self._device)
            root = seed if seed is not None else _entropy(self.np_random_seed)
            self._env_state = batch.reset(self._rules, batch.env_keys(root, env_index))
        elif not self._ended:
            self._env_state = next_episode(
                self._rules, self._env_state, torch.ones(1, dtype=torch.bool, device=self._device)
            )
        self._board, self._ended = self._env_state.game, False
        return self._observe(), {"score": 0, "won": False} | self._mask()

    def step(self, action: int | np.int64) -> tuple[Array, SupportsFloat, bool, bool, dict[str, Any]]:
        if self._env_state is None or self._ended:
            when = "before the first reset" if self._env_state is None else "after the episode ended"
            raise ResetNeeded(f"step was called {when}; call reset first.")
        if not self.action_space.contains(action):
            raise InvalidAction(
                f"step expects an integer action from 0 to {self._spec.num_actions - 1}, "
                f"got {action!r} ({type(action).__name__})."
            )
        legal = batch.legal(self._rules, self._env_state.game)
        if legal is not None:
            check_legal(np.array([action]), to_numpy(legal))
        played = torch.tensor([int(action)], device=self._device)
        self._env_state, step = batch.step(self._rules, self._env_state, played)
        self._board = step.final_state
        terminated, truncated = bool(step.terminated), bool(step.truncated)
        self._ended = terminated or truncated
        info: dict[str, Any] = {"score": int(step.episode.score), "won": bool(step.won)} | self._mask()
        if self._ended:
            info["episode_stats"] = {name: array.item() for name, array in episode_stats(step.episode).items()}
        return self._observe(), float(step.reward), terminated, truncated, info

    def render(self) -> Any:
        """An (H, W, 3) uint8 picture, or lines of letters, as the render mode says; nothing without one."""
        if self._env_state is None:
            raise ResetNeeded("render was called before the first reset; call reset first.")
        frames = draw(self._rules, self._board, self.render_mode)
        return frames[0] if frames else None

    def _observe(self) -> Array:
        obs: Array = to_numpy(self._rules.game.observe(self._rules.config, self._board))[0]
        return obs

    def _mask(self) -> dict[str, Array]:
        return {name: mask[0] for name, mask in action_mask(self._rules, self._board).items()}


class GameVectorEnv(VectorEnv[Array, Array, Array]):
    """N games in one batch on a device, auto-reset in the same step, infos as SyncVectorEnv makes them in that mode.

    `reset(seed=s)` starts environments 0 to N-1 of seed s, as `redline.make` does; a list of N seeds starts environment 0 of each, so
    that environment i plays what a single environment reset with that seed plays.
    """

    def __init__(
        self,
        game: str,
        num_envs: int = 1,
        *,
        device: torch.device | str = "cpu",
        time_limit: int = 0,
        max_episode_steps: int | None = None,  # Gymnasium's word for time_limit; the shorter of the two holds
        render_mode: str | None = None,
        **options: Any,
    ) -> None:
        if num_envs < 1:
            raise UserError(f"num_envs is {num_envs}; expected at least 1 environment.")
        limits = [limit for limit in (time_limit, max_episode_steps) if limit]
        self._rules = make_rules(game, options, min(limits, default=0))
        self._device = torch.device(device)
        self.num_envs = num_envs
        self.render_mode = _known_render_mode(render_mode)
        self.metadata = GameEnv.metadata | {"autoreset_mode": AutoresetMode.SAME_STEP}
        self._spec = self._rules.game.spec(self._rules.config)
        self.single_observation_space, self.single_action_space = game_spaces(self._spec)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._env_state: EnvState | None = None

    def reset(
        self, *, seed: int | Sequence[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed if isinstance(seed, int) else None)
        mask = self._reset_mask(options)
        chosen = torch.as_tensor(mask, device=self._device)
        if seed is None and self._env_state is not None:
            self._env_state = next_episode(self._rules, self._env_state, chosen)
        else:
            fresh = batch.reset(self._rules, self._keys(seed))
            if self._env_state is None and not mask.all():
                raise UserError("The first reset starts every environment; leave reset_mask out.")
            self._env_state = fresh if self._env_state is None else where(chosen, fresh, self._env_state)
        infos: dict[str, Any] = {}
        present = {"score": np.zeros(self.num_envs, np.int64), "won": np.zeros(self.num_envs, np.bool_)}
        _add_infos(infos, present | action_mask(self._rules, self._env_state.game), mask)
        return self._observe(self._env_state.game), infos

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        if self._env_state is None:
            raise ResetNeeded("step was called before the first reset; call reset first.")
        chosen = checked_actions(actions, self.num_envs, self._spec.num_actions)
        legal = batch.legal(self._rules, self._env_state.game)
        if legal is not None:
            check_legal(chosen, to_numpy(legal))
        self._env_state, step = batch.step(self._rules, self._env_state, torch.as_tensor(chosen, device=self._device))
        terminated, truncated, won = (to_numpy(x) for x in (step.terminated, step.truncated, step.won))
        stats = episode_stats(step.episode)
        ended = terminated | truncated
        infos: dict[str, Any] = {}
        if ended.any():
            where_ended = torch.as_tensor(ended, device=self._device)
            last = self._observe(map_record(lambda x: x[where_ended], step.final_state))
            final_obs = np.full(self.num_envs, None, dtype=object)
            for env_index, obs in zip(np.flatnonzero(ended), last, strict=True):
                final_obs[env_index] = obs
            final_info: dict[str, Any] = {}
            result = {"score": stats["score"].copy(), "won": won.copy(), "episode_stats": stats}
            _add_infos(final_info, result | action_mask(self._rules, step.final_state), ended)
            infos |= {"final_obs": final_obs, "_final_obs": ended.copy()}
            infos |= {"final_info": final_info, "_final_info": ended.copy()}
        # Of the episode now under way: a new one has no score yet.
        present = {"score": np.where(ended, 0, stats["score"]), "won": won & ~ended}
        _add_infos(infos, present | action_mask(self._rules, self._env_state.game), np.ones(self.num_envs, np.bool_))
        reward = to_numpy(step.reward).astype(np.float64)
        return self._observe(self._env_state.game), reward, terminated, truncated, infos

    def render(self) -> tuple[Any, ...] | None:
        """A picture or text of every game; nothing without a render mode."""
        if self._env_state is None:
            raise ResetNeeded("render was called before the first reset; call reset first.")
        return draw(self._rules, self._env_state.game, self.render_mode) or None

    def _observe(self, state: Any) -> Array:
        return to_numpy(self._rules.game.observe(self._rules.config, state))

    def _keys(self, seed: int | Sequence[int] | None) -> Tensor:
        """Root keys (N,) int32 of the environments that `seed` asks for."""
        if seed is None or isinstance(seed, int | np.integer):
            root = _entropy(self.np_random_seed) if seed is None else int(seed)
            return batch.env_keys(root, torch.arange(self.num_envs, device=self._device))
        if len(seed) != self.num_envs or not all(isinstance(each, int | np.integer) for each in seed):
            raise UserError(f"reset expects one seed or a list of {self.num_envs} integer seeds, got {seed!r}.")
        first_lane = torch.zeros(1, dtype=torch.int64, device=self._device)
        return torch.cat([batch.env_keys(int(each), first_lane) for each in seed])

    def _reset_mask(self, options: dict[str, Any] | None) -> NDArray[np.bool_]:
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, np.bool_))
        if not isinstance(mask, np.ndarray) or mask.shape != (self.num_envs,) or mask.dtype != np.bool_:
            raise UserError(f"reset_mask must be a bool array of shape ({self.num_envs},), got {mask!r}.")
        return mask


def checked_actions(actions: Any, num_envs: int, num_actions: int) -> Array:
    """Actions (N,) as int64, or an error that names what was expected and what came."""
    given = np.asarray(actions)
    if given.shape != (num_envs,) or given.dtype.kind not in "iu":
        raise InvalidAction(
            f"step expects integer actions of shape ({num_envs},), got {given.dtype} of shape {given.shape}."
        )
    wrong = given[(given < 0) | (given >= num_actions)]
    if wrong.size:
        raise InvalidAction(f"step expects actions from 0 to {num_actions - 1}, got {wrong[0]}.")
    return given.astype(np.int64)


def check_legal(actions: Array, legal: Array) -> None:
    """Raise where one of actions (N,) is illegal in its game. legal (N, A) bool."""
    envs = np.arange(len(actions))
    for env_index in envs[~legal[envs, actions]]:
        place = f" in environment {env_index}" if len(actions) > 1 else ""
        raise InvalidAction(
            f"Action {actions[env_index]} is illegal{place}: {legal[env_index].sum()} of the {legal.shape[1]} actions are legal "
            "now, those where info['action_mask'] is 1."
        )


def action_mask(rules: Rules, state: Any) -> dict[str, Array]:
    """`action_mask` (N, A) int8, as Gymnasium's own environments have it; nothing where every action is always legal."""
    legal = batch.legal(rules, state)
    return {} if legal is None else {"action_mask": to_numpy(legal).astype(np.int8)}


def next_episode(rules: Rules, envs: EnvState, chosen: Tensor) -> EnvState:
    """Leave the episode under way in the environments `chosen` (N,) bool, and start each one's next."""
    played = envs.played + chosen.to(torch.int32)
    fresh = EnvState(
        game=rules.game.init(rules.config, random.fold(envs.key, played)),
        key=envs.key,
        played=played,
        episode=Episode(*(torch.zeros_like(x) for x in envs.episode)),
    )
    return where(chosen, fresh, envs)


def game_spaces(spec: Spec) -> tuple[spaces.Box, spaces.Discrete]:
    """Observation and action space of one game."""
    dtype = torch.empty(0, dtype=spec.obs_dtype).numpy().dtype
    box = spaces.Box(spec.obs_low, spec.obs_high, spec.obs_shape, dtype.type)
    return box, spaces.Discrete(spec.num_actions)


def to_numpy(x: Tensor) -> Array:
    """A tensor as an array on the host."""
    array: Array = x.cpu().numpy()
    return array


def episode_stats(episode: Episode) -> dict[str, Array]:
    """Reward, length and score, each (N,), under the names Gymnasium's and SB3's own statistics have."""
    return {
        "r": to_numpy(episode.episode_return).astype(np.float64),
        "l": to_numpy(episode.length).astype(np.int64),
        "score": to_numpy(episode.score).astype(np.int64),
    }


def draw(rules: Rules, state: Any, render_mode: str | None) -> tuple[Any, ...]:
    """Each of the N games as an (H, W, 3) uint8 picture or as lines of letters; empty without a render mode."""
    if render_mode is None:
        return ()
    cells = to_numpy(games.draw_cells(rules.game, rules.config, state))
    if render_mode == "ansi":
        letters = np.array(["."] + [name[0] for name, _ in rules.game.PALETTE[1:]])
        return tuple("\n".join(" ".join(letters[row]) for row in board) + "\n" for board in cells)
    colours = np.array([colour for _, colour in rules.game.PALETTE], np.uint8)
    return tuple(colours[cells].repeat(_CELL_PIXELS, 1).repeat(_CELL_PIXELS, 2))


def _add_infos(infos: dict[str, Any], values: dict[str, Any], mask: NDArray[np.bool_]) -> None:
    """Gymnasium's vector infos: values (N, …), zero in environments that have none, beside the mask of those that have."""
    for name, value in values.items():
        if isinstance(value, dict):
            infos[name] = {}
            _add_infos(infos[name], value, mask)
        else:
            infos[name] = np.where(mask.reshape(-1, *(1,) * (value.ndim - 1)), value, value.dtype.type(0))
        infos[f"_{name}"] = mask.copy()


def _known_render_mode(render_mode: str | None) -> str | None:
    if render_mode is not None and render_mode not in RENDER_MODES:
        raise UserError(f"render_mode is '{render_mode}'; expected {' or '.join(RENDER_MODES)}.")
    return render_mode


def _entropy(seed: int | None) -> int:
    """What Gymnasium drew from the system when nobody gave a seed, as one of our seeds."""
    return (seed or 0) & _SEED_BITS
