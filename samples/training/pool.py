"""Drawn tiles kept on disk, each shown several times: drawing one takes about as long as learning from it once.

A pool is a folder of parts, each drawn from a seed of its own, so that drawing goes on where it stopped and uses every
core. A tile may be shown mirrored: left and right change places in what is said of it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from samples.figures import COLOUR_NAMES, LOWER_KINDS
from samples.training.facts import side
from samples.training.photographed import Glimpse, glimpses
from samples.training.pictures import Photograph, camera_like, random_scene
from samples.training.views import (
    ACTIONS,
    COUNTS,
    NEAREST,
    PATCHES,
    SIDES,
    TILE_PX,
    Labels,
    Person,
    View,
    crop_region,
    label_tiles,
    patch_labels,
    tiles_of,
    view_of,
)

if TYPE_CHECKING:  # its language model needs the model server's environment
    from samples.training.codebook import Codebook

PART_TILES = 256
PART_PHOTOGRAPHS = 64
WHOLE = 8  # the number of the tile that holds the whole picture
UNKNOWN = -100
_PART_SHARE = 0.3  # of the views of which a part is shown beside the whole
_FRAME_SHARE = 0.2
_LEAST_PART = 0.15  # of a photograph's tile that people's boxes cover, for a part of somebody to be in it
_MIRRORED = np.array([ACTIONS.index(name) for name in ("standing", "walking right", "walking left", *ACTIONS[3:])])
People = Sequence[Person] | None
_NONE = len(COLOUR_NAMES)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles (N, 256, 256, 3) of bytes with what they show.

    `kinds` and `actions` (N, 256) of their patches, `counts` (N) of people, `nearest` (N, len(NEAREST)) of the nearest
    person, UNKNOWN where nothing is asked.
    """

    images: Tensor
    kinds: Tensor
    actions: Tensor
    counts: Tensor
    nearest: Tensor


@dataclass(frozen=True, slots=True)
class Told:
    """Whom a tile should tell of (None: it is just a part of somebody), and which phrases of that stay open."""

    people: People
    unknown: frozenset[str] = frozenset()

    def mirrored(self) -> Told:
        """The same in a mirror."""
        return replace(self, people=self.people and tuple(mirrored_person(person) for person in self.people))


def random_views(rng: np.random.Generator, backgrounds: list[Path], *, frames: bool) -> Iterator[View]:
    """Crops of the people of one generated scene, or the scene as a whole frame."""
    width = int(rng.integers(480, 961))
    scene = random_scene(rng, width, int(width * 0.5625), backgrounds, largest=0.75)
    image = camera_like(rng, scene.image)
    height = scene.image.shape[0]
    if frames:
        yield view_of(scene, (0, 0, width, height), image, upright=False)
        return
    if not scene.seen or rng.random() < 0.05:  # a false alarm of the detector
        high = height * rng.uniform(0.3, 0.9)
        x, y = rng.uniform(0, width - high / 2), rng.uniform(0, height - high)
        yield view_of(scene, (int(x), int(y), int(x + high / 2), int(y + high)), image, upright=True)
    shown = [seen for seen in scene.seen if seen.visible > 0.4 and seen.box_px[3] - seen.box_px[1] > 36]
    for seen in shown[:2]:
        yield view_of(scene, crop_region(rng, image, seen.box_px, 0.05), image, upright=True)


def nearest_answers(people: Sequence[Person]) -> list[int]:
    """What NEAREST asks about the first of `people`, UNKNOWN where it cannot be seen or nobody is there."""
    if not people:
        return [UNKNOWN] * len(NEAREST)
    person, look = people[0], people[0].seen.look

    def colour(name: str | None, shown: bool) -> int:
        return COLOUR_NAMES.index(name) if name is not None and shown else _NONE

    return [
        SIDES.index(side(person)),
        colour(look.top, person.shows_top),
        colour(look.lower, person.shows_lower),
        ACTIONS.index(person.seen.action) if person.shows_feet else UNKNOWN,
        colour(look.bag, person.shows_bag),
        colour(look.hat, person.shows_hat),
        LOWER_KINDS.index(look.lower_kind) if person.shows_lower else UNKNOWN,
    ]


def mirrored_person(person: Person) -> Person:
    """The same person in a mirror."""
    action = ACTIONS[_MIRRORED[ACTIONS.index(person.seen.action)]]
    return replace(person, place=1.0 - person.place, seen=replace(person.seen, action=action))


def labelled_tiles(view: View, chosen: list[int]) -> Tiles:
    """The tiles `chosen` (WHOLE: the whole picture) of a view."""
    kinds, actions = patch_labels(label_tiles(view.classes)[chosen], label_tiles(view.owners)[chosen], view.people)
    return _tiles(view, chosen, torch.from_numpy(kinds), torch.from_numpy(actions), nearest_answers(view.people))


