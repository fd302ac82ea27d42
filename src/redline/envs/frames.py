"""How images and actions of an environment are commonly treated: repeated actions, grey images of 84x84, and so on.

Mnih et al. 2015 and Machado et al. 2018 (sticky actions) in one wrapper. Stacks of frames are made on the device.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from redline.core.errors import UserError

Array = np.ndarray[Any, Any]
Parts = list[tuple[Array, Array]]  # see `_parts`
_GREY = (77, 150, 29)  # of red, green and blue, in 256ths


class Frames(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment whose every action is repeated `skip` times; of images the last, or the brighter of the last two, is seen.

    With chance `sticky`, anew for each repetition, the action before is taken instead. Images become grey (H, W, 1) and `size`
    cells wide and high; those without channels (H, W) get one. What is not of the shape that the environment `name` says it is
    of, or no bytes where it says bytes, is an error.
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        skip: int,
        brightest: bool,
        grey: bool,
        size: int,
        sticky: float,
        name: str = "The environment",
    ) -> None:
        super().__init__(env)
        self.skip, self.brightest, self.grey, self.sticky, self.name = skip, brightest, grey, sticky, name
        seen, self.resize = env.observation_space, None
        self.box = seen if isinstance(seen, spaces.Box) else None
        self.chance = np.random.default_rng()
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
                self.resize = (_parts(_averages(height, size)), _parts(_averages(width, size)))
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
        if self.box is not None:
            obs = np.asarray(obs)
            if obs.shape != self.box.shape or obs.dtype != self.box.dtype:
                obs = self._fitting(obs, self.box)
        if self.flat:
            obs, before = obs[:, :, None], None if before is None else before[:, :, None]
        if self.brightest and before is not None:
            obs = np.maximum(obs, before)
        if self.grey and obs.shape[2] == 3:
            obs = _grey(obs)[:, :, None]
        if self.resize is not None:
            obs = np.stack([_resized(obs[:, :, channel], *self.resize) for channel in range(obs.shape[2])], 2)
        return obs

    def _fitting(self, obs: Array, box: spaces.Box) -> Array:
        """The same numbers, as they were announced."""
        got = f"{obs.dtype} of shape {obs.shape}"
        whole = box.dtype.kind != "f"  # numbers; where they are not, any number does, and be it beyond the bounds
        fits = obs.shape == box.shape and obs.dtype.kind in ("biu" if whole else "biuf")
        if fits and whole:
            fits = bool(((obs >= box.low) & (obs <= box.high)).all())
            got += f" from {obs.min()} to {obs.max()}"
        if not fits:
            raise UserError(
                f"{self.name} shows {got}, but says that it shows {box.dtype} of shape {box.shape}; "
                "correct its observation_space, or wrap it."
            )
        return obs.astype(box.dtype, copy=False)


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


def _grey(image: Array) -> Array:
    """(H, W) bytes of (H, W, 3)."""
    # Bytes that lie apart are gathered as bytes: to convert them where they lie takes twice as long.
    red, green, blue = (np.ascontiguousarray(image[:, :, channel]).astype(np.uint16) for channel in range(3))
    red *= _GREY[0]
    green *= _GREY[1]
    blue *= _GREY[2]
    red += green
    red += blue
    red >>= 8
    return red.astype(np.uint8)


def _resized(plane: Array, rows: Parts, columns: Parts) -> Array:
    """(H, W) bytes made smaller or larger: each new cell is the mean of what it covers, to a grey or two of 256."""
    halfway = _added_up(plane.astype(np.uint16), rows)
    return _added_up(np.ascontiguousarray(halfway.T), columns).T.astype(np.uint8)


def _added_up(plane: Array, parts: Parts) -> Array:
    """Rows (size, …) of the rows of `plane` (cells, …) uint16, with their shares."""
    total = np.full((len(parts[0][0]), *plane.shape[1:]), 128, np.uint16)  # a half
    for places, shares in parts:
        part = plane[places]
        part *= shares
        total += part
    total >>= 8
    return total


def _parts(shares: Array) -> Parts:
    """The few cells that every new one covers: of each the first, then of each the second, …: places and shares in 256ths.

    A matrix that makes 84 of 240 cells is zero but for four in a row, and bytes times 256ths need no floating point.
    """
    size, cells = shares.shape
    upto = np.round(256 * shares.cumsum(1)).astype(np.int64)
    whole = np.diff(upto, prepend=0)  # so that 256 are shared out exactly
    first = (shares > 0).argmax(1)
    found = []
    for number in range(int((shares > 0).sum(1).max())):
        places = np.minimum(first + number, cells - 1)
        covered = np.where(first + number < cells, whole[np.arange(size), places], 0)
        found.append((places, covered[:, None].astype(np.uint16)))
    return found


def _averages(cells: int, size: int) -> Array:
    """(size, cells) float32: each new cell is the mean of what it covers of the old ones."""
    edges = np.linspace(0, cells, size + 1)
    low, high = edges[:-1, None], edges[1:, None]
    old = np.arange(cells)
    covered = np.clip(np.minimum(high, old + 1) - np.maximum(low, old), 0, None)
    shares: Array = (covered / covered.sum(1, keepdims=True)).astype(np.float32)
    return shares
