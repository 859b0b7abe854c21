"""Time stamps, damage and turning, without a reader process."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pil

from pipeline.decode import (
    Damaged,
    DecodeError,
    LagWatch,
    MediaClock,
    Picture,
    Stream,
    is_uniform,
    natural_key,
    pictures,
    turned,
    webcam,
)
from tests.videos import number_of, numbered, write_video


@pytest.mark.parametrize(
    ("declared_fps", "stamps", "expected"),
    [
        pytest.param(10.0, [0.0, 0.1, 0.2], [0, 0.1, 0.2], id="stamps are used"),
        pytest.param(1000.0, [0.0, 0.1, 0.2], [0, 0.1, 0.2], id="a declared rate that lies is not"),
        pytest.param(20.0, [None, None, None], [0, 0.05, 0.1], id="no stamps: the declared rate"),
        pytest.param(0.0, [None, None, None], [0, 0.04, 0.08], id="no stamps, declared 0"),
        pytest.param(math.nan, [None, None, None], [0, 0.04, 0.08], id="no stamps, declared NaN"),
        pytest.param(90_000.0, [None, None, None], [0, 0.04, 0.08], id="no stamps, declared 90000"),
        pytest.param(None, [5.0, 5.5, 6.0], [0, 0.5, 1.0], id="begins late"),
        pytest.param(10.0, [1.0, 1.1, 0.0, 0.1], [0, 0.1, 0.2, 0.3], id="stamps go back"),
        pytest.param(10.0, [0.0, 3600.0, 3600.1], [0, 0.1, 0.2], id="stamps leap an hour"),
        pytest.param(10.0, [0.0, 1e-5, 2e-5], [0, 0.1, 0.2], id="stamps in the wrong unit"),
    ],
)
def test_media_clock(declared_fps: float | None, stamps: list[float | None], expected: list[float]) -> None:
    clock = MediaClock(declared_fps)
    assert [clock.next(stamp) for stamp in stamps] == pytest.approx(expected)


def test_media_clock_fills_gaps_with_the_usual_step() -> None:
    clock = MediaClock(declared_fps=30.0)
    times = [clock.next(stamp) for stamp in [0.0, 0.2, 0.4, 0.6, 0.8, 1.0, None, None]]
    assert times[-2:] == pytest.approx([1.2, 1.4])


def _lags(stamps_and_arrivals: list[tuple[float, float]]) -> list[float | None]:
    watch = LagWatch()
    return [watch.lag_s(stamp, at) for stamp, at in stamps_and_arrivals]


def test_lag_is_noticed_when_decoding_is_slower_than_the_camera() -> None:
    lags = _lags([(i * 0.1, 100 + i * 0.15) for i in range(200)])
    first = next(i for i, lag in enumerate(lags) if lag is not None)
    assert 2.0 < (lags[first] or 0) < 5.0


@pytest.mark.parametrize(
    "times",
    [
        pytest.param([(i * 0.1, 100 + i * 0.1) for i in range(200)], id="in step"),
        pytest.param([(i * 0.1, 100 + i * 0.1 + (1.5 if i % 20 == 0 else 0)) for i in range(200)], id="jitter"),
        pytest.param(
            [(i * 0.1, 100 + i * 0.1 + (4 - (i - 50) * 0.08 if 50 <= i < 100 else 0)) for i in range(200)],
            id="a hiccup that is caught up with",
        ),
        pytest.param(
            [(i * 0.1, 100 + i * 0.1) for i in range(50)] + [(i * 0.1, 200 + i * 0.1) for i in range(50)],
            id="the camera's clock is set back",
        ),
        pytest.param([(i * 0.1, 100 + i * 0.10005) for i in range(20_000)], id="clocks drift apart slowly"),
    ],
)
def test_no_false_lag(times: list[tuple[float, float]]) -> None:
    assert set(_lags(times)) == {None}


def test_natural_order() -> None:
    names = ["b2.png", "b10.png", "B1.png", "10.png", "9.png"]
    assert [p.name for p in sorted(map(Path, names), key=natural_key)] == [
        "9.png", "10.png", "B1.png", "b2.png", "b10.png",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("image", "uniform"),
    [
        pytest.param(np.zeros((120, 160, 3), np.uint8), True, id="black"),
        pytest.param(np.full((120, 160, 3), 128, np.uint8), True, id="grey"),
        pytest.param(np.full((120, 160, 3), (0, 200, 0), np.uint8), True, id="green"),
        pytest.param(numbered(3), False, id="a picture"),
        pytest.param(np.random.default_rng(0).integers(0, 12, (120, 160, 3), np.uint8), False, id="a night's noise"),
    ],
)
def test_uniform(image: np.ndarray, uniform: bool) -> None:
    assert is_uniform(image) is uniform


def test_turned_is_clockwise() -> None:
    image = np.zeros((2, 3, 3), np.uint8)
    image[0, 0] = 255  # top left
    assert turned(image, 90).shape == (3, 2, 3)
    assert turned(image, 90)[0, 1, 0] == 255  # goes to the top right
    assert turned(image, 180)[1, 2, 0] == 255
    assert turned(image, 270)[2, 0, 0] == 255
    assert turned(image, 0) is image


def test_pictures_are_upright_in_order_and_the_damaged_skipped(tmp_path: Path) -> None:
    upright = np.zeros((60, 100, 3), np.uint8)
    upright[:30, :50] = (0, 0, 255)  # top left, red in BGR
    stored = np.rot90(upright, 1)  # turned left, to be shown turned right: EXIF orientation 6
    exif = Pil.Exif()
    exif[0x0112] = 6
    Pil.fromarray(np.ascontiguousarray(stored[:, :, ::-1])).save(tmp_path / "2.png", exif=exif)
    Pil.fromarray(numbered(1)).save(tmp_path / "10.jpg")
    (tmp_path / "1.jpg").write_bytes(b"no picture")
    whole = (tmp_path / "10.jpg").read_bytes()
    (tmp_path / "3.jpg").write_bytes(whole[: len(whole) // 2])
    Pil.fromarray(np.zeros((20, 400, 3), np.uint8)).save(tmp_path / "4.png")
    (tmp_path / "notes.txt").write_text("no picture")

    items = list(pictures(tmp_path, picture_s=0.4, max_side_px=300))

    damaged = [item.why.split()[0] for item in items if isinstance(item, Damaged)]
    shown = [item for item in items if isinstance(item, Picture)]
    assert damaged == ["1.jpg", "3.jpg", "4.png"]
    assert [item.image.shape for item in shown] == [(60, 100, 3)] * 2 + [(120, 160, 3)] * 2
    assert [item.new_scene for item in shown] == [False, False, True, False]
    assert [item.media_s for item in shown] == pytest.approx([0, 0.2, 0.4, 0.6])
    assert shown[0].image[10, 10].tolist() == [0, 0, 255]


def test_no_readable_picture(tmp_path: Path) -> None:
    (tmp_path / "1.jpg").write_bytes(b"no picture")
    with pytest.raises(DecodeError, match="no readable picture"):
        list(pictures(tmp_path, picture_s=0.2, max_side_px=300))


def _stream(path: Path, **changes: int) -> Stream:
    return Stream(
        f"file:{path}", {}, live=False, open_timeout_s=5, read_timeout_s=5, max_side_px=changes.get("side", 4096)
    )


def test_every_frame_of_a_file_in_order(tmp_path: Path) -> None:
    stream = _stream(write_video(tmp_path / "v.mp4", [numbered(i) for i in range(30)]))
    assert stream.open() == pytest.approx(25)
    frames = [item for item in stream.frames(lambda: 0.0) if not isinstance(item, Damaged)]
    assert [number_of(image) for image, _ in frames] == list(range(30))
    assert all(b - a == pytest.approx(0.04) for a, b in pairwise(stamp or 0.0 for _, stamp in frames))


def test_damage_in_mid_file_is_skipped_and_reading_goes_on(tmp_path: Path) -> None:
    path = write_video(tmp_path / "v.mp4", [numbered(i) for i in range(40)])
    data = bytearray(path.read_bytes())
    middle = data.index(b"mdat") + (len(data) - data.index(b"mdat")) // 2
    data[middle : middle + 2000] = bytes(2000)
    path.write_bytes(data)
    stream = _stream(path)
    stream.open()
    items = list(stream.frames(lambda: 0.0))
    assert any(isinstance(item, Damaged) for item in items)
    numbers = [number_of(item[0]) for item in items if not isinstance(item, Damaged)]
    assert numbers[:10] == list(range(10))
    assert numbers[-1] == 39


def test_pictures_that_are_too_large_are_skipped(tmp_path: Path) -> None:
    stream = _stream(write_video(tmp_path / "v.mp4", [numbered(i) for i in range(3)]), side=100)
    stream.open()
    assert [type(item) for item in stream.frames(lambda: 0.0)] == [Damaged] * 3


@pytest.mark.parametrize(
    ("content", "message"),
    [pytest.param(b"", "cannot be opened", id="empty"), pytest.param(b"text " * 99, "cannot be opened", id="text")],
)
def test_what_is_no_video(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "v.mp4").write_bytes(content)
    with pytest.raises(DecodeError, match=message) as error:
        _stream(tmp_path / "v.mp4").open()
    assert str(tmp_path) not in str(error.value)


def test_webcam_pictures_until_it_stops(tmp_path: Path) -> None:
    """The library opens a file as it opens a device."""
    path = write_video(tmp_path / "v.mp4", [numbered(i) for i in range(5)])
    items = webcam(str(path))
    numbers = [number_of(item.image) for _, item in zip(range(5), items, strict=False) if isinstance(item, Picture)]
    assert numbers == list(range(5))
    with pytest.raises(DecodeError, match="stopped giving pictures"):
        next(items)


def test_no_such_webcam(tmp_path: Path) -> None:
    with pytest.raises(DecodeError, match="plugged in"):
        webcam(str(tmp_path / "video9"))
