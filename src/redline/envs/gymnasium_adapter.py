"""Redline's games as Gymnasium environments: GameEnv for a single game, GameVectorEnv for a batch.

    import redline
    env = gymnasium.make("redline/Snake-v0", width=7, render_mode="rgb_array")
    envs = gymnasium.make_vec("redline/Snake-v0", num_envs=64, device="cuda")

`info` holds `score` and `won` and, when an episode ends, its statistics (`r`, `l`, `score`) under `episode_stats`: the key
`episode` is reserved by Gymnasium's RecordEpisodeStatistics.

In a game with illegal actions, `info["action_mask"]` (int8, 1: legal) marks the legal ones. Pass it to
`action_space.sample`; sb3-contrib's MaskablePPO calls `action_masks()`. The game's rules define the effect of an illegal
action: in Tetris the game ends. With `on_illegal="raise"` it raises InvalidAction and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, SupportsFloat

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
from redline.core.errors import UserError
from redline.core.records import Episode, Spec, map_record, where
from redline.envs import batch
from redline.envs.batch import EnvState, Rules
from redline.envs.env import available_device
from redline.envs.rules import make_rules
from redline.envs.single_game import single_game

Array = NDArray[Any]
OnIllegal = Literal["play", "raise"]  # apply the game's rules to an illegal action, or raise InvalidAction
RENDER_MODES = ("rgb_array", "ansi")
_CELL_PIXELS = 24
_SEED_BITS = (1 << 64) - 1  # Redline's seeds have 64 bits


class GameEnv(gymnasium.Env[Array, np.int64]):
    """One game as a gymnasium.Env. The step that ends an episode returns its final observation.

    `reset(seed=s)` starts the same episode as environment 0 of `redline.make(game, seed=s)`; a later `reset()` starts the next.
    On a CPU the game's plain-Python oracle plays: it is faster than a batch of one, and its trajectories are the same.
    """

    metadata = {"render_modes": list(RENDER_MODES), "render_fps": 10}  # noqa: RUF012 (Gymnasium's own type)

    def __init__(
        self,
        game: str,
        *,
        device: torch.device | str = "cpu",
        time_limit: int = 0,
        on_illegal: OnIllegal = "play",
        render_mode: str | None = None,
        **options: Any,
    ) -> None:
        self._rules = make_rules(game, options, time_limit)
        self._game = single_game(self._rules, available_device(device))
        self._on_illegal = known_on_illegal(on_illegal)
        self.render_mode = _known_render_mode(render_mode)
        self._spec = self._rules.game.spec(self._rules.config)
        self.observation_space, self.action_space = game_spaces(self._spec)
        self._legal: Array | None = None  # (A,) bool; None: all
        self._started = self._ended = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        if seed is not None or not self._started:
            self._game.reset(seed if seed is not None else _entropy(self.np_random_seed))
        else:
            self._game.next_episode()
        self._started, self._ended, self._legal = True, False, self._game.legal()
        return self._game.observe(), {"score": 0, "won": False} | self._mask()

    def step(self, action: int | np.int64) -> tuple[Array, SupportsFloat, bool, bool, dict[str, Any]]:
        if not self._started or self._ended:
            when = "after the episode ended" if self._started else "before the first reset"
            raise ResetNeeded(f"step was called {when}; call reset first.")
        if not self.action_space.contains(action):
            raise InvalidAction(
                f"step expects an integer action from 0 to {self._spec.num_actions - 1}, "
                f"got {action!r} ({type(action).__name__})."
            )
        if self._on_illegal == "raise" and self._legal is not None:
            check_legal(np.array([action]), self._legal[np.newaxis])
        step = self._game.step(int(action))
        self._ended, self._legal = step.terminated or step.truncated, self._game.legal()
        info: dict[str, Any] = {"score": step.score, "won": step.won} | self._mask()
        if self._ended:
            info["episode_stats"] = {"r": step.episode_return, "l": step.length, "score": step.score}
        return self._game.observe(), step.reward, step.terminated, step.truncated, info

    def action_masks(self) -> NDArray[np.bool_]:
        """Return the action mask (A,) bool, as sb3-contrib's MaskablePPO expects it."""
        return np.ones(self._spec.num_actions, np.bool_) if self._legal is None else self._legal.copy()

    def render(self) -> Any:
        """Return an (H, W, 3) uint8 image or lines of letters, depending on the render mode; None without one."""
        if not self._started:
            raise ResetNeeded("render was called before the first reset; call reset first.")
        frames = draw(self._rules, self._game.state(), self.render_mode) if self.render_mode else ()
        return frames[0] if frames else None

    def _mask(self) -> dict[str, Array]:
        return {} if self._legal is None else {"action_mask": self._legal.astype(np.int8)}


