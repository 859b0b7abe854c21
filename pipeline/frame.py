"""The two things that travel through the pipeline: a frame, and a person found in it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Image = npt.NDArray[np.uint8]
Box = tuple[float, float, float, float]  # x1, y1, x2, y2


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """One picture of a camera.

    Attributes:
        image: (H, W, 3) uint8, BGR, upright; the receiver's own copy.
        index: Counts up by one a frame that the reader published; gaps are frames that a receiver did not take.
        arrived_s: When the reader process had the picture, on the clock of `serving.records.now_s`; never goes back.
        media_s: Position in the file, never going back (it goes on over loops); None for live sources.
        scene: Changes when this picture does not continue the one before: tracks do not carry over.
        cut: Changes with `scene` where this picture shows something else altogether (next picture of a folder, file
            starts again, another source): people do not carry over either. It stays over a gap (camera reconnected,
            size changed).
    """

    image: Image
    index: int
    arrived_s: float
    media_s: float | None = None
    scene: int = 0
    cut: int = 0

    @property
    def width_px(self) -> int:
        """Width of the picture."""
        return int(self.image.shape[1])

    @property
    def height_px(self) -> int:
        """Height of the picture."""
        return int(self.image.shape[0])


@dataclass(frozen=True, slots=True)
class Detection:
    """A tracked person in a frame; `box_px` is x1, y1, x2, y2 in pixels of that frame."""

    track_id: int
    box_px: Box
    confidence: float
