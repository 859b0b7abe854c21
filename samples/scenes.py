"""Scenes with people in them, as pictures with the truth about every person: for the sample video and for training."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from samples.backdrops import Backdrop, Image
from samples.figures import LIGHT, Appearance, Part, Rgb, Sprite, draw_figure
from samples.skeleton import Pose

Bytes = NDArray[np.uint8]
_MAX_SPRITE_PX = 420.0  # larger people are drawn at this height and enlarged


@dataclass(frozen=True, slots=True)
class Placed:
    """One person to draw: soles at (x_px, y_px), `height_px` tall."""

    look: Appearance
    pose: Pose
    x_px: float
    y_px: float
    height_px: float


@dataclass(frozen=True, slots=True)
class Seen:
    """The truth about one drawn person; `box_px` (x1, y1, x2, y2) bounds what is visible."""

    look: Appearance
    action: str
    box_px: tuple[int, int, int, int]
    visible: float  # visible share of the whole figure, inside the picture
    index: int  # its value in `Scene.people`
    height_px: float
    soles_px: float  # the row of its soles, seen or not
    yaw: float | None = None  # which way it faces, as in `Pose`; None where nobody knows


@dataclass(frozen=True, slots=True)
class Scene:
    """`image` (H, W, 3) RGB; `parts` (H, W) of `Part`; `people` (H, W): 0 or 1 + index of the person seen there."""

    image: Image
    parts: Bytes
    people: Bytes
    seen: tuple[Seen, ...]


def _enlarged(sprite: Sprite, factor: float) -> Sprite:
    size = math.ceil(sprite.alpha.shape[1] * factor), math.ceil(sprite.alpha.shape[0] * factor)
    return Sprite(
        np.asarray(cv2.resize(sprite.rgb, size, interpolation=cv2.INTER_LINEAR), np.float32),
        np.asarray(cv2.resize(sprite.alpha, size, interpolation=cv2.INTER_LINEAR), np.float32),
        np.asarray(cv2.resize(sprite.parts, size, interpolation=cv2.INTER_NEAREST), np.uint8),
        (sprite.foot[0] * factor, sprite.foot[1] * factor),
    )


def _shadow(image: NDArray[np.float32], person: Placed, strength: float) -> None:
    radius_x, radius_y = 0.17 * person.height_px, 0.04 * person.height_px
    height, width = image.shape[:2]
    x1, x2 = max(0, int(person.x_px - radius_x)), min(width, int(person.x_px + radius_x) + 1)
    y1, y2 = max(0, int(person.y_px - radius_y)), min(height, int(person.y_px + radius_y) + 1)
    if x1 >= x2 or y1 >= y2:
        return
    dx = (np.arange(x1, x2, dtype=np.float32)[None] - person.x_px) / radius_x
    dy = (np.arange(y1, y2, dtype=np.float32)[:, None] - person.y_px) / max(1.0, radius_y)
    image[y1:y2, x1:x2] *= (1.0 - strength * np.clip(1.0 - dx * dx - dy * dy, 0, 1))[..., None]


def draw(person: Placed, light: Rgb = LIGHT) -> Sprite:
    """One person at its full size."""
    factor = max(1.0, person.height_px / _MAX_SPRITE_PX)
    sprite = draw_figure(person.look, person.pose, person.height_px / factor, light)
    return _enlarged(sprite, factor) if factor > 1.0 else sprite


def compose(
    backdrop: Backdrop, people: list[Placed], *, exposure: float = 1.0, drawer: Callable[[Placed], Sprite] = draw
) -> Scene:
    """Draw `people` with `drawer`, the farthest (smallest y) first, over the backdrop."""
    height, width = backdrop.image.shape[:2]
    image = backdrop.image.astype(np.float32) / 255.0
    parts = np.zeros((height, width), np.uint8)
    owner = np.zeros((height, width), np.uint8)
    order = sorted(range(len(people)), key=lambda index: people[index].y_px)
    areas = [0] * len(people)
    for index in order:
        person = people[index]
        _shadow(image, person, 0.4)
        sprite = drawer(person)
        areas[index] = int(np.count_nonzero(sprite.parts))
        left, top = round(person.x_px - sprite.foot[0]), round(person.y_px - sprite.foot[1])
        x1, y1 = max(0, left), max(0, top)
        x2, y2 = min(width, left + sprite.alpha.shape[1]), min(height, top + sprite.alpha.shape[0])
        if x1 >= x2 or y1 >= y2:
            continue
        window, cut = np.s_[y1:y2, x1:x2], np.s_[y1 - top : y2 - top, x1 - left : x2 - left]
        alpha = sprite.alpha[cut][..., None]
        image[window] += (sprite.rgb[cut] * exposure - image[window]) * alpha
        drawn = sprite.parts[cut] != Part.NOTHING
        parts[window][drawn] = sprite.parts[cut][drawn]
        owner[window][drawn] = index + 1
    seen = []
    for index, person in enumerate(people):
        mask = owner == index + 1
        count = int(np.count_nonzero(mask))
        if not count:
            continue
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        box = int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1
        pose, visible = person.pose, count / areas[index]
        seen.append(Seen(person.look, pose.action, box, visible, index, person.height_px, person.y_px, pose.yaw))
    return Scene((np.clip(image, 0, 1) * 255).astype(np.uint8), parts, owner, tuple(seen))
