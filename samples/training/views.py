"""What the product shows its model, out of generated scenes: person crops and whole frames, in tiles, with labels.

The geometry is the product's own: a crop keeps a margin of 0.25 of the person's height and has the shape 1:2; a
frame is fitted into 2:1 with grey bars. The processor cuts such a picture into 2x4 tiles and adds the whole, squeezed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pil

from samples.backdrops import Image
from samples.figures import COLOUR_NAMES, LOWER_KINDS, Part
from samples.scenes import Scene, Seen

Labels = NDArray[np.int64]

TILE_PX, PATCH_PX = 256, 16
PATCHES = TILE_PX // PATCH_PX
_SHORT_PX, _LONG_PX = 512, 1024
_GREY = 114
MARGIN = 0.25
ACTIONS = ("standing", "walking left", "walking right", "walking towards the camera", "walking away")

# Classes of a patch: background, skin, hair, shoes, then top, lower clothes, bag and hat in each colour.
_COLOURED = (Part.TOP, Part.LOWER, Part.BAG, Part.HAT)
CLASSES = 4 + len(_COLOURED) * len(COLOUR_NAMES)
COUNTS = 5  # nobody, one, two, three, more
SIDES = ("on the left", "in the middle", "on the right")
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
_LEAST_COVER = 0.2  # of a patch, to be more than background
LEAST_VISIBLE, LEAST_HEIGHT = 0.3, 0.1  # of a person, and of the view, to be counted
_FEET = 0.06  # of a person's height: how far above its soles it may be cut off with its feet still seen


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
    """`picture` (1024, 512, 3) or (512, 1024, 3) RGB, label maps of the same size, the people, the nearest first."""

    picture: Image
    classes: NDArray[np.uint8]
    owners: NDArray[np.uint8]
    people: tuple[Person, ...]


def class_of(part: Part, colour: str) -> int:
    """The patch class of a part in a colour."""
    return 4 + _COLOURED.index(part) * len(COLOUR_NAMES) + COLOUR_NAMES.index(colour)


def name_of(number: int) -> tuple[str, str | None]:
    """(part, colour) of a patch class, in words."""
    if number < 4:
        return ("background", "skin", "hair", "shoe")[number], None
    part, colour = divmod(number - 4, len(COLOUR_NAMES))
    return _COLOURED[part].name.lower(), COLOUR_NAMES[colour]


def _class_map(scene: Scene) -> NDArray[np.uint8]:
    """(H, W) patch classes of single pixels."""
    width = len(Part)
    table = np.zeros((256, width), np.uint8)
    table[:, Part.SKIN], table[:, Part.HAIR], table[:, Part.SHOE] = 1, 2, 3
    for person in scene.seen:
        look, row = person.look, person.index + 1
        table[row, Part.TOP] = class_of(Part.TOP, look.top)
        table[row, Part.LOWER] = class_of(Part.LOWER, look.lower)
        table[row, Part.BAG] = class_of(Part.BAG, look.bag or "black")
        table[row, Part.HAT] = class_of(Part.HAT, look.hat or "black")
    return np.asarray(table[scene.people, scene.parts], np.uint8)


def surroundings(box_px: tuple[float, float, float, float], width_px: int, height_px: int) -> tuple[int, int, int, int]:
    """The product's crop (x1, y1, x2, y2) around a box in a frame: margin, shape 1:2, moved inward at the border."""
    x1, y1, x2, y2 = box_px
    box_width, box_height = max(1.0, x2 - x1), max(1.0, y2 - y1)
    wide, high = box_width + 2 * MARGIN * box_height, box_height * (1 + 2 * MARGIN)
    wide, high = (high / 2, high) if wide < high / 2 else (wide, wide * 2)
    shrink = min(1.0, width_px / wide, height_px / high)
    if wide * shrink >= box_width and high * shrink >= box_height:
        wide, high = wide * shrink, high * shrink
    wide, high = min(wide, width_px), min(high, height_px)
    left = min(max(0.0, (x1 + x2 - wide) / 2), width_px - wide)
    top = min(max(0.0, (y1 + y2 - high) / 2), height_px - high)
    first, upper = int(left), int(top)
    right, lower = max(first + 1, round(left + wide)), max(upper + 1, round(top + high))
    return first, upper, min(width_px, right), min(height_px, lower)


def crop_region(
    rng: np.random.Generator, image: Image, box_px: tuple[int, int, int, int], loose: float
) -> tuple[int, int, int, int]:
    """The product's crop around a box that a detector missed by up to `loose` of its height on each side."""
    height, width = image.shape[:2]
    missed = rng.uniform(-loose, loose, 4) * (box_px[3] - box_px[1])
    x1, y1, x2, y2 = (float(value) for value in np.asarray(box_px) + missed)
    return surroundings((x1, y1, x2, y2), width, height)


def tight_crop(image: Image, box_px: tuple[int, int, int, int]) -> Image:
    """(1024, 512, 3): what the product shows of a person in a frame (H, W, 3)."""
    x1, y1, x2, y2 = surroundings(box_px, image.shape[1], image.shape[0])
    return fitted(image[y1:y2, x1:x2], upright=True)


