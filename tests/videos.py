"""Videos and pictures made for the tests, with pictures that can be told apart."""

from __future__ import annotations

from pathlib import Path

import av
import cv2
import numpy as np

from pipeline.frame import Image


def numbered(number: int, width_px: int = 160, height_px: int = 120) -> Image:
    """A busy picture that carries `number` (0 to 255) as 8 black or white squares in its top row."""
    rng = np.random.default_rng(7)
    small = rng.integers(40, 215, (height_px // 10, width_px // 10, 3), dtype=np.uint8)
    image = cv2.resize(small, (width_px, height_px), interpolation=cv2.INTER_NEAREST)
    side = width_px // 8
    for bit in range(8):
        image[: height_px // 6, bit * side : (bit + 1) * side] = 255 if number >> bit & 1 else 0
    return np.asarray(image, np.uint8)


def number_of(image: Image) -> int:
    """What `numbered` put there."""
    height_px, width_px = image.shape[:2]
    side = width_px // 8
    row = image[height_px // 12]
    return sum(int(row[bit * side + side // 2].mean() > 127) << bit for bit in range(8))


def write_video(
    path: Path, frames: list[Image], fps: int = 25, *, codec: str = "libx264", options: dict[str, str] | None = None
) -> Path:
    """Encode `frames`; H.264 with a key frame every 5 unless told otherwise."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=fps, options=options or {"g": "5", "bf": "0", "crf": "18"})
        if not isinstance(stream, av.VideoStream):
            raise TypeError(f"{codec} is not a video codec")
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="bgr24")))
        container.mux(stream.encode())
    return path


def jpeg(image: Image) -> bytes:
    """As a JPEG file."""
    return bytes(cv2.imencode(".jpg", image)[1].tobytes())


def turn_in_metadata(path: Path, clockwise_degrees: int) -> None:
    """Write a rotation into an MP4's track header, as telephones do (ISO 14496-12, tkhd: the matrix)."""
    data = bytearray(path.read_bytes())
    at = data.index(b"tkhd") + 4 + 40  # version 0: 40 bytes before the matrix
    one, minus = 0x00010000, 0xFFFF0000
    a, b, c, d = {90: (0, one, minus, 0), 180: (minus, 0, 0, minus), 270: (0, minus, one, 0)}[clockwise_degrees]
    for offset, value in ((0, a), (4, b), (12, c), (16, d)):
        data[at + offset : at + offset + 4] = value.to_bytes(4, "big")
    path.write_bytes(data)