def _tiles(shown: View | Glimpse, chosen: list[int], kinds: Tensor, actions: Tensor, nearest: list[int]) -> Tiles:
    """The tiles `chosen`; how many people there are, and what the nearest is like, is asked of the whole alone."""
    count = min(len(shown.people), COUNTS - 1)
    unasked = [UNKNOWN] * len(NEAREST)
    return Tiles(
        torch.from_numpy(tiles_of(shown.picture)[chosen]),
        kinds,
        actions,
        torch.tensor([count if tile == WHOLE else UNKNOWN for tile in chosen]),
        torch.tensor([nearest if tile == WHOLE else unasked for tile in chosen]),
    )


def told_of(view: View, tiles: Tiles, chosen: list[int]) -> list[Told]:
    """Whom each of the `tiles` of a view should tell of: a part of the picture of nobody, or it is just a part."""
    parts = [None if bool(kinds.any()) else () for kinds in tiles.kinds]
    return [Told(view.people if tile == WHOLE else part) for tile, part in zip(chosen, parts, strict=True)]


def joined(parts: Sequence[Tiles]) -> Tiles:
    """All tiles of all parts."""
    return Tiles(
        torch.cat([part.images for part in parts]),
        torch.cat([part.kinds for part in parts]),
        torch.cat([part.actions for part in parts]),
        torch.cat([part.counts for part in parts]),
        torch.cat([part.nearest for part in parts]),
    )


def _draw(seed: tuple[int, ...], backgrounds: list[Path]) -> tuple[Tiles, list[Told]]:
    """One part of a pool of generated tiles."""
    rng = _alone(seed)
    parts: list[Tiles] = []
    told: list[Told] = []
    while len(told) < PART_TILES:
        for view in random_views(rng, backgrounds, frames=bool(rng.random() < _FRAME_SHARE)):
            peopled = [tile for tile, owners in enumerate(label_tiles(view.owners)[:WHOLE]) if owners.any()]
            rng.shuffle(peopled)
            chosen = [*peopled[: int(rng.random() < _PART_SHARE)], WHOLE]
            parts.append(labelled_tiles(view, chosen))
            told += told_of(view, parts[-1], chosen)
    return joined(parts), told


def _cut(seed: tuple[int, ...], photographs: Sequence[Photograph]) -> tuple[Tiles, list[Told]]:
    """One part of a pool of photographs' tiles; too many of their people wear black, so half of these are left out."""
    rng = _alone(seed)
    parts: list[Tiles] = []
    told: list[Told] = []
    for photograph in photographs:
        for glimpse in glimpses(rng, photograph, frames=bool(rng.random() < _FRAME_SHARE)):
            black = "top" not in glimpse.unknown and glimpse.people and glimpse.people[0].seen.look.top == "black"
            if black and rng.random() < 0.5:
                continue
            covers = label_tiles(glimpse.taken)[:WHOLE].mean((1, 2))
            clear = np.flatnonzero((covers == 0) | (covers > _LEAST_PART))
            rng.shuffle(clear)
            chosen = [*clear[: int(rng.random() < _PART_SHARE)].tolist(), WHOLE]
            parts.append(_glimpsed_tiles(glimpse, chosen))
            for tile in chosen[:-1]:
                told.append(Told(None if covers[tile] else ()))
            told.append(Told(glimpse.people, glimpse.unknown))
    return joined(parts), told


def _alone(seed: tuple[int, ...]) -> np.random.Generator:
    """A worker's random numbers; it keeps to one core."""
    cv2.setNumThreads(1)
    torch.set_num_threads(1)
    return np.random.default_rng(seed)


def _glimpsed_tiles(glimpse: Glimpse, chosen: list[int]) -> Tiles:
    """As `labelled_tiles`: of a photograph's patches nothing is known."""
    unasked = torch.full((len(chosen), PATCHES**2), UNKNOWN)
    nearest = nearest_answers(glimpse.people)
    for question, name in enumerate(NEAREST):
        if name in glimpse.unknown:
            nearest[question] = UNKNOWN
    return _tiles(glimpse, chosen, unasked, unasked, nearest)


def _write(path: Path, tiles: Tiles, told: list[Told], codebook: Codebook) -> None:
    """Write one part; a kill in between leaves nothing."""
    working = path.with_suffix(f".tmp{path.suffix}")
    mirrored = [each.mirrored() for each in told]
    np.savez(
        working,
        images=tiles.images.numpy(),
        kinds=tiles.kinds.numpy().astype(np.int8),
        actions=tiles.actions.numpy().astype(np.int8),
        counts=tiles.counts.numpy().astype(np.int8),
        nearest=tiles.nearest.numpy().astype(np.int8),
        rows=torch.stack([rows_of(codebook, each) for each in told]).numpy().astype(np.int16),
        mirrored_rows=torch.stack([rows_of(codebook, each) for each in mirrored]).numpy().astype(np.int16),
    )
    working.replace(path)


