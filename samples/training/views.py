"""What a view of a generated scene shows: a person crop or a whole frame, its people, and what of that is in doubt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from samples.backdrops import Image
from samples.figures import Appearance, Part
from samples.scenes import Scene, Seen
from samples.training.framing import fitted
from samples.training.kinds import kind_map

ACTIONS = ("standing", "walking left", "walking right", "walking towards the camera", "walking away")
SIDES = ("on the left", "in the middle", "on the right")
SIDE_LIMITS = (0.36, 0.64)  # of a view's width, between the three
OF_THE_NEAREST = frozenset({"place", "top", "lower", "lower_kind", "action", "bag", "hat"})  # phrases and a word
LEAST_VISIBLE, LEAST_HEIGHT = 0.3, 0.1  # of a person, and of the view, to be counted
_LEAST_PART = 0.015  # of a person, of clothes, bag or hat, to be told of
_FEET = 0.06  # of a person's height: how far above its soles it may be cut off with its feet still seen
# Within this factor of such a limit, on either side, two people would differ; so they would on which of two is the
# nearest if they are nearly equally tall, and on a bag or hat in the shade of what it is worn on.
_DOUBTFUL = 1.5
_EQUALLY_TALL = 0.9
_SIDE_DOUBT = 0.03  # of a view's width
_LEAST_CONTRAST = 0.15  # in one of red, green and blue, each 0 to 1


@dataclass(frozen=True, slots=True)
class Person:
    """One person to be told of: what can be seen of it in the view, and where (0 left to 1 right)."""

    seen: Seen
    place: float
    height: float  # of the view
    shows_top: bool
    shows_lower: bool
    shows_feet: bool  # without which nobody could say whether it walks
    shows_bag: bool
    shows_hat: bool


@dataclass(frozen=True, slots=True)
class View:
    """`picture` (1024, 512, 3) or (512, 1024, 3) RGB, label maps of the same size, the people, the nearest first.

    Of the description of `people` nobody could tell for sure the phrases `unknown`; `doubtful` are the indices of those
    who are counted, or not, for hardly any reason.
    """

    picture: Image
    kinds: NDArray[np.uint8]
    owners: NDArray[np.uint8]
    people: tuple[Person, ...]
    unknown: frozenset[str]
    doubtful: frozenset[int]


def view_of(scene: Scene, region: tuple[int, int, int, int], image: Image | None = None, *, upright: bool) -> View:
    """The part `region` (x1, y1, x2, y2) of the scene as the product shows it; `image` replaces the scene's picture."""
    x1, y1, x2, y2 = region
    window = np.s_[y1:y2, x1:x2]
    picture = fitted((scene.image if image is None else image)[window], upright=upright)
    kinds = fitted(kind_map(scene)[window], upright=upright, labels=True)
    owners = fitted(scene.people[window], upright=upright, labels=True)
    people: list[Person] = []
    unsure: dict[int, frozenset[str]] = {}  # of each person's phrases
    heights: dict[int, float] = {}  # of those who are doubtful
    for seen in scene.seen:
        whole = np.count_nonzero(scene.people == seen.index + 1) / max(seen.visible, 1e-6)
        mine = scene.people[window] == seen.index + 1
        rows = np.flatnonzero(mine.any(1))
        if not len(rows):
            continue
        tall = float((rows[-1] - rows[0] + 1) / (y2 - y1))
        shown = min(np.count_nonzero(mine) / (LEAST_VISIBLE * whole), tall / LEAST_HEIGHT)
        if is_doubtful(shown):
            heights[seen.index] = tall
        if shown < 1:
            continue
        shares = np.bincount(scene.parts[window][mine], minlength=len(Part)) / (_LEAST_PART * whole)
        cut = (seen.soles_px - y1 - int(rows[-1])) / (_FEET * seen.height_px)
        place = float(np.flatnonzero(mine.any(0)).mean() / (x2 - x1))
        unsure[seen.index] = frozenset(_unsure(seen.look, shares, cut))
        people.append(
            Person(
                seen,
                place,
                tall,
                shows_top=bool(shares[Part.TOP] >= 1),
                shows_lower=bool(shares[Part.LOWER] >= 1),
                shows_feet=bool(cut <= 1),
                shows_bag=bool(shares[Part.BAG] >= 1),
                shows_hat=bool(shares[Part.HAT] >= 1),
            )
        )
    people.sort(key=lambda person: -person.height)
    unknown = doubts(people, heights, unsure[people[0].seen.index] if people else frozenset())
    return View(picture, kinds, owners, tuple(people), unknown, frozenset(heights))


def doubts(people: Sequence[Person], doubtful: Mapping[int, float], of_the_first: frozenset[str]) -> frozenset[str]:
    """The phrases about `people`, the nearest first, that nobody could tell for sure.

    `doubtful` holds the heights of those who are counted, or not, for hardly any reason, by their indices.
    """
    unknown = frozenset({"count", "place"} if doubtful else ())
    if not people:
        return unknown | OF_THE_NEAREST if doubtful else unknown
    nearest = people[0]
    rivals = [person.height for person in people[1:]]
    rivals += [height for index, height in doubtful.items() if index != nearest.seen.index]
    if nearest.seen.index in doubtful or max(rivals, default=0.0) >= _EQUALLY_TALL * nearest.height:
        return unknown | OF_THE_NEAREST
    at_a_limit = min(abs(nearest.place - limit) for limit in SIDE_LIMITS) < _SIDE_DOUBT
    return unknown | of_the_first | ({"place"} if len(people) > 1 and at_a_limit else frozenset())


def is_doubtful(share: float) -> bool:
    """Whether nobody could tell on which side of its limit something is that has this share of it."""
    return 1 / _DOUBTFUL < share < _DOUBTFUL


def _unsure(look: Appearance, shares: NDArray[np.float64], cut: float) -> Iterator[str]:
    """The phrases about somebody that nobody could tell for sure; parts and cut are given as shares of their limits."""
    if is_doubtful(shares[Part.TOP]):
        yield from ("top", "lower", "lower_kind")  # the word between the two goes with them
    if is_doubtful(shares[Part.LOWER]):
        yield from ("lower", "lower_kind")
        if shares[Part.TOP] < 1:
            yield "top"  # or all clothes are hidden
    if is_doubtful(cut):
        yield "action"
    behind = look.top_rgb if look.bag_kind == "backpack" else look.lower_rgb
    for name, part, rgb, ground in (
        ("bag", Part.BAG, look.bag_rgb, behind),
        ("hat", Part.HAT, look.hat_rgb, look.hair_rgb),
    ):
        blends = max(abs(ours - theirs) for ours, theirs in zip(rgb, ground, strict=True)) < _LEAST_CONTRAST
        if is_doubtful(shares[part]) or (blends and shares[part] >= 1):
            yield name
