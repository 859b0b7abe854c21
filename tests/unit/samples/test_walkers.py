from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from samples.figures import random_appearance
from samples.walkers import Stage, Walker, crowd, placed, quantised

STAGE = Stage(width_px=960, far_px=200, near_px=530, far_height_px=100, near_height_px=300)


def a_walker(**changes: object) -> Walker:
    walker = Walker(
        look=random_appearance(np.random.default_rng(1)),
        start_s=2.0,
        start_px=(-100.0, 400.0),
        end_px=(1060.0, 400.0),
        speed=0.9,
        stop_at=None,
        stop_s=4.0,
        stature=1.0,
        stance=0.0,
    )
    return replace(walker, **changes)  # type: ignore[arg-type]


def test_a_walker_enters_crosses_and_leaves() -> None:
    walker = a_walker()
    where = [placed(walker, STAGE, at) for at in np.arange(0.0, 20.0, 0.25)]
    present = [index for index, person in enumerate(where) if person is not None]
    assert where[0] is None
    assert where[-1] is None
    assert present == list(range(present[0], present[-1] + 1))
    xs = [person.x_px for person in where if person is not None]
    assert xs == sorted(xs)
    assert xs[0] == pytest.approx(-100)


@pytest.mark.parametrize(
    ("start", "end", "action"),
    [
        pytest.param((-100, 400), (1060, 400), "walking right", id="right"),
        pytest.param((1060, 420), (-100, 380), "walking left", id="left"),
        pytest.param((500, 200), (520, 900), "walking towards the camera", id="towards"),
        pytest.param((500, 900), (470, 200), "walking away", id="away"),
    ],
)
def test_the_body_faces_the_way_it_goes(start: tuple[float, float], end: tuple[float, float], action: str) -> None:
    person = placed(a_walker(start_px=start, end_px=end), STAGE, 3.0)
    assert person is not None
    assert person.pose.action == action


def test_a_stop_lasts_its_time_and_the_way_goes_on() -> None:
    walker = a_walker(stop_at=0.5, stop_s=4.0)
    moments = np.arange(2.0, 20.0, 0.1)
    where = [placed(walker, STAGE, at) for at in moments]
    standing = [person is not None and person.pose.phase is None for person in where]
    assert sum(standing) * 0.1 == pytest.approx(4.0, abs=0.3)
    still = {round(person.x_px, 3) for person, stands in zip(where, standing, strict=True) if person and stands}
    assert len(still) == 1
    assert max(person.x_px for person in where if person) > still.pop() + 200


def test_people_grow_towards_the_camera() -> None:
    assert STAGE.height_at(200) == 100
    assert STAGE.height_at(530) == 300


def test_a_crowd_is_the_same_for_a_seed_and_spread_over_the_time() -> None:
    one, again, other = (crowd(np.random.default_rng(seed), STAGE, 40.0, 3.0) for seed in (4, 4, 5))
    assert one == again
    assert one != other
    starts = [walker.start_s for walker in one]
    assert starts[0] < 0
    assert 30 < starts[-1] < 40
    assert 10 <= len(one) <= 25


def test_quantised_people_can_share_a_drawing() -> None:
    person = placed(a_walker(), STAGE, 3.0)
    assert person is not None
    rounded = quantised(person, steps=20)
    assert rounded.pose.phase is not None
    assert (rounded.pose.phase / (2 * math.pi) * 20) % 1 == pytest.approx(0, abs=1e-6)
    assert rounded.height_px % 3 == 0
    assert quantised(replace(person, height_px=person.height_px + 0.2)).pose == rounded.pose
