"""Drawn tiles: what they say of their people, also in a mirror, and a pool that goes on where it stopped."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from torch import Tensor

from samples.figures import LOWER_KINDS
from samples.training import pool
from samples.training.facts import description
from samples.training.pictures import Photograph, random_scene
from samples.training.questions import NEAREST, UNKNOWN, nearest_answers, row_of
from samples.training.views import ACTIONS, SIDES, Person, View

FACING = row_of("facing")
# Eighths of a turn from half a right angle above the right on: 0 and 1 face right, 2 and 3 the camera, 4 and 5 left.
FACED_IN_A_MIRROR = np.full(256, UNKNOWN)
FACED_IN_A_MIRROR[:8] = [5, 4, 3, 2, 1, 0, 7, 6]


class SpeltOut:
    """A codebook whose codes are the letters of the description."""

    part = torch.full((64,), 7)

    def sentence(self, people: Sequence[Person]) -> Tensor:
        return torch.tensor(list(description(people).encode().ljust(64))[:64])

    def opened(self, rows: Tensor, unknown: Collection[str]) -> Tensor:
        return torch.where(torch.arange(64) < 10 * len(unknown), -100, rows)


@pytest.fixture(scope="module")
def view() -> View:
    """One crop with somebody whose feet are seen."""
    rng = np.random.default_rng(4)
    while True:
        for found in pool.random_views(rng, [], frames=False):
            if found.people and found.people[0].shows_feet and found.people[0].seen.action == "walking left":
                return found


def test_people_together_share_a_crop() -> None:
    def shown(company: bool) -> list[int]:
        views = (
            pool.random_views(np.random.default_rng(seed), [], frames=False, company=company) for seed in range(20)
        )
        return [len(view.people) for found in views for view in found if "count" not in view.unknown]

    together, apart = shown(company=True), shown(company=False)
    assert sum(count >= 3 for count in together) >= len(together) / 5
    assert sum(count >= 3 for count in apart) <= len(apart) / 10


def test_the_nearest_person_is_told_in_numbers(view: View) -> None:
    (person, *_others) = view.people
    told = dict(zip(NEAREST, nearest_answers(view.people), strict=True))
    assert ACTIONS[told["action"]] == "walking left"
    assert SIDES[told["place"]] in SIDES
    assert LOWER_KINDS[told["lower_kind"]] == person.seen.look.lower_kind
    assert (told["bag"] < NEAREST["bag"] - 1) == (person.seen.look.bag is not None and person.shows_bag)
    assert all(0 <= told[name] < count for name, count in NEAREST.items())
    assert nearest_answers(view.people, {"bag"}) == [
        UNKNOWN if name == "bag" else answer for name, answer in told.items()
    ]
    assert nearest_answers(()) == [UNKNOWN] * len(NEAREST)


def test_in_a_mirror_left_is_right(view: View) -> None:
    (person, *_others) = view.people
    mirrored = pool.mirrored_person(person)
    assert mirrored.seen.action == "walking right"
    assert mirrored.place == pytest.approx(1 - person.place)
    assert mirrored.seen.yaw is not None
    assert person.seen.yaw is not None
    assert math.cos(mirrored.seen.yaw) == pytest.approx(-math.cos(person.seen.yaw))
    assert math.sin(mirrored.seen.yaw) == pytest.approx(math.sin(person.seen.yaw))
    assert pool.mirrored_person(mirrored).seen.action == person.seen.action
    assert [pool.mirrored_person(_doing(person, action)).seen.action for action in ACTIONS] == [
        "standing",
        "walking right",
        "walking left",
        "walking towards the camera",
        "walking away",
    ]


def _doing(person: Person, action: str) -> Person:
    return replace(person, seen=replace(person.seen, action=action))


def test_a_pool_is_drawn_once_and_gives_tiles_both_ways_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "ProcessPoolExecutor", _Here)
    monkeypatch.setattr(pool, "PART_TILES", 6)
    codebook: Any = SpeltOut()
    parts = pool.drawn(tmp_path, 12, 3, [], codebook, processes=1)
    assert [part.name for part in parts] == ["3-0000.npz", "3-0001.npz"]
    written = parts[0].stat().st_mtime_ns
    parts[1].unlink()
    assert pool.drawn(tmp_path, 12, 3, [], codebook, processes=1) == parts
    assert parts[0].stat().st_mtime_ns == written
    tiles = pool.Pool(parts)
    assert len(tiles) >= 12
    rng = np.random.default_rng(0)
    shown = set()
    for _ in range(10):
        batch, rows = tiles.batch(rng, 4)
        for index, mirrored in enumerate((False, True, False, True)):
            image, kinds = batch.images[index].numpy(), batch.kinds[index].reshape(16, 16).numpy()
            facings = batch.patches[index, FACING].reshape(16, 16).numpy()
            plain = image[:, ::-1] if mirrored else image
            (at,) = [number for number in range(len(tiles)) if np.array_equal(plain, tiles.images[number])]
            stored, faced = (tiles.patches[at, question].reshape(16, 16) for question in (0, FACING))
            assert np.array_equal(kinds, stored[:, ::-1] if mirrored else stored)
            assert np.array_equal(facings, FACED_IN_A_MIRROR[faced[:, ::-1]] if mirrored else faced)
            assert np.array_equal(rows[index].numpy(), tiles.rows[at, int(mirrored)])
            shown.add(at)
    assert len(shown) > 6
    assert len(tiles.batch(rng, 3)[0].images) == 3


def test_photographs_tell_only_what_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "ProcessPoolExecutor", _Here)
    scene = random_scene(np.random.default_rng(12), 640, 360, [])
    height, width = scene.image.shape[:2]
    path = tmp_path / "p1.jpg"
    cv2.imwrite(str(path), np.ascontiguousarray(scene.image[..., ::-1]))
    found = np.array([seen.box_px for seen in scene.seen], np.float32) / [width, height, width, height]
    codebook: Any = SpeltOut()
    photographs = [Photograph(path, found.astype(np.float32))] * 16
    parts = pool.cut(tmp_path / "pool", 3, photographs, codebook, processes=1)
    assert [part.name for part in parts] == ["photographs-3-0000.npz"]
    tiles = pool.Pool(parts)
    assert (tiles.patches == UNKNOWN).all()
    wholes = tiles.counts != UNKNOWN
    assert wholes.sum() >= 4
    assert (tiles.counts[wholes] >= 1).all()
    for name in ("action", "bag", "lower_kind"):
        assert (tiles.nearest[:, list(NEAREST).index(name)] == UNKNOWN).all()
    assert (tiles.nearest[wholes, list(NEAREST).index("place")] >= 0).all()
    opened = (tiles.rows == -100).sum(-1)
    assert (opened[wholes] >= 30).all()
    assert (opened[~wholes] == 0).all()


class _Here:
    """An executor that works in this process."""

    def __init__(self, *_settings: object, **_named: object) -> None: ...

    def __enter__(self) -> _Here:
        return self

    def __exit__(self, *_error: object) -> None: ...

    def map(self, work: Any, *items: Sequence[Any]) -> Any:
        return map(work, *items)
