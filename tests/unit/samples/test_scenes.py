from __future__ import annotations

import math

import numpy as np
import pytest

from samples import backdrops
from samples.figures import random_appearance
from samples.scenes import Placed, compose
from samples.skeleton import Pose


def a_place(width: int = 320, height: int = 240) -> backdrops.Backdrop:
    return backdrops.drawn(np.random.default_rng(5), width, height, "yard")


def somebody(x: float, y: float, height: float, seed: int = 1) -> Placed:
    return Placed(random_appearance(np.random.default_rng(seed)), Pose(math.pi / 2, None), x, y, height)


@pytest.mark.parametrize("kind", ["street", "yard", "park", "hall"])
def test_every_kind_of_place_is_a_picture_with_room_for_people(kind: str) -> None:
    place = backdrops.drawn(np.random.default_rng(2), 320, 200, kind)
    assert place.image.shape == (200, 320, 3)
    assert place.image.dtype == np.uint8
    assert place.image.std() > 8
    assert 0 < place.far_px < place.near_px <= 200


def test_an_empty_scene_is_its_backdrop() -> None:
    place = a_place()
    scene = compose(place, [])
    assert scene.seen == ()
    assert np.abs(scene.image.astype(int) - place.image).max() <= 1


def test_the_truth_of_a_person_fits_the_picture() -> None:
    place = a_place()
    scene = compose(place, [somebody(160, 220, 150)])
    (seen,) = scene.seen
    x1, y1, x2, y2 = seen.box_px
    assert seen.visible == pytest.approx(1.0)
    assert y2 - y1 == pytest.approx(150, rel=0.08)
    assert x1 < 160 < x2
    assert ((scene.people == 1) == (scene.parts != 0)).all()
    changed = np.abs(scene.image.astype(int) - place.image).sum(2) > 60
    assert changed[y1:y2, x1:x2].sum() > 0.9 * changed[: y2 - 20].sum()


def test_the_nearer_person_hides_the_farther_one_whatever_the_order() -> None:
    near, far = somebody(160, 225, 170, seed=1), somebody(165, 190, 120, seed=2)
    for people in ([near, far], [far, near]):
        seen = {round(one.height_px): one.visible for one in compose(a_place(), people).seen}
        assert seen[170] == pytest.approx(1.0)
        assert seen.get(120, 0.0) < 0.5


def test_a_person_cut_by_the_border_counts_as_partly_visible() -> None:
    (seen,) = compose(a_place(), [somebody(0, 220, 150)]).seen
    assert 0.3 < seen.visible < 0.7
    assert seen.box_px[0] == 0


def test_a_person_outside_is_not_seen() -> None:
    assert compose(a_place(), [somebody(-200, 220, 150)]).seen == ()


def test_a_person_larger_than_a_sprite_is_enlarged() -> None:
    (seen,) = compose(a_place(600, 1000), [somebody(300, 980, 900)]).seen
    assert seen.box_px[3] - seen.box_px[1] == pytest.approx(900, rel=0.08)
