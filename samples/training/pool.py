"""Drawn tiles kept on disk, each shown several times: drawing one takes about as long as learning from it once.

A pool is a folder of parts, each drawn from a seed of its own, so that drawing goes on where it stopped and uses every
core. A tile may be shown mirrored: left and right change places in what is said of it, too.
"""

from __future__ import annotations

import math
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

from samples.training.framing import TILE_PX, WHOLE, crop_region, label_tiles, tiles_of
from samples.training.photographed import Glimpse, glimpses
from samples.training.pictures import Photograph, camera_like, random_company, random_scene
from samples.training.questions import (
    COUNTS,
    FACINGS,
    NEAREST,
    PATCHED,
    PATCHES,
    UNKNOWN,
    Labels,
    nearest_answers,
    patch_labels,
    row_of,
)
from samples.training.views import ACTIONS, SIDES, Person, View, view_of

if TYPE_CHECKING:  # its language model needs the model server's environment
    from samples.training.codebook import Codebook

PART_TILES = 256
PART_PHOTOGRAPHS = 64
_PART_SHARE = 0.3  # of the views of which a part is shown beside the whole
_FRAME_SHARE = 0.2
_COMPANY_SHARE = 0.4  # of the other scenes: else three people in a crop, one of 25, are too rare to be learnt
_LEAST_PART = 0.15  # of a photograph's tile that people's boxes cover, for a part of somebody to be in it
_MIRRORED = np.array([ACTIONS.index(name) for name in ("standing", "walking right", "walking left", *ACTIONS[3:])])
_IN_A_MIRROR = {"action": _MIRRORED, "facing": (5 - np.arange(FACINGS)) % FACINGS}  # those that are others there
People = Sequence[Person] | None


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles (N, 256, 256, 3) of bytes with what they show.

    `patches` (N, len(PATCHED), 256) about each patch, `counts` (N) of people, `nearest` (N, len(NEAREST)) about the
    nearest person, UNKNOWN where nothing is asked.
    """

    images: Tensor
    patches: Tensor
    counts: Tensor
    nearest: Tensor

    @property
    def kinds(self) -> Tensor:
        """What each patch shows, (N, 256); not 0 where it shows somebody."""
        return self.patches[:, row_of("kind")]


@dataclass(frozen=True, slots=True)
class Told:
    """Whom a tile should tell of (None: it is just a part of somebody), and which phrases of that stay open."""

    people: People
    unknown: frozenset[str] = frozenset()

    def mirrored(self) -> Told:
        """The same in a mirror."""
        return replace(self, people=self.people and tuple(mirrored_person(person) for person in self.people))


def random_views(
    rng: np.random.Generator, backgrounds: list[Path], *, frames: bool, company: bool = False
) -> Iterator[View]:
    """Crops of the people of one generated scene, or the scene as a whole frame; `company`: of people together."""
    width = int(rng.integers(480, 961))
    height = int(width * 0.5625)
    if company:
        scene = random_company(rng, width, height, backgrounds)
    else:
        scene = random_scene(rng, width, height, backgrounds, largest=0.75)
    image = camera_like(rng, scene.image)
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


def taught_views(rng: np.random.Generator, backgrounds: list[Path], *, frames: bool) -> Iterator[View]:
    """As `random_views`, with people together oftener than chance has them."""
    company = not frames and bool(rng.random() < _COMPANY_SHARE)
    return random_views(rng, backgrounds, frames=frames, company=company)


def mirrored_person(person: Person) -> Person:
    """The same person in a mirror."""
    seen = person.seen
    yaw = None if seen.yaw is None else (math.pi - seen.yaw) % (2 * math.pi)
    seen = replace(seen, action=ACTIONS[_MIRRORED[ACTIONS.index(seen.action)]], yaw=yaw)
    return replace(person, place=1.0 - person.place, seen=seen)


def labelled_tiles(view: View, chosen: list[int]) -> Tiles:
    """The tiles `chosen` (WHOLE: the whole picture) of a view."""
    return _tiles(view, chosen, torch.from_numpy(patch_labels(view, chosen)))


def _tiles(shown: View | Glimpse, chosen: list[int], patches: Tensor) -> Tiles:
    """The tiles `chosen`; how many people there are, and what the nearest is like, is asked of the whole alone."""
    count = UNKNOWN if "count" in shown.unknown else min(len(shown.people), COUNTS - 1)
    nearest, unasked = nearest_answers(shown.people, shown.unknown), [UNKNOWN] * len(NEAREST)
    return Tiles(
        torch.from_numpy(tiles_of(shown.picture)[chosen]),
        patches,
        torch.tensor([count if tile == WHOLE else UNKNOWN for tile in chosen]),
        torch.tensor([nearest if tile == WHOLE else unasked for tile in chosen]),
    )


def told_of(view: View, tiles: Tiles, chosen: list[int]) -> list[Told]:
    """Whom each of the `tiles` of a view should tell of: a part of the picture of nobody, or it is just a part."""
    parts = [Told(None if bool(kinds.any()) else ()) for kinds in tiles.kinds]
    whole = Told(view.people, view.unknown)
    return [whole if tile == WHOLE else part for tile, part in zip(chosen, parts, strict=True)]


def joined(parts: Sequence[Tiles]) -> Tiles:
    """All tiles of all parts."""
    return Tiles(
        torch.cat([part.images for part in parts]),
        torch.cat([part.patches for part in parts]),
        torch.cat([part.counts for part in parts]),
        torch.cat([part.nearest for part in parts]),
    )


def _draw(seed: tuple[int, ...], backgrounds: list[Path]) -> tuple[Tiles, list[Told]]:
    """One part of a pool of generated tiles."""
    rng = _alone(seed)
    parts: list[Tiles] = []
    told: list[Told] = []
    while len(told) < PART_TILES:
        for view in taught_views(rng, backgrounds, frames=bool(rng.random() < _FRAME_SHARE)):
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
            nothing = torch.full((len(chosen), len(PATCHED), PATCHES**2), UNKNOWN)
            parts.append(_tiles(glimpse, chosen, nothing))
            for tile in chosen[:-1]:
                told.append(Told(None if covers[tile] else ()))
            told.append(Told(glimpse.people, glimpse.unknown))
    if not parts:
        raise ValueError(f"nobody is large enough to be shown in {len(photographs)} photographs: leave them out")
    return joined(parts), told


def _alone(seed: tuple[int, ...]) -> np.random.Generator:
    """A worker's random numbers; it keeps to one core."""
    cv2.setNumThreads(1)
    torch.set_num_threads(1)
    return np.random.default_rng(seed)


