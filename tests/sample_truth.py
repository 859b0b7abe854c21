"""What the sample video really shows: its walkers, drawn again from the same seed."""

from __future__ import annotations

import numpy as np

from pipeline.frame import Box
from samples import backdrops, video, walkers

MATCH_IOU = 0.3


def people_of_the_sample() -> tuple[list[walkers.Walker], walkers.Stage]:
    """The walkers of `samples.video.street`, drawn from the same seed."""
    rng = np.random.default_rng(video.SEED)
    place = backdrops.drawn(rng, video.WIDTH_PX, video.HEIGHT_PX, "street")
    stage = walkers.make_stage(place, 150.0, 290.0)
    return walkers.crowd(rng, stage, video.STREET_S, every_s=3.2), stage


def true_box(walker: walkers.Walker, stage: walkers.Stage, at_s: float) -> Box | None:
    """About where a walker is, as fractions of the picture; None while out of it."""
    person = walkers.placed(walker, stage, at_s)
    if person is None:
        return None
    half = 0.19 * person.height_px
    return (
        (person.x_px - half) / video.WIDTH_PX,
        (person.y_px - person.height_px) / video.HEIGHT_PX,
        (person.x_px + half) / video.WIDTH_PX,
        person.y_px / video.HEIGHT_PX,
    )


def overlap(one: Box, other: Box) -> float:
    """Intersection over union."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    shared = max(0.0, width) * max(0.0, height)
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)]
    return shared / (sum(areas) - shared) if shared else 0.0


def well_seen(walker: walkers.Walker, stage: walkers.Stage) -> bool:
    """Whole in the picture for two seconds of the video or more."""
    inside = 0
    for index in range(round(video.STREET_S * video.FPS)):
        box = true_box(walker, stage, index / video.FPS)
        inside += box is not None and min(box) > 0.01 and max(box) < 0.99
    return inside >= 2 * video.FPS


def expected_walkers() -> set[int]:
    """Numbers of the walkers that are well seen."""
    people, stage = people_of_the_sample()
    return {index for index, walker in enumerate(people) if well_seen(walker, stage)}


def who_is_there(box: Box, at_s: float, people: list[walkers.Walker], stage: walkers.Stage) -> tuple[int, float]:
    """The walker that `box` shows at `at_s`, -1 for nobody, and how well it fits."""
    boxes = [true_box(walker, stage, at_s) for walker in people]
    scores = [0.0 if one is None else overlap(box, one) for one in boxes]
    index = int(np.argmax(scores))
    return (index if scores[index] >= MATCH_IOU else -1), scores[index]
