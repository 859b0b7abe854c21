"""How good a look at a person is, and what of the frame is kept."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from pipeline.config import TriggerConfig
from pipeline.frame import Box, Detection, Frame
from pipeline.views import judge, overlap_by_others, take_view

CONFIG = TriggerConfig(min_height_px=48, min_height_fraction=0.2, min_sharpness=20, border_margin_px=4, max_overlap=0.3)
WIDTH, HEIGHT = 640, 480
BOX = (100.0, 100.0, 150.0, 200.0)


def frame(contrast: int = 60) -> Frame:
    """Noise, which is sharp; without contrast all of it is blurred."""
    noise = np.random.default_rng(1).integers(100 - contrast, 101 + contrast, (HEIGHT, WIDTH, 3))
    return Frame(noise.astype(np.uint8), 5, 12.0, 3.0)


@pytest.mark.parametrize(
    ("others", "share"),
    [
        pytest.param([], 0.0, id="nobody"),
        pytest.param([(200, 100, 250, 200)], 0.0, id="beside"),
        pytest.param([(125, 100, 175, 200)], 0.5, id="level with the feet: in front"),
        pytest.param([(125, 100, 175, 201)], 0.5, id="in front"),
        pytest.param([(125, 100, 175, 199)], 0.5 * 0.99 * 0.3, id="behind"),
        pytest.param([(125, 100, 175, 200), (100, 100, 110, 200)], 0.5, id="the worst of two"),
        pytest.param([(0, 0, 640, 480)], 1.0, id="all of it"),
    ],
)
def test_overlap(others: Sequence[Box], share: float) -> None:
    assert overlap_by_others(BOX, others) == pytest.approx(share)


@pytest.mark.parametrize(
    ("box", "others", "contrast", "problem", "usable"),
    [
        pytest.param(BOX, [], 60, "", True, id="good"),
        pytest.param((100, 100, 150, 147), [], 60, "too small (47 px high, needs 48)", False, id="too small to tell"),
        pytest.param(
            (100, 100, 150, 148), [], 60, "too small (10% of the picture's height, needs 20%)", True, id="small"
        ),
        pytest.param(BOX, [(114, 100, 164, 200)], 60, "hidden behind another person (72%)", False, id="hidden"),
        pytest.param(BOX, [(116, 100, 166, 200)], 60, "partly hidden behind another person (68%)", True, id="partly"),
        pytest.param(BOX, [(135, 100, 185, 200)], 60, "", True, id="touched by somebody in front"),
        pytest.param((3, 100, 53, 200), [], 60, "cut by the border", True, id="at the border"),
        pytest.param((4, 100, 54, 200), [], 60, "", True, id="near the border"),
        pytest.param((590, 380, 637, 477), [], 60, "cut by the border", True, id="at the lower right"),
        pytest.param(BOX, [], 1, "blurred (sharpness ", True, id="blurred"),
    ],
)
def test_what_speaks_against_a_view(box: Box, others: Sequence[Box], contrast: int, problem: str, usable: bool) -> None:
    quality = judge(frame(contrast), Detection(1, box, 0.9), others, CONFIG)
    assert quality.problem.startswith(problem)
    assert (quality.good, quality.usable) == (not problem, usable)


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        pytest.param((BOX, [], 60, 0.9), ((100, 100, 150, 199), [], 60, 0.9), id="larger"),
        pytest.param((BOX, [], 60, 0.9), (BOX, [], 60, 0.5), id="surer"),
        pytest.param((BOX, [], 60, 0.9), (BOX, [(140, 100, 190, 200)], 60, 0.9), id="free"),
        pytest.param((BOX, [], 60, 0.9), ((1, 100, 51, 200), [], 60, 0.9), id="whole"),
        pytest.param((BOX, [], 2, 0.9), (BOX, [], 1, 0.9), id="sharper"),
    ],
)
def test_of_two_views_the_better_scores_higher(
    better: tuple[Box, Sequence[Box], int, float], worse: tuple[Box, Sequence[Box], int, float]
) -> None:
    scores = [
        judge(frame(contrast), Detection(1, box, confidence), others, CONFIG).score
        for box, others, contrast, confidence in (better, worse)
    ]
    assert scores[0] > scores[1]


@pytest.mark.parametrize(
    ("box", "margin", "shape", "inside"),
    [
        pytest.param(BOX, None, (480, 640), BOX, id="whole frame"),
        pytest.param(BOX, 0.25, (150, 100), (25, 25, 75, 125), id="with a margin"),
        pytest.param((10, 0, 60, 100), 0.25, (125, 85), (10, 0, 60, 100), id="as far as the frame goes"),
    ],
)
def test_what_is_kept(box: Box, margin: float | None, shape: tuple[int, int], inside: Box) -> None:
    given = frame()
    detection = Detection(7, box, 0.9)
    view = take_view(given, detection, judge(given, detection, [], CONFIG), margin)
    assert view.image.shape == (*shape, 3)
    assert view.box_px == inside
    assert np.shares_memory(view.image, given.image) == (margin is None)
    x1, y1, x2, y2 = (int(v) for v in inside)
    left, top, right, bottom = (int(v) for v in box)
    assert np.array_equal(view.image[y1:y2, x1:x2], given.image[top:bottom, left:right])
    assert view.frame_box == pytest.approx((left / WIDTH, top / HEIGHT, right / WIDTH, bottom / HEIGHT))
    assert (view.track_id, view.frame_index, view.arrived_s, view.media_s) == (7, 5, 12.0, 3.0)
