"""How a person's picture looks, cheaply: colour signature, sharpness, and the scene around the box."""

from __future__ import annotations

import cv2
import numpy as np
import numpy.typing as npt

from pipeline.frame import Box, Image

Signature = npt.NDArray[np.float32]

_SIGNATURE_HEIGHT_PX = 64
_SHARPNESS_HEIGHT_PX = 160
_HUES, _SATURATIONS, _GREYS = 12, 2, 6
_GREY_BELOW = 45  # saturation or value under which a hue is noise


def clip_box(box: Box, width_px: int, height_px: int) -> tuple[int, int, int, int]:
    """Whole pixels of `box` inside a picture of this size; empty (x2 <= x1 or y2 <= y1) when it lies outside."""
    x1, y1, x2, y2 = box
    return (
        max(0, min(width_px, int(x1))),
        max(0, min(height_px, int(y1))),
        max(0, min(width_px, round(x2))),
        max(0, min(height_px, round(y2))),
    )


def _scaled(crop: Image, height_px: int) -> Image:
    if crop.shape[0] <= height_px:
        return crop
    width = max(1, round(crop.shape[1] * height_px / crop.shape[0]))
    return np.asarray(cv2.resize(crop, (width, height_px), interpolation=cv2.INTER_AREA), dtype=np.uint8)


def sharpness(image: Image, box: Box) -> float:
    """Variance of the Laplacian of the grey crop, at most 160 px high so that near and far people compare.

    Source: Pech-Pacheco et al., "Diatom autofocusing in brightfield microscopy", ICPR 2000.
    """
    x1, y1, x2, y2 = clip_box(box, image.shape[1], image.shape[0])
    if x2 - x1 < 3 or y2 - y1 < 3:
        return 0.0
    grey = cv2.cvtColor(_scaled(image[y1:y2, x1:x2], _SHARPNESS_HEIGHT_PX), cv2.COLOR_BGR2GRAY)
    return float(cv2.Laplacian(grey, cv2.CV_32F).var())


def _colours(pixels: Image) -> Signature:
    """(bins,) float32 summing to 1: hues where there is colour, brightness where there is none."""
    hsv = cv2.cvtColor(pixels, cv2.COLOR_BGR2HSV).reshape(-1, 3)
    hue, saturation, value = (hsv[:, i].astype(np.int32) for i in range(3))
    grey = (saturation < _GREY_BELOW) | (value < _GREY_BELOW)
    coloured_bin = (hue * _HUES // 180) * _SATURATIONS + (saturation >= 128)
    bins = np.where(grey, _HUES * _SATURATIONS + value * _GREYS // 256, coloured_bin)
    counts = np.bincount(bins, minlength=_HUES * _SATURATIONS + _GREYS).astype(np.float32)
    return np.asarray(counts / max(1.0, float(counts.sum())), dtype=np.float32)


def signature(image: Image, box: Box) -> Signature | None:
    """Colours of a person's upper and lower half, (2, bins) float32; None for a box too small to say.

    Only the middle of the box counts: its edges show the background.
    """
    x1, y1, x2, y2 = clip_box(box, image.shape[1], image.shape[0])
    width, height = x2 - x1, y2 - y1
    if width < 6 or height < 12:
        return None
    inner = image[y1 + height // 12 : y2 - height // 12, x1 + width // 5 : x2 - width // 5]
    inner = _scaled(inner, _SIGNATURE_HEIGHT_PX)
    middle = inner.shape[0] // 2
    return np.stack([_colours(inner[:middle]), _colours(inner[middle:])])


def similarity(one: Signature, other: Signature) -> float:
    """0 (nothing alike) to 1 (same colours): Bhattacharyya coefficient, averaged over the halves."""
    return float(np.sqrt(one * other).sum(axis=1).mean())


def surroundings(image: Image, box: Box) -> Signature:
    """Colours of the scene around a box (twice its size, the box itself left out), (1, bins) float32."""
    height_px, width_px = image.shape[:2]
    x1, y1, x2, y2 = box
    dx, dy = (x2 - x1) / 2, (y2 - y1) / 2
    ax1, ay1, ax2, ay2 = clip_box((x1 - dx, y1 - dy, x2 + dx, y2 + dy), width_px, height_px)
    bx1, by1, bx2, by2 = clip_box(box, width_px, height_px)
    strips = [
        image[ay1:by1:2, ax1:ax2:2],
        image[by2:ay2:2, ax1:ax2:2],
        image[by1:by2:2, ax1:bx1:2],
        image[by1:by2:2, bx2:ax2:2],
    ]
    around = [strip.reshape(-1, 1, 3) for strip in strips if strip.size]
    return _colours(np.concatenate(around) if around else image[::8, ::8])[None]
