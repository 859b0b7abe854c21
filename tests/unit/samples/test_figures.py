from __future__ import annotations

import colorsys
import math
from dataclasses import replace

import numpy as np
import pytest

from samples.figures import COLOURS, Appearance, Part, draw_figure, random_appearance, shade_of
from samples.skeleton import Pose


def a_look(**changes: object) -> Appearance:
    look = random_appearance(np.random.default_rng(1))
    plain = replace(look, bag=None, hat=None, lower_kind="trousers", stripes=0.0)
    return replace(plain, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", list(COLOURS))
def test_a_shade_lies_in_the_range_of_its_colour(name: str) -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        red, green, blue = shade_of(name, rng)
        _hue, saturation, value = colorsys.rgb_to_hsv(red, green, blue)
        assert COLOURS[name][2][0] - 1e-6 <= value <= COLOURS[name][2][1] + 1e-6
        assert saturation <= COLOURS[name][1][1] + 1e-6


def test_a_figure_has_the_asked_height_and_stands_on_its_soles() -> None:
    sprite = draw_figure(a_look(), Pose(math.pi / 2, None, pitch=0.0), 300)
    rows = np.flatnonzero((sprite.parts != Part.NOTHING).any(1))
    assert rows[-1] - rows[0] == pytest.approx(300, rel=0.06)
    assert rows[-1] == pytest.approx(sprite.foot[1], abs=0.05 * 300)


def test_the_order_of_a_body_is_head_top_legs_shoes() -> None:
    parts = draw_figure(a_look(), Pose(0.0, 0.7), 300).parts
    middle = {
        part: np.flatnonzero((parts == part).any(1)).mean() for part in (Part.HAIR, Part.TOP, Part.LOWER, Part.SHOE)
    }
    assert middle[Part.HAIR] < middle[Part.TOP] < middle[Part.LOWER] < middle[Part.SHOE]


def test_clothes_have_their_colour() -> None:
    look = a_look(top_rgb=(0.9, 0.1, 0.1), lower_rgb=(0.1, 0.1, 0.9))
    sprite = draw_figure(look, Pose(0.3, 0.7), 300)
    top, lower = (sprite.rgb[sprite.parts == part].mean(0) for part in (Part.TOP, Part.LOWER))
    assert top[0] > 2 * top[2]
    assert lower[2] > 2 * lower[0]


@pytest.mark.parametrize("kind", ["backpack", "handbag"])
@pytest.mark.parametrize("yaw", [0.0, math.pi, 1.5 * math.pi], ids=["right", "left", "away"])
def test_a_bag_is_seen(kind: str, yaw: float) -> None:
    with_bag = draw_figure(a_look(bag="green", bag_kind=kind), Pose(yaw, 0.7), 300)
    without = draw_figure(a_look(), Pose(yaw, 0.7), 300)
    assert np.count_nonzero(with_bag.parts == Part.BAG) > 200
    assert not (without.parts == Part.BAG).any()


def test_a_side_view_faces_where_it_goes() -> None:
    faces = []
    for yaw in (0.0, math.pi):
        sprite = draw_figure(a_look(long_hair=False), Pose(yaw, None), 400)
        head = np.argwhere(np.isin(sprite.parts, [Part.SKIN, Part.HAIR]))
        rows = head[:, 0] < head[:, 0].min() + 0.12 * 400
        skin = sprite.parts[tuple(head[rows].T)] == Part.SKIN
        faces.append(head[rows][skin][:, 1].mean() - head[rows][~skin][:, 1].mean())
    assert faces[0] > 5
    assert faces[1] < -5


def test_the_same_person_is_drawn_alike_twice_and_its_gait_moves() -> None:
    look = a_look()
    one, again, later = (draw_figure(look, Pose(0.0, phase), 120) for phase in (0.4, 0.4, 2.0))
    assert np.array_equal(one.rgb, again.rgb)
    assert not np.array_equal(one.parts, later.parts)
