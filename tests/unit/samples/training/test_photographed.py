from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from samples.backdrops import Image
from samples.figures import COLOURS, shade_of
from samples.training import photographed
from samples.training.photographed import Boxes, Glimpse, clothes_of, colour_of, glimpses
from samples.training.pictures import Photograph, is_held_out
from samples.training.views import ACTIONS

BOX = (100.0, 60.0, 160.0, 240.0)
RED, BLUE, GREEN = (190, 20, 25), (30, 60, 200), (40, 140, 60)


def a_picture() -> Image:
    """Somebody in red and blue inside BOX, in front of green."""
    image = np.full((300, 400, 3), GREEN, np.uint8)
    image[60:150, 110:150], image[150:240, 110:150] = RED, BLUE
    return image


def boxes(*rows: tuple[float, float, float, float]) -> Boxes:
    return np.array(rows, np.float32)


@pytest.mark.parametrize("name", list(COLOURS))
def test_a_colour_is_told_by_most_of_the_pixels(name: str) -> None:
    rng = np.random.default_rng(1)
    shades = [shade_of(name, rng) for _ in range(8)]
    pixels = (np.repeat(shades, 8, axis=0) * 255).astype(np.uint8)
    other = "black" if name != "black" else "red"
    pixels[:20] = np.array(shade_of(other, rng)) * 255
    assert colour_of(pixels) == name


@pytest.mark.parametrize(
    "pixels",
    [
        pytest.param(np.zeros((0, 3), np.uint8), id="nothing"),
        pytest.param(np.array([RED, BLUE] * 20, np.uint8), id="halves"),
    ],
)
def test_a_colour_is_not_guessed(pixels: Image) -> None:
    assert colour_of(pixels) is None


@pytest.mark.parametrize(
    ("others", "told"),
    [
        pytest.param([], ("red", "blue"), id="alone"),
        pytest.param([(100, 150, 180, 290)], ("red", None), id="legs behind somebody nearer"),
        pytest.param([(100, 60, 180, 290)], (None, None), id="behind somebody nearer"),
        pytest.param([(100, 40, 160, 200)], ("red", "blue"), id="in front of somebody"),
    ],
)
def test_clothes_are_told_where_nobody_nearer_may_hide_them(
    others: list[tuple[float, float, float, float]], told: tuple[str | None, str | None]
) -> None:
    assert clothes_of(a_picture(), boxes(BOX, *others), 0) == told


@pytest.mark.parametrize(
    ("box", "told"),
    [
        pytest.param((100, 60, 240, 240), (None, None), id="as wide as somebody sitting"),
        pytest.param((100, 180, 160, 300), ("blue", None), id="cut by the border"),
    ],
)
def test_clothes_are_told_of_whole_people(
    box: tuple[float, float, float, float], told: tuple[str | None, str | None]
) -> None:
    image = a_picture()
    image[180:300, 110:150] = BLUE
    assert clothes_of(image, boxes(box), 0) == told


def glimpses_of(folder: Path, people: Boxes, *, frames: bool) -> list[Glimpse]:
    path = folder / "p1.jpg"
    cv2.imwrite(str(path), np.ascontiguousarray(a_picture()[..., ::-1]))
    photograph = Photograph(path, people / np.array([400, 300, 400, 300], np.float32))
    return list(glimpses(np.random.default_rng(0), photograph, frames=frames))


def test_each_person_is_shown_with_what_can_be_told(tmp_path: Path) -> None:
    shown = glimpses_of(tmp_path, boxes(BOX, (300, 100, 320, 150)), frames=False)
    (glimpse,) = shown  # the other is too small to be shown by itself
    assert glimpse.picture.shape == (1024, 512, 3)
    (person,) = glimpse.people
    assert (person.seen.look.top, person.seen.look.lower) == ("red", "blue")
    assert glimpse.unknown == {"action", "bag", "lower_kind"}
    assert person.place == pytest.approx(0.5, abs=0.1)
    assert 0.2 < (glimpse.taken > 0).mean() < 0.6


def test_a_whole_photograph_tells_of_everybody_the_nearest_first(tmp_path: Path) -> None:
    (glimpse,) = glimpses_of(tmp_path, boxes((300, 100, 320, 150), BOX), frames=True)
    assert glimpse.picture.shape == (512, 1024, 3)
    nearest, other = glimpse.people
    assert nearest.seen.look.top == "red"
    assert nearest.place < other.place


def test_what_eyes_have_told_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {
        ("p1.jpg", 1): {"action": "walking left", "top": "pink", "bag": "red", "hat": "none"},
        ("p2.jpg", 0): {"bag": "green"},
    }
    monkeypatch.setattr(photographed, "labelled", lambda: told)
    other, *shown = glimpses_of(tmp_path, boxes((300, 100, 330, 170), BOX), frames=False)
    assert "action" in other.unknown
    assert len(shown) > 1
    for glimpse in shown:
        assert glimpse.unknown == {"lower", "lower_kind"}  # which eyes could not tell
        (person,) = glimpse.people
        assert person.seen.action == "walking left"
        assert (person.seen.look.top, person.seen.look.bag, person.seen.look.hat) == ("pink", "red", None)
    assert len({glimpse.picture.tobytes() for glimpse in shown}) == len(shown)


def test_the_labels_name_actions_and_colours() -> None:
    labels = photographed.labelled()
    assert len(labels) > 400
    for facts in labels.values():
        assert facts.get("action", "standing") in ACTIONS
        assert {facts.get("top", "red"), facts.get("lower", "red")} <= set(COLOURS)
        assert {facts.get("bag", "none"), facts.get("hat", "none")} <= {"none", *COLOURS}
    assert not any(is_held_out(Path(file)) for file, _person in labels)


def test_who_hardly_shows_is_in_doubt(tmp_path: Path) -> None:
    (glimpse,) = glimpses_of(tmp_path, boxes(BOX, (300, 100, 320, 135)), frames=True)
    assert {"count", "place"} <= glimpse.unknown
    assert "top" not in glimpse.unknown


def test_nothing_is_unknown_about_nobody(tmp_path: Path) -> None:
    (glimpse,) = glimpses_of(tmp_path, np.zeros((0, 4), np.float32), frames=True)
    assert glimpse.people == ()
    assert not glimpse.unknown
    assert not glimpse.taken.any()


def test_a_photograph_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "p2.jpg").write_bytes(b"no picture")
    with pytest.raises(OSError, match=r"p2\.jpg cannot be read"):
        list(photographed.glimpses(np.random.default_rng(0), Photograph(tmp_path / "p2.jpg", boxes(BOX)), frames=True))
