"""What the model is shown and asked about one person: pictures out of a frame, and the messages around them."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np

from pipeline.config import DescribeConfig
from pipeline.frame import Box, Image
from serving.request import picture_part, text_part

_BAR_GREY = 114
_ROUNDING = 0.03
_MARK_BGR = (0, 0, 255)
_THUMBNAIL_MARGIN = 0.12  # of the box's height
_THUMBNAIL_QUALITY = 82


def encode_jpeg(image: Image, quality: int) -> bytes:
    """JPEG of an (H, W, 3) BGR picture; `quality` 0 to 100."""
    done, buffer = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, quality])
    if not done:
        raise ValueError(f"a picture of shape {image.shape} cannot be made a JPEG")
    return bytes(buffer)


def surroundings(
    box_px: Box, frame_width_px: int, frame_height_px: int, margin: float, aspect: float
) -> tuple[int, int, int, int]:
    """The part of the frame to show for a person, as x1, y1, x2, y2 in whole pixels, inside the frame.

    It has the shape `aspect` (width / height) wherever the frame has room for that: the box with `margin` (of its
    height, on every side) grows to the shape, gives up margin where the frame is too small, and moves inward at the
    border. Only a box that no part of that shape could hold gives another shape.
    """
    x1, y1, x2, y2 = box_px
    box_width, box_height = max(1.0, x2 - x1), max(1.0, y2 - y1)
    spare = 2 * margin * box_height
    width, height = box_width + spare, box_height + spare
    if width < height * aspect:
        width = height * aspect
    else:
        height = width / aspect
    shrink = min(1.0, frame_width_px / width, frame_height_px / height)
    if width * shrink >= box_width and height * shrink >= box_height:
        width, height = width * shrink, height * shrink
    width, height = min(width, frame_width_px), min(height, frame_height_px)
    left = min(max(0.0, (x1 + x2 - width) / 2), frame_width_px - width)
    top = min(max(0.0, (y1 + y2 - height) / 2), frame_height_px - height)
    x1_px, y1_px = int(left), int(top)
    x2_px = min(frame_width_px, max(x1_px + 1, round(left + width)))
    y2_px = min(frame_height_px, max(y1_px + 1, round(top + height)))
    return x1_px, y1_px, x2_px, y2_px


def fitted(image: Image, width_px: int, height_px: int) -> Image:
    """`image` scaled to (height_px, width_px, 3) undistorted; grey bars where the shapes differ."""
    height, width = image.shape[:2]
    scale = min(width_px / width, height_px / height)
    size = max(1, min(width_px, round(width * scale))), max(1, min(height_px, round(height * scale)))
    # A part of a frame is a whole number of pixels: a shape off by so little is rounding, not worth a bar.
    size = (
        width_px if size[0] >= width_px * (1 - _ROUNDING) else size[0],
        height_px if size[1] >= height_px * (1 - _ROUNDING) else size[1],
    )
    scaled = cv2.resize(image, size, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_CUBIC)
    if size == (width_px, height_px):
        return np.asarray(scaled, dtype=np.uint8)
    canvas = np.full((height_px, width_px, 3), _BAR_GREY, dtype=np.uint8)
    top, left = (height_px - size[1]) // 2, (width_px - size[0]) // 2
    canvas[top : top + size[1], left : left + size[0]] = scaled
    return canvas


def crop_view(image: Image, box_px: Box, config: DescribeConfig) -> Image:
    """The person with surroundings, picture_height_px x picture_width_px."""
    height, width = image.shape[:2]
    aspect = config.picture_width_px / config.picture_height_px
    x1, y1, x2, y2 = surroundings(box_px, width, height, config.crop_margin, aspect)
    return fitted(image[y1:y2, x1:x2], config.picture_width_px, config.picture_height_px)


def frame_view(image: Image, box_px: Box | None, config: DescribeConfig) -> Image:
    """The whole frame, with a red box around the person if there is one to mark.

    The picture has the configured size, turned on its side where the frame lies the other way: a tiled or patched
    picture costs the same number of tokens either way.
    """
    sides = sorted((config.picture_width_px, config.picture_height_px))
    wide = image.shape[1] >= image.shape[0]
    width_px, height_px = (sides[1], sides[0]) if wide else (sides[0], sides[1])
    if box_px is None:
        return fitted(image, width_px, height_px)
    marked = image.copy()
    thickness = max(2, round(max(image.shape[:2]) / 240))
    x1, y1, x2, y2 = (round(value) for value in box_px)
    cv2.rectangle(marked, (x1 - thickness, y1 - thickness), (x2 + thickness, y2 + thickness), _MARK_BGR, thickness)
    return fitted(marked, width_px, height_px)


def pictures(image: Image, box_px: Box, config: DescribeConfig) -> tuple[bytes, ...]:
    """The JPEG(s) that show one person by `describe.view`; with `both`, the marked frame comes first."""
    views = []
    if config.view in ("frame", "both"):
        views.append(frame_view(image, box_px, config))
    if config.view in ("crop", "both"):
        views.append(crop_view(image, box_px, config))
    return tuple(encode_jpeg(view, config.jpeg_quality) for view in views)


def thumbnail(image: Image, box_px: Box, side_px: int) -> bytes:
    """JPEG of the person in its own shape, the longer side `side_px`."""
    height, width = image.shape[:2]
    x1, y1, x2, y2 = box_px
    aspect = max(1.0, x2 - x1) / max(1.0, y2 - y1)
    left, top, right, bottom = surroundings(box_px, width, height, _THUMBNAIL_MARGIN, aspect)
    part = image[top:bottom, left:right]
    scale = side_px / max(part.shape[:2])
    size = max(1, round(part.shape[1] * scale)), max(1, round(part.shape[0] * scale))
    scaled = cv2.resize(part, size, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_CUBIC)
    return encode_jpeg(np.asarray(scaled, dtype=np.uint8), _THUMBNAIL_QUALITY)


def description_messages(config: DescribeConfig, jpegs: tuple[bytes, ...]) -> list[dict[str, Any]]:
    """System prompt, then one user turn: the constant prompt first, the pictures after it.

    All that is the same in every request comes before all that differs, so that the server's prefix cache holds it.
    With `picture_first`, for models that were trained so, only the system prompt is found there.
    """
    system = [{"role": "system", "content": config.system_prompt}] if config.system_prompt else []
    shown = [picture_part(jpeg) for jpeg in jpegs]
    asked = text_part(config.prompt)
    content = [*shown, asked] if config.picture_first else [asked, *shown]
    return [*system, {"role": "user", "content": content}]


def kept_margin(config: DescribeConfig) -> float | None:
    """How many box heights around a person a view must keep for `pictures`; None: the whole frame.

    Enough for a box up to as wide as it is high, with room to move inward at the frame's border.
    """
    if config.view != "crop":
        return None
    aspect = config.picture_width_px / config.picture_height_px
    return (1 + 2 * config.crop_margin) * max(aspect, 1 / aspect)