def fitted(image: Image, *, upright: bool, labels: bool = False) -> Image:
    """A part of a frame, or of its label map, scaled into (1024, 512) or (512, 1024) with grey, or 0, around it."""
    width_px, height_px = (_SHORT_PX, _LONG_PX) if upright else (_LONG_PX, _SHORT_PX)
    scale = min(width_px / image.shape[1], height_px / image.shape[0])
    size = min(width_px, round(image.shape[1] * scale)), min(height_px, round(image.shape[0] * scale))
    size = (width_px if width_px - size[0] < 2 else size[0]), (height_px if height_px - size[1] < 2 else size[1])
    smooth = cv2.INTER_AREA if scale < 1 else cv2.INTER_CUBIC
    scaled = cv2.resize(image, size, interpolation=cv2.INTER_NEAREST if labels else smooth)
    canvas = np.full((height_px, width_px, *image.shape[2:]), 0 if labels else _GREY, np.uint8)
    top, left = (height_px - size[1]) // 2, (width_px - size[0]) // 2
    canvas[top : top + size[1], left : left + size[0]] = scaled
    return canvas


def view_of(scene: Scene, region: tuple[int, int, int, int], image: Image | None = None, *, upright: bool) -> View:
    """The part `region` (x1, y1, x2, y2) of the scene as the product shows it; `image` replaces the scene's picture."""
    x1, y1, x2, y2 = region
    window = np.s_[y1:y2, x1:x2]
    picture = fitted((scene.image if image is None else image)[window], upright=upright)
    classes = fitted(_class_map(scene)[window], upright=upright, labels=True)
    owners = fitted(scene.people[window], upright=upright, labels=True)
    people = []
    for seen in scene.seen:
        whole = np.count_nonzero(scene.people == seen.index + 1) / max(seen.visible, 1e-6)
        mine = scene.people[window] == seen.index + 1
        rows = np.flatnonzero(mine.any(1))
        if not len(rows) or np.count_nonzero(mine) < LEAST_VISIBLE * whole:
            continue
        tall = (rows[-1] - rows[0] + 1) / (y2 - y1)
        if tall < LEAST_HEIGHT:
            continue
        parts = scene.parts[window][mine]
        least = 0.015 * whole
        shows = {part: bool(np.count_nonzero(parts == part) >= least) for part in _COLOURED}
        place = float(np.flatnonzero(mine.any(0)).mean() / (x2 - x1))
        people.append(
            Person(
                seen,
                place,
                float(tall),
                shows_top=shows[Part.TOP],
                shows_lower=shows[Part.LOWER],
                shows_feet=y1 + int(rows[-1]) >= seen.soles_px - _FEET * seen.height_px,
                shows_bag=shows[Part.BAG],
                shows_hat=shows[Part.HAT],
            )
        )
    people.sort(key=lambda person: -person.height)
    return View(picture, classes, owners, tuple(people))


def tiles_of(picture: Image) -> Image:
    """(9, 256, 256, 3): the eight tiles row by row, then the whole picture squeezed into one."""
    rows, columns = picture.shape[0] // TILE_PX, picture.shape[1] // TILE_PX
    tiles = [
        picture[row * TILE_PX : (row + 1) * TILE_PX, column * TILE_PX : (column + 1) * TILE_PX]
        for row in range(rows)
        for column in range(columns)
    ]
    whole = Pil.fromarray(picture).resize((TILE_PX, TILE_PX), Pil.Resampling.LANCZOS)
    return np.stack([*tiles, np.asarray(whole, np.uint8)])


def label_tiles(labels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The same nine tiles of a label map, (9, 256, 256)."""
    rows, columns = labels.shape[0] // TILE_PX, labels.shape[1] // TILE_PX
    tiles = labels.reshape(rows, TILE_PX, columns, TILE_PX).swapaxes(1, 2).reshape(-1, TILE_PX, TILE_PX)
    whole = cv2.resize(labels, (TILE_PX, TILE_PX), interpolation=cv2.INTER_NEAREST)
    return np.concatenate([tiles, whole[None]])


def patch_labels(
    classes: NDArray[np.uint8], owners: NDArray[np.uint8], people: Sequence[Person]
) -> tuple[Labels, Labels]:
    """(classes, actions) of the 16x16 patches of tiles (N, 256, 256): each (N, 256).

    A patch has the class that most of its non-background pixels have, if those cover _LEAST_COVER of it. An action is
    an index into ACTIONS, -100 where there is nobody, or nobody of `people` whose feet are seen.
    """
    count = classes.shape[0]

    def patched(maps: NDArray[np.uint8]) -> NDArray[np.uint8]:
        cells = maps.reshape(count, PATCHES, PATCH_PX, PATCHES, PATCH_PX).swapaxes(2, 3)
        return cells[..., ::2, ::2].reshape(count * PATCHES**2, -1)

    def most(cells: NDArray[np.uint8], size: int) -> Labels:
        flat = cells.astype(np.int64) + size * np.arange(cells.shape[0])[:, None]
        votes = np.bincount(flat.ravel(), minlength=size * cells.shape[0]).reshape(-1, size)
        best: Labels = votes[:, 1:].argmax(1) + 1
        best[votes[:, 1:].sum(1) < _LEAST_COVER * cells.shape[1]] = 0
        return best

    kinds = most(patched(classes), CLASSES)
    owner = most(patched(owners), 1 + int(owners.max(initial=1)))
    actions = np.full(256, -100, np.int64)
    for person in people:
        if person.shows_feet:
            actions[person.seen.index + 1] = ACTIONS.index(person.seen.action)
    return kinds.reshape(count, -1), actions[owner].reshape(count, -1)
