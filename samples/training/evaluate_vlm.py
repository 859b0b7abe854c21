"""How true what the sample VLM says is: on generated scenes, and on photographs labelled by eye."""

from __future__ import annotations

import argparse
import csv
import itertools
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import cv2
import numpy as np

from samples import vlm
from samples.backdrops import Image
from samples.training.describing import Reference, served_dtype
from samples.training.facts import DEFAULT_PROMPT, PROMPTS, QUESTIONS, Facts, answers, description, read_facts
from samples.training.framing import tight_crop
from samples.training.pool import random_views
from samples.training.views import View

_Any = TypeVar("_Any")
LABELS = Path(__file__).parent / "photographs.csv"
_TOGETHER = 8
_SOME = "some"  # bag or hat, whatever its colour
_KINDS = ("count", "top", "lower", "bag", "hat", "direction", "action", "whole")
_SCENE_SEED = 1_000_003  # far from the seeds of training, which have three parts


@dataclass(frozen=True, slots=True)
class Case:
    """A picture as the product sends it, the truth, the kinds of fact it tells, and those that nobody is sure of."""

    name: str
    picture: Image
    truth: Facts
    told: frozenset[str]
    doubtful: frozenset[str] = frozenset()


def _told_by(truth: Facts) -> frozenset[str]:
    """The kinds of fact that a true description settles."""
    told = {"count", "whole"} | ({"bag", "hat"} if truth.count else set())
    told |= {kind for kind in ("top", "lower", "action") if getattr(truth, kind)}
    return frozenset(told | _direction(truth))


def _direction(truth: Facts) -> set[str]:
    """What is asked further of somebody who walks."""
    return {"direction"} if truth.action not in (None, "standing") else set()


def _doubts(unknown: frozenset[str]) -> frozenset[str]:
    """The kinds of fact that cannot be told where a description's phrases are `unknown`."""
    further = ({"whole"} if unknown else set()) | ({"direction"} if "action" in unknown else set())
    return unknown | further


def scene_views(count: int, *, frames: bool = False) -> Iterator[tuple[str, View]]:
    """Generated views by name: crops of people, the odd one without anybody, or whole frames."""
    made = 0
    for index in range(10 * count):
        rng = np.random.default_rng((_SCENE_SEED, index))
        for view in random_views(rng, [], frames=frames):
            if made < count:
                yield f"scene {index}", view
            made += 1
        if made >= count:
            return


def scene_cases(count: int, *, frames: bool = False) -> Iterator[Case]:
    """Generated views with the true descriptions."""
    for name, view in scene_views(count, frames=frames):
        truth = read_facts(description(view.people))
        yield Case(name, view.picture, truth, _told_by(truth), _doubts(view.unknown))


def photograph_cases(data: Path) -> Iterator[Case]:
    """The crops of photographs.csv: columns file, x1, y1, x2, y2 (pixels), then facts, `?` where eyes differ.

    These are count, top, lower, action, and of bag and hat whether there is `some` or `none`.

    Raises:
        OSError: A photograph cannot be read.
    """
    with LABELS.open(newline="", encoding="utf-8") as rows:
        for row in csv.DictReader(rows):
            image = cv2.imread(str(data / "images" / row["file"]))
            if image is None:
                raise OSError(f"{data / 'images' / row['file']} cannot be read as a picture")
            box = (int(row["x1"]), int(row["y1"]), int(row["x2"]), int(row["y2"]))
            known = {kind: row[kind] for kind in _KINDS if row.get(kind, "?") != "?"}
            truth = Facts(
                int(known["count"]) if "count" in known else None,
                **{kind: known.get(kind) for kind in ("top", "lower", "action")},
                **{kind: _SOME if known.get(kind) == _SOME else None for kind in ("bag", "hat")},
            )
            picture = tight_crop(np.ascontiguousarray(image[..., ::-1], np.uint8), box)
            yield Case(row["file"], picture, truth, frozenset(known) | _direction(truth))


