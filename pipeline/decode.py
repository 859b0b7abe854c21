"""Pictures out of files, network streams, webcams and folders. Runs inside the reader process; imports stay light."""

from __future__ import annotations

import math
import re
import statistics
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Image = npt.NDArray[np.uint8]

PICTURE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff"})
_PICTURE_RATE_HZ = 5.0  # a still picture is published so often while it is shown
_MAX_BAD_PACKETS = 500  # in a row; then the stream counts as broken
_MAX_STEP_S, _MIN_STEP_S = 10.0, 0.001  # time stamps that step further, or less, are lies
_UNIFORM_BELOW = 1.0  # standard deviation of the grey levels of a picture with nothing in it
_MAX_LAG_S, _LAG_PATIENCE_S = 2.0, 3.0
_CLOCK_DRIFT = 1e-3  # camera and host clocks may drift apart by so much


class DecodeError(Exception):
    """The source cannot be read, or cannot be read on; one line, without the source's address."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A decoded picture: (H, W, 3) uint8 BGR, upright. `media_s` is None for live sources."""

    image: Image
    media_s: float | None
    new_scene: bool = False


@dataclass(frozen=True, slots=True)
class Damaged:
    """Something that was no picture, and why."""

    why: str


Item = Picture | Damaged


@dataclass(slots=True)
class MediaClock:
    """Turns a file's time stamps into times that only go forward.

    The declared frame rate is used only where stamps are missing or wrong, and only when it is itself possible; else
    the usual step of the stamps seen so far, else 1/25 s.
    """

    declared_fps: float | None
    now_s: float = 0.0
    _raw_s: float | None = None
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=25))
    _started: bool = False

    def _usual_step_s(self) -> float:
        if len(self._steps) >= 5:
            return statistics.median(self._steps)
        fps = self.declared_fps
        return 1 / fps if fps is not None and math.isfinite(fps) and 1 <= fps <= 240 else 1 / 25

    def next(self, raw_s: float | None) -> float:
        """Time of the next picture, whose stamp is `raw_s`."""
        if not self._started:
            self._started = True
        else:
            step = raw_s - self._raw_s if raw_s is not None and self._raw_s is not None else None
            if step is not None and _MIN_STEP_S <= step <= _MAX_STEP_S:
                self._steps.append(step)
                self.now_s += step
            else:
                self.now_s += self._usual_step_s()
        self._raw_s = raw_s
        return self.now_s


@dataclass(slots=True)
class LagWatch:
    """Notices a live stream that is decoded slower than it comes: the pictures get older and older.

    Stamps are compared with arrivals; the smallest difference seen is "no lag".
    """

    _least_s: float | None = None
    _last_stamp_s: float | None = None
    _last_at_s: float = 0.0
    _late_since_s: float | None = None

    def lag_s(self, stamp_s: float | None, at_s: float) -> float | None:
        """The lag, once it has been above 2 s for 3 s; None while all is well."""
        if stamp_s is None:
            return None
        jumped = self._last_stamp_s is not None and not 0 <= stamp_s - self._last_stamp_s <= _MAX_STEP_S
        difference = at_s - stamp_s
        if self._least_s is None or jumped:
            self._least_s, self._late_since_s = difference, None
        else:
            self._least_s = min(difference, self._least_s + _CLOCK_DRIFT * (at_s - self._last_at_s))
        self._last_stamp_s, self._last_at_s = stamp_s, at_s
        lag = difference - self._least_s
        if lag <= _MAX_LAG_S:
            self._late_since_s = None
            return None
        if self._late_since_s is None:
            self._late_since_s = at_s
        return lag if at_s - self._late_since_s >= _LAG_PATIENCE_S else None


def is_uniform(image: Image) -> bool:
    """Nothing to see: every 8th pixel has nearly the same grey level."""
    return float(image[::8, ::8].mean(axis=2).std()) < _UNIFORM_BELOW


