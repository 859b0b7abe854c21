from __future__ import annotations

import math

import numpy as np
import pytest

from pipeline.config import DescribeConfig
from pipeline.describe import crop_view
from pipeline.describe import surroundings as product_surroundings
from samples import backdrops
from samples.figures import Part, random_appearance
from samples.scenes import Placed, Scene, compose
from samples.skeleton import Pose
from samples.training import views


def a_scene(count: int = 1) -> Scene:
    place = backdrops.drawn(np.random.default_rng(5), 640, 360, "yard")
    looks = [random_appearance(np.random.default_rng(seed)) for seed in range(count)]
    people = [
        Placed(look, Pose(math.pi, 1.0), 150.0 + 250 * index, 330.0 - 40 * index, 200.0 - 50 * index)
        for index, look in enumerate(looks)
    ]
    return compose(place, people)


@pytest.mark.parametrize(
    "box",
    [
        pytest.param((300, 100, 380, 300), id="in the middle"),
        pytest.param((0, 40, 60, 200), id="at the left border"),
        pytest.param((560, 200, 640, 360), id="in the lower right corner"),
        pytest.param((100, 0, 400, 360), id="as high as the frame"),
        pytest.param((0, 0, 640, 360), id="the whole frame"),
        pytest.param((200, 150, 420, 200), id="lying down"),
        pytest.param((10, 10, 12, 14), id="tiny"),
    ],
)
def test_the_crop_is_the_product_s(box: tuple[int, int, int, int]) -> None:
    config = DescribeConfig()
    aspect = config.picture_width_px / config.picture_height_px
    expected = product_surroundings(box, 640, 360, config.crop_margin, aspect)
    assert views.surroundings(box, 640, 360) == pytest.approx(expected, abs=1)
    image = np.random.default_rng(0).integers(0, 255, (360, 640, 3), np.uint8)
    assert views.tight_crop(image, box).shape == crop_view(image, box, config).shape
    difference = np.abs(views.tight_crop(image, box).astype(int) - crop_view(image, box, config))
    assert difference.mean() < 3


def test_the_patch_classes_have_names_and_numbers_that_agree() -> None:
    assert views.name_of(0) == ("background", None)
    assert views.name_of(views.class_of(Part.LOWER, "blue")) == ("lower", "blue")
    assert len({views.name_of(number) for number in range(views.CLASSES)}) == views.CLASSES


def test_a_view_tells_of_its_person() -> None:
    scene = a_scene()
    box = scene.seen[0].box_px
    region = views.surroundings(box, 640, 360)
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


def test_who_shows_no_feet_is_not_asked_what_it_does() -> None:
    scene = a_scene()
    x1, y1, x2, y2 = scene.seen[0].box_px
    view = views.view_of(scene, (x1, y1, x2, y1 + int(0.8 * (y2 - y1))), upright=True)
    assert view.people[0].shows_lower
    assert not view.people[0].shows_feet
    _kinds, actions = views.patch_labels(views.label_tiles(view.classes), views.label_tiles(view.owners), view.people)
    assert (actions == -100).all()


@pytest.mark.parametrize("shape", [(1024, 512), (512, 1024)], ids=["crop", "frame"])
def test_tiles_are_cut_row_by_row_and_end_with_the_whole(shape: tuple[int, int]) -> None:
    picture = np.zeros((*shape, 3), np.uint8)
    columns = shape[1] // 256
    for tile in range(8):
        row, column = divmod(tile, columns)
        picture[row * 256 : (row + 1) * 256, column * 256 : (column + 1) * 256] = 20 * tile
    tiles = views.tiles_of(picture)
    assert tiles.shape == (9, 256, 256, 3)
    assert [int(tile.mean()) for tile in tiles[:8]] == [20 * tile for tile in range(8)]
    assert tiles[8].mean() == pytest.approx(70, abs=1)
    labels = views.label_tiles(picture[..., 0])
    assert (labels[:8] == tiles[:8, ..., 0]).all()


def test_patch_labels_follow_the_pixels() -> None:
    scene = a_scene()
    view = views.view_of(scene, views.surroundings(scene.seen[0].box_px, 640, 360), upright=True)
    classes = views.label_tiles(view.classes)
    kinds, actions = views.patch_labels(classes, views.label_tiles(view.owners), view.people)
    assert kinds.shape == actions.shape == (9, 256)
    look = scene.seen[0].look
    present = {views.name_of(int(kind)) for kind in np.unique(kinds)}
    assert ("top", look.top) in present
    assert ("lower", look.lower) in present
    empty = (classes.reshape(9, 16, 16, 16, 16) == 0).all((2, 4)).reshape(9, 256)
    assert (kinds[empty] == 0).all()
    assert (actions[empty] == -100).all()
    assert set(np.unique(actions[kinds > 0])) == {views.ACTIONS.index("walking left")}
