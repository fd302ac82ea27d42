"""Pictures of games: large enough, the same in every format, and looked at cell by cell."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from redline import envs
from redline.core.errors import StorageError
from redline.tools import watch
from redline.tools.pictures import SIDE, CellDrawings, cell_pixels, enlarge_picture, indexed_boards
from redline.tools.video import write_mp4

PALETTE = (("floor", (20, 20, 20)), ("body", (60, 160, 90)), ("head", (150, 230, 120)), ("food", (220, 70, 60)))
UP, RIGHT, DOWN, LEFT = 1, 2, 4, 8


@pytest.mark.parametrize("shape", [(10, 10), (20, 10), (4, 4), (32, 16), (3, 200), (1, 1)])
def test_boards_are_large_enough_to_show(shape: tuple[int, int]) -> None:
    size = cell_pixels(*shape)
    assert max(shape) * size >= SIDE
    assert min(shape) * size >= 320
    assert size % 2 == 0


def test_a_body_is_joined_and_has_a_gap_to_what_it_is_not_joined_to() -> None:
    """A snake of three: tail, bend, head that looks up; beside it another cell of the body that is not linked."""
    cells = np.array([[0, 2, 0], [1, 1, 1], [0, 3, 0]], np.uint8)
    links = np.array([[0, DOWN | 16 * UP, 0], [RIGHT, LEFT | UP, UP], [0, 0, 0]], np.uint8)
    size = 40
    picture = CellDrawings(PALETTE, True, size).board(cells, links).astype(int)
    assert picture.shape == (120, 120, 3)

    def colour(x: int, y: int) -> str:
        nearest = min(PALETTE, key=lambda entry: np.abs(picture[y, x] - entry[1]).sum())
        return nearest[0]

    assert [colour(x, 60) for x in (20, 40, 60)] == ["body"] * 3  # no gap between linked cells
    assert colour(80, 60) == "floor"  # a gap where they are not
    assert [colour(60, y) for y in (38, 42)] == ["head", "body"]
    assert colour(60, 100) == "food"
    assert colour(42, 82) == "floor"  # food is a disc: its corners are free
    eyes = picture[:20, 40:80].min(2) > 240  # white, in the upper half of the head
    assert eyes.any()
    assert not (picture[20:40, 40:80].min(2) > 240).any()
    assert eyes[:, :20].sum() == pytest.approx(eyes[:, 20:].sum(), abs=4)  # one on each side


def test_cells_that_are_numbers_show_them() -> None:
    palette = (("empty", (200, 190, 180)), ("2", (230, 220, 210)), ("4", (230, 220, 210)))
    board = CellDrawings(palette, False, 48).board(np.array([[1, 2], [0, 1]], np.uint8))
    two, four = board[:48, :48], board[:48, 48:]
    assert (two.min(2) < 100).any()  # dark ink
    assert not np.array_equal(two, four)
    named = (palette[0], ("a", (230, 220, 210)), palette[2])
    assert not (CellDrawings(named, False, 48).board(np.array([[1]], np.uint8)).min(2) < 100).any()


def test_the_frames_of_a_gif_share_their_colours() -> None:
    drawings = CellDrawings(PALETTE, False, 24)
    boards = [np.array([[0, 1], [value, 3]], np.uint8) for value in (1, 2)]
    images = list(indexed_boards(drawings, ((board, None) for board in boards)))
    assert all(image.mode == "P" for image in images)
    first, second = (np.array(image.convert("RGB")) for image in images)
    assert np.array_equal(first[:24], second[:24])  # what does not change keeps every pixel
    assert not np.array_equal(first[24:, :24], second[24:, :24])
    exact = drawings.board(boards[1]).astype(int)
    assert np.abs(second.astype(int) - exact).max() <= 12


def test_rendered_pictures_are_enlarged_by_whole_pixels() -> None:
    picture = np.zeros((210, 161, 3), np.uint8)
    picture[:, 80:] = (9, 8, 7)
    large = enlarge_picture(picture)
    assert large.size == (482, 630)  # sides are even
    assert large.getpixel((239, 0)) == (0, 0, 0)
    assert large.getpixel((240, 0)) == (9, 8, 7)
    assert enlarge_picture(np.zeros((600, 800, 3), np.uint8)).size == (800, 600)


def go_up(obs: Tensor, legal: Tensor | None = None) -> Tensor:  # noqa: ARG001
    return torch.zeros(len(obs), dtype=torch.int64)


def test_a_video_shows_the_game_at_its_pace(tmp_path: Path) -> None:
    ffmpeg = pytest.importorskip("imageio_ffmpeg")
    path = tmp_path / "game.mp4"
    result = watch.record_mp4(envs.make_rules("snake"), go_up, 0, path, fps=10)
    reader = ffmpeg.read_frames(str(path))
    facts = next(reader)
    frames = [np.frombuffer(frame, np.uint8).reshape(480, 480, 3) for frame in reader]
    assert facts["size"] == (480, 480)
    assert facts["fps"] == 10
    assert len(frames) == result.length + 1 + 15  # the last one stays for a second and a half
    exact = CellDrawings(envs.make_rules("snake").game.PALETTE, True, 48)
    for number, frame in enumerate(watch.record(envs.make_rules("snake"), go_up, 0)):
        drawn = exact.board(frame.picture, frame.links).astype(int)
        assert np.abs(frames[number].astype(int) - drawn).mean() < 4  # compressed, but the same picture
    assert [entry.name for entry in tmp_path.iterdir()] == ["game.mp4"]


def test_a_video_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    image = Image.new("RGB", (4, 4))
    with pytest.raises(StorageError, match="Cannot write"):
        write_mp4(tmp_path / "no" / "x.mp4", [image] * 3)
    with pytest.raises(ValueError, match="at least one"):
        write_mp4(tmp_path / "x.mp4", [])
    assert list(tmp_path.iterdir()) == []


def test_settled_pieces_keep_their_colours_in_recordings() -> None:
    rules = envs.make_rules("tetris")

    def first_legal(obs: Tensor, legal: Tensor | None) -> Tensor:  # noqa: ARG001
        assert legal is not None
        return legal.to(torch.int64).argmax(1)

    frames = watch.record(rules, first_legal, 0, max_steps=12)
    assert len({int(value) for value in frames[-1].picture[5:].flatten()} & set(range(3, 10))) >= 3
    assert not (frames[-1].picture == 1).any()
    assert frames[-1].result.truncated or frames[-1].ended


def test_ffmpeg_is_only_needed_for_videos() -> None:
    code = "import sys; sys.modules['imageio_ffmpeg'] = None; from redline.tools import watch, video\n"
    code += "from redline.core.errors import UserError\ntry: video.check_video()\nexcept UserError as e: print(e)"
    import sys

    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "pip install 'redline[video]'" in output