def _write(path: Path, tiles: Tiles, told: list[Told], codebook: Codebook) -> None:
    """Write one part; a kill in between leaves nothing."""
    working = path.with_suffix(f".tmp{path.suffix}")
    mirrored = [each.mirrored() for each in told]
    np.savez(
        working,
        images=tiles.images.numpy(),
        patches=tiles.patches.numpy().astype(np.int8),
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

        self.images, self.patches = column("images"), column("patches")
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

        answers = self.patches[chosen].astype(np.int64)
        for question, name in enumerate(PATCHED):
            if name in _IN_A_MIRROR:
                answers[flipped, question] = _swapped(answers[flipped, question], _IN_A_MIRROR[name])
        nearest = self.nearest[chosen].astype(np.int64)
        place, action = (list(NEAREST).index(name) for name in ("place", "action"))
        known = flipped & (nearest[:, place] >= 0)
        nearest[known, place] = len(SIDES) - 1 - nearest[known, place]
        nearest[flipped, action] = _swapped(nearest[flipped, action], _MIRRORED)
        of_patches = turned(answers.swapaxes(1, 2), (PATCHES, PATCHES, len(PATCHED)))
        tiles = Tiles(
            torch.from_numpy(np.ascontiguousarray(turned(self.images[chosen], (TILE_PX, TILE_PX, 3)))),
            torch.from_numpy(of_patches.reshape(count, PATCHES**2, len(PATCHED)).swapaxes(1, 2)),
            torch.from_numpy(self.counts[chosen].astype(np.int64)),
            torch.from_numpy(nearest),
        )
        return tiles, torch.from_numpy(self.rows[chosen, flipped.astype(np.int64)].astype(np.int64))


def _swapped(answers: Labels, mirrored: Labels) -> Labels:
    return np.where(answers >= 0, mirrored[np.maximum(answers, 0)], answers)


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
    """As `drawn`, out of the photographs in which there is somebody; each part has some of every kind."""
    count = -(-len(photographs) // PART_PHOTOGRAPHS)
    chunks = [photographs[first::count] for first in range(count)]
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
