"""ArrayWrapper: converts observations of any Gymnasium space to one array, channels first, and numbers actions from 0."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from redline.core.errors import InvalidStep, UserError
from redline.envs.frames import is_image

_NOT_NUMBERS = (spaces.Text, spaces.Sequence, spaces.Graph, spaces.OneOf)


class ArrayWrapper(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Converts observations to arrays: images to channels-first uint8, everything else flattened to float32.

    Entries of a Dict or Tuple that are not a fixed count of numbers (Text, Sequence) are omitted; `dropped` lists them.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], name: str) -> None:
        super().__init__(env)
        self.name = name
        actions = env.action_space
        self._announced = env.observation_space, actions
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
        self.flat_space = space if self._flattens else None  # the space that observations are flattened from
        self._channels_last = is_image(box)
        self._dtype = np.uint8 if box.dtype == np.uint8 else np.float32
        low, high = (self._as_array(x) for x in (box.low, box.high))
        self.observation_space = spaces.Box(low, high, dtype=self._dtype)
        self.action_space = spaces.Discrete(int(actions.n))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        first: Any = self.env.reset(seed=seed, options=options)
        if not (isinstance(first, tuple) and len(first) == 2 and isinstance(first[1], dict)):
            raise InvalidStep(f"{self.name} returned {type(first).__name__} from reset; expected observation, info.")
        self._check_spaces()
        return self._observation(first[0]), first[1]

    def step(self, action: int) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action + self._first_action)
        if not isinstance(info, dict):
            raise InvalidStep(f"{self.name} returned info of type {type(info).__name__} from step; expected a dict.")
        return self._observation(obs), reward, bool(terminated), bool(truncated), info

    def _check_spaces(self) -> None:
        """Raise InvalidStep if the environment's spaces have changed since it was made."""
        for kind, before in zip(("observation_space", "action_space"), self._announced, strict=True):
            now = getattr(self.env, kind)
            if now is not before and now != before:
                raise InvalidStep(
                    f"{self.name} changed its {kind} from {before} to {now}; the spaces of an environment must stay the same."
                )

    def _observation(self, obs: Any) -> np.ndarray[Any, Any]:
        if not self._flattens:
            return self._as_array(obs)
        assert self._space is not None
        try:
            array = self._as_array(spaces.flatten(self._space, select(self._space, obs) if self.dropped else obs))
        except Exception as error:
            raise self._unlike_space(obs) from error
        if array.shape != self.observation_space.shape:
            raise self._unlike_space(obs)
        return array

    def _unlike_space(self, obs: Any) -> InvalidStep:
        """Return the error for an observation that does not match its space, naming the first wrong entry."""
        self._check_spaces()
        assert self._space is not None
        name, entry, space = first_wrong(self._space, select(self._space, obs) if self.dropped else obs)
        return InvalidStep(
            f"{self.name} returned {_describe(entry)} as its observation{name}, but the space of that is {space}; correct the "
            "space, or wrap the environment."
        )

    def _as_array(self, obs: Any) -> np.ndarray[Any, Any]:
        array = np.asarray(obs)
        if array.ndim == 0:
            array = array.reshape(1)
        return (np.moveaxis(array, 2, 0) if self._channels_last else array).astype(self._dtype, copy=False)


def keep_numbers(space: spaces.Space[Any], path: str = "") -> tuple[spaces.Space[Any] | None, list[str]]:
    """Return the part of `space` that can be flattened (None: nothing) and the paths of the omitted entries."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        entries = space.spaces if isinstance(space, spaces.Dict) else {str(i): part for i, part in enumerate(space)}
        parts = {key: keep_numbers(entry, f"{path}.{key}" if path else key) for key, entry in entries.items()}
        kept = {key: part for key, (part, _) in parts.items() if part is not None}
        dropped = [entry for _, missing in parts.values() for entry in missing]
        if not dropped and isinstance(space, spaces.Tuple):
            return space, []
        return (spaces.Dict(kept) if kept else None), dropped  # a Tuple becomes a Dict with its indices as keys
    if path and _unflattenable(space):
        return None, [f"{path} ({type(space).__name__})"]
    return (None if _unflattenable(space) else space), []


def select(space: spaces.Space[Any], obs: Any) -> Any:
    """Return the part of an observation that belongs to `space`, a result of `keep_numbers`."""
    if isinstance(space, spaces.Dict):
        by_number = isinstance(obs, tuple)
        return {key: select(entry, obs[int(key) if by_number else key]) for key, entry in space.spaces.items()}
    return obs


def first_wrong(space: spaces.Space[Any], obs: Any, path: str = "") -> tuple[str, Any, spaces.Space[Any]]:
    """Return path, value and space of the innermost entry of an observation that does not match its space."""
    parts: dict[Any, Any] = {}
    if isinstance(space, spaces.Dict) and isinstance(obs, dict):
        parts = dict(space.spaces)
    elif isinstance(space, spaces.Tuple) and isinstance(obs, tuple) and len(obs) == len(space.spaces):
        parts = dict(enumerate(space.spaces))
    for key, part in parts.items():
        entry = obs.get(key) if isinstance(obs, dict) else obs[key]
        if not _fits(part, entry):
            return first_wrong(part, entry, f"{path}.{key}")
    return path, obs, space


def _fits(space: spaces.Space[Any], obs: Any) -> bool:
    """Return whether an observation flattens to the size of its space; bounds and dtypes are not checked."""
    try:
        flat: Any = spaces.flatten(space, obs)
    except Exception:
        return False
    return bool(np.shape(flat) == (spaces.flatdim(space),))


def _describe(value: Any) -> str:
    array = np.asarray(value, dtype=object) if isinstance(value, dict) else np.asarray(value)
    if array.dtype != object and array.ndim:
        return f"{array.dtype} of shape {array.shape}"
    return f"{value!r:.60} ({type(value).__name__})"


def entry_name(space: spaces.Space[Any] | None, place: int) -> str:
    """Return the name of element `place` of a flattened observation, as `.position[2]`, or `[2]` for a plain array."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        parts = space.spaces if isinstance(space, spaces.Dict) else dict(enumerate(space.spaces))
        for key, part in parts.items():
            size = spaces.flatdim(part)
            if place < size:
                return f".{key}{entry_name(part, place)}"
            place -= size
    return f"[{place}]"


def _unflattenable(space: spaces.Space[Any]) -> bool:
    if isinstance(space, _NOT_NUMBERS):
        return True
    try:
        return not isinstance(spaces.flatten_space(space), spaces.Box)
    except NotImplementedError:  # a custom space
        return True
