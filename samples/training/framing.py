"""How the product frames what it shows its model: crops around people, whole frames, tiles.

A crop keeps a margin of 0.25 of the person's height and has the shape 1:2; a frame is fitted into 2:1 with grey bars.
The processor cuts such a picture into 2x4 tiles and adds the whole, squeezed.
"""

from __future__ import annotations

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pil

from pipeline import describe
from samples.backdrops import Image

TILE_PX = 256
WHOLE = 8  # the number of the tile that holds the whole picture
MARGIN = 0.25
_SHORT_PX, _LONG_PX = 512, 1024
_GREY = 114


def surroundings(box_px: tuple[float, float, float, float], width_px: int, height_px: int) -> tuple[int, int, int, int]:
    """The product's crop (x1, y1, x2, y2) around a box in a frame: margin, shape 1:2, moved inward at the border."""
    return describe.surroundings(box_px, width_px, height_px, MARGIN, _SHORT_PX / _LONG_PX)


def crop_region(
    rng: np.random.Generator, image: Image, box_px: tuple[int, int, int, int], loose: float
) -> tuple[int, int, int, int]:
    """The product's crop around a box that a detector missed by up to `loose` of its height on each side."""
    height, width = image.shape[:2]
    missed = rng.uniform(-loose, loose, 4) * (box_px[3] - box_px[1])
    x1, y1, x2, y2 = (float(value) for value in np.asarray(box_px) + missed)
    return surroundings((x1, y1, x2, y2), width, height)


def tight_crop(image: Image, box_px: tuple[int, int, int, int]) -> Image:
    """(1024, 512, 3): what the product shows of a person in a frame (H, W, 3)."""
    x1, y1, x2, y2 = surroundings(box_px, image.shape[1], image.shape[0])
    return fitted(image[y1:y2, x1:x2], upright=True)


def fitted(image: Image, *, upright: bool, labels: bool = False) -> Image:
    """A part of a frame, or of its label map, scaled into (1024, 512) or (512, 1024) with grey, or 0, around it."""
    width_px, height_px = (_SHORT_PX, _LONG_PX) if upright else (_LONG_PX, _SHORT_PX)
    scale = min(width_px / image.shape[1], height_px / image.shape[0])
    size = min(width_px, round(image.shape[1] * scale)), min(height_px, round(image.shape[0] * scale))
    size = (width_px if width_px - size[0] < 2 else size[0]), (height_px if height_px - size[1] < 2 else size[1])
    smooth = cv2.INTER_AREA if scale < 1 else cv2.INTER_CUBIC
    scaled = cv2.resize(image, size, interpolation=cv2.INTER_NEAREST if labels else smooth)
    canvas = np.full((height_px, width_px, *image.shape[2:]), 0 if labels else _GREY, np.uint8)
    top, left = (height_px - size[1]) // 2, (width_px - size[0]) // 2
    canvas[top : top + size[1], left : left + size[0]] = scaled
    return canvas


def tiles_of(picture: Image) -> Image:
    """(9, 256, 256, 3): the eight tiles row by row, then the whole picture squeezed into one."""
    rows, columns = picture.shape[0] // TILE_PX, picture.shape[1] // TILE_PX
    tiles = [
        picture[row * TILE_PX : (row + 1) * TILE_PX, column * TILE_PX : (column + 1) * TILE_PX]
        for row in range(rows)
        for column in range(columns)
    ]
    whole = Pil.fromarray(picture).resize((TILE_PX, TILE_PX), Pil.Resampling.LANCZOS)
    return np.stack([*tiles, np.asarray(whole, np.uint8)])


def label_tiles(labels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The same nine tiles of a label map, (9, 256, 256)."""
    rows, columns = labels.shape[0] // TILE_PX, labels.shape[1] // TILE_PX
    tiles = labels.reshape(rows, TILE_PX, columns, TILE_PX).swapaxes(1, 2).reshape(-1, TILE_PX, TILE_PX)
    whole = cv2.resize(labels, (TILE_PX, TILE_PX), interpolation=cv2.INTER_NEAREST)
    return np.concatenate([tiles, whole[None]])