class Tally:
    """Right answers of each kind, out of those that were asked for, and what is taken for what."""

    def __init__(self) -> None:
        self.right: Counter[str] = Counter()
        self.known: Counter[str] = Counter()
        self.confused: Counter[tuple[str, str, str]] = Counter()

    def add(self, truth: Facts, said: Facts, asked: frozenset[str]) -> None:
        """Count those facts of one description that are `asked` for."""
        for kind in asked:
            self.known[kind] += 1
            if kind == "whole":
                self.right[kind] += said == truth
                continue
            true, told = (getattr(facts, "action" if kind == "direction" else kind) for facts in (truth, said))
            right = bool(told) if true == _SOME else told == true
            self.right[kind] += right
            if not right and kind not in ("count", "direction"):
                self.confused[kind, true or "none", told or "nothing"] += 1

    def row(self, kind: str) -> str:
        """One line of a table, without its ends."""
        return f"{self.right[kind]}/{self.known[kind]} | {self.right[kind] / max(1, self.known[kind]):.1%}"

    def mistakes(self) -> str:
        """What is taken for what most often."""
        worst = (f"{kind} {true} as {told} {times}" for (kind, true, told), times in self.confused.most_common(12))
        return ", ".join(worst) or "none"


def run(options: argparse.Namespace) -> int:
    """The `scenes`, `photographs` and `questions` parts of the command line."""
    checkpoint = vlm.ensure_checkpoint(python=Path(sys.executable))
    reference = Reference(checkpoint, options.weights, served_dtype(), splitting=not options.one_tile)
    if options.part == "questions":
        return _ask(reference, options.count, options.show)
    on_scenes = options.part == "scenes"
    cases = scene_cases(options.count, frames=options.frames) if on_scenes else photograph_cases(options.data)
    clear, every = Tally(), Tally()
    began_s, done = time.monotonic(), 0
    for case, said in _answered(reference, ((case.picture, case) for case in cases)):
        clear.add(case.truth, read_facts(said), case.told - case.doubtful)
        every.add(case.truth, read_facts(said), case.told)
        done += 1
        if done <= options.show:
            print(f"{case.name}: {said}\n    truth: {case.truth}", flush=True)
    print(f"{done} pictures, {(time.monotonic() - began_s) / max(1, done):.2f} s each")
    print("| fact | right where nobody doubts it | | with those in doubt | |")
    for kind in (kind for kind in _KINDS if every.known[kind]):
        print(f"| {kind} | {clear.row(kind)} | {every.row(kind)} |")
    print(f"confused, where nobody doubts: {clear.mistakes()}", flush=True)
    return 0


def _answered(
    reference: Reference, pictured: Iterable[tuple[Image, _Any]], prompt: str = DEFAULT_PROMPT
) -> Iterator[tuple[_Any, str]]:
    """What comes with each picture, and what is said of it; some pictures at a time."""
    left = iter(pictured)
    while together := list(itertools.islice(left, _TOGETHER)):
        said = reference.answers([picture for picture, _ in together], prompt)
        yield from zip((what for _, what in together), said, strict=True)


def _ask(reference: Reference, count: int, show: int) -> int:
    """Print how often each phrasing and question gets the true answer, word for word, on views where it has one."""
    asked = [(view.picture, answers(view.people, view.unknown)) for _, view in scene_views(count)]
    print("| asked | true answers | | wrong ones |")
    for prompt in (*PROMPTS, *QUESTIONS):
        known = [(picture, truths[prompt]) for picture, truths in asked if prompt in truths]
        wrong = [f"{said} (not {true})" for true, said in _answered(reference, known, prompt) if said != true]
        right, shown = len(known) - len(wrong), "; ".join(wrong[:show])
        print(f"| {prompt} | {right}/{len(known)} | {right / max(1, len(known)):.0%} | {shown} |", flush=True)
    return 0
