"""Live pictures: one JPEG a camera and width and tick, made off the event loop and shared by everyone who looks.

A feed works only while somebody looks at it.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass

import cv2
import numpy as np

from pipeline.api import TrackView
from pipeline.camera import CameraWorker
from pipeline.describe import encode_jpeg
from pipeline.frame import Image

_QUALITY = 78
_WIDTH_STEP_PX = 160  # widths are rounded to this, so that tabs of nearly the same size share one encoding
_MARKS_BGR = {
    "new": (160, 160, 160),
    "watched": (255, 200, 80),
    "waiting": (0, 190, 255),
    "describing": (0, 120, 255),
    "described": (90, 200, 60),
    "skipped": (120, 120, 120),
}


@dataclass(frozen=True, slots=True)
class LivePicture:
    """One picture as it goes over the wire. `number` grows by one a picture of its feed."""

    number: int
    message: bytes


def shared_width(width_px: int, most_px: int) -> int:
    """`width_px` rounded up to a width that others are likely to use, at most `most_px`."""
    return min(most_px, max(_WIDTH_STEP_PX, -(-width_px // _WIDTH_STEP_PX) * _WIDTH_STEP_PX))


def scaled(image: Image, width_px: int) -> Image:
    """`image` no wider than `width_px`."""
    height, width = image.shape[:2]
    if width <= width_px:
        return image
    size = (width_px, max(1, round(height * width_px / width)))
    return np.asarray(cv2.resize(image, size, interpolation=cv2.INTER_AREA), dtype=np.uint8)


def framed(header: dict[str, object], jpeg: bytes) -> bytes:
    """The binary message of a live picture: header length (4 bytes, big-endian), JSON header, JPEG."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack(">I", len(text)) + text + jpeg


def with_boxes(image: Image, tracks: list[TrackView]) -> Image:
    """A copy of `image` with every person's box and state drawn."""
    drawn = image.copy()
    height, width = drawn.shape[:2]
    for track in tracks:
        x1, y1, x2, y2 = (round(value * side) for value, side in zip(track.box, (width, height) * 2, strict=True))
        colour = _MARKS_BGR[track.state]
        cv2.rectangle(drawn, (x1, y1), (x2, y2), colour, 2)
        cv2.putText(drawn, track.state, (x1, max(12, y1 - 5)), cv2.FONT_HERSHEY_SIMPLEX, 0.45, colour, 1, cv2.LINE_AA)
    return drawn


class PictureFeed:
    """The newest picture of one camera at one width."""

    def __init__(self, worker: CameraWorker, width_px: int, rate_hz: float) -> None:
        self._worker = worker
        self._width_px = width_px
        self._period_s = 1.0 / rate_hz
        self._index = -1
        self._seen: object = None
        self._task: asyncio.Task[None] | None = None
        self._ears: set[asyncio.Event] = set()
        self.newest: LivePicture | None = None

    def join(self, ear: asyncio.Event) -> None:
        """Set `ear` at every new picture from now on."""
        self._ears.add(ear)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._work())

    def leave(self, ear: asyncio.Event) -> bool:
        """Undo `join`; True when nobody looks any more."""
        self._ears.discard(ear)
        if self._ears:
            return False
        if self._task is not None:
            self._task.cancel()
            self._task = None
        return True

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            message = await asyncio.to_thread(self._make)
            if message is not None:
                number = 1 if self.newest is None else self.newest.number + 1
                self.newest = LivePicture(number, message)
                for ear in self._ears:
                    ear.set()
            due_s = max(due_s + self._period_s, loop.time())
            await asyncio.sleep(due_s - loop.time())

    def _make(self) -> bytes | None:
        """The next message; None while there is no new frame."""
        frame = self._worker.frame()
        # A reader that was started again counts its frames anew, so the arrival tells them apart.
        if frame is None or (frame.index, frame.arrived_s) == self._seen:
            return None
        self._seen = (frame.index, frame.arrived_s)
        image = scaled(frame.image, self._width_px)
        header: dict[str, object] = {
            "type": "frame",
            "camera_id": self._worker.camera_id,
            "frame_s": frame.arrived_s,
            "width_px": image.shape[1],
            "height_px": image.shape[0],
            "tracks": [track.model_dump() for track in self._worker.tracks()],
        }
        return framed(header, encode_jpeg(image, _QUALITY))


class Pictures:
    """Every picture feed somebody looks at."""

    def __init__(self, worker: Callable[[str], CameraWorker | None], rate_hz: float) -> None:
        self._worker = worker
        self._rate_hz = rate_hz
        self._feeds: dict[tuple[CameraWorker, int], PictureFeed] = {}

    def join(self, camera_id: str, width_px: int, ear: asyncio.Event) -> PictureFeed | None:
        """Look at a camera; None when there is none of that id."""
        worker = self._worker(camera_id)
        if worker is None:
            return None
        key = (worker, width_px)
        feed = self._feeds.get(key)
        if feed is None:
            feed = self._feeds[key] = PictureFeed(worker, width_px, self._rate_hz)
        feed.join(ear)
        return feed

    def current(self, feed: PictureFeed) -> bool:
        """Whether the feed's camera is still the one of its id."""
        return any(
            feed is other and self._worker(worker.camera_id) is worker for (worker, _), other in self._feeds.items()
        )

    def leave(self, feed: PictureFeed, ear: asyncio.Event) -> None:
        """Look away."""
        if feed.leave(ear):
            self._feeds = {key: other for key, other in self._feeds.items() if other is not feed}
