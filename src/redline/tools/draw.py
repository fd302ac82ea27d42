"""Draw boards and rendered pictures of any game as pixels, or as text for a terminal.

A board is a game's `cells`, (H, W) uint8 indices into its PALETTE of (name, colour). A picture is (H, W, 3) uint8 RGB.
"""

from __future__ import annotations

import itertools
import os
import string
from collections.abc import Mapping
from typing import Literal, TextIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Palette = tuple[tuple[str, tuple[int, int, int]], ...]
Pixels = NDArray[np.uint8]
Style = Literal["rgb", "256", "letters"]  # of a terminal: 24-bit colour, 256 colours, text only

BORDER = (88, 92, 104)  # around a board in a terminal, whose background may have the floor's colour
RESET = "\x1b[0m"
_LEVELS, _GREYS = (0, 95, 135, 175, 215, 255), range(8, 248, 10)
_XTERM = np.array(
    [*itertools.product(_LEVELS, repeat=3), *((grey, grey, grey) for grey in _GREYS)]
)  # colours 16 to 255


def style_of(out: TextIO, environ: Mapping[str, str] = os.environ) -> Style:
    """Return the richest style `out` can show: letters for a file, with NO_COLOR set, or without UTF-8."""
    if not out.isatty() or environ.get("NO_COLOR") or environ.get("TERM") == "dumb":
        return "letters"
    if (out.encoding or "").lower().replace("-", "") not in ("utf8", "utf8sig"):
        return "letters"
    # Without this variable, a terminal may not support 24-bit colour and show noise (macOS Terminal); all have 256 colours.
    return "rgb" if environ.get("COLORTERM") in ("truecolor", "24bit") else "256"


def colours(palette: Palette) -> Pixels:
    """Return the palette's colours, (P, 3) uint8."""
    return np.array([rgb for _, rgb in palette], dtype=np.uint8).reshape(-1, 3)


def grid_colour(palette: Palette) -> tuple[int, int, int]:
    """Return the colour of the lines between cells: a darker shade of the floor's, the palette's first."""
    red, green, blue = palette[0][1]
    return red * 5 // 8, green * 5 // 8, blue * 5 // 8


def enlarge(cells: Pixels, scale: int, gap: int | None = None) -> Pixels:
    """Return a board (H * scale, W * scale) with square cells; with `gap`, their last row and column hold that index."""
    large = cells.repeat(scale, 0).repeat(scale, 1)
    if gap is not None and scale >= 4:  # a line would cover most of a smaller cell
        large[scale - 1 :: scale] = gap
        large[:, scale - 1 :: scale] = gap
    return large


def board_rgb(cells: Pixels, palette: Palette, scale: int = 16) -> Pixels:
    """Return a board as a picture, (H * scale, W * scale, 3) uint8, with dark lines between the cells."""
    table = np.vstack([colours(palette), np.array(grid_colour(palette), dtype=np.uint8)])
    return table[enlarge(cells, scale, len(palette))]


def board_lines(cells: Pixels, palette: Palette, style: Style, scale: int = 1) -> list[str]:
    """Return a board as lines of text: in colour, two pixel rows per line, `scale` pixels per cell; else a letter per cell."""
    if style == "letters":
        letter = letters(palette)
        return [" ".join(letter[cell] for cell in row) for row in cells.tolist()]
    rgb = np.pad(colours(palette)[enlarge(cells, scale)], ((1, 1), (1, 1), (0, 0)))
    rgb[[0, -1]] = rgb[:, [0, -1]] = BORDER
    return _half_blocks(rgb, style)


def board_size(shape: tuple[int, int], style: Style, scale: int = 1) -> tuple[int, int]:
    """Return the lines and columns of `board_lines` for a board of `shape`."""
    height, width = shape
    if style == "letters":
        return height, 2 * width - 1
    return (height * scale + 3) // 2, width * scale + 2


def picture_lines(rgb: Pixels, style: Style, lines: int, columns: int) -> list[str]:
    """Return a picture as text of at most `lines` by `columns`; empty if the style has no colours."""
    if style == "letters":
        return []
    height, width = rgb.shape[:2]
    scale = min(2 * lines / height, columns / width, 1.0)
    rows, cells = max(1, int(height * scale)), max(1, int(width * scale))
    small = Image.fromarray(rgb).resize((cells, rows), Image.Resampling.BOX)
    return _half_blocks(np.asarray(small), style)


def letters(palette: Palette) -> list[str]:
    """Return a unique character for each entry: a dot for the floor (the first), a letter of the name for the others."""
    chosen = ["."]
    for name, _ in palette[1:]:
        candidates = name.lower() + name.upper() + string.ascii_letters + string.digits
        chosen.append(next((c for c in candidates if c.isalnum() and c.isascii() and c not in chosen), "?"))
    return chosen


def _half_blocks(rgb: Pixels, style: Style) -> list[str]:
    """Return a picture as lines of upper half blocks: the text colour is the upper pixel, the background the lower."""
    lines = []
    for top in range(0, len(rgb), 2):
        below = rgb[top + 1].tolist() if top + 1 < len(rgb) else [None] * rgb.shape[1]
        parts, last = [], None
        for pair in zip(rgb[top].tolist(), below, strict=True):
            if pair != last:  # codes only where a colour changes, to suit slow connections
                background = "49" if pair[1] is None else f"48;{_code(pair[1], style)}"  # None: below the last row
                parts.append(f"\x1b[38;{_code(pair[0], style)};{background}m")
                last = pair
            parts.append("▀")
        lines.append("".join(parts) + RESET)
    return lines


def _code(colour: list[int], style: Style) -> str:
    """Return the colour code that follows 38 or 48; with 256 colours, the nearest of the 6x6x6 cube or the 24 greys."""
    if style == "rgb":
        return "2;{};{};{}".format(*colour)
    return f"5;{16 + int(((_XTERM - colour) ** 2).sum(1).argmin())}"
