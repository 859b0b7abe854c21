"""What the tower is asked about patches and about the nearest person, with the true answers."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from samples.figures import COLOUR_NAMES, LOWER_KINDS
from samples.training.facts import side
from samples.training.framing import TILE_PX, WHOLE, label_tiles
from samples.training.kinds import KINDS
from samples.training.views import ACTIONS, OF_THE_NEAREST, SIDES, Person, View

Labels = NDArray[np.int64]

PATCH_PX = 16
PATCHES = TILE_PX // PATCH_PX
FACINGS = 8  # eighths of a turn, two for each direction of ACTIONS
COUNTS = 5  # nobody, one, two, three, more
# What is asked about every patch, and how many answers there are. Its role: nobody's who is counted, the nearest
# person's, another one's. Its crown: whether it holds the highest point of somebody who is counted.
PATCHED = {"kind": KINDS, "action": len(ACTIONS), "facing": FACINGS, "role": 3, "crown": 2}
# What is asked about the nearest person, and how many answers there are; instead of a colour there may be none.
NEAREST = {
    "place": len(SIDES),
    "top": len(COLOUR_NAMES) + 1,
    "lower": len(COLOUR_NAMES) + 1,
    "action": len(ACTIONS),
    "bag": len(COLOUR_NAMES) + 1,
    "hat": len(COLOUR_NAMES) + 1,
    "lower_kind": len(LOWER_KINDS),
}
UNKNOWN = -100
_NO_COLOUR = len(COLOUR_NAMES)
_LEAST_COVER = 0.2  # of a patch, to be more than background


def patch_labels(view: View, chosen: list[int]) -> Labels:
    """(N, len(PATCHED), 256): the answers about the 16x16 patches of the tiles `chosen`, UNKNOWN where there are none.

    A patch is of the kind that most of its non-background pixels have, if those cover _LEAST_COVER of it. What somebody
    does is asked where feet are seen; roles and crowns are asked of the whole picture alone.
    """
    answers = np.full((len(chosen), len(PATCHED), PATCHES**2), UNKNOWN, np.int64)
    answers[:, row_of("kind")] = _most(_patched(label_tiles(view.kinds)[chosen]), KINDS)
    of_tiles = label_tiles(view.owners)[chosen]
    owner = _most(_patched(of_tiles), 1 + int(of_tiles.max(initial=1)))
    actions, facings = np.full(256, UNKNOWN), np.full(256, UNKNOWN)
    for person in view.people:
        row = person.seen.index + 1
        if person.shows_feet:
            actions[row] = ACTIONS.index(person.seen.action)
        if person.seen.yaw is not None:
            facings[row] = int((person.seen.yaw + math.pi / 4) % (2 * math.pi) / (2 * math.pi / FACINGS))
    answers[:, row_of("action")], answers[:, row_of("facing")] = actions[owner], facings[owner]
    if WHOLE in chosen:
        whole = chosen.index(WHOLE)
        answers[whole, row_of("role")], answers[whole, row_of("crown")] = _roles(view)[owner[whole]], _crowns(view)
    return answers


def row_of(question: str) -> int:
    """Where the answers to a question of PATCHED are."""
    return list(PATCHED).index(question)


def _patched(maps: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Every other pixel of the patches of tiles (N, 256, 256): (N, 256, 64)."""
    cells = maps.reshape(len(maps), PATCHES, PATCH_PX, PATCHES, PATCH_PX).swapaxes(2, 3)
    return cells[..., ::2, ::2].reshape(len(maps), PATCHES**2, -1)


def _most(cells: NDArray[np.uint8], size: int) -> Labels:
    """What most pixels that are not 0 are, of cells (N, 256, 64) of numbers below `size`; 0 where they are too few."""
    count = cells.shape[0] * cells.shape[1]
    flat = cells.reshape(count, -1).astype(np.int64) + size * np.arange(count)[:, None]
    votes = np.bincount(flat.ravel(), minlength=size * count).reshape(-1, size)
    best: Labels = votes[:, 1:].argmax(1) + 1
    best[votes[:, 1:].sum(1) < _LEAST_COVER * cells.shape[2]] = 0
    return best.reshape(cells.shape[:2])


def _roles(view: View) -> Labels:
    """The role (256) of whoever is in `owners`, by that number."""
    roles = np.zeros(256, np.int64)
    for rank, person in enumerate(view.people):
        roles[person.seen.index + 1] = UNKNOWN if view.unknown >= OF_THE_NEAREST else min(rank + 1, 2)
    for index in view.doubtful:
        roles[index + 1] = UNKNOWN
    return roles


def _crowns(view: View) -> Labels:
    """Which of the patches (256) of the whole picture hold the highest point of somebody who is counted."""
    crowns = np.zeros((PATCHES, PATCHES), np.int64)
    counted = {person.seen.index: 1 for person in view.people} | dict.fromkeys(view.doubtful, UNKNOWN)
    height, width = view.owners.shape
    for index, answer in counted.items():
        ys, xs = np.nonzero(view.owners == index + 1)
        if len(ys):
            column = xs[ys <= ys[0] + 0.03 * (ys[-1] - ys[0])].mean()  # np.nonzero goes row by row
            crowns[ys[0] * PATCHES // height, int(column * PATCHES / width)] = answer
    return crowns.ravel()


def nearest_answers(people: Sequence[Person], unknown: Collection[str] = ()) -> list[int]:
    """What NEAREST asks about the first of `people`: UNKNOWN if nobody is there, it cannot be seen, or is `unknown`."""
    if not people:
        return [UNKNOWN] * len(NEAREST)
    person, look = people[0], people[0].seen.look

    def colour(name: str | None, shown: bool) -> int:
        return COLOUR_NAMES.index(name) if name is not None and shown else _NO_COLOUR

    known = {
        "place": SIDES.index(side(person)),
        "top": colour(look.top, person.shows_top),
        "lower": colour(look.lower, person.shows_lower),
        "action": ACTIONS.index(person.seen.action) if person.shows_feet else UNKNOWN,
        "bag": colour(look.bag, person.shows_bag),
        "hat": colour(look.hat, person.shows_hat),
        "lower_kind": LOWER_KINDS.index(look.lower_kind) if person.shows_lower else UNKNOWN,
    }
    return [UNKNOWN if question in unknown else known[question] for question in NEAREST]
