"""The sample videos: a drawn street with people, and a pan over the photographs that come with ultralytics.

`python -m samples.video [sample|sample-photos]` makes them and prints where they lie.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import cv2
import numpy as np
from filelock import FileLock, Timeout

from samples import backdrops, figures, scenes, vlm, walkers
from samples.backdrops import Image

VIDEOS = ("sample", "sample-photos")
SEED = 20
WIDTH_PX, HEIGHT_PX, FPS = 960, 540, 12.0
STREET_S = 48.0
PHOTO_S = 18.0  # each photograph
MAKE_TIMEOUT_S = 300.0
_MODULES = (backdrops, figures, scenes, walkers)


class SampleVideoError(RuntimeError):
    """A sample video cannot be made; the message is one line with the mend."""


def ensure_video(name: str = "sample") -> Path:
    """The path of a sample video, made first where it is missing (some seconds).

    Raises:
        SampleVideoError: An unknown name, a missing photograph, or a cache folder that cannot be written.
    """
    if name not in VIDEOS:
        raise SampleVideoError(f"there is no sample video {name!r}; allowed: {', '.join(VIDEOS)}")
    target = vlm.cache_folder() / f"{name}-{_digest(name)}.mp4"
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_name(f".{target.name}.lock"), timeout=MAKE_TIMEOUT_S):
            if not target.exists():
                working = target.with_name(f".{target.stem}.{os.getpid()}.tmp.mp4")
                try:
                    _write(working, street() if name == "sample" else photographs())
                    working.replace(target)
                finally:
                    working.unlink(missing_ok=True)
    except Timeout:
        raise SampleVideoError(f"another process has been making {target.name} for {MAKE_TIMEOUT_S:.0f} s") from None
    except OSError as error:
        raise SampleVideoError(
            f"the sample video cannot be written to {target.parent} ({error.strerror or error}); "
            "set FRAMECHAT_CACHE to another folder"
        ) from None
    return target


def _digest(name: str) -> str:
    digest = hashlib.sha256()
    sources = [Path(__file__), *(Path(str(module.__file__)) for module in _MODULES)]
    if name == "sample-photos":
        sources = [Path(__file__), *_photograph_paths()]
    for path in sources:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def street(seed: int = SEED, seconds: float = STREET_S) -> Iterator[Image]:
    """Frames (540, 960, 3) BGR of a street where people enter, cross, stop, hide each other and leave."""
    rng = np.random.default_rng(seed)
    place = backdrops.drawn(rng, WIDTH_PX, HEIGHT_PX, "street")
    stage = walkers.make_stage(place, 150.0, 290.0)
    people = walkers.crowd(rng, stage, seconds, every_s=3.2)
    drawer = lru_cache(maxsize=4096)(figures.draw_figure)
    for index in range(round(seconds * FPS)):
        present = [walkers.placed(walker, stage, index / FPS) for walker in people]
        shown = [walkers.quantised(person) for person in present if person is not None]
        scene = scenes.compose(place, shown, drawer=lambda person: drawer(person.look, person.pose, person.height_px))
        yield np.ascontiguousarray(scene.image[..., ::-1])


def _photograph_paths() -> list[Path]:
    spec = importlib.util.find_spec("ultralytics")
    if spec is None or spec.origin is None:
        raise SampleVideoError("ultralytics is not installed; run `make setup`")
    paths = [Path(spec.origin).parent / "assets" / name for name in ("bus.jpg", "zidane.jpg")]
    for path in paths:
        if not path.exists():
            raise SampleVideoError(f"{path} is missing; reinstall ultralytics")
    return paths


def photographs(seconds: float = PHOTO_S) -> Iterator[Image]:
    """Frames (540, 960, 3) BGR that pan and zoom over each photograph in turn."""
    for path in _photograph_paths():
        picture = cv2.imread(str(path))
        if picture is None:
            raise SampleVideoError(f"{path} cannot be read as a picture; reinstall ultralytics")
        frames = round(seconds * FPS)
        for index in range(frames):
            yield _window(picture, 0.5 - 0.5 * np.cos(2 * np.pi * index / frames))


def _window(picture: Image, share: float) -> Image:
    """One 16:9 view of `picture`, grey beside it where it is too narrow; `share` 0 to 1 moves and zooms in."""
    height, width = picture.shape[:2]
    aspect = WIDTH_PX / HEIGHT_PX
    wide = width * (1.0 - 0.12 * share)
    high = min(float(height), max(wide / aspect, 0.72 * height))
    x, y = (width - wide) * share, (height - high) * (0.35 + 0.55 * share)
    size = round(wide), round(high)
    cut = cv2.getRectSubPix(picture, size, (float(x + wide / 2), float(y + high / 2)))
    scale = min(WIDTH_PX / size[0], HEIGHT_PX / size[1])
    cut = cv2.resize(cut, (round(size[0] * scale), round(size[1] * scale)), interpolation=cv2.INTER_AREA)
    frame = np.full((HEIGHT_PX, WIDTH_PX, 3), 96, np.uint8)
    top, left = (HEIGHT_PX - cut.shape[0]) // 2, (WIDTH_PX - cut.shape[1]) // 2
    frame[top : top + cut.shape[0], left : left + cut.shape[1]] = cut
    return frame


def _write(path: Path, frames: Iterator[Image]) -> None:
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), FPS, (WIDTH_PX, HEIGHT_PX))
    if not writer.isOpened():
        raise SampleVideoError(f"OpenCV cannot write {path.name} (MPEG-4); reinstall opencv-python")
    try:
        for frame in frames:
            writer.write(frame)
    finally:
        writer.release()


def main() -> int:
    """Make the named videos (default: both); 1 and one line on stderr when one cannot be made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(VIDEOS)}; default: all")
    try:
        for name in parser.parse_args().names or VIDEOS:
            print(ensure_video(name))
    except SampleVideoError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