def turned(image: Image, clockwise_degrees: int) -> Image:
    """The picture rotated by a multiple of 90 degrees."""
    return np.rot90(image, k=-(clockwise_degrees // 90) % 4) if clockwise_degrees % 360 else image


def natural_key(path: Path) -> list[tuple[int, int, str]]:
    """Sorts 2.jpg before 10.jpg."""
    parts = re.split(r"(\d+)", path.name.lower())
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in parts]


def one_line(error: BaseException) -> str:
    """An error's cause without file names, which may hold a password."""
    text = getattr(error, "strerror", None) or type(error).__name__
    return " ".join(str(text).split())


def pictures(path: Path, *, picture_s: float, max_side_px: int) -> Iterator[Item]:
    """A folder's pictures in natural order, or one picture, each shown for `picture_s`; EXIF orientation applied.

    Raises:
        DecodeError: There is no readable picture.
    """
    from PIL import Image as Pil  # noqa: PLC0415 - only when pictures are read
    from PIL import ImageOps  # noqa: PLC0415

    Pil.MAX_IMAGE_PIXELS = None  # our own limit is checked before decoding
    files = [path]
    if path.is_dir():
        found = (file for file in path.iterdir() if file.suffix.lower() in PICTURE_SUFFIXES)
        files = sorted(found, key=natural_key)
    shown, readable = 0, False
    per_picture = max(1, round(picture_s * _PICTURE_RATE_HZ))
    for file in files:
        try:
            with Pil.open(file) as opened:
                if max(opened.size) > max_side_px:
                    yield Damaged(f"{file.name} is larger than {max_side_px} px")
                    continue
                upright = ImageOps.exif_transpose(opened).convert("RGB")
            image = np.ascontiguousarray(np.asarray(upright)[:, :, ::-1])
        except (OSError, ValueError, SyntaxError) as error:
            yield Damaged(f"{file.name} cannot be decoded ({type(error).__name__})")
            continue
        readable = True
        for repeat in range(per_picture):
            yield Picture(image, shown / _PICTURE_RATE_HZ, new_scene=repeat == 0 and shown > 0)
            shown += 1
    if not readable:
        raise DecodeError("holds no readable picture" if path.is_dir() else "is not a readable picture")


@dataclass(slots=True)
class Stream:
    """A video file or network stream, decoded by FFmpeg (PyAV).

    Attributes:
        url: `file:/absolute/path`, or the address with its password.
        options: FFmpeg's.
        live: Nothing paces it and it has no end. After `open`, false for a network source with a length.
        paced: Its time stamps are to be kept (files, and streams that come in bursts such as HLS).
    """

    url: str
    options: dict[str, str]
    live: bool
    open_timeout_s: float
    read_timeout_s: float
    max_side_px: int
    threads: str | None = None  # FFmpeg's thread type; None: one thread, no added delay
    paced: bool = False
    _container: Any = None

    def open(self) -> float | None:
        """Connect and find the pictures; the declared frame rate, if any.

        Raises:
            DecodeError: It cannot be opened, or holds no video.
        """
        import av  # noqa: PLC0415 - only for video
        import av.error  # noqa: PLC0415

        try:
            self._container = av.open(
                self.url, options=self.options, timeout=(self.open_timeout_s, self.read_timeout_s)
            )
        except av.error.ExitError:
            raise DecodeError(f"did not answer within {self.open_timeout_s:g} s") from None
        except (av.error.FFmpegError, OSError, ValueError) as error:
            raise DecodeError(f"cannot be opened: {one_line(error)}") from None
        if not self._container.streams.video:
            raise DecodeError("holds no video")
        stream = self._container.streams.video[0]
        for other in self._container.streams:
            if other is not stream:
                other.discard = "all"
        if self.threads is None:
            stream.codec_context.thread_count = 1
            stream.codec_context.thread_type = "NONE"
        else:
            stream.codec_context.thread_type = self.threads
        if self.live and self._container.duration:
            self.live = False
        self.paced = not self.live or "hls" in self._container.format.name
        rate = stream.average_rate or stream.base_rate
        return float(rate) if rate else None

    def frames(self, now_s: Any) -> Iterator[tuple[Image, float | None] | Damaged]:
        """Upright pictures with their raw time stamps.

        Args:
            now_s: The monotonic clock.

        Raises:
            DecodeError: A live stream stopped or fell behind, or too much in a row was damaged.
        """
        import av  # noqa: PLC0415
        import av.error  # noqa: PLC0415

        stream = self._container.streams.video[0]
        lag = LagWatch() if self.live and self.url.startswith("rtsp") else None
        bad = 0
        packets = self._container.demux(stream)
        while True:
            try:
                packet = next(packets, None)
            except av.error.EOFError:
                return
            except (av.error.ExitError, av.error.TimeoutError):
                raise DecodeError(f"no picture for {self.read_timeout_s:g} s") from None
            except av.error.FFmpegError as error:
                raise DecodeError(f"broke off: {one_line(error)}") from None
            if packet is None:
                return
            try:
                decoded = packet.decode()
            except av.error.EOFError:
                return
            except av.error.FFmpegError as error:
                bad += 1
                if bad > _MAX_BAD_PACKETS:
                    raise DecodeError(f"is damaged: {one_line(error)}") from None
                yield Damaged(f"cannot be decoded: {one_line(error)}")
                continue
            for frame in decoded:
                if frame.is_corrupt:
                    yield Damaged("decoded with errors")
                    continue
                if max(frame.width, frame.height) > self.max_side_px:
                    yield Damaged(f"larger than {self.max_side_px} px")
                    continue
                bad = 0
                behind = lag.lag_s(frame.time, now_s()) if lag is not None else None
                if behind is not None:
                    raise DecodeError(f"fell {behind:.1f} s behind, this machine decodes too slowly")
                yield turned(frame.to_ndarray(format="bgr24"), -round(frame.rotation / 90) * 90), frame.time

    def close(self) -> None:
        """Let go of the stream."""
        if self._container is not None:
            self._container.close()
            self._container = None


def webcam(device: int | str) -> Iterator[Item]:
    """Open a webcam at once; then its pictures, of which the driver keeps only the newest.

    Raises:
        DecodeError: It cannot be opened, or (while iterating) stopped.
    """
    import cv2  # noqa: PLC0415 - only for webcams

    capture = cv2.VideoCapture(device)
    if not capture.isOpened():
        raise DecodeError("cannot be opened: is it plugged in, free, and may this user read it (group video)?")
    capture.set(cv2.CAP_PROP_BUFFERSIZE, 1)

    def items() -> Iterator[Item]:
        while True:
            ok, image = capture.read()
            if not ok or image is None:
                raise DecodeError("stopped giving pictures")
            colour = image if image.ndim == 3 else cv2.cvtColor(image, cv2.COLOR_GRAY2BGR)
            yield Picture(np.asarray(colour, dtype=np.uint8), None)

    return items()
