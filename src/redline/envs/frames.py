"""Frames: the usual image and action preprocessing in one wrapper: frame skip, greyscale, resizing, sticky actions.

Follows Mnih et al. 2015 and Machado et al. 2018 (sticky actions). Frames are stacked on the device, not here.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from redline.core.errors import InvalidStep, UserError
from redline.envs import images
from redline.envs.gym_make import STEP_VALUES

Array = np.ndarray[Any, Any]
_BAR_ROWS = 10  # the action bar takes up one tenth of the image's height


class Frames(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Repeats every action `skip` times and returns the last image, or the maximum of the last two.

    skip: repetitions of an action; rewards are summed, and the end of the episode stops the repetition.
    brightest: show the pixelwise maximum of the last two images.
    grey, size: convert images to (size, size, 1) greyscale; images without channels (H, W) get one.
    sticky: probability, drawn for each repetition, that the previous action is taken instead.
    show_action: draw the action of the last repetition at the top of the image: a black bar with one position per action,
        white at that of the action; all black at the start of an episode.

    If the environment has an attribute `frame_hidden`, it is set to True for steps whose observation is discarded unless
    the episode ends there.

    An observation that does not fit the announced space in shape, or in range where the space holds integers, raises
    InvalidStep with the environment's `name`.
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        skip: int,
        brightest: bool,
        grey: bool,
        size: int,
        sticky: float,
        show_action: bool = False,
        name: str = "The environment",
    ) -> None:
        super().__init__(env)
        self.skip, self.brightest, self.grey, self.sticky, self.name = skip, brightest, grey, sticky, name
        space = env.observation_space
        self.shrink: images.Shrink | None = None
        self.box = space if isinstance(space, spaces.Box) else None
        self.rng = np.random.default_rng()
        self.no_channels = isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) == 2
        if self.no_channels:
            assert space.shape is not None
            space = self.observation_space = spaces.Box(0, 255, (*space.shape, 1), np.uint8)
        if brightest or grey or size or show_action:
            if not is_image(space):
                option = "frame_max" if brightest else "grey" if grey else "size" if size else "show_action"
                raise UserError(
                    f"env.{option} is set, but the observation of shape {space.shape} is no image; remove env.{option}."
                )
            assert space.shape is not None
            height, width, channels = space.shape
            if grey and channels not in (1, 3):
                raise UserError(f"env.grey is set, but images have {channels} channels, not red, green and blue.")
            if size:
                self.shrink = images.Shrink(height, width, size)
            shape = (size or height, size or width, 1 if grey else channels)
            self.observation_space = spaces.Box(0, 255, shape, np.uint8)
        self.fields = self._action_fields() if show_action else None
        self.last_action: Any = None
        self.may_hide = hasattr(env, "frame_hidden") and not brightest

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(seed=seed, options=options)
        if seed is not None:
            self.rng = np.random.default_rng([seed, 1])  # independent of the environment's own draws
        self.last_action = None
        return self._preprocess(obs, None), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        total_reward, before, obs = 0.0, None, None
        for repetition in range(self.skip):
            if self.may_hide:
                self.env.frame_hidden = repetition < self.skip - 1  # type: ignore[attr-defined]
            sticks = self.sticky and self.last_action is not None and self.rng.random() < self.sticky
            self.last_action = self.last_action if sticks else action
            before = obs.copy() if self.brightest and obs is not None else None  # the environment may overwrite obs
            values: Any = self.env.step(self.last_action)
            try:
                obs, reward, terminated, truncated, info = values
                total_reward += float(reward)
            except (TypeError, ValueError):
                raise self._invalid(values) from None
            if terminated or truncated:
                break
        return self._preprocess(obs, before), total_reward, terminated, truncated, info

    def _invalid(self, values: Any) -> InvalidStep:
        """Return the error for a result of `step` that cannot be unpacked or whose reward is not a number."""
        if not isinstance(values, tuple) or len(values) != 5:
            count = len(values) if isinstance(values, tuple) else 1
            return InvalidStep(
                f"{self.name} returned {count} value{'s' * (count != 1)} from step; expected {STEP_VALUES}."
            )
        reward = f"{values[1]!r:.60}"
        return InvalidStep(f"{self.name} returned the reward {reward} ({type(values[1]).__name__}); expected a number.")

    def _preprocess(self, obs: Any, before: Any) -> Any:
        if self.box is not None:
            obs = self._as_announced(np.asarray(obs), self.box)
            before = None if before is None else self._as_announced(np.asarray(before), self.box)
        if self.no_channels:
            obs, before = obs[:, :, None], None if before is None else before[:, :, None]
        if self.brightest and before is not None:
            obs = np.maximum(obs, before)
        if self.shrink is not None:
            planes = [obs] if self.grey else [obs[:, :, i : i + 1] for i in range(obs.shape[2])]
            obs = np.concatenate([self.shrink(plane) for plane in planes], 2)
        elif self.grey and obs.shape[2] == 3:
            obs = images.grey(obs)[:, :, None]
        return obs if self.fields is None else self._with_action(obs)

    def _action_fields(self) -> dict[Any, slice]:
        """Return the columns of the action bar that mark each action."""
        actions, shape = self.env.action_space, self.observation_space.shape
        count = int(actions.n) if isinstance(actions, spaces.Discrete) else 0
        assert shape is not None
        width = shape[1] // count if count else 0
        if not width:
            raise UserError(
                f"env.show_action is set, but {self.name} has actions of {actions} and images {shape[1]} pixels wide; "
                "expected actions that are one of a few (Discrete), no more of them than pixels."
            )
        first = int(actions.start)  # type: ignore[attr-defined]
        return {first + number: slice(number * width, (number + 1) * width) for number in range(count)}

    def _with_action(self, obs: Array) -> Array:
        """Return a copy of the image with the action bar drawn in."""
        assert self.fields is not None
        shown = obs.copy()
        bar = shown[: max(1, len(shown) // _BAR_ROWS)]
        bar[:] = 0
        if self.last_action is not None:
            bar[:, self.fields[self.last_action]] = 255
        return shown

    def _as_announced(self, obs: Array, box: spaces.Box) -> Array:
        """Return the observation in the announced dtype; raise InvalidStep if it does not fit the announced space."""
        if obs.shape == box.shape and obs.dtype == box.dtype:
            return obs
        actual = f"{obs.dtype} of shape {obs.shape}"
        integers = box.dtype.kind != "f"  # must lie within the bounds; floats may exceed them
        fits = obs.shape == box.shape and obs.dtype.kind in ("biu" if integers else "biuf")
        if fits and integers:
            fits = bool(((obs >= box.low) & (obs <= box.high)).all())
            actual += f" from {obs.min()} to {obs.max()}"
        if not fits:
            raise InvalidStep(
                f"{self.name} returned an observation of {actual}, but its observation_space is {box.dtype} of shape "
                f"{box.shape}; correct the space, or wrap the environment."
            )
        return obs.astype(box.dtype, copy=False)


def is_image(space: spaces.Space[Any]) -> bool:
    """Return whether the space holds images: (H, W, channels) uint8 with up to four channels."""
    shape = space.shape
    return (
        isinstance(space, spaces.Box)
        and space.dtype == np.uint8
        and shape is not None
        and len(shape) == 3
        and shape[2] <= 4
    )
