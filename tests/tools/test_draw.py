"""The board as text and as pixels, read back and compared."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest

from redline import games
from redline.tools import draw

PALETTE = (
    ("floor", (24, 26, 32)),
    ("food", (226, 74, 62)),
    ("frog", (1, 2, 3)),
    ("I", (9, 9, 9)),
    ("i", (255, 255, 255)),
)
CELLS = np.array([[0, 1, 2], [3, 4, 0], [1, 1, 0]], dtype=np.uint8)


class Terminal(io.StringIO):
    """A text stream that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def pixels_of(lines: list[str]) -> list[list[object]]:
    """Rows of colours shown by lines of half blocks: the text colour is the upper pixel, the background the lower."""
    rows: list[list[object]] = []
    for line in lines:
        upper, lower, fg, bg = [], [], None, None
        for codes, character in re.findall(r"\x1b\[([0-9;]*)m|(.)", line):
            if character:
                assert character == "▀"
                upper.append(fg)
                lower.append(bg)
            elif codes == "0":
                fg = bg = None
            else:
                match = re.fullmatch(r"38;(2;\d+;\d+;\d+|5;\d+);(49|48;(2;\d+;\d+;\d+|5;\d+))", codes)
                assert match, codes
                fg, bg = (tuple(map(int, code.split(";")[1:])) if code else None for code in (match[1], match[3]))
        assert fg is None, "a line must end in the terminal's own colours"
        rows += [upper, lower]
    return rows


@pytest.mark.parametrize("scale", [1, 2, 3])
@pytest.mark.parametrize("height", [2, 3])
def test_colours_of_every_pixel(height: int, scale: int) -> None:
    lines = draw.board_lines(CELLS[:height], PALETTE, "rgb", scale)
    rows = pixels_of(lines)
    if (height * scale) % 2:  # the last line has a lower half that is no part of the board
        assert set(rows.pop()) == {None}
    assert len(rows) == height * scale + 2
    inside = np.array([row[1:-1] for row in rows[1:-1]])
    assert np.array_equal(inside, draw.colours(PALETTE)[draw.enlarge(CELLS[:height], scale)])
    border = rows[0] + rows[-1] + [row[0] for row in rows] + [row[-1] for row in rows]
    assert set(border) == {draw.BORDER}
    assert draw.board_size((height, 3), "rgb", scale) == (len(lines), len(rows[0]))


def test_256_colours_are_the_nearest() -> None:
    # Of the cube 16 + 36 r + 6 g + b with levels 0 95 135 175 215 255, or of the greys 232 + i of 8 + 10 i.
    palette = tuple(("x", rgb) for rgb in [(0, 0, 0), (255, 0, 0), (0, 94, 255), (24, 26, 32), (140, 130, 170)])
    rows = pixels_of(draw.board_lines(np.arange(5, dtype=np.uint8).reshape(1, 5), palette, "256"))
    assert [code for (code,) in rows[1][1:-1]] == [16, 196, 16 + 6 + 5, 234, 16 + 72 + 12 + 3]


def test_letters() -> None:
    assert draw.letters(PALETTE) == [".", "f", "r", "i", "I"]  # each once: a name gives its first letter that is free
    assert draw.board_lines(CELLS, PALETTE, "letters", scale=2) == [". f r", "i I .", "f f ."]
    assert draw.board_size((3, 3), "letters", scale=2) == (3, 5)


@pytest.mark.parametrize("name", games.names())
def test_letters_differ_in_every_game(name: str) -> None:
    palette = games.load(name).PALETTE
    letters = draw.letters(palette)
    assert len(set(letters)) == len(palette)
    assert all(len(letter) == 1 and letter.isascii() and letter != "?" for letter in letters)


def test_style() -> None:
    true, latin = Terminal(), Terminal()
    latin.encoding = "iso-8859-1"
    colour = {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
    assert draw.style_of(true, colour) == "rgb"
    assert draw.style_of(true, {"TERM": "xterm-256color"}) == "256"
    assert draw.style_of(true, colour | {"NO_COLOR": "1"}) == "letters"
    assert draw.style_of(true, colour | {"NO_COLOR": ""}) == "rgb"  # no-color.org: only when not empty
    assert draw.style_of(true, {"TERM": "dumb"}) == "letters"
    assert draw.style_of(latin, colour) == "letters"
    assert draw.style_of(io.StringIO(), colour) == "letters"


def test_pixels() -> None:
    image = draw.board_rgb(CELLS, PALETTE, scale=8)
    assert image.shape == (24, 24, 3)
    assert image.dtype == np.uint8
    for row in range(24):
        for column in range(24):
            line = row % 8 == 7 or column % 8 == 7
            expected = (15, 16, 20) if line else PALETTE[CELLS[row // 8, column // 8]][1]
            assert tuple(image[row, column]) == expected
    assert np.array_equal(draw.board_rgb(CELLS, PALETTE, scale=1), draw.colours(PALETTE)[CELLS])  # too small for lines
