"""How images and actions of an environment are commonly treated: repeated actions, grey images of 84x84, and so on.

Mnih et al. 2015 and Machado et al. 2018 (sticky actions) in one wrapper. Stacks of frames are made on the device.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from redline.core.errors import UserError

_GREY = np.array([77, 150, 29], np.uint16)  # of red, green and blue, in 256ths


class Frames(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment whose every action is repeated `skip` times; of images the last, or the brighter of the last two, is seen.

    With chance `sticky`, anew for each repetition, the action before is taken instead. Images become grey (H, W, 1) and `size`
    cells wide and high; those without channels (H, W) get one.
    """

    def __init__(
        self, env: gymnasium.Env[Any, Any], skip: int, brightest: bool, grey: bool, size: int, sticky: float
    ) -> None:
        super().__init__(env)
        self.skip, self.brightest, self.grey, self.sticky = skip, brightest, grey, sticky
        seen, self.resize = env.observation_space, None
        self.flat = isinstance(seen, spaces.Box) and seen.dtype == np.uint8 and len(seen.shape) == 2
        if self.flat:
            assert seen.shape is not None
            seen = self.observation_space = spaces.Box(0, 255, (*seen.shape, 1), np.uint8)
        if brightest or grey or size:
            if not is_image(seen):
                wanted = "frame_max" if brightest else "grey" if grey else "size"
                raise UserError(f"env.{wanted} is set, but what is seen here, {seen}, is no image; leave it away.")
            assert seen.shape is not None
            height, width, channels = seen.shape
            if grey and channels not in (1, 3):
                raise UserError(f"env.grey is set, but images have {channels} channels, not red, green and blue.")
            if size:
                self.resize = (_averages(height, size), _averages(width, size).T)
            shape = (size or height, size or width, 1 if grey else channels)
            self.observation_space = spaces.Box(0, 255, shape, np.uint8)
        self.last: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(seed=seed, options=options)
        if seed is not None:
            self.chance = np.random.default_rng([seed, 1])  # not the numbers the environment draws
        self.last = None
        return self._seen(obs, None), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        earned, before, obs = 0.0, None, None
        for _ in range(self.skip):
            stuck = self.sticky and self.last is not None and self.chance.random() < self.sticky
            self.last = self.last if stuck else action
            before = obs.copy() if self.brightest and obs is not None else None  # it may be overwritten
            obs, reward, terminated, truncated, info = self.env.step(self.last)
            earned += float(reward)
            if terminated or truncated:
                break
        return self._seen(obs, before), earned, terminated, truncated, info

    def _seen(self, obs: Any, before: Any) -> Any:
        if self.flat:
            obs, before = obs[:, :, None], None if before is None else before[:, :, None]
        if self.brightest and before is not None:
            obs = np.maximum(obs, before)
        if self.grey and obs.shape[2] == 3:
            obs = ((obs * _GREY).sum(2, dtype=np.uint16) >> 8).astype(np.uint8)[:, :, None]
        if self.resize is not None:
            rows, columns = self.resize
            planes = rows @ np.moveaxis(obs, 2, 0).astype(np.float32) @ columns
            obs = np.moveaxis((planes + 0.5).astype(np.uint8), 0, 2)
        return obs


def is_image(space: spaces.Space[Any]) -> bool:
    """(H, W, channels) of bytes."""
    shape = space.shape
    return (
        isinstance(space, spaces.Box)
        and space.dtype == np.uint8
        and shape is not None
        and len(shape) == 3
        and shape[2] <= 4
    )


def _averages(cells: int, size: int) -> np.ndarray[Any, Any]:
    """(size, cells) float32: each new cell is the mean of what it covers of the old ones."""
    edges = np.linspace(0, cells, size + 1)
    low, high = edges[:-1, None], edges[1:, None]
    old = np.arange(cells)
    covered = np.clip(np.minimum(high, old + 1) - np.maximum(low, old), 0, None)
    shares: np.ndarray[Any, Any] = (covered / covered.sum(1, keepdims=True)).astype(np.float32)
    return shares