class GameVectorEnv(VectorEnv[Array, Array, Array]):
    """N games in one batch on a device, with same-step auto-reset and infos in the format of SyncVectorEnv's SAME_STEP mode.

    `reset(seed=s)` starts the same episodes as `redline.make(game, num_envs=N, seed=s)`. With a list of N seeds,
    environment i plays like a GameEnv reset with the i-th of them.
    """

    def __init__(
        self,
        game: str,
        num_envs: int = 1,
        *,
        device: torch.device | str = "cpu",
        time_limit: int = 0,
        max_episode_steps: int | None = None,  # Gymnasium's name for time_limit; the shorter of the two applies
        on_illegal: OnIllegal = "play",
        render_mode: str | None = None,
        **options: Any,
    ) -> None:
        if num_envs < 1:
            raise UserError(f"num_envs is {num_envs}; expected at least 1 environment.")
        limits = [limit for limit in (time_limit, max_episode_steps) if limit]
        self._rules = make_rules(game, options, min(limits, default=0))
        self._device = available_device(device)
        self.num_envs = num_envs
        self._on_illegal = known_on_illegal(on_illegal)
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
            self._env_state = batch.next_episode(self._rules, self._env_state, chosen)
        else:
            fresh = batch.reset(self._rules, self._keys(seed))
            if self._env_state is None and not mask.all():
                raise UserError("The first reset starts every environment; omit reset_mask.")
            self._env_state = fresh if self._env_state is None else where(chosen, fresh, self._env_state)
        infos: dict[str, Any] = {}
        present = {"score": np.zeros(self.num_envs, np.int64), "won": np.zeros(self.num_envs, np.bool_)}
        _add_infos(infos, present | action_mask(self._rules, self._env_state.game), mask)
        return self._observe(self._env_state.game), infos

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        if self._env_state is None:
            raise ResetNeeded("step was called before the first reset; call reset first.")
        chosen = checked_actions(actions, self.num_envs, self._spec.num_actions)
        legal = batch.legal(self._rules, self._env_state.game) if self._on_illegal == "raise" else None
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
        # These are of the current episode: a new one has no score yet.
        present = {"score": np.where(ended, 0, stats["score"]), "won": won & ~ended}
        _add_infos(infos, present | action_mask(self._rules, self._env_state.game), np.ones(self.num_envs, np.bool_))
        reward = to_numpy(step.reward).astype(np.float64)
        return self._observe(self._env_state.game), reward, terminated, truncated, infos

    def action_masks(self) -> NDArray[np.bool_]:
        """Return the action masks (N, A) bool of all games."""
        if self._env_state is None:
            raise ResetNeeded("action_masks was called before the first reset; call reset first.")
        return to_numpy(self._rules.game.legal(self._rules.config, self._env_state.game))

    def render(self) -> tuple[Any, ...] | None:
        """Return an image or text of every game; None without a render mode."""
        if self._env_state is None:
            raise ResetNeeded("render was called before the first reset; call reset first.")
        return draw(self._rules, self._env_state.game, self.render_mode) or None

    def _observe(self, state: Any) -> Array:
        return to_numpy(self._rules.game.observe(self._rules.config, state))

    def _keys(self, seed: int | Sequence[int] | None) -> Tensor:
        """Return the environments' root keys (N,) int32 for one seed, a list of seeds, or None."""
        if seed is None or isinstance(seed, int | np.integer):
            root = _entropy(self.np_random_seed) if seed is None else int(seed)
            return batch.env_keys(root, torch.arange(self.num_envs, device=self._device))
        if len(seed) != self.num_envs or not all(isinstance(each, int | np.integer) for each in seed):
            raise UserError(f"reset expects one seed or a list of {self.num_envs} integer seeds, got {seed!r}.")
        first_env = torch.zeros(1, dtype=torch.int64, device=self._device)
        return torch.cat([batch.env_keys(int(each), first_env) for each in seed])

    def _reset_mask(self, options: dict[str, Any] | None) -> NDArray[np.bool_]:
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, np.bool_))
        if not isinstance(mask, np.ndarray) or mask.shape != (self.num_envs,) or mask.dtype != np.bool_:
            raise UserError(f"reset_mask must be a bool array of shape ({self.num_envs},), got {mask!r}.")
        return mask


