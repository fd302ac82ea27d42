"""GIFs as another decoder (Pillow) sees them, and their compression against a plain decoder written from the format."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from redline.core.errors import StorageError, UserError
from redline.tools.draw import board_rgb
from redline.tools.gif import compress, write_gif

PALETTE = (("floor", (24, 26, 32)), ("body", (64, 160, 92)), ("head", (150, 230, 120)), ("food", (226, 74, 62)))


def decoded(path: Path) -> tuple[list[np.ndarray], list[int], dict[str, object]]:
    """Every frame (H, W, 3), every duration in ms, and the file's own facts, as Pillow reads them."""
    with Image.open(path) as image:
        frames, durations = [], []
        for number in range(image.n_frames):
            image.seek(number)
            frames.append(np.array(image.convert("RGB")))
            durations.append(image.info["duration"])
        return frames, durations, dict(image.info)


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
    images, _, info = decoded(path)
    assert len(images) == len(frames)
    for image, cells in zip(images, frames, strict=True):
        assert np.array_equal(image, board_rgb(cells, PALETTE, scale))
    assert info["loop"] == 0  # for ever


@pytest.mark.parametrize("colours", [1, 2, 3, 6, 7, 30, 254])
def test_palettes_of_any_size(tmp_path: Path, colours: int) -> None:
    palette = tuple((f"c{i}", (i, 255 - i, (7 * i) % 256)) for i in range(colours))
    rng = np.random.default_rng(2)
    frames = [rng.integers(0, colours, (12, 9)).astype(np.uint8) for _ in range(3)]
    write_gif(tmp_path / "a.gif", frames, palette, scale=4)
    images, _, _ = decoded(tmp_path / "a.gif")
    assert all(np.array_equal(image, board_rgb(c, palette, 4)) for image, c in zip(images, frames, strict=True))


def test_durations_add_up_and_the_last_frame_is_held(tmp_path: Path) -> None:
    write_gif(tmp_path / "a.gif", walk(25, 5, 5), PALETTE, scale=2, fps=12)
    _, durations, _ = decoded(tmp_path / "a.gif")
    assert set(durations[:-1]) == {80, 90}  # a twelfth of a second is no whole number of hundredths
    assert sum(durations[:-1]) == 2000
    assert durations[-1] == 1500


def test_small_changes_make_small_files(tmp_path: Path) -> None:
    frames = noise(1, 10, 10) * 21
    for number in range(1, 21):  # two opposite corners change, so the rectangle around the change is the whole board
        frames[number] = frames[number - 1].copy()
        frames[number][[0, -1], [0, -1]] = number % 4, (number + 1) % 4
    write_gif(tmp_path / "all.gif", frames, PALETTE)
    write_gif(tmp_path / "first.gif", frames[:1], PALETTE)
    first = (tmp_path / "first.gif").stat().st_size
    assert ((tmp_path / "all.gif").stat().st_size - first) / 20 < first / 4


def expand(data: bytes, depth: int) -> bytes:
    """GIF's LZW decoder, from the specification; strict about how the stream starts, widens and ends."""
    clear, end = 1 << depth, (1 << depth) + 1
    bits, place, width = int.from_bytes(data, "little"), 0, depth + 1
    phrases: list[bytes] = []
    previous, out, first = b"", bytearray(), True
    while True:
        code = (bits >> place) & ((1 << width) - 1)
        place += width
        assert place <= 8 * len(data), "the stream has no end"
        assert code == clear or not first, "the stream must start with a clear code"
        first = False
        if code == end:
            assert 8 * len(data) - place < 8, "bytes after the end"
            return bytes(out)
        if code == clear:
            phrases = [bytes([i]) for i in range(clear)] + [b"", b""]
            previous, width = b"", depth + 1
            continue
        assert code <= len(phrases), "a code nobody has defined"
        phrase = phrases[code] if code < len(phrases) else previous + previous[:1]
        if previous and len(phrases) < 4096:
            phrases.append(previous + phrase[:1])
        if len(phrases) == 1 << width and width < 12:
            width += 1
        out += phrase
        previous = phrase


def test_compression_of_every_length() -> None:
    # Every length, so that the stream ends just before, at and after each widening of the codes, with any number of
    # bits left over in its last byte; noise fills the table.
    for seed in range(40):
        short = np.random.default_rng(seed).integers(0, 4, 60).astype(np.uint8).tobytes()
        for length in range(1, 60):
            assert expand(compress(short[:length], 2), 2) == short[:length], (seed, length)
    noise_data = np.random.default_rng(3).integers(0, 8, 20_000).astype(np.uint8).tobytes()
    for length in [*range(1, 400), 1_500, *range(3_000, 3_012), 20_000]:
        assert expand(compress(noise_data[:length], 3), 3) == noise_data[:length], length
    for length in [*range(1, 100), 25_600]:
        assert expand(compress(b"\5" * length, 3), 3) == b"\5" * length, length
    assert expand(compress(bytes(range(256)) * 40, 8), 8) == bytes(range(256)) * 40
    assert len(compress(b"\5" * 25_600, 3)) < 400


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
    assert len(decoded(path)[0]) == 3
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
    with pytest.raises(ValueError, match="254 colours"):
        write_gif(path, walk(1, 4, 4), (("x", (0, 0, 0)),) * 255)
    assert os.listdir(tmp_path) == []
