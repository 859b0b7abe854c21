"""What a view of a generated scene shows, and what of it is in doubt."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from samples import backdrops
from samples.figures import random_appearance
from samples.scenes import Placed, Scene, compose
from samples.skeleton import Pose
from samples.training import views
from samples.training.framing import surroundings


def a_scene(count: int = 1) -> Scene:
    place = backdrops.drawn(np.random.default_rng(5), 640, 360, "yard")
    looks = [random_appearance(np.random.default_rng(seed)) for seed in range(count)]
    people = [
        Placed(look, Pose(math.pi, 1.0), 150.0 + 250 * index, 330.0 - 40 * index, 200.0 - 50 * index)
        for index, look in enumerate(looks)
    ]
    return compose(place, people)


def test_a_view_tells_of_its_person() -> None:
    scene = a_scene()
    box = scene.seen[0].box_px
    region = surroundings(box, 640, 360)
    view = views.view_of(scene, region, upright=True)
    assert view.picture.shape == (1024, 512, 3)
    (person,) = view.people
    assert person.seen.action == "walking left"
    assert person.place == pytest.approx(0.5, abs=0.1)
    assert person.height == pytest.approx((box[3] - box[1]) / (region[3] - region[1]))
    assert person.shows_top
    assert person.shows_lower
    assert person.shows_feet


def test_people_come_nearest_first_and_those_cut_away_are_left_out() -> None:
    scene = a_scene(2)
    whole = views.view_of(scene, (0, 0, 640, 360), upright=False)
    assert whole.picture.shape == (512, 1024, 3)
    assert [person.seen.index for person in whole.people] == [0, 1]
    assert whole.people[0].place < whole.people[1].place
    right = views.view_of(scene, (250, 0, 640, 360), upright=True)
    assert [person.seen.index for person in right.people] == [1]


def test_a_view_without_legs_does_not_show_them() -> None:
    scene = a_scene()
    x1, y1, x2, y2 = scene.seen[0].box_px
    view = views.view_of(scene, (x1, y1, x2, y1 + int(0.4 * (y2 - y1))), upright=True)
    assert view.people[0].shows_top
    assert not view.people[0].shows_lower
    assert not view.people[0].shows_feet


def beside(height_px: float, x_px: float = 430.0) -> Scene:
    """Somebody 200 px tall, and somebody else."""
    looks = [random_appearance(np.random.default_rng(seed)) for seed in (3, 4)]
    people = [Placed(looks[0], Pose(math.pi, 1.0), 200.0, 330.0, 200.0)]
    people.append(Placed(looks[1], Pose(0.0, 1.0), x_px, 325.0, height_px))
    return compose(backdrops.drawn(np.random.default_rng(5), 640, 360, "yard"), people)


@pytest.mark.parametrize(
    ("scene", "region", "doubted"),
    [
        pytest.param(beside(100.0), (0, 0, 640, 360), set(), id="all is plain"),
        pytest.param(
            beside(192.0),
            (0, 0, 640, 360),
            {"place", "top", "lower", "lower_kind", "action", "bag", "hat"},
            id="two equally tall",
        ),
        pytest.param(beside(100.0), (0, 0, 425, 360), {"count", "place"}, id="a third of somebody"),
        pytest.param(beside(100.0), (0, 0, 640, 321), {"action"}, id="feet nearly cut off"),
    ],
)
def test_what_is_a_matter_of_a_limit_is_in_doubt(
    scene: Scene, region: tuple[int, int, int, int], doubted: set[str]
) -> None:
    view = views.view_of(scene, region, upright=True)
    assert view.unknown == doubted
    assert bool(view.doubtful) == ("count" in doubted)


@pytest.mark.parametrize(("shade", "doubted"), [(0.1, True), (0.3, False)])
def test_a_bag_in_the_shade_of_what_it_is_worn_on_is_in_doubt(shade: float, doubted: bool) -> None:
    look = random_appearance(np.random.default_rng(3))
    look = replace(look, bag="grey", bag_kind="handbag", lower_rgb=(0.4, 0.4, 0.4), bag_rgb=(0.4 + shade, 0.4, 0.4))
    place = backdrops.drawn(np.random.default_rng(5), 640, 360, "yard")
    scene = compose(place, [Placed(look, Pose(math.pi, 1.0), 300.0, 330.0, 200.0)])
    view = views.view_of(scene, (0, 0, 640, 360), upright=False)
    assert view.people[0].shows_bag
    assert ("bag" in view.unknown) == doubted
