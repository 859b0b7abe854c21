"""The kinds of patches: background, skin, hair, shoes, then top, lower clothes, bag and hat in each colour."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from samples.figures import COLOUR_NAMES, Part
from samples.scenes import Scene

_PLAIN = ("background", "skin", "hair", "shoe")
_COLOURED = (Part.TOP, Part.LOWER, Part.BAG, Part.HAT)
KINDS = len(_PLAIN) + len(_COLOURED) * len(COLOUR_NAMES)


def kind_of(part: Part, colour: str) -> int:
    """The kind of a part in a colour."""
    return len(_PLAIN) + _COLOURED.index(part) * len(COLOUR_NAMES) + COLOUR_NAMES.index(colour)


def name_of(number: int) -> tuple[str, str | None]:
    """(part, colour) of a kind, in words."""
    if number < len(_PLAIN):
        return _PLAIN[number], None
    part, colour = divmod(number - len(_PLAIN), len(COLOUR_NAMES))
    return _COLOURED[part].name.lower(), COLOUR_NAMES[colour]


def kind_map(scene: Scene) -> NDArray[np.uint8]:
    """(H, W): the kind of every single pixel."""
    width = len(Part)
    table = np.zeros((256, width), np.uint8)
    table[:, Part.SKIN], table[:, Part.HAIR], table[:, Part.SHOE] = 1, 2, 3
    for person in scene.seen:
        look, row = person.look, person.index + 1
        table[row, Part.TOP] = kind_of(Part.TOP, look.top)
        table[row, Part.LOWER] = kind_of(Part.LOWER, look.lower)
        table[row, Part.BAG] = kind_of(Part.BAG, look.bag or "black")
        table[row, Part.HAT] = kind_of(Part.HAT, look.hat or "black")
    return np.asarray(table[scene.people, scene.parts], np.uint8)
