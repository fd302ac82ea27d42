"""Animated GIFs of games, written atomically with Pillow."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
from PIL import Image

from redline.core.errors import StorageError, UserError
from redline.tools.draw import Palette, Pixels, colours, enlarge, grid_colour

LAST_FRAME = 150  # hundredths of a second that the last frame stays before the animation repeats
_WIDEST = 480  # pixels; larger rendered pictures are reduced


def write_gif(path: str | Path, frames: Iterable[Pixels], palette: Palette, scale: int = 16, fps: float = 12) -> None:
    """Write `frames` as an endless animation. Identical consecutive frames are merged into one that is shown longer.

    A frame is a board, (H, W) uint8 indices into `palette` drawn with cells of `scale` pixels, or a picture,
    (H, W, 3) uint8 RGB.
    """
    if len(palette) > 255 or scale < 1:
        raise ValueError(f"a GIF holds at most 255 colours and a scale of at least 1, not {len(palette)} and {scale}")
    write_images(path, list(_images(frames, palette, scale)), fps)


def write_images(path: str | Path, images: list[Image.Image], fps: float = 12) -> None:
    """Write equally large pictures as an endless animation; see `write_gif`."""
    if not 0.1 <= fps <= 50:  # above 50, viewers fall back to 10
        raise UserError(f"fps is {fps:g}; a GIF shows 0.1 to 50 frames per second.")
    if not images:
        raise ValueError("a GIF needs at least one frame")
    # Hundredths of a second, rounded so that the total duration is right.
    ends = [round(number * 100 / fps) for number in range(len(images) + 1)]
    durations = [10 * (end - start) for start, end in itertools.pairwise(ends)]
    durations[-1] = max(10 * LAST_FRAME, durations[-1])
    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    first, *others = images
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        first.save(part, "GIF", save_all=True, append_images=others, duration=durations, loop=0)
        os.replace(part, path)
    except OSError as error:
        raise StorageError(f"Cannot write {path}: {error.strerror or error}. Choose another place.") from error
    finally:
        with suppress(OSError):  # gone after success
            part.unlink()


def _images(frames: Iterable[Pixels], palette: Palette, scale: int) -> Iterator[Image.Image]:
    table = np.vstack([colours(palette), np.array(grid_colour(palette), np.uint8)]) if palette else None
    shape: tuple[int, ...] = ()
    for number, frame in enumerate(frames):
        if number and frame.shape != shape:
            raise ValueError(f"frame {number} has another size than the first")
        shape = frame.shape
        if frame.ndim == 3:
            yield _picture(frame)
            continue
        if table is None or frame.ndim != 2 or frame.max() >= len(palette):
            raise ValueError(f"frame {number} is no (H, W) board of indices below {len(palette)}")
        image = Image.fromarray(enlarge(frame, scale, len(palette)), "P")
        image.putpalette(table.tobytes())
        yield image


def _picture(rgb: Pixels) -> Image.Image:
    """Return a rendered picture, reduced to a sensible size and 256 colours."""
    image = Image.fromarray(rgb)
    image.thumbnail((_WIDEST, _WIDEST))
    return image.quantize(256, dither=Image.Dither.NONE)
