"""Whether a new track is somebody seen before, and whose tracks have changed places."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.appearance import Signature, similarity
from pipeline.config import TriggerConfig
from pipeline.frame import Box, Detection, Frame
from pipeline.people import Person, Track, began_in_time, exchange_if_swapped, join_cost
from pipeline.views import Quality, View

CONFIG = TriggerConfig(reentry_window_s=10, reentry_distance=1.5, reentry_similarity=0.8)
BOX = (100.0, 100.0, 140.0, 200.0)


def look(red: float) -> Signature:
    """A signature of two colours; `similarity` of two looks a and b is sqrt(ab) + sqrt((1-a)(1-b))."""
    return np.array([[red, 1 - red]] * 2, np.float32)


def track(
    track_id: int,
    at_s: float,
    *boxes: Box,
    every_s: float = 1.0,
    red: float | None = 1.0,
    size: tuple[int, int] = (640, 480),
) -> Track:
    found = Track(track_id, at_s)
    for step, box in enumerate(boxes):
        frame = Frame(np.zeros((size[1], size[0], 3), np.uint8), step, at_s)
        found.see(at_s + step * every_s, Detection(track_id, box, 0.9), frame)
    if red is not None:
        found.learn(look(red))
    return found


def lost_person(before: Track) -> Person:
    person = Person("1", before.first_s)
    person.adopt(before)
    return person


def moved(box: Box, dx: float, dy: float = 0.0, grow: float = 1.0) -> Box:
    x1, y1, x2, y2 = box
    return x1 + dx, y1 + dy, x1 + dx + (x2 - x1) * grow, y1 + dy + (y2 - y1) * grow


@pytest.mark.parametrize(
    ("first_s", "in_time"),
    [
        pytest.param(20.0, False, id="still seen then"),
        pytest.param(20.1, True, id="right after"),
        pytest.param(30.0, True, id="at the end"),
        pytest.param(30.1, False, id="too late"),
    ],
)
def test_began_in_time(first_s: float, in_time: bool) -> None:
    assert began_in_time(lost_person(track(1, 20, BOX)), track(2, first_s, BOX), 10) is in_time


@pytest.mark.parametrize(
    ("found", "cost"),
    [
        pytest.param(track(2, 25, BOX), 0.0, id="the same place and look"),
        pytest.param(track(2, 25, moved(BOX, 100)), 0.5, id="one height away"),
        pytest.param(track(2, 25, moved(BOX, 151)), None, id="too far"),
        pytest.param(track(2, 25, BOX, red=0.81), 0.1, id="paler"),
        pytest.param(track(2, 25, BOX, red=0.6), None, id="other clothes"),
        pytest.param(track(2, 20.5, moved(BOX, 20), red=0.6), 0.1 + 1 - 0.6**0.5, id="other light, a moment later"),
        pytest.param(track(2, 25, BOX, red=None), None, id="no look"),
        pytest.param(track(2, 25, moved(BOX, 0, 0, 1.8)), None, id="other size"),
        pytest.param(track(2, 31, BOX), None, id="too late"),
    ],
)
def test_how_badly_a_track_fits(found: Track, cost: float | None) -> None:
    fits = join_cost(lost_person(track(1, 20, BOX)), found, CONFIG, similarity)
    assert fits == (None if cost is None else pytest.approx(cost, abs=1e-5))


def test_who_walked_is_expected_further_on_but_not_for_ever() -> None:
    walking = [moved(BOX, 100.0 * step) for step in range(20)]
    person = lost_person(track(1, 0, *walking))  # 100 px a second, one height; last seen at 19 s
    assert person.last_track is not None
    assert person.last_track.speed[0] == pytest.approx(100, rel=0.01)
    assert join_cost(person, track(2, 21, moved(walking[-1], 200)), CONFIG, similarity) == pytest.approx(0, abs=0.01)
    assert join_cost(person, track(2, 24, moved(walking[-1], 500)), CONFIG, similarity) is None


@pytest.mark.parametrize("size", [pytest.param((1280, 960), id="twice"), pytest.param((1280, 480), id="wider")])
def test_places_are_compared_in_the_new_size_of_the_picture(size: tuple[int, int]) -> None:
    wider, higher = size[0] / 640, size[1] / 480
    walking = [moved(BOX, 100.0 * step) for step in range(3)]
    person = lost_person(track(1, 0, *walking))
    x1, y1, x2, y2 = moved(walking[-1], 64)  # as far as they get in a second at 64 px/s, the speed by then
    again = track(2, 3, (x1 * wider, y1 * higher, x2 * wider, y2 * higher), size=size)
    assert join_cost(person, again, CONFIG, similarity) == pytest.approx(0, abs=1e-5)


def view_of(score: float, *, problem: str = "") -> View:
    quality = Quality(100, 0.2, 50, False, 0.0, problem, True, score)
    image = np.zeros((2, 2, 3), np.uint8)
    return View(image, BOX, BOX, 640, 480, 0, 0.0, None, 1, 0.9, quality)


@pytest.mark.parametrize(
    ("had", "brings", "kept"),
    [
        pytest.param(view_of(0.5), view_of(0.7), "new", id="the higher score"),
        pytest.param(view_of(0.2), view_of(0.7, problem="blurred"), "old", id="a good view before a bad one"),
        pytest.param(None, view_of(0.1), "new", id="the only one"),
        pytest.param(view_of(0.1), None, "old", id="nothing new"),
    ],
)
def test_the_better_view_stays_with_the_person(had: View | None, brings: View | None, kept: str) -> None:
    person, found = lost_person(track(1, 0, BOX)), track(2, 5, BOX)
    person.best, found.best = had, brings
    person.adopt(found)
    assert person.best is (had if kept == "old" else brings)
    assert found.best is None
    assert found.person is person
    assert (person.track_id, person.track_ids, person.last_seen_s) == (2, [1, 2], 5)


@pytest.mark.parametrize(
    ("now_one", "now_other", "swapped"),
    [
        pytest.param(1.0, 0.0, False, id="each as before"),
        pytest.param(0.0, 1.0, True, id="each like the other"),
        pytest.param(0.5, 0.5, False, id="cannot be told"),
    ],
)
def test_tracks_that_changed_places(now_one: float, now_other: float, swapped: bool) -> None:
    one, other = track(1, 0, BOX, red=1.0), track(2, 0, moved(BOX, 200), red=0.0)
    first, second = lost_person(one), lost_person(other)
    first.best = second.best = view_of(0.5)
    exchange_if_swapped(one, other, (look(now_one), look(now_other)), similarity)
    assert (one.person, other.person) == ((second, first) if swapped else (first, second))
    assert (first.best is None) is swapped  # it may show the other one
    assert np.array_equal(one.colours, look(0.0 if swapped else 1.0))


def test_without_a_look_nobody_is_exchanged() -> None:
    one, other = track(1, 0, BOX), track(2, 0, BOX, red=0.0)
    first, _ = lost_person(one), lost_person(other)
    exchange_if_swapped(one, other, (None, look(1.0)), similarity)
    assert one.person is first


def test_a_track_learns_slowly() -> None:
    found = track(1, 0, BOX, red=1.0)
    found.learn(look(0.0))
    found.learn(None)
    assert np.allclose(found.colours, look(0.8))
