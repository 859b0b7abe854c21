"""Photographs to train the sample VLM on, and what can be told of their people.

Boxes give how many people there are and where. Action, clothes, bag and hat of some were labelled by eye (taught.csv).
Of others the colours of the clothes are read off the pixels, where most of these agree; action and bag stay open, which
is not taught. Only of hats, which few people wear, silence is taught then: one that is left out is no untruth, and one
that is made up is.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from samples.backdrops import Image
from samples.figures import COLOUR_NAMES, COLOURS, random_appearance
from samples.scenes import Seen
from samples.training.framing import crop_region, fitted
from samples.training.pictures import Boxes, Photograph, camera_like, read_labelled
from samples.training.views import LEAST_HEIGHT, LEAST_VISIBLE, Person, doubts, is_doubtful

_LEAST_BOX_PX = 60.0  # of a person's height, to be shown by itself
_LABELS = Path(__file__).with_name("taught.csv")
_TIMES = 6  # each of those who are labelled is shown, a little otherwise each time
_BY_EYE = ("action", "top", "lower", "bag", "hat")
_NO_RULE = frozenset({"action", "bag", "lower_kind"})  # can tell these
_ANYBODY = replace(random_appearance(np.random.default_rng(0)), lower_kind="trousers", bag=None, hat=None)
_AGREEING = 0.55  # share of the pixels
_SPREAD = np.array([0.05, 0.25, 0.2])  # of hue, saturation and value outside a colour's range: as much as one step
_TINGED = 0.1  # the same for the saturation of grey and white: a tinge makes a colour of them
# Where the clothes of somebody upright are in the box: columns and rows.
_TOP_AT, _LOWER_AT = ((0.3, 0.7), (0.2, 0.45)), ((0.3, 0.7), (0.55, 0.8))
_UPRIGHT = (1.8, 4.5)  # height of a box over its width, if it holds all of somebody upright


@dataclass(frozen=True, slots=True)
class Glimpse:
    """`picture` (1024, 512, 3) or (512, 1024, 3) RGB and the people, the nearest first.

    Of that one the phrases `unknown` cannot be told. `taken` is not 0 where somebody's box is.
    """

    picture: Image
    people: tuple[Person, ...]
    unknown: frozenset[str]
    taken: NDArray[np.uint8]


def colour_of(pixels: NDArray[np.uint8]) -> str | None:
    """The name of the colour that most of the RGB `pixels` (N, 3) have, None if they differ."""
    if not len(pixels):
        return None
    hsv = cv2.cvtColor(pixels[None].astype(np.float32) / 255.0, cv2.COLOR_RGB2HSV)[0] / np.array([360.0, 1.0, 1.0])
    steps = np.empty((len(COLOURS), len(hsv)))
    for row, (name, limits) in enumerate(COLOURS.items()):
        low, high = np.transpose(limits)
        outside = np.maximum(0.0, np.maximum(low - hsv, hsv - high))
        if high[0] - low[0] < 1.0:  # hue goes round
            off = np.abs((hsv[:, 0] - (low[0] + high[0]) / 2 + 0.5) % 1.0 - 0.5) - (high[0] - low[0]) / 2
            outside[:, 0] = np.maximum(0.0, off)
        spread = (_SPREAD[0], _TINGED, _SPREAD[2]) if name in ("grey", "white") else _SPREAD
        steps[row] = np.linalg.norm(outside / spread, axis=1)
    votes = np.bincount(steps.argmin(0), minlength=len(COLOURS))
    return COLOUR_NAMES[int(votes.argmax())] if votes.max() >= _AGREEING * len(pixels) else None


@cache
def labelled() -> dict[tuple[str, int], dict[str, str]]:
    """What is known by eye of people, by file name and line of its label file: `action`, and colours.

    `bag` and `hat` may be "none"; what eyes could not tell is left out.
    """
    with _LABELS.open(newline="", encoding="utf-8") as rows:
        return {
            (row["file"], int(row["person"])): {name: row[name] for name in _BY_EYE if row[name] != "?"}
            for row in csv.DictReader(rows)
        }


def _part(box: NDArray[np.float32], at: tuple[tuple[float, float], tuple[float, float]]) -> tuple[int, int, int, int]:
    (left, right), (top, bottom) = at
    x1, y1, x2, y2 = box
    wide, high = x2 - x1, y2 - y1
    return int(x1 + left * wide), int(y1 + top * high), int(x1 + right * wide), int(y1 + bottom * high)


def _covered(part: tuple[int, int, int, int], others: Boxes) -> float:
    """The largest share of a part (x1, y1, x2, y2) that one of the other boxes covers."""
    x1, y1, x2, y2 = part
    wide = np.minimum(x2, others[:, 2]) - np.maximum(x1, others[:, 0])
    high = np.minimum(y2, others[:, 3]) - np.maximum(y1, others[:, 1])
    shares = np.clip(wide, 0, None) * np.clip(high, 0, None) / max(1, (x2 - x1) * (y2 - y1))
    return float(shares.max(initial=0.0))


def clothes_of(image: Image, boxes: Boxes, index: int) -> tuple[str | None, str | None]:
    """The colours of the upper and lower clothes of the person in `boxes`[index], None where they cannot be told."""
    box, height = boxes[index], image.shape[0]
    upright = _UPRIGHT[0] <= (box[3] - box[1]) / max(1.0, float(box[2] - box[0])) <= _UPRIGHT[1]
    others = np.delete(boxes, index, axis=0)
    nearer = others[others[:, 3] > box[3]]  # they stand lower in the picture and hide what is behind
    told: list[str | None] = []
    for at in (_TOP_AT, _LOWER_AT):
        x1, y1, x2, y2 = part = _part(box, at)
        cut = at is _LOWER_AT and box[3] > 0.99 * height
        hidden = not upright or cut or _covered(part, nearer) > 0.1
        told.append(None if hidden else colour_of(image[y1:y2, x1:x2].reshape(-1, 3)))
    return told[0], told[1]


def glimpses(rng: np.random.Generator, photograph: Photograph, *, frames: bool) -> Iterator[Glimpse]:
    """Crops of the people of a photograph as the product shows them, or the photograph as a whole frame.

    Raises:
        OSError: The photograph cannot be read.
    """
    read, boxes = read_labelled(photograph)
    image = np.ascontiguousarray(read[..., ::-1])
    height, width = image.shape[:2]
    shown = camera_like(rng, image)
    if frames:
        yield _glimpse(image, shown, boxes, {}, (0, 0, width, height), upright=False)
        return
    known = {person: facts for (file, person), facts in labelled().items() if file == photograph.path.name}
    for person in np.flatnonzero(boxes[:, 3] - boxes[:, 1] >= _LEAST_BOX_PX):
        x1, y1, x2, y2 = (int(value) for value in boxes[person])
        for time in range(_TIMES if person in known else 1):
            region = crop_region(rng, image, (x1, y1, x2, y2), 0.05)
            again = camera_like(rng, image) if time else shown
            yield _glimpse(image, again, boxes, known, region, upright=True)


def _glimpse(
    image: Image,
    shown: Image,
    boxes: Boxes,
    known: Mapping[int, Mapping[str, str]],
    region: tuple[int, int, int, int],
    *,
    upright: bool,
) -> Glimpse:
    left, upper, right, lower = region
    window = np.s_[upper:lower, left:right]
    taken = np.zeros(image.shape[:2], np.uint8)
    for x1, y1, x2, y2 in boxes.astype(int):
        taken[y1:y2, x1:x2] = 1
    inside = np.clip(boxes, [left, upper, left, upper], [right, lower, right, lower])
    size = inside[:, 2:] - inside[:, :2]
    visible = size.prod(1) / np.maximum(1.0, (boxes[:, 2:] - boxes[:, :2]).prod(1))
    tall = size[:, 1] / (lower - upper)
    shown_at_all = np.minimum(visible / LEAST_VISIBLE, tall / LEAST_HEIGHT)
    counted = [int(index) for index in np.argsort(-tall) if shown_at_all[index] >= 1]
    doubtful = {index: float(tall[index]) for index in range(len(boxes)) if is_doubtful(shown_at_all[index])}
    people, unsure = [], _NO_RULE
    for number, index in enumerate(counted):
        look = _ANYBODY
        facts: Mapping[str, str] = {}
        if number == 0:
            facts = known.get(index, {})
            seen_by_eye = facts.get("top"), facts.get("lower")
            top, bottom = seen_by_eye if facts else clothes_of(image, boxes, index)
            unsure |= {name for name, colour in (("top", top), ("lower", bottom)) if colour is None}
            look = replace(look, top=top or look.top, lower=bottom or look.lower)
            bag, hat = (None if facts.get(name, "none") == "none" else facts[name] for name in ("bag", "hat"))
            look, unsure = replace(look, bag=bag, hat=hat), unsure - set(facts)
        x1, y1, x2, y2 = (int(value) for value in boxes[index])
        action = facts.get("action", "standing")
        seen = Seen(look, action, (x1, y1, x2, y2), float(visible[index]), index, float(y2 - y1), float(y2))
        middle = float((inside[index, 0] + inside[index, 2]) / 2 - left) / (right - left)
        people.append(Person(seen, middle, float(tall[index]), *[True] * 5))
    return Glimpse(
        fitted(shown[window], upright=upright),
        tuple(people),
        doubts(people, doubtful, unsure),
        fitted(taken[window], upright=upright, labels=True),
    )
