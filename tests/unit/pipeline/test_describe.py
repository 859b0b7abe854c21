from __future__ import annotations

import cv2
import numpy as np
import pytest

from pipeline.config import DescribeConfig
from pipeline.describe import crop_view, description_messages, fitted, frame_view, pictures, surroundings, thumbnail
from pipeline.frame import Box, Image

GREY = 114


def street(width: int, height: int) -> Image:
    """A frame without a single grey-114 pixel, so that bars can be told from surroundings."""
    image = np.zeros((height, width, 3), np.uint8)
    image[:, :, 1] = np.linspace(0, 100, width, dtype=np.uint8)
    image[:, :, 2] = 200
    return image


def decoded(jpeg: bytes) -> Image:
    return np.asarray(cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR), np.uint8)


@pytest.mark.parametrize(
    ("box", "frame", "expected"),
    [
        pytest.param((300, 100, 360, 250), (768, 576), (267, 42, 393, 293), id="grows to the shape with its margin"),
        pytest.param((0, 100, 60, 250), (768, 576), (0, 50, 125, 300), id="moves inward at the left border"),
        pytest.param((300, 60, 450, 520), (768, 576), (231, 0, 519, 576), id="gives up margin where the frame ends"),
        pytest.param((100, 100, 700, 400), (768, 576), (16, 0, 768, 576), id="too wide for the shape: all there is"),
    ],
)
def test_surroundings(box: Box, frame: tuple[int, int], expected: tuple[int, int, int, int]) -> None:
    found = surroundings(box, *frame, 0.25, 0.5)
    x1, y1, x2, y2 = found
    assert x1 <= box[0] and y1 <= box[1] and x2 >= box[2] and y2 >= box[3]  # the person is in it
    assert 0 <= x1 < x2 <= frame[0] and 0 <= y1 < y2 <= frame[1]
    assert np.allclose(found, expected, atol=26)


@pytest.mark.parametrize("box", [(300, 100, 360, 250), (0, 0, 40, 120), (700, 400, 768, 576), (300, 60, 450, 520)])
def test_a_crop_has_no_bars_where_the_frame_has_surroundings(box: Box) -> None:
    crop = crop_view(street(768, 576), box, DescribeConfig())
    assert crop.shape == (1024, 512, 3)
    assert not np.any(np.all(crop == GREY, axis=2))
    x1, y1, x2, y2 = surroundings(box, 768, 576, 0.25, 0.5)
    assert (x2 - x1) / (y2 - y1) == pytest.approx(0.5, abs=0.02)  # nobody is stretched


def test_bars_only_where_no_part_of_the_frame_has_the_shape() -> None:
    crop = crop_view(street(768, 300), (10, 10, 700, 290), DescribeConfig())
    assert crop.shape == (1024, 512, 3)
    assert np.all(crop[0] == GREY) and np.all(crop[-1] == GREY)
    assert not np.any(np.all(crop[512] == GREY, axis=1))


def test_the_marked_frame_shows_everything_and_one_red_box() -> None:
    frame = street(768, 576)
    frame[:, :, 2] = 0
    box = (300.0, 100.0, 360.0, 250.0)
    before = frame.copy()
    view = frame_view(frame, box, DescribeConfig())
    assert view.shape == (512, 1024, 3)  # lies like the frame; same number of tokens
    assert np.array_equal(frame, before)
    red = np.argwhere((view[:, :, 2] > 180) & (view[:, :, 0] < 60) & (view[:, :, 1] < 90))
    scale, left = 512 / 576, (1024 - 768 * 512 / 576) / 2
    (top, first), (bottom, last) = red.min(axis=0), red.max(axis=0)
    assert np.allclose(
        (first, top, last, bottom),
        (box[0] * scale + left, box[1] * scale, box[2] * scale + left, box[3] * scale),
        atol=8,
    )
    unmarked = frame_view(frame, None, DescribeConfig())
    assert not np.any(unmarked[:, :, 2] > 180)


@pytest.mark.parametrize(("view", "shapes"), [
    pytest.param("crop", [(1024, 512)], id="crop"),
    pytest.param("frame", [(512, 1024)], id="frame"),
    pytest.param("both", [(512, 1024), (1024, 512)], id="both"),
])  # fmt: skip
def test_pictures_have_the_configured_size(view: str, shapes: list[tuple[int, int]]) -> None:
    config = DescribeConfig.model_validate({"view": view})
    made = pictures(street(768, 576), (300, 100, 360, 250), config)
    assert [decoded(jpeg).shape[:2] for jpeg in made] == shapes


def test_a_thumbnail_keeps_the_persons_shape() -> None:
    image = decoded(thumbnail(street(768, 576), (300, 100, 360, 250), 192))
    assert image.shape[0] == 192
    assert image.shape[1] / image.shape[0] == pytest.approx(0.4, abs=0.15)


def test_fitted_never_distorts() -> None:
    square = np.full((100, 100, 3), 255, np.uint8)
    canvas = fitted(square, 300, 200)
    white = np.argwhere(np.all(canvas == 255, axis=2))
    height, width = white.max(axis=0) - white.min(axis=0) + 1
    assert (height, width) == (200, 200)


def test_what_is_constant_comes_first() -> None:
    config = DescribeConfig(system_prompt="You watch.", prompt="Who is it?", view="both")
    one = description_messages(config, (b"a", b"b"))
    other = description_messages(config, (b"c", b"d"))
    assert one[0] == other[0] == {"role": "system", "content": "You watch."}
    assert one[1]["content"][0] == other[1]["content"][0] == {"type": "text", "text": "Who is it?"}
    assert [part["type"] for part in one[1]["content"]] == ["text", "image_url", "image_url"]
    assert one[1]["content"][1]["image_url"]["url"].startswith("data:image/jpeg;base64,")
    assert [message["role"] for message in description_messages(DescribeConfig(), (b"a",))] == ["user"]


def test_a_model_that_was_trained_so_gets_the_picture_first() -> None:
    config = DescribeConfig(picture_first=True, system_prompt="Be brief.")
    system, turn = description_messages(config, (b"a", b"b"))
    assert system["role"] == "system"
    assert [part["type"] for part in turn["content"]] == ["image_url", "image_url", "text"]