class Pool:
    """The tiles of a folder of drawn parts, in memory; about 200 kB a tile."""

    def __init__(self, parts: Sequence[Path]) -> None:
        loaded = [np.load(part) for part in parts]

        def column(name: str) -> NDArray[np.generic]:
            return np.concatenate([part[name] for part in loaded])

        self.images, self.kinds, self.actions = column("images"), column("kinds"), column("actions")
        self.counts, self.nearest = column("counts"), column("nearest")
        self.rows = np.stack([column("rows"), column("mirrored_rows")], 1)

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, rng: np.random.Generator, count: int) -> tuple[Tiles, Tensor]:
        """`count` tiles, drawn at random and each shown both ways round, and the rows (count, 64) of their codes.

        Of two mirrored tiles all but left and right is the same, and so is what they teach: left from right stands out.
        """
        chosen = np.repeat(rng.choice(len(self), -(-count // 2), replace=False), 2)[:count]
        flipped = np.arange(count) % 2 == 1

        def turned(values: NDArray[np.generic], shape: tuple[int, ...]) -> NDArray[np.generic]:
            whole = values.reshape(count, *shape)
            return np.where(flipped.reshape(-1, *[1] * len(shape)), whole[:, :, ::-1], whole)

        actions = self.actions[chosen].astype(np.int64)
        actions[flipped] = _swapped(actions[flipped])
        nearest = self.nearest[chosen].astype(np.int64)
        place, action = (list(NEAREST).index(name) for name in ("place", "action"))
        known = flipped & (nearest[:, place] >= 0)
        nearest[known, place] = len(SIDES) - 1 - nearest[known, place]
        nearest[flipped, action] = _swapped(nearest[flipped, action])
        patches = (PATCHES, PATCHES)
        tiles = Tiles(
            torch.from_numpy(np.ascontiguousarray(turned(self.images[chosen], (TILE_PX, TILE_PX, 3)))),
            torch.from_numpy(turned(self.kinds[chosen].astype(np.int64), patches).reshape(count, -1)),
            torch.from_numpy(turned(actions, patches).reshape(count, -1)),
            torch.from_numpy(self.counts[chosen].astype(np.int64)),
            torch.from_numpy(nearest),
        )
        return tiles, torch.from_numpy(self.rows[chosen, flipped.astype(np.int64)].astype(np.int64))


def _swapped(actions: Labels) -> Labels:
    return np.where(actions >= 0, _MIRRORED[np.maximum(actions, 0)], actions)


def rows_of(codebook: Codebook, told: Told) -> Tensor:
    """The codes (64) that a tile should give, OPEN where nobody knows."""
    return codebook.part if told.people is None else codebook.opened(codebook.sentence(told.people), told.unknown)


def drawn(
    folder: Path, tiles: int, seed: int, backgrounds: list[Path], codebook: Codebook, *, processes: int
) -> list[Path]:
    """The parts of a pool of at least `tiles` tiles in `folder`; those that are missing are drawn first."""
    parts = [folder / f"{seed}-{number:04d}.npz" for number in range(-(-tiles // PART_TILES))]
    jobs = [((seed, 77, number), backgrounds) for number in range(len(parts))]
    _made(parts, _draw, jobs, codebook, processes)
    return parts


def cut(
    folder: Path, seed: int, photographs: Sequence[Photograph], codebook: Codebook, *, processes: int
) -> list[Path]:
    """As `drawn`, out of the photographs in which there is somebody."""
    chunks = [photographs[first : first + PART_PHOTOGRAPHS] for first in range(0, len(photographs), PART_PHOTOGRAPHS)]
    parts = [folder / f"photographs-{seed}-{number:04d}.npz" for number in range(len(chunks))]
    jobs = [((seed, 78, number), chunk) for number, chunk in enumerate(chunks)]
    _made(parts, _cut, jobs, codebook, processes)
    return parts


def _made(
    parts: Sequence[Path],
    make: Callable[[tuple[int, ...], Any], tuple[Tiles, list[Told]]],
    jobs: Sequence[tuple[tuple[int, ...], Any]],
    codebook: Codebook,
    processes: int,
) -> None:
    """Make those of the `parts` that are missing, each by its job: the arguments of `make`."""
    missing = [number for number, part in enumerate(parts) if not part.exists()]
    if not missing:
        return
    parts[0].parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as workers:
        making = workers.map(make, *zip(*(jobs[number] for number in missing), strict=True))
        for number, (tiles, told) in zip(missing, making, strict=True):
            _write(parts[number], tiles, told, codebook)
            print(f"part {number + 1} of {len(parts)}: {len(told)} tiles", flush=True)
