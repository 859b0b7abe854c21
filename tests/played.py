"""A camera reader that plays a video in this process, where a test is about what is done with the frames.

The product's reader is a process of its own; tests/component/pipeline/test_source.py and others are about that one.
"""

from __future__ import annotations

import functools
import threading
import time

import cv2
import numpy as np

from pipeline.config import CameraConfig, SourceConfig
from pipeline.frame import Frame, Image
from pipeline.readerstatus import ReaderStatus
from serving.records import now_s


@functools.lru_cache(maxsize=8)
def _frames(path: str) -> tuple[tuple[Image, ...], float]:
    capture = cv2.VideoCapture(path)
    images = []
    while True:
        more, image = capture.read()
        if not more:
            return tuple(images), float(capture.get(cv2.CAP_PROP_FPS))
        images.append(np.asarray(image, np.uint8))


class PlayedReader:
    """Plays at the video's own pace, newest frame only, with the surface of `pipeline.source.CameraReader`."""

    def __init__(self, camera: CameraConfig, _settings: SourceConfig) -> None:
        self._images, self._fps = _frames(camera.source)
        self._loop = camera.loop
        self._started = time.monotonic()
        self._closed = threading.Event()

    def wait_frame(self, after_index: int, timeout_s: float) -> Frame | None:
        due_s = self._started + (after_index + 1) / self._fps
        self._closed.wait(min(timeout_s, max(0.0, due_s - time.monotonic())))
        frame = self.newest()
        return frame if frame is not None and frame.index > after_index else None

    def newest(self) -> Frame | None:
        if self._closed.is_set():
            return None
        index = self._index()
        image = self._images[index % len(self._images)].copy()
        plays = index // len(self._images)
        return Frame(image, index, now_s(), index / self._fps, plays, plays)

    def status(self) -> ReaderStatus:
        finished = (not self._loop and self._index() >= len(self._images) - 1) or self._closed.is_set()
        height, width = self._images[0].shape[:2]
        state = "ended" if finished else "live"
        return ReaderStatus(state, finished=finished, frames=self._index() + 1, width_px=width, height_px=height)

    def close(self) -> None:
        self._closed.set()

    def _index(self) -> int:
        index = int((time.monotonic() - self._started) * self._fps)
        return index if self._loop else min(index, len(self._images) - 1)
