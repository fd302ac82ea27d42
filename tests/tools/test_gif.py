"""GIFs decoded again: every picture at its time, sizes, names and places that are refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from redline.core.errors import StorageError, UserError
from redline.tools.draw import board_rgb
from redline.tools.gif import write_gif

PALETTE = (("floor", (24, 26, 32)), ("body", (64, 160, 92)), ("head", (150, 230, 120)), ("food", (226, 74, 62)))


def decoded(path: Path) -> tuple[list[np.ndarray], list[int], dict[str, object]]:
    """Return every frame (H, W, 3), every duration in ms, and the file's own facts."""
    with Image.open(path) as image:
        frames, durations = [], []
        for number in range(image.n_frames):
            image.seek(number)
            frames.append(np.array(image.convert("RGB")))
            durations.append(image.info["duration"])
        return frames, durations, dict(image.info)


def shown(path: Path, count: int, fps: float = 12) -> list[np.ndarray]:
    """Return the picture on the screen in the middle of each of `count` frames: unchanged frames are stored once."""
    frames, durations, _ = decoded(path)
    ends = np.cumsum(durations)
    times = [(number + 0.5) * 1000 / fps for number in range(count)]
    return [frames[int(np.searchsorted(ends, time))] for time in times]


def walk(steps: int, height: int, width: int) -> Iterator[np.ndarray]:
    """A head that wanders with a food elsewhere: small changes, and boards that stay as they were."""
    rng = np.random.default_rng(0)
    row, column = 0, 0
    for step in range(steps):
        cells = np.zeros((height, width), dtype=np.uint8)
        cells[(step // 7) % height, -1] = 3
        cells[row, column] = 2
        yield cells
        if step % 3:
            row, column = (row + rng.integers(2)) % height, (column + rng.integers(2)) % width


def noise(steps: int, height: int, width: int) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, 4, (height, width)).astype(np.uint8) for _ in range(steps)]


@pytest.mark.parametrize("scale", [1, 4, 16])
@pytest.mark.parametrize(
    "frames", [list(walk(60, 9, 6)), noise(6, 10, 20), noise(1, 1, 1)], ids=["walk", "noise", "one"]
)
def test_every_pixel_of_every_frame(tmp_path: Path, frames: list[np.ndarray], scale: int) -> None:
    path = tmp_path / "game.gif"
    write_gif(path, iter(frames), PALETTE, scale=scale)
    for image, cells in zip(shown(path, len(frames)), frames, strict=True):
        assert np.array_equal(image, board_rgb(cells, PALETTE, scale))
    if len(frames) > 1:
        assert decoded(path)[2]["loop"] == 0  # for ever


@pytest.mark.parametrize("colours", [1, 2, 3, 6, 7, 30, 255])
def test_palettes_of_any_size(tmp_path: Path, colours: int) -> None:
    palette = tuple((f"c{i}", (i, 255 - i, (7 * i) % 256)) for i in range(colours))
    rng = np.random.default_rng(2)
    frames = [rng.integers(0, colours, (12, 9)).astype(np.uint8) for _ in range(3)]
    write_gif(tmp_path / "a.gif", frames, palette, scale=4)
    images = shown(tmp_path / "a.gif", 3)
    assert all(np.array_equal(image, board_rgb(c, palette, 4)) for image, c in zip(images, frames, strict=True))


def test_durations_add_up_and_the_last_frame_is_held(tmp_path: Path) -> None:
    write_gif(tmp_path / "a.gif", walk(25, 5, 5), PALETTE, scale=2, fps=12)
    _, durations, _ = decoded(tmp_path / "a.gif")
    assert sum(durations) == 2000 + 1500  # a twelfth of a second is no whole number of hundredths
    assert durations[-1] >= 1500


def test_small_changes_make_small_files(tmp_path: Path) -> None:
    frames = noise(1, 10, 10) * 21
    for number in range(1, 21):  # two opposite corners change, so the rectangle around the change is the whole board
        frames[number] = frames[number - 1].copy()
        frames[number][[0, -1], [0, -1]] = number % 4, (number + 1) % 4
    write_gif(tmp_path / "all.gif", frames, PALETTE)
    write_gif(tmp_path / "first.gif", frames[:1], PALETTE)
    first = (tmp_path / "first.gif").stat().st_size
    assert ((tmp_path / "all.gif").stat().st_size - first) / 20 < first / 4


def test_rendered_pictures(tmp_path: Path) -> None:
    """RGB frames, as environments of Gymnasium render them, keep their colours and are made smaller if they are large."""
    picture = np.zeros((300, 960, 3), np.uint8)
    picture[:, :480] = (200, 30, 40)
    write_gif(tmp_path / "a.gif", [picture, picture[:, ::-1].copy()], ())
    frames, _, _ = decoded(tmp_path / "a.gif")
    assert [frame.shape for frame in frames] == [(150, 480, 3)] * 2
    assert tuple(frames[0][75, 100]) == tuple(frames[1][75, 380]) == (200, 30, 40)


def test_the_old_file_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "game.gif"
    path.write_bytes(b"old")

    def interrupted() -> Iterator[np.ndarray]:
        yield from walk(3, 4, 4)
        assert path.read_bytes() == b"old"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_gif(path, interrupted(), PALETTE)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["game.gif"]
    write_gif(path, walk(3, 4, 4), PALETTE)
    assert len(decoded(path)[0]) == 2  # the last two boards are equal
    assert os.listdir(tmp_path) == ["game.gif"]


def test_folders_are_made_and_an_impossible_place_is_named(tmp_path: Path) -> None:
    write_gif(tmp_path / "a" / "b" / "game.gif", walk(1, 4, 4), PALETTE)
    assert (tmp_path / "a" / "b" / "game.gif").exists()
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"Cannot write .*file/game\.gif"):
        write_gif(tmp_path / "file" / "game.gif", walk(1, 4, 4), PALETTE)


def test_what_cannot_be_a_gif(tmp_path: Path) -> None:
    path = tmp_path / "a.gif"
    for fps in (0, -1, 51, float("nan")):
        with pytest.raises(UserError, match="fps"):
            write_gif(path, walk(2, 4, 4), PALETTE, fps=fps)
    with pytest.raises(ValueError, match="at least one frame"):
        write_gif(path, [], PALETTE)
    with pytest.raises(ValueError, match="frame 1 has another size"):
        write_gif(path, [*walk(1, 4, 4), *walk(1, 4, 5)], PALETTE)
    with pytest.raises(ValueError, match="frame 0 is no"):
        write_gif(path, [np.full((2, 2), 4, dtype=np.uint8)], PALETTE)
    with pytest.raises(ValueError, match="255 colours"):
        write_gif(path, walk(1, 4, 4), (("x", (0, 0, 0)),) * 256)
    assert os.listdir(tmp_path) == []