def checked_actions(actions: Any, num_envs: int, num_actions: int) -> Array:
    """Return actions (N,) as int64; raise InvalidAction for a wrong shape, dtype or value."""
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
    """Raise InvalidAction if any of the actions (N,) is illegal in its game. legal (N, A) bool."""
    envs = np.arange(len(actions))
    for env_index in envs[~legal[envs, actions]]:
        place = f" in environment {env_index}" if len(actions) > 1 else ""
        raise InvalidAction(
            f"Action {actions[env_index]} is illegal{place}: {legal[env_index].sum()} of the {legal.shape[1]} actions "
            "are legal now, those where info['action_mask'] is 1."
        )


def action_mask(rules: Rules, state: Any) -> dict[str, Array]:
    """Return {"action_mask": (N, A) int8}, Gymnasium's format; empty if every action is always legal in the game."""
    legal = batch.legal(rules, state)
    return {} if legal is None else {"action_mask": to_numpy(legal).astype(np.int8)}


def game_spaces(spec: Spec) -> tuple[spaces.Box, spaces.Discrete]:
    """Return the observation space and the action space of one game."""
    dtype = torch.empty(0, dtype=spec.obs_dtype).numpy().dtype
    box = spaces.Box(spec.obs_low, spec.obs_high, spec.obs_shape, dtype.type)
    return box, spaces.Discrete(spec.num_actions)


def to_numpy(x: Tensor) -> Array:
    """Return a tensor as a NumPy array."""
    array: Array = x.cpu().numpy()
    return array


def episode_stats(episode: Episode) -> dict[str, Array]:
    """Return the episodes' returns `r`, lengths `l` and `score`, (N,) each; Gymnasium and SB3 use the same keys."""
    return {
        "r": to_numpy(episode.episode_return).astype(np.float64),
        "l": to_numpy(episode.length).astype(np.int64),
        "score": to_numpy(episode.score).astype(np.int64),
    }


def draw(rules: Rules, state: Any, render_mode: str | None) -> tuple[Any, ...]:
    """Return each of the N games as an (H, W, 3) uint8 image or as lines of letters; empty without a render mode."""
    if render_mode is None:
        return ()
    cells = to_numpy(games.draw_cells(rules.game, rules.config, state))
    if render_mode == "ansi":
        letters = np.array(["."] + [name[0] for name, _ in rules.game.PALETTE[1:]])
        return tuple("\n".join(" ".join(letters[row]) for row in board) + "\n" for board in cells)
    colours = np.array([colour for _, colour in rules.game.PALETTE], np.uint8)
    return tuple(colours[cells].repeat(_CELL_PIXELS, 1).repeat(_CELL_PIXELS, 2))


def _add_infos(infos: dict[str, Any], values: dict[str, Any], mask: NDArray[np.bool_]) -> None:
    """Add values (N, …) in Gymnasium's vector format: zero where `mask` (N,) is False, with the mask under `_name`."""
    for name, value in values.items():
        if isinstance(value, dict):
            infos[name] = {}
            _add_infos(infos[name], value, mask)
        else:
            infos[name] = np.where(mask.reshape(-1, *(1,) * (value.ndim - 1)), value, value.dtype.type(0))
        infos[f"_{name}"] = mask.copy()


def known_on_illegal(on_illegal: OnIllegal) -> OnIllegal:
    """Return `on_illegal`; raise UserError if it is neither "play" nor "raise"."""
    if on_illegal not in ("play", "raise"):
        raise UserError(f"on_illegal is '{on_illegal}'; expected play (by the game's rules) or raise.")
    return on_illegal


def _known_render_mode(render_mode: str | None) -> str | None:
    if render_mode is not None and render_mode not in RENDER_MODES:
        raise UserError(f"render_mode is '{render_mode}'; expected {' or '.join(RENDER_MODES)}.")
    return render_mode


def _entropy(seed: int | None) -> int:
    """Return the seed that Gymnasium drew from the operating system, reduced to 64 bits."""
    return (seed or 0) & _SEED_BITS
