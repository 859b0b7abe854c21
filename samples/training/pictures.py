"""Pictures to train on: generated scenes of every kind, and photographs with boxes around their people."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from samples import backdrops
from samples.backdrops import Image
from samples.figures import random_appearance
from samples.scenes import Placed, Scene, compose
from samples.skeleton import Pose, stride_shown

Boxes = NDArray[np.float32]
_LEAST_STRIDE = 0.06  # of a walker's height: with less, nobody could tell it from standing


@dataclass(frozen=True, slots=True)
class Photograph:
    """A picture file and its people, boxes (N, 4) as x1, y1, x2, y2 from 0 to 1."""

    path: Path
    boxes: Boxes


def read_photographs(folder: Path) -> list[Photograph]:
    """The pictures of `folder`/images with the YOLO-format labels of `folder`/labels, sorted by name.

    Raises:
        FileNotFoundError: There are no pictures, or one has no label file.
        ValueError: A label file does not hold lines of five numbers.
    """
    photographs = []
    for path in sorted((folder / "images").glob("*.jpg")):
        text = (folder / "labels" / f"{path.stem}.txt").read_text(encoding="ascii")
        rows = [[float(value) for value in line.split()] for line in text.splitlines() if line.strip()]
        if any(len(row) != 5 for row in rows):
            raise ValueError(f"labels/{path.stem}.txt: expected lines of class, centre x, centre y, width, height")
        centre = np.asarray(rows, np.float32).reshape(-1, 5)[:, 1:]
        half = centre[:, 2:] / 2
        photographs.append(Photograph(path, np.hstack([centre[:, :2] - half, centre[:, :2] + half])))
    if not photographs:
        raise FileNotFoundError(f"{folder}/images holds no .jpg files")
    return photographs


def read_labelled(photograph: Photograph) -> tuple[Image, Boxes]:
    """A photograph (H, W, 3) BGR with its boxes (N, 4) in pixels.

    Raises:
        OSError: It cannot be read.
    """
    image = cv2.imread(str(photograph.path))
    if image is None:
        raise OSError(f"{photograph.path} cannot be read as a picture")
    height, width = image.shape[:2]
    return np.asarray(image, np.uint8), photograph.boxes * np.array([width, height, width, height], np.float32)


def is_held_out(path: Path) -> bool:
    """Whether a photograph is kept for evaluation: every 20th street scene, every 4th of the others."""
    number = int("".join(letter for letter in path.stem if letter.isdigit()) or "0")
    return number % (20 if path.stem.startswith("p") else 4) == 3


def without_people(photographs: list[Photograph]) -> list[Path]:
    """Photographs in which people take up next to no room: backgrounds for generated people."""
    return [photo.path for photo in photographs if _area(photo.boxes) < 0.01]


def _area(boxes: Boxes) -> float:
    return float(np.prod(boxes[:, 2:] - boxes[:, :2], axis=1).sum()) if len(boxes) else 0.0


def random_pose(rng: np.random.Generator) -> Pose:
    """Standing or walking with a stride that shows, in one of the four directions give or take 35 degrees."""
    stands = rng.random() < 0.3
    while True:
        yaw = float(rng.integers(4) * math.pi / 2 + rng.uniform(-0.6, 0.6)) % (2 * math.pi)
        phase = None if stands else float(rng.uniform(0, 2 * math.pi))
        pose = Pose(yaw, phase, float(rng.uniform(0.02, 0.45)), float(rng.uniform(-1, 1)))
        if stands or stride_shown(pose) >= _LEAST_STRIDE:
            return pose


def random_backdrop(
    rng: np.random.Generator, width_px: int, height_px: int, photographs: list[Path]
) -> backdrops.Backdrop:
    """A drawn place, or a part of a photograph where there are some."""
    if photographs and rng.random() < 0.4:
        return backdrops.photographed(rng, width_px, height_px, photographs)
    return backdrops.drawn(rng, width_px, height_px)


def random_company(rng: np.random.Generator, width_px: int, height_px: int, photographs: list[Path]) -> Scene:
    """Two to six people beside and behind each other, so that a crop around one of them shows several."""
    place = random_backdrop(rng, width_px, height_px, photographs)
    near = height_px * rng.uniform(0.25, 0.6)
    middle = width_px * rng.uniform(0.2, 0.8)
    soles = rng.uniform(max(place.far_px, 0.8 * near), max(place.near_px, near))
    people = []
    for _ in range(int(rng.integers(2, 7))):
        tall = near * rng.uniform(0.45, 1.1)
        x, y = middle + near * rng.uniform(-0.55, 0.55), soles + near * rng.uniform(-0.3, 0.1)
        people.append(Placed(random_appearance(rng), random_pose(rng), x, y, tall))
    return compose(place, people, exposure=float(rng.uniform(0.8, 1.15)))


def random_scene(
    rng: np.random.Generator, width_px: int, height_px: int, photographs: list[Path], largest: float = 0.9
) -> Scene:
    """Nobody up to eight people anywhere, `largest` of the picture's height at most."""
    place = random_backdrop(rng, width_px, height_px, photographs)
    count = int(rng.choice(9, p=[0.06, 0.16, 0.18, 0.18, 0.14, 0.1, 0.08, 0.06, 0.04]))
    near = height_px * rng.uniform(0.3, largest)
    people = []
    for _ in range(count):
        y = rng.uniform(place.far_px, place.near_px)
        share = (y - place.far_px) / max(1.0, place.near_px - place.far_px)
        tall = near * (0.4 + 0.6 * share) * rng.uniform(0.85, 1.12)
        if rng.random() < 0.12:  # somebody close, cut by the lower border
            tall = height_px * rng.uniform(0.9, 1.6)
            y = height_px * rng.uniform(1.0, 1.4)
        people.append(Placed(random_appearance(rng), random_pose(rng), rng.uniform(-0.03, 1.03) * width_px, y, tall))
    return compose(place, people, exposure=float(rng.uniform(0.8, 1.15)))


def camera_like(rng: np.random.Generator, image: Image) -> Image:
    """What a camera does to a picture: exposure, white balance, blur, grain and JPEG, some of each."""
    picture = image.astype(np.float32)
    if rng.random() < 0.7:
        picture = picture * rng.uniform(0.93, 1.07, 3).astype(np.float32)
        picture = (picture - 128) * float(rng.uniform(0.75, 1.15)) + 128 + float(rng.uniform(-18, 18))
    if rng.random() < 0.4:
        picture = np.asarray(cv2.GaussianBlur(picture, (0, 0), float(rng.uniform(0.3, 1.3))), np.float32)
    if rng.random() < 0.5:
        picture = picture + rng.normal(0, rng.uniform(1, 7), picture.shape[:2]).astype(np.float32)[..., None]
    result = np.clip(picture, 0, 255).astype(np.uint8)
    if rng.random() < 0.5:
        done, data = cv2.imencode(".jpg", result, [cv2.IMWRITE_JPEG_QUALITY, int(rng.integers(50, 95))])
        if done:
            result = np.asarray(cv2.imdecode(data, cv2.IMREAD_COLOR), np.uint8)
    return result
