"""Places for people to walk in: streets, yards, parks, halls, and photographs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

Image = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Backdrop:
    """`image` (H, W, 3) RGB; people's soles stand between the rows `far_px` and `near_px`."""

    image: Image
    far_px: float
    near_px: float


def _noise(rng: np.random.Generator, height: int, width: int, cell: int, contrast: float) -> Floats:
    """Smooth noise around 1, features of about `cell` pixels."""
    coarse = rng.normal(1.0, contrast, (height // cell + 2, width // cell + 2)).astype(np.float32)
    return np.asarray(cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC), dtype=np.float32)


def _textured(image: Floats, rng: np.random.Generator, top: int, bottom: int, grain: float) -> None:
    height, width = bottom - top, image.shape[1]
    if height <= 0:
        return
    tone = _noise(rng, height, width, 24, grain) * _noise(rng, height, width, 3, grain * 0.6)
    image[top:bottom] *= tone[..., None]


def _colour(rng: np.random.Generator, low: float, high: float, tint: float) -> Floats:
    base = rng.uniform(low, high)
    return np.clip(base + rng.normal(0, tint, 3), 0.03, 0.97).astype(np.float32)


def _rectangle(image: Floats, x: float, y: float, width: float, height: float, colour: Floats) -> None:
    cv2.rectangle(image, (int(x), int(y)), (int(x + width), int(y + height)), colour.tolist(), -1)


def _facades(image: Floats, rng: np.random.Generator, base: int) -> None:
    """Houses with windows and doors, standing on row `base`."""
    width, x = image.shape[1], -rng.uniform(0, 60)
    while x < width:
        wide = rng.uniform(0.14, 0.34) * width
        roof = base - rng.uniform(0.5, 1.3) * base
        wall = _colour(rng, 0.25, 0.85, 0.08)
        _rectangle(image, x, roof, wide, base - roof, wall)
        columns, floor = int(rng.integers(2, 5)), rng.uniform(0.2, 0.32) * base
        pane = _colour(rng, 0.1, 0.55, 0.06)
        frame = np.clip(wall * rng.uniform(0.6, 1.25), 0, 1).astype(np.float32)
        y = base - floor * 1.15
        shop = rng.random() < 0.5
        if shop:
            _rectangle(image, x + 0.06 * wide, base - floor * 0.95, 0.6 * wide, floor * 0.9, pane * 0.8)
            _rectangle(
                image, x + 0.04 * wide, base - floor * 1.12, 0.9 * wide, floor * 0.16, _colour(rng, 0.1, 0.8, 0.22)
            )
        _rectangle(image, x + 0.74 * wide, base - floor * 0.85, 0.16 * wide, floor * 0.85, frame * 0.6)
        while y > roof:
            for column in range(columns):
                left = x + (column + 0.25) * wide / columns
                _rectangle(image, left - 2, y - floor * 0.62, wide / columns * 0.5 + 4, floor * 0.58, frame)
                _rectangle(image, left, y - floor * 0.6, wide / columns * 0.5, floor * 0.52, pane)
            y -= floor
        x += wide


def _paving(image: Floats, rng: np.random.Generator, top: int, bottom: int) -> None:
    """Joints that run to a vanishing point, and rows that close up with distance."""
    width = image.shape[1]
    tone = float(rng.uniform(0.8, 0.95))
    layer = image[top:bottom].copy()
    centre = rng.uniform(0.3, 0.7) * width
    for x in np.linspace(-2 * width, 3 * width, int(rng.integers(20, 50))):
        start, end = (int(centre + (x - centre) * 0.35), 0), (int(x), bottom - top)
        cv2.line(layer, start, end, (image[top].mean(0) * tone).tolist(), 1, cv2.LINE_AA)
    for share in np.linspace(0, 1, int(rng.integers(5, 12))) ** 1.8:
        y = int(share * (bottom - top))
        cv2.line(layer, (0, y), (width, y), (image[top].mean(0) * tone).tolist(), 1, cv2.LINE_AA)
    image[top:bottom] = layer


def _tree(image: Floats, rng: np.random.Generator, x: float, base: float, size: float) -> None:
    trunk = _colour(rng, 0.15, 0.3, 0.02) * np.array([1.15, 1.0, 0.8], np.float32)
    _rectangle(image, x - size * 0.04, base - size, size * 0.08, size, trunk)
    leaf = np.array([0.2, 0.38, 0.14], np.float32) * float(rng.uniform(0.6, 1.3))
    for _ in range(22):
        place = (int(x + rng.normal(0, 0.2) * size), int(base - size * rng.uniform(0.75, 1.5)))
        shade = np.clip(leaf * rng.uniform(0.7, 1.3), 0, 1)
        cv2.circle(image, place, max(1, int(size * rng.uniform(0.08, 0.2))), shade.tolist(), -1, cv2.LINE_AA)


def _car(image: Floats, rng: np.random.Generator, x: float, base: float, size: float) -> None:
    """A parked car seen from the side, `size` long."""
    body = _colour(rng, 0.08, 0.8, 0.18)
    high = size * 0.16
    cabin = np.array(
        [[0.2, -high * 1.05], [0.33, -high * 1.85], [0.7, -high * 1.85], [0.86, -high * 1.05]], np.float32
    ) * np.array([size, 1.0], np.float32)
    place = np.array([x, base - high * 0.35], np.float32)
    cv2.fillPoly(image, [(cabin + place).astype(np.int32)], (body * 0.9).tolist(), cv2.LINE_AA)
    glass = (cabin - cabin.mean(0)) * 0.8 + cabin.mean(0) + place
    cv2.fillPoly(image, [glass.astype(np.int32)], (0.16, 0.2, 0.24), cv2.LINE_AA)
    _rectangle(image, x, base - high * 1.4, size, high * 1.1, body)
    for wheel in (0.2, 0.8):
        centre = (int(x + wheel * size), int(base - high * 0.3))
        cv2.circle(image, centre, max(1, int(high * 0.42)), (0.06, 0.06, 0.06), -1, cv2.LINE_AA)
        cv2.circle(image, centre, max(1, int(high * 0.2)), (0.5, 0.5, 0.52), -1, cv2.LINE_AA)


def _lamp(image: Floats, rng: np.random.Generator, x: float, base: float, size: float) -> None:
    metal = _colour(rng, 0.15, 0.4, 0.02)
    _rectangle(image, x, base - size, max(2.0, size * 0.02), size, metal)
    _rectangle(image, x - size * 0.06, base - size, size * 0.14, size * 0.03, metal)


def drawn(rng: np.random.Generator, width_px: int, height_px: int, kind: str | None = None) -> Backdrop:
    """A drawn place; `kind` is street, yard, park or hall (default: any)."""
    kind = kind or str(rng.choice(["street", "yard", "park", "hall"], p=[0.4, 0.25, 0.2, 0.15]))
    image = np.empty((height_px, width_px, 3), np.float32)
    horizon = int(height_px * rng.uniform(0.28, 0.5))
    if kind == "hall":
        horizon = int(height_px * rng.uniform(0.45, 0.6))
        image[:horizon] = _colour(rng, 0.55, 0.9, 0.05)
    else:
        sky = np.linspace(rng.uniform(0.6, 0.8), rng.uniform(0.8, 0.97), horizon, dtype=np.float32)
        image[:horizon] = sky[:, None, None] * np.array([0.9, 0.96, 1.03], np.float32)
    ground = _colour(rng, 0.3, 0.72, 0.03)
    if kind == "park":
        ground = np.array([0.33, 0.46, 0.2], np.float32) * float(rng.uniform(0.7, 1.3))
    fade = np.linspace(1.06, 0.9, height_px - horizon, dtype=np.float32)
    image[horizon:] = ground * fade[:, None, None]
    _textured(image, rng, horizon, height_px, 0.05 if kind != "park" else 0.1)
    if kind in ("street", "yard"):
        _facades(image, rng, horizon)
        _textured(image, rng, 0, horizon, 0.03)
    if kind == "park":
        for _ in range(int(rng.integers(3, 9))):
            _tree(image, rng, rng.uniform(0, width_px), horizon + rng.uniform(0, 0.12) * height_px, 0.3 * height_px)
    if kind in ("street", "yard", "hall"):
        _paving(image, rng, horizon, height_px)
    far = horizon + 0.1 * (height_px - horizon)
    if kind == "street":
        road = int(horizon + (height_px - horizon) * rng.uniform(0.03, 0.08))
        edge = int(horizon + (height_px - horizon) * rng.uniform(0.25, 0.34))
        image[road:edge] = _colour(rng, 0.22, 0.42, 0.01)
        _textured(image, rng, road, edge, 0.04)
        image[edge : edge + 3] = _colour(rng, 0.6, 0.8, 0.02)
        for _ in range(int(rng.integers(1, 4))):
            _car(image, rng, rng.uniform(-0.1, 0.9) * width_px, edge - 2, rng.uniform(0.2, 0.3) * width_px)
        far = edge + 0.04 * height_px
    for _ in range(int(rng.integers(0, 3))):
        _lamp(image, rng, rng.uniform(0, width_px), horizon + 0.1 * height_px, rng.uniform(0.35, 0.6) * height_px)
    if kind == "hall":
        for _ in range(int(rng.integers(1, 5))):
            side = rng.uniform(0.08, 0.2)
            x, colour = rng.uniform(0, 1) * width_px, _colour(rng, 0.1, 0.8, 0.2)
            _rectangle(image, x, horizon * rng.uniform(0.2, 0.6), side * width_px, side * height_px, colour)
    picture = (np.clip(image, 0, 1) * 255).astype(np.uint8)
    return Backdrop(picture, far, 0.98 * height_px)


def photographed(rng: np.random.Generator, width_px: int, height_px: int, photographs: list[Path]) -> Backdrop:
    """A random part of a photograph without people, mirrored half of the time.

    Raises:
        OSError: A photograph cannot be read.
    """
    path = photographs[int(rng.integers(len(photographs)))]
    picture = cv2.imread(str(path))
    if picture is None:
        raise OSError(f"{path} cannot be read as a picture")
    picture = cv2.cvtColor(picture, cv2.COLOR_BGR2RGB)
    height, width = picture.shape[:2]
    part = rng.uniform(0.5, 1.0)
    aspect = width_px / height_px
    wide = min(width * part, height * part * aspect)
    high = wide / aspect
    x, y = rng.uniform(0, width - wide), rng.uniform(0, height - high)
    cut = picture[int(y) : max(int(y) + 1, int(y + high)), int(x) : max(int(x) + 1, int(x + wide))]
    cut = cv2.resize(cut, (width_px, height_px), interpolation=cv2.INTER_CUBIC)
    if rng.random() < 0.5:
        cut = cut[:, ::-1]
    return Backdrop(np.ascontiguousarray(cut, dtype=np.uint8), 0.55 * height_px, 1.0 * height_px)
