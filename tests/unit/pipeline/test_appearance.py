"""Colours, sharpness and surroundings of drawn people."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.appearance import clip_box, sharpness, signature, similarity, surroundings
from pipeline.frame import Box, Image

RED, BLUE, GREY = (30, 30, 220), (220, 30, 30), (120, 120, 120)
BOX = (40.0, 20.0, 80.0, 140.0)


def scene(top: tuple[int, int, int] = RED, bottom: tuple[int, int, int] = BLUE) -> Image:
    """A person of two colours in BOX, in a grey room."""
    image = np.full((160, 120, 3), GREY, np.uint8)
    image[20:80, 40:80] = top
    image[80:140, 40:80] = bottom
    return image


@pytest.mark.parametrize(
    ("box", "clipped"),
    [
        pytest.param((10.9, 5.9, 20.4, 30.6), (10, 5, 20, 31), id="to whole pixels"),
        pytest.param((-5, -1, 500, 400), (0, 0, 120, 160), id="larger than the picture"),
        pytest.param((-9, 10, -2, 20), (0, 10, 0, 20), id="left of it: empty"),
        pytest.param((130, 170, 140, 180), (120, 160, 120, 160), id="beyond it: empty"),
    ],
)
def test_boxes_are_clipped(box: Box, clipped: tuple[int, int, int, int]) -> None:
    assert clip_box(box, 120, 160) == clipped


def test_near_and_far_people_are_compared_at_one_size() -> None:
    far = np.random.default_rng(1).integers(0, 255, (160, 60, 3), dtype=np.uint8)
    near = far.repeat(3, axis=0).repeat(3, axis=1)
    assert sharpness(near, (0, 0, 180, 480)) == pytest.approx(sharpness(far, (0, 0, 60, 160)))
    assert sharpness(far, (0, 0, 60, 160)) > 20


@pytest.mark.parametrize("box", [(0, 0, 2, 100), (0, 0, 100, 2), (200, 0, 300, 100)])
def test_what_is_too_small_or_outside_is_not_sharp(box: Box) -> None:
    noise = np.random.default_rng(1).integers(0, 255, (160, 120, 3), dtype=np.uint8)
    assert sharpness(noise, box) == 0.0


def test_a_signature_tells_the_halves_apart_and_sums_to_one() -> None:
    found = signature(scene(), BOX)
    assert found is not None
    assert found.shape == (2, 30)
    assert found.sum(axis=1) == pytest.approx([1, 1])
    assert found.max(axis=1) == pytest.approx([1, 1])  # one colour each
    assert found[0].argmax() != found[1].argmax()


def test_a_signature_leaves_the_edges_of_the_box_to_the_background() -> None:
    image = scene()
    before = signature(image, BOX)
    image[20:140, 40:48] = image[20:140, 72:80] = image[20:30, 40:80] = image[130:140, 40:80] = 255
    after = signature(image, BOX)
    assert before is not None and after is not None
    assert np.array_equal(before, after)


@pytest.mark.parametrize("box", [(40, 20, 45, 140), (40, 20, 80, 31), (130, 20, 180, 140)])
def test_a_box_too_small_to_say_has_no_signature(box: Box) -> None:
    assert signature(scene(), box) is None


@pytest.mark.parametrize(
    ("top", "bottom", "alike"),
    [
        pytest.param(RED, BLUE, 1.0, id="the same"),
        pytest.param(RED, RED, 0.5, id="other trousers"),
        pytest.param(BLUE, RED, 0.0, id="upside down"),
        pytest.param((20, 20, 150), BLUE, 1.0, id="the same red in the shade"),
        pytest.param((10, 10, 40), BLUE, 0.5, id="so dark that a hue is noise"),
    ],
)
def test_similarity(top: tuple[int, int, int], bottom: tuple[int, int, int], alike: float) -> None:
    one, other = signature(scene(), BOX), signature(scene(top, bottom), BOX)
    assert one is not None and other is not None
    assert similarity(one, other) == pytest.approx(alike)
    assert similarity(other, one) == pytest.approx(alike)


def test_surroundings_are_twice_the_box_without_it() -> None:
    image = scene()
    box = (40.0, 60.0, 60.0, 100.0)
    before = surroundings(image, box)
    assert before.shape == (1, 30)
    assert before.sum() == pytest.approx(1)
    image[60:100, 40:60] = 255  # the person
    image[125:] = 255  # far away
    assert np.array_equal(surroundings(image, box), before)
    image[100:118, 32:68] = 255  # at their feet
    assert similarity(surroundings(image, box), before) < 0.9


def test_a_box_that_fills_the_picture_has_the_picture_around_it() -> None:
    image = np.full((160, 120, 3), RED, np.uint8)
    assert np.array_equal(surroundings(image, (0, 0, 120, 160)), surroundings(image, (40, 40, 60, 60)))
