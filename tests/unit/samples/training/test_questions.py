"""What the tower is asked, and the true answers."""

from __future__ import annotations

import numpy as np

from samples.figures import Part
from samples.training import framing, questions, views
from samples.training.kinds import KINDS, kind_of, name_of
from samples.training.questions import PATCHED, UNKNOWN
from tests.unit.samples.training.test_views import a_scene

KIND, ACTION, FACING = (questions.row_of(name) for name in ("kind", "action", "facing"))


def test_the_kinds_have_names_and_numbers_that_agree() -> None:
    assert name_of(0) == ("background", None)
    assert name_of(kind_of(Part.LOWER, "blue")) == ("lower", "blue")
    assert len({name_of(number) for number in range(KINDS)}) == KINDS


def test_who_shows_no_feet_is_not_asked_what_it_does() -> None:
    scene = a_scene()
    x1, y1, x2, y2 = scene.seen[0].box_px
    view = views.view_of(scene, (x1, y1, x2, y1 + int(0.8 * (y2 - y1))), upright=True)
    assert view.people[0].shows_lower
    assert not view.people[0].shows_feet
    answers = questions.patch_labels(view, [*range(9)])
    assert (answers[:, ACTION] == UNKNOWN).all()
    assert (answers[:, FACING] != UNKNOWN).any()


def test_patch_labels_follow_the_pixels() -> None:
    scene = a_scene()
    view = views.view_of(scene, framing.surroundings(scene.seen[0].box_px, 640, 360), upright=True)
    of_pixels = framing.label_tiles(view.kinds)
    answers = questions.patch_labels(view, [*range(9)])
    assert answers.shape == (9, len(PATCHED), 256)
    kinds, actions, facings = answers[:, KIND], answers[:, ACTION], answers[:, FACING]
    look = scene.seen[0].look
    present = {name_of(int(kind)) for kind in np.unique(kinds)}
    assert ("top", look.top) in present
    assert ("lower", look.lower) in present
    empty = (of_pixels.reshape(9, 16, 16, 16, 16) == 0).all((2, 4)).reshape(9, 256)
    assert (kinds[empty] == 0).all()
    assert (actions[empty] == UNKNOWN).all()
    assert set(np.unique(actions[kinds > 0])) == {views.ACTIONS.index("walking left")}
    assert set(np.unique(facings[kinds > 0])) == {5}


def test_the_whole_picture_says_who_is_the_nearest_and_where_heads_are() -> None:
    scene = a_scene(2)
    view = views.view_of(scene, (0, 0, 640, 360), upright=False)
    assert not view.unknown
    answers = questions.patch_labels(view, [0, framing.WHOLE])
    roles, crowns = (answers[:, list(PATCHED).index(name)] for name in ("role", "crown"))
    assert (roles[0] == UNKNOWN).all()
    assert (crowns[0] == UNKNOWN).all()
    for seen, role in zip(scene.seen, (1, 2), strict=True):
        x1, y1, x2, y2 = (16 * value // size for value, size in zip(seen.box_px, (640, 360) * 2, strict=True))
        inside = roles[1].reshape(16, 16)[y1 : y2 + 1, x1 : x2 + 1]
        assert role in inside
        assert set(np.unique(inside)) <= {0, role}
        (crown,) = np.argwhere(crowns[1].reshape(16, 16)[:, x1 : x2 + 1] == 1)
        assert crown[0] == y1
    assert (crowns[1] == 1).sum() == 2
