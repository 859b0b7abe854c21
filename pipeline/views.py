"""How good a look at a person one frame gives, in words and as a number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.appearance import clip_box, sharpness
from pipeline.config import TriggerConfig
from pipeline.frame import Box, Detection, Frame, Image

_WORST_OVERLAP = 0.7  # hidden this far, a view shows somebody else
_BEHIND_WEIGHT = 0.3  # somebody behind hides nothing, but is in the picture too


@dataclass(frozen=True, slots=True)
class Quality:
    """One look at a person.

    Attributes:
        height_px: Height of the box.
        height_fraction: The same, of the picture's height.
        sharpness: Variance of the Laplacian (see `appearance.sharpness`).
        cut: The box touches the picture's border.
        overlap: Share of the box covered by somebody else, 0 to 1; somebody behind counts little.
        problem: Why this is not a good view, in words; empty when it is one.
        usable: Good enough to be described when no better view comes.
        score: Orders the views of one person; higher is better.
    """

    height_px: float
    height_fraction: float
    sharpness: float
    cut: bool
    overlap: float
    problem: str
    usable: bool
    score: float

    @property
    def good(self) -> bool:
        """Nothing speaks against describing the person from this view."""
        return not self.problem


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """A look at a person that can be described later: what the description request is made of.

    Attributes:
        image: (H, W, 3) uint8 BGR: the whole frame, or only the region around the person (see `Trigger`).
        box_px: The person in `image`.
        frame_box: The person as fractions of the whole frame's width and height.
        frame_width_px, frame_height_px: Size of the whole frame.
        frame_index, arrived_s, media_s: Of the frame.
        track_id: The track at that time.
        confidence: The detector's.
        quality: How good a look it is.
    """

    image: Image
    box_px: Box
    frame_box: Box
    frame_width_px: int
    frame_height_px: int
    frame_index: int
    arrived_s: float
    media_s: float | None
    track_id: int
    confidence: float
    quality: Quality


def overlap_by_others(box: Box, others: Sequence[Box]) -> float:
    """The largest share of `box` that one other box covers; one whose feet are higher is behind and counts little."""
    x1, y1, x2, y2 = box
    area = max(1.0, (x2 - x1) * (y2 - y1))
    worst = 0.0
    for ox1, oy1, ox2, oy2 in others:
        shared = max(0.0, min(x2, ox2) - max(x1, ox1)) * max(0.0, min(y2, oy2) - max(y1, oy1))
        worst = max(worst, shared / area * (1.0 if oy2 >= y2 else _BEHIND_WEIGHT))
    return min(1.0, worst)


def judge(frame: Frame, detection: Detection, others: Sequence[Box], config: TriggerConfig) -> Quality:
    """Rate the view of `detection` in `frame`; `others` are the other people's boxes."""
    x1, y1, x2, y2 = detection.box_px
    height = y2 - y1
    fraction = height / frame.height_px
    margin = config.border_margin_px
    cut = x1 < margin or y1 < margin or x2 > frame.width_px - margin or y2 > frame.height_px - margin
    overlap = overlap_by_others(detection.box_px, others)
    sharp = sharpness(frame.image, detection.box_px)

    problem = ""
    usable = True
    if height < config.min_height_px:
        problem, usable = f"too small ({height:.0f} px high, needs {config.min_height_px})", False
    elif overlap > _WORST_OVERLAP:
        problem, usable = f"hidden behind another person ({overlap:.0%})", False
    elif fraction < config.min_height_fraction:
        problem = f"too small ({fraction:.0%} of the picture's height, needs {config.min_height_fraction:.0%})"
    elif overlap > config.max_overlap:
        problem = f"partly hidden behind another person ({overlap:.0%})"
    elif cut:
        problem = "cut by the border"
    elif sharp < config.min_sharpness:
        problem = f"blurred (sharpness {sharp:.0f}, needs {config.min_sharpness:.0f})"

    score = (
        min(1.0, fraction / 0.5) ** 0.5 * (1.0 - overlap) * min(1.0, 0.2 + sharp / (4 * config.min_sharpness + 1e-9))
    )
    score *= (0.5 if cut else 1.0) * (0.5 + 0.5 * detection.confidence)
    if problem:
        score *= 0.5
    return Quality(height, fraction, sharp, cut, overlap, problem, usable, score)


def take_view(frame: Frame, detection: Detection, quality: Quality, keep_margin: float | None) -> View:
    """Keep what a description needs: the whole frame, or a copy of the box with `keep_margin` box heights around it."""
    x1, y1, x2, y2 = detection.box_px
    width, height = frame.width_px, frame.height_px
    image, left, top = frame.image, 0, 0
    if keep_margin is not None:
        around = keep_margin * (y2 - y1)
        left, top, right, bottom = clip_box((x1 - around, y1 - around, x2 + around, y2 + around), width, height)
        image = np.ascontiguousarray(frame.image[top:bottom, left:right]).copy()
    return View(
        image=image,
        box_px=(x1 - left, y1 - top, x2 - left, y2 - top),
        frame_box=(x1 / width, y1 / height, x2 / width, y2 / height),
        frame_width_px=width,
        frame_height_px=height,
        frame_index=frame.index,
        arrived_s=frame.arrived_s,
        media_s=frame.media_s,
        track_id=detection.track_id,
        confidence=detection.confidence,
        quality=quality,
    )
