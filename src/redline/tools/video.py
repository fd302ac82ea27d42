"""MP4 videos of games, written atomically with ffmpeg (extra `video`)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from PIL import Image

from redline.core.errors import StorageError, UserError

LAST_SECONDS = 1.5  # for which the last picture stays


def check_video() -> None:
    """Raise UserError if the extra `video` is not installed."""
    try:
        import imageio_ffmpeg  # noqa: F401
    except ImportError:
        raise UserError("--mp4 needs imageio-ffmpeg; install it with pip install 'redline[video]'.") from None


def write_mp4(path: Path, images: Iterable[Image.Image], fps: float = 12) -> None:
    """Write equally large pictures, with even sides, as a video."""
    check_video()
    import imageio_ffmpeg

    part = path.with_name(f".{path.stem}.{os.getpid()}.part.mp4")
    writer = None
    image: Image.Image | None = None
    try:
        for image in images:
            if writer is None:
                writer = imageio_ffmpeg.write_frames(
                    str(part),
                    image.size,
                    fps=fps,
                    codec="libx264",
                    quality=8,
                    macro_block_size=2,
                    ffmpeg_log_level="error",
                )
                writer.send(None)
            writer.send(image.tobytes())
        if writer is None or image is None:
            raise ValueError("a video needs at least one picture")
        for _ in range(round(LAST_SECONDS * fps)):
            writer.send(image.tobytes())
        writer.close()
        writer = None
        os.replace(part, path)
    except OSError as error:
        raise StorageError(f"Cannot write {path}: {str(error).splitlines()[0]}. Choose another place.") from error
    finally:
        if writer is not None:
            writer.close()
        with suppress(OSError):  # gone after success
            part.unlink()
