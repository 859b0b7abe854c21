"""How true the sample VLM's descriptions are: on generated scenes, and on photographs labelled by eye."""

from __future__ import annotations

import argparse
import csv
import itertools
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

from samples import vlm
from samples.backdrops import Image
from samples.training.describing import Reference, served_dtype
from samples.training.facts import Facts, description, read_facts
from samples.training.pool import random_views
from samples.training.views import tight_crop

LABELS = Path(__file__).parent / "photographs.csv"
_TOGETHER = 8
_SCENE_SEED = 1_000_003  # far from the seeds of training, which have three parts


@dataclass(frozen=True, slots=True)
class Case:
    """A picture as the product sends it, and the truth about it."""

    name: str
    picture: Image
    truth: Facts


def scene_cases(count: int) -> Iterator[Case]:
    """Generated views as the default configuration shows them: crops of people, the odd one without anybody."""
    made = 0
    for index in range(10 * count):
        rng = np.random.default_rng((_SCENE_SEED, index))
        for view in random_views(rng, [], frames=False):
            if made < count:
                yield Case(f"scene {index}", view.picture, read_facts(description(view.people)))
            made += 1
        if made >= count:
            return


def photograph_cases(data: Path) -> Iterator[Case]:
    """The crops of photographs.csv: columns file, x1, y1, x2, y2 (pixels), count, top, lower; `?` where eyes differ.

    Raises:
        OSError: A photograph cannot be read.
    """
    with LABELS.open(newline="", encoding="utf-8") as rows:
        for row in csv.DictReader(rows):
            image = cv2.imread(str(data / "images" / row["file"]))
            if image is None:
                raise OSError(f"{data / 'images' / row['file']} cannot be read as a picture")
            box = (int(row["x1"]), int(row["y1"]), int(row["x2"]), int(row["y2"]))
            known = {key: None if row[key] == "?" else row[key] for key in ("count", "top", "lower")}
            truth = Facts(
                None if known["count"] is None else int(known["count"]), top=known["top"], lower=known["lower"]
            )
            picture = tight_crop(np.ascontiguousarray(image[..., ::-1], np.uint8), box)
            yield Case(row["file"], picture, truth)


class Tally:
    """Right answers of each kind, out of those where the truth is known, and what is taken for what."""

    def __init__(self) -> None:
        self.right: Counter[str] = Counter()
        self.known: Counter[str] = Counter()
        self.confused: Counter[tuple[str, str, str]] = Counter()

    def add(self, truth: Facts, said: Facts, *, whole: bool) -> None:
        """Count one description; `whole` says whether the truth is all there is to say."""
        for kind in ("count", "top", "lower"):
            true, told = getattr(truth, kind), getattr(said, kind)
            if true is None:
                continue
            self.known[kind] += 1
            self.right[kind] += told == true
            if told != true and kind != "count":
                self.confused[kind, true, told or "nothing"] += 1
        if not whole:
            return
        self.known["whole"] += 1
        self.right["whole"] += truth == said
        if truth.action:
            self.known["action"] += 1
            self.right["action"] += said.action == truth.action
            if said.action != truth.action:
                self.confused["action", truth.action, said.action or "nothing"] += 1
            if truth.action != "standing":
                self.known["direction"] += 1
                self.right["direction"] += said.action == truth.action
        if truth.count:
            self.known["bag"] += 1
            self.right["bag"] += said.bag == truth.bag
            self.known["hat"] += 1
            self.right["hat"] += said.hat == truth.hat

    def print(self) -> None:
        """The table."""
        for kind in self.known:
            print(f"| {kind} | {self.right[kind]}/{self.known[kind]} | {self.right[kind] / self.known[kind]:.1%} |")
        worst = ", ".join(
            f"{kind} {true} as {told} {times}" for (kind, true, told), times in self.confused.most_common(12)
        )
        print(f"confused: {worst or 'none'}", flush=True)


def run(options: argparse.Namespace) -> int:
    """The `scenes` and `photographs` parts of the command line."""
    checkpoint = vlm.ensure_checkpoint(python=Path(sys.executable))
    reference = Reference(checkpoint, options.weights, served_dtype())
    on_scenes = options.part == "scenes"
    cases = scene_cases(options.count) if on_scenes else photograph_cases(options.data)
    tally, began_s, done = Tally(), time.monotonic(), 0
    while together := list(itertools.islice(cases, _TOGETHER)):
        for case, said in zip(together, reference.answers([case.picture for case in together]), strict=True):
            tally.add(case.truth, read_facts(said), whole=on_scenes)
            done += 1
            if done <= options.show:
                print(f"{case.name}: {said}\n    truth: {case.truth}", flush=True)
    print(f"{done} pictures, {(time.monotonic() - began_s) / max(1, done):.2f} s each")
    tally.print()
    return 0
