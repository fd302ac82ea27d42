"""ArrayWrapper: observations of any Gymnasium space as one array, channels first; actions from 0."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from redline.core.errors import UserError
from redline.envs.frames import is_image

_NOT_NUMBERS = (spaces.Text, spaces.Sequence, spaces.Graph, spaces.OneOf)


class ArrayWrapper(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment with array observations: images channels first in uint8, everything else flattened to float32.

    Entries of a Dict or Tuple that are no numbers of a fixed count (a Text, a Sequence) are left out; `dropped` lists them.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], name: str) -> None:
        super().__init__(env)
        actions = env.action_space
        if not isinstance(actions, spaces.Discrete):
            raise UserError(
                f"{name} takes actions of {actions}; Redline's learners choose one of a few (Discrete). "
                "Use an environment with discrete actions, or wrap it so that it has them."
            )
        self._first_action = int(actions.start)
        space, entries = keep_numbers(env.observation_space)
        if not isinstance(flat := None if space is None else spaces.flatten_space(space), spaces.Box):
            raise UserError(
                f"The observation of {name} is {env.observation_space}, which has no fixed size; wrap it so that it is a Box."
            )
        self.dropped = ", ".join(entries)
        self._space = space
        self._flattens = not isinstance(space, spaces.Box)
        box = flat if self._flattens else space
        assert isinstance(box, spaces.Box)
        self._channels_last = is_image(box)
        self._dtype = np.uint8 if box.dtype == np.uint8 else np.float32
        low, high = (self._as_array(x) for x in (box.low, box.high))
        self.observation_space = spaces.Box(low, high, dtype=self._dtype)
        self.action_space = spaces.Discrete(int(actions.n))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(seed=seed, options=options)
        return self._observation(obs), info

    def step(self, action: int) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action + self._first_action)
        return self._observation(obs), reward, bool(terminated), bool(truncated), info

    def _observation(self, obs: Any) -> np.ndarray[Any, Any]:
        if self._flattens:
            assert self._space is not None
            obs = spaces.flatten(self._space, select(self._space, obs) if self.dropped else obs)
        return self._as_array(obs)

    def _as_array(self, obs: Any) -> np.ndarray[Any, Any]:
        array = np.asarray(obs)
        if array.ndim == 0:
            array = array.reshape(1)
        return (np.moveaxis(array, 2, 0) if self._channels_last else array).astype(self._dtype, copy=False)


def keep_numbers(space: spaces.Space[Any], path: str = "") -> tuple[spaces.Space[Any] | None, list[str]]:
    """Return the part of `space` that can be flattened (None: nothing) and the paths of the entries left out."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        entries = space.spaces if isinstance(space, spaces.Dict) else {str(i): part for i, part in enumerate(space)}
        parts = {key: keep_numbers(entry, f"{path}.{key}" if path else key) for key, entry in entries.items()}
        kept = {key: part for key, (part, _) in parts.items() if part is not None}
        dropped = [entry for _, missing in parts.values() for entry in missing]
        if not dropped and isinstance(space, spaces.Tuple):
            return space, []
        return (spaces.Dict(kept) if kept else None), dropped  # of a Tuple, its entries by number
    if path and _unflattenable(space):
        return None, [f"{path} ({type(space).__name__})"]
    return (None if _unflattenable(space) else space), []


def select(space: spaces.Space[Any], obs: Any) -> Any:
    """Return the part of an observation that belongs to `space`, a result of `keep_numbers`."""
    if isinstance(space, spaces.Dict):
        by_number = isinstance(obs, tuple)
        return {key: select(entry, obs[int(key) if by_number else key]) for key, entry in space.spaces.items()}
    return obs


def _unflattenable(space: spaces.Space[Any]) -> bool:
    if isinstance(space, _NOT_NUMBERS):
        return True
    try:
        return not isinstance(spaces.flatten_space(space), spaces.Box)
    except NotImplementedError:  # a space of the environment's own
        return True
