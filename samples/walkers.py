"""People who walk through a place: straight ways at their own pace, some of them stopping on the way."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from samples.backdrops import Backdrop
from samples.figures import Appearance, random_appearance
from samples.scenes import Placed
from samples.skeleton import Pose

_STRIDE = 0.82  # ground covered in one full gait cycle, in body heights


@dataclass(frozen=True, slots=True)
class Walker:
    """One person's way over the ground, in pixels of the picture; heights follow from the row."""

    look: Appearance
    start_s: float
    start_px: tuple[float, float]
    end_px: tuple[float, float]
    speed: float  # body heights a second
    stop_at: float | None  # share of the way after which the person stands still for `stop_s`
    stop_s: float
    stature: float  # height factor, about 1
    stance: float


@dataclass(frozen=True, slots=True)
class Stage:
    """How tall people are at a row of the picture: `far_height_px` at `far_px`, growing evenly to `near_px`."""

    width_px: int
    far_px: float
    near_px: float
    far_height_px: float
    near_height_px: float

    def height_at(self, y_px: float) -> float:
        """Height in pixels of an average person whose soles are at row `y_px`."""
        share = (y_px - self.far_px) / (self.near_px - self.far_px)
        return self.far_height_px + share * (self.near_height_px - self.far_height_px)


def make_stage(backdrop: Backdrop, far_height_px: float, near_height_px: float) -> Stage:
    """The stage that a backdrop offers."""
    return Stage(backdrop.image.shape[1], backdrop.far_px, backdrop.near_px, far_height_px, near_height_px)


def random_walker(rng: np.random.Generator, stage: Stage, start_s: float) -> Walker:
    """Somebody who crosses the stage from one side to the other, or comes from afar, or goes there."""
    look = random_appearance(rng)
    kind = rng.choice(["across", "depth"], p=[0.75, 0.25])
    depth = rng.uniform(0.15, 0.95)
    row = stage.far_px + depth * (stage.near_px - stage.far_px)
    beyond = 0.45 * stage.near_height_px
    if kind == "across":
        slant = rng.uniform(-0.2, 0.2) * (stage.near_px - stage.far_px)
        other = float(np.clip(row + slant, stage.far_px, stage.near_px))
        start, end = (-beyond, row), (stage.width_px + beyond, other)
    else:
        x, drift = rng.uniform(0.15, 0.85) * stage.width_px, rng.uniform(-0.06, 0.06) * stage.width_px
        start, end = (x, stage.far_px), (x + drift, stage.near_px + 1.05 * stage.near_height_px)
    if rng.random() < 0.5:
        start, end = end, start
    stops = rng.random() < 0.3
    return Walker(
        look=look,
        start_s=start_s,
        start_px=start,
        end_px=end,
        speed=float(rng.uniform(0.62, 1.05)) * (0.45 if kind == "depth" else 1.0),
        stop_at=float(rng.uniform(0.3, 0.65)) if stops else None,
        stop_s=float(rng.uniform(3.0, 6.0)),
        stature=float(rng.uniform(0.86, 1.1)),
        stance=float(rng.uniform(-1, 1)),
    )


def placed(walker: Walker, stage: Stage, at_s: float) -> Placed | None:
    """Where and how the walker is at `at_s`; None before it enters and after it left."""
    elapsed = at_s - walker.start_s
    if elapsed < 0:
        return None
    dx, dy = walker.end_px[0] - walker.start_px[0], walker.end_px[1] - walker.start_px[1]
    middle = stage.height_at((walker.start_px[1] + walker.end_px[1]) / 2) * walker.stature
    # A step in depth covers fewer rows than the same step across covers columns.
    way = math.hypot(dx, dy) / middle
    total_s = way / walker.speed
    standing = False
    if walker.stop_at is not None:
        stop_s = walker.stop_at * total_s
        standing = stop_s < elapsed < stop_s + walker.stop_s
        elapsed = min(elapsed, stop_s) if elapsed < stop_s + walker.stop_s else elapsed - walker.stop_s
    share = elapsed / total_s
    if share > 1:
        return None
    x, y = walker.start_px[0] + share * dx, walker.start_px[1] + share * dy
    across = abs(dx) > abs(dy)
    yaw = math.atan2(dy * 0.6 if across else dy * 2.5, dx)
    phase = None if standing else 2 * math.pi * share * way / _STRIDE * (1.0 if across else 2.2)
    pose = Pose(yaw % (2 * math.pi), phase, stance=walker.stance)
    return Placed(walker.look, pose, x, y, stage.height_at(y) * walker.stature)


def crowd(rng: np.random.Generator, stage: Stage, seconds: float, every_s: float) -> list[Walker]:
    """Walkers that enter about every `every_s` seconds; the first few are on their way when the clock starts."""
    walkers, entering_s = [], -6.0
    while entering_s < seconds - 4.0:
        walkers.append(random_walker(rng, stage, entering_s))
        entering_s += float(rng.uniform(0.5, 1.5)) * every_s
    return walkers


def quantised(person: Placed, steps: int = 20) -> Placed:
    """The same person with gait, direction and height rounded, so that drawings can be used again."""
    pose = person.pose
    phase = None if pose.phase is None else round(pose.phase % (2 * math.pi) / (2 * math.pi) * steps) % steps
    exact = None if phase is None else phase * 2 * math.pi / steps
    return replace(person, pose=replace(pose, phase=exact), height_px=float(round(person.height_px / 3) * 3))
