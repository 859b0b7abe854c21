"""Pictures for a load: frames of the sample video or any other, a folder, or what `framechat watch` recorded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import av
import numpy as np
from PIL import Image, ImageOps

from pipeline.decode import PICTURE_SUFFIXES, natural_key
from samples.video import VIDEOS, SampleVideoError, ensure_video
from serving.load.contents import Pixels

MOST = 32
_VIDEO_STEP = 12  # frames between two that are taken: a second of the sample video
_SIDE_PX = 2048


class PicturesError(ValueError):
    """There are no pictures; the message is one line."""


class Pictures:
    """A few pictures, fitted to whatever size is asked for. See :class:`serving.load.contents.PictureSource`."""

    def __init__(self, pictures: list[Image.Image]) -> None:
        self._pictures = pictures
        self._fitted = lru_cache(maxsize=4 * MOST)(self._fit)

    def __len__(self) -> int:
        return len(self._pictures)

    def picture(self, number: int, width_px: int, height_px: int) -> Pixels:
        """RGB, shape (height_px, width_px, 3); the caller must not write to it."""
        return self._fitted(number % len(self._pictures), width_px, height_px)

    def _fit(self, index: int, width_px: int, height_px: int) -> Pixels:
        return np.asarray(ImageOps.fit(self._pictures[index], (width_px, height_px)), dtype=np.uint8)


def load_pictures(what: str) -> Pictures:
    """Read up to `MOST` pictures.

    Args:
        what: `sample` or `sample-photos`, a video, a picture, a folder with pictures in it or below it (such as the
            store's thumbnails), or a JSONL file of `framechat watch --jsonl`.

    Raises:
        PicturesError: There are none, or they cannot be read.
    """
    try:
        if what in VIDEOS:
            found = _frames(ensure_video(what))
        else:
            path = Path(what)
            if not path.exists():
                raise PicturesError(f"--pictures {what}: no such file or folder, allowed: {', '.join(VIDEOS)}, or one")
            if path.is_dir():
                files = [file for file in path.rglob("*") if file.suffix.lower() in PICTURE_SUFFIXES]
                found = _opened(sorted(files, key=natural_key)[:MOST])
            elif path.suffix.lower() == ".jsonl":
                found = _opened(_recorded(path)[:MOST])
            elif path.suffix.lower() in PICTURE_SUFFIXES:
                found = _opened([path])
            else:
                found = _frames(path)
        pictures = list(found)
    except SampleVideoError as error:
        raise PicturesError(str(error)) from error
    except (OSError, ValueError, SyntaxError, av.FFmpegError) as error:
        if isinstance(error, PicturesError):
            raise
        raise PicturesError(f"--pictures {what} cannot be read: {' '.join(str(error).split())[:200]}") from error
    if not pictures:
        raise PicturesError(f"--pictures {what} holds no picture")
    return Pictures(pictures)


def _frames(path: Path) -> Iterator[Image.Image]:
    with av.open(str(path)) as container:
        for number, frame in enumerate(container.decode(video=0)):
            if number % _VIDEO_STEP == 0:
                yield Image.fromarray(frame.to_ndarray(format="rgb24"))
            if number >= _VIDEO_STEP * (MOST - 1):
                return


def _opened(files: list[Path]) -> Iterator[Image.Image]:
    for file in files:
        with Image.open(file) as opened:
            upright = ImageOps.exif_transpose(opened).convert("RGB")
        upright.thumbnail((_SIDE_PX, _SIDE_PX))
        yield upright


def _recorded(path: Path) -> list[Path]:
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [Path(line["thumbnail"]) for line in lines if isinstance(line, dict) and line.get("thumbnail")]
