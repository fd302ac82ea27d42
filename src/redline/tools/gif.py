"""Animated GIFs (GIF89a) of boards, written without a library.

A frame holds only the rectangle that changed, and in it transparent pixels where nothing did: mostly long runs, which
the format's compression (LZW) makes small.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from redline.core.errors import StorageError, UserError
from redline.tools.draw import Palette, Pixels, colours, enlarge, grid_colour

LAST_FRAME = 150  # hundredths of a second, so that the eye sees how it ended before it starts again
_CODES = 4096  # an LZW code has 12 bits at most


def write_gif(path: str | Path, frames: Iterable[Pixels], palette: Palette, scale: int = 16, fps: float = 12) -> None:
    """Write `frames`, each (H, W) uint8 indices into `palette`, as an endless animation; a cell is `scale` pixels wide.

    The frames are drawn from the iterable one by one. The file appears whole or not at all.
    """
    if not 0.1 <= fps <= 50:  # above 50, viewers fall back to 10
        raise UserError(f"fps is {fps:g}; a GIF shows 0.1 to 50 frames a second.")
    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            for block in _blocks(frames, palette, scale, fps):
                file.write(block)
        os.replace(part, path)
    except OSError as error:
        raise StorageError(f"Cannot write {path}: {error.strerror or error}. Name another place.") from error
    finally:
        with suppress(OSError):  # gone when all went well
            part.unlink()


def _blocks(frames: Iterable[Pixels], palette: Palette, scale: int, fps: float) -> Iterator[bytes]:
    """The file's parts in order."""
    grid, transparent = len(palette), len(palette) + 1  # two indices after the game's own
    depth = max(2, transparent.bit_length())
    if depth > 8 or scale < 1:
        raise ValueError(f"a GIF holds at most 254 colours and a scale of at least 1, not {len(palette)} and {scale}")
    shown: Pixels | None = None
    waiting: tuple[int, bytes] | None = None  # the frame before: its delay depends on whether another follows
    for number, cells in enumerate(frames):
        if cells.ndim != 2 or cells.max() >= len(palette):
            raise ValueError(f"frame {number} is no (H, W) board of indices below {len(palette)}")
        pixels = enlarge(cells, scale, grid)
        if shown is None:
            height, width = pixels.shape
            table = np.zeros((1 << depth, 3), dtype=np.uint8)
            table[:transparent] = [*colours(palette), grid_colour(palette)]
            yield struct.pack("<6sHHBBB", b"GIF89a", width, height, 0xF0 | (depth - 1), 0, 0) + table.tobytes()
            yield b"\x21\xff\x0bNETSCAPE2.0\x03\x01\x00\x00\x00"  # repeat for ever
            image = _image(pixels, 0, 0, depth)
        else:
            if pixels.shape != shown.shape:
                raise ValueError(f"frame {number} has another size than the first")
            image = _image(*_changed(shown, pixels, transparent), depth)
        if waiting is not None:
            yield _control(waiting[0], transparent) + waiting[1]
        # Hundredths of a second, rounded so that the frames together take the right time.
        waiting = round((number + 1) * 100 / fps) - round(number * 100 / fps), image
        shown = pixels
    if waiting is None:
        raise ValueError("a GIF needs at least one frame")
    yield _control(max(LAST_FRAME, waiting[0]), transparent) + waiting[1] + b"\x3b"


def _changed(old: Pixels, new: Pixels, transparent: int) -> tuple[Pixels, int, int]:
    """The smallest rectangle of `new` that holds every change, transparent where there is none; its top and left."""
    differs = old != new
    rows, columns = differs.any(1).nonzero()[0], differs.any(0).nonzero()[0]
    if not rows.size:  # a frame must hold something
        return np.full((1, 1), transparent, dtype=np.uint8), 0, 0
    box = slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)
    return np.where(differs[box], new[box], np.uint8(transparent)), int(rows[0]), int(columns[0])


def _control(delay: int, transparent: int) -> bytes:
    """What precedes an image: how long it shows, and that it stays for the next one to be laid over it."""
    return struct.pack("<BBBBHBB", 0x21, 0xF9, 4, 0x05, delay, transparent, 0)


def _image(pixels: Pixels, top: int, left: int, depth: int) -> bytes:
    """An image of (h, w) indices below 2 ** depth, placed at (top, left)."""
    height, width = pixels.shape
    data = compress(pixels.tobytes(), depth)
    blocks = b"".join(bytes([len(data[i : i + 255])]) + data[i : i + 255] for i in range(0, len(data), 255))
    return struct.pack("<BHHHHBB", 0x2C, left, top, width, height, 0, depth) + blocks + b"\x00"


def compress(data: bytes, depth: int) -> bytes:
    """GIF's LZW: a code for the longest phrase known, which together with the symbol after it is a new phrase."""
    clear, end = 1 << depth, (1 << depth) + 1
    phrases: dict[int, int] = {}  # code of a phrase << 8 | next symbol -> code of the longer phrase
    width, free = depth + 1, end + 1
    codes = [(clear, width)]
    phrase, find = data[0], phrases.get
    for symbol in data[1:]:
        longer = find(phrase << 8 | symbol)
        if longer is not None:
            phrase = longer
            continue
        codes.append((phrase, width))
        if free < _CODES:
            phrases[phrase << 8 | symbol] = free
            width += free >> width  # the decoder learns a phrase one code later: it widens after this code, as we do
            free += 1
        else:
            codes.append((clear, width))
            phrases.clear()
            width, free = depth + 1, end + 1
        phrase = symbol
    codes += [(phrase, width), (end, min(width + (free >> width), 12))]
    return _pack(codes)


def _pack(codes: list[tuple[int, int]]) -> bytes:
    """Codes of the given widths in bits, least significant bit first, as bytes."""
    packed, bits, used = bytearray(), 0, 0
    for code, width in codes:
        bits |= code << used
        used += width
        while used >= 8:
            packed.append(bits & 0xFF)
            bits >>= 8
            used -= 8
    return bytes(packed) + (bytes([bits]) if used else b"")
