"""Pictures of games, large enough to show: boards assembled from drawings of their cells, and enlarged rendered frames.

A cell is drawn once, antialiased, for each value and each combination of links to its neighbours; a board is assembled from
these drawings. The page in the browser draws in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from redline.tools.draw import Palette, Pixels

SIDE = 480  # pixels of the longer side, at least
_SHORT_SIDE = 320
_FINE = 4  # cells are drawn this many times as large, then reduced
_SIDES = ((1, 0, -1), (2, 1, 0), (4, 0, 1), (8, -1, 0))  # bit, right, down
_WHITE, _BLACK, _DARK = (255, 255, 255), (22, 24, 29), (43, 42, 40)
Key = tuple[int, int, int]  # value, links, whether the square below is light
Colour = tuple[int, int, int]


def cell_pixels(rows: int, columns: int) -> int:
    """Return the pixels per cell that make a board large enough: an even number, as required by videos."""
    needed = max(SIDE / max(rows, columns), _SHORT_SIDE / min(rows, columns), 2)
    return 2 * math.ceil(needed / 2)


class CellDrawings:
    """Drawings of the cells of one game."""

    def __init__(self, palette: Palette, linked: bool, size: int) -> None:
        """linked: whether the game defines links between cells; cells without links are then discs. size: pixels of a cell."""
        self.palette, self.linked, self.size = palette, linked, size
        self._drawn: dict[Key, Pixels] = {}

    def keys(self, cells: Pixels, links: Pixels | None) -> list[list[Key]]:
        """Return the key of the drawing for each cell of a board (H, W)."""
        joined = np.zeros_like(cells) if links is None else links
        return [
            [(value, link, (row + column) % 2) for column, (value, link) in enumerate(zip(*pair, strict=True))]
            for row, pair in enumerate(zip(cells.tolist(), joined.tolist(), strict=True))
        ]

    def drawing(self, key: Key) -> Pixels:
        """Return the drawing of a cell, (size, size, 3) uint8."""
        if key not in self._drawn:
            self._drawn[key] = self._draw(*key)
        return self._drawn[key]

    def board(self, cells: Pixels, links: Pixels | None = None) -> Pixels:
        """Return a board (H, W) as a picture (H * size, W * size, 3)."""
        return _assemble(self.keys(cells, links), self.drawing)

    def _draw(self, value: int, links: int, light: int) -> Pixels:
        side = self.size * _FINE
        floor = self.palette[0][1]
        square = Image.new("RGB", (side, side), _mix(floor, _WHITE, 0.028 * light))
        pen = ImageDraw.Draw(square)
        if value:
            colour = self.palette[value][1]
            if self.linked and links:
                _draw_linked(pen, side, colour, links)
            elif self.linked:
                _disc(pen, side / 2, side / 2, 0.34 * side, colour)
            else:
                box = [0.04 * side, 0.04 * side, 0.96 * side - 1, 0.96 * side - 1]
                pen.rounded_rectangle(box, 0.16 * side, colour)
                name, numbered = self.palette[value][0], all(name.isdigit() for name, _ in self.palette[1:])
                pen.rectangle([0.14 * side, 0.1 * side, 0.86 * side, 0.17 * side], _mix(colour, _WHITE, 0.14))
                if numbered:
                    font = ImageFont.load_default(side * (0.27 if len(name) > 3 else 0.38))
                    pen.text((side / 2, side / 2), name, _DARK, font, "mm")
        return np.asarray(square.resize((self.size, self.size), Image.Resampling.BOX))


def _assemble(keys: list[list[Key]], drawing: Callable[[Key], Pixels]) -> Pixels:
    return np.concatenate([np.concatenate([drawing(key) for key in row], 1) for row in keys], 0)


def _mix(colour: Colour, other: Colour, share: float) -> Colour:
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(colour, other, strict=True))
    return red, green, blue


def _disc(pen: ImageDraw.ImageDraw, x: float, y: float, radius: float, colour: Colour) -> None:
    pen.ellipse([x - radius, y - radius, x + radius, y + radius], colour)


def _draw_linked(pen: ImageDraw.ImageDraw, side: int, colour: Colour, links: int) -> None:
    """Draw a part of a body: an arm to each linked side, and eyes if it faces a side."""
    middle, half = side / 2, 0.37 * side
    for bit, right, down in _SIDES:
        if links & bit:
            x, y = middle + right * middle, middle + down * middle
            thick_x, thick_y = half * abs(down), half * abs(right)
            pen.rectangle(
                [
                    min(x, middle) - thick_x,
                    min(y, middle) - thick_y,
                    max(x, middle) + thick_x,
                    max(y, middle) + thick_y,
                ],
                colour,
            )
    faces = links >> 4
    _disc(pen, middle, middle, (0.44 if faces else 0.37) * side, colour)
    for bit, right, down in _SIDES:
        if faces & bit:
            for aside in (-1, 1):
                x = middle + side * (0.12 * right - 0.19 * aside * down)
                y = middle + side * (0.12 * down + 0.19 * aside * right)
                _disc(pen, x, y, 0.115 * side, _WHITE)
                _disc(pen, x + 0.045 * side * right, y + 0.045 * side * down, 0.062 * side, _BLACK)


def enlarge_picture(rgb: Pixels) -> Image.Image:
    """Return a rendered picture with a longer side of at least SIDE pixels, enlarged by a whole number, sides even."""
    factor = max(1, math.ceil(SIDE / max(rgb.shape[:2])))
    large = rgb.repeat(factor, 0).repeat(factor, 1)
    height, width = (side - side % 2 or side for side in large.shape[:2])
    return Image.fromarray(large[:height, :width])


def indexed_boards(drawings: CellDrawings, boards: Iterable[tuple[Pixels, Pixels | None]]) -> Iterator[Image.Image]:
    """Yield boards as pictures that share 255 colours, so that an unchanged cell changes no pixel."""
    all_keys = [drawings.keys(cells, links) for cells, links in boards]
    used = sorted({key for keys in all_keys for row in keys for key in row})
    sheet = Image.fromarray(np.concatenate([drawings.drawing(key) for key in used], 0))
    reduced = sheet.quantize(255, dither=Image.Dither.NONE)
    tiles = dict(zip(used, np.asarray(reduced).reshape(len(used), drawings.size, drawings.size), strict=True))
    for keys in all_keys:
        image = Image.fromarray(_assemble(keys, tiles.__getitem__), "P")
        image.putpalette(reduced.getpalette() or [])
        yield image
