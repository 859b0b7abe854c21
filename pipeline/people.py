"""What the trigger remembers of a track and of a person, and whether a new track is somebody seen before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pipeline.api import TrackState
from pipeline.appearance import Signature
from pipeline.config import TriggerConfig
from pipeline.decisions import PersonState
from pipeline.frame import Box, Detection, Frame
from pipeline.views import View

LEFT_AFTER_S = 1.0  # unseen this long, no better view is likely: decide with what there is
_LEARN = 0.2  # weight of a new look in the running colour signature
_SPEED_WEIGHT = 0.4
_FORESEE_S = 2.0  # a lost person is expected to walk on for so long
_MAX_GROWTH = 1.7  # ratio of box heights beyond which two boxes are two people
_MOMENT_S = 1.0  # a gap this short, and near: an ID switch of the tracker; looks matter less
_MOMENT_EASE = 0.15
_SWAP_MARGIN = 0.25  # by so much more must two people look like each other, summed over both


@dataclass(slots=True, eq=False)
class Track:
    """One track of the tracker. Positions are the box's middle and height, in pixels."""

    track_id: int
    first_s: float
    last_s: float = 0.0
    hits: int = 0
    visible: bool = False
    confidence: float = 0.0
    first_box: Box = (0.0, 0.0, 0.0, 0.0)
    box: Box = (0.0, 0.0, 0.0, 0.0)
    frame_box: Box = (0.0, 0.0, 0.0, 0.0)
    frame_px: tuple[int, int] = (1, 1)
    speed: tuple[float, float] = (0.0, 0.0)  # pixels a second
    colours: Signature | None = None
    best: View | None = None
    person: Person | None = None

    def see(self, now_s: float, detection: Detection, frame: Frame) -> None:
        """The track was found again."""
        if self.hits == 0:
            self.first_box = detection.box_px
        elif now_s > self.last_s:
            (x0, y0), (x1, y1) = middle(self.box), middle(detection.box_px)
            elapsed = now_s - self.last_s
            vx, vy = self.speed
            self.speed = (
                vx + _SPEED_WEIGHT * ((x1 - x0) / elapsed - vx),
                vy + _SPEED_WEIGHT * ((y1 - y0) / elapsed - vy),
            )
        self.hits += 1
        self.visible = True
        self.last_s = now_s
        self.box = detection.box_px
        self.confidence = detection.confidence
        x1, y1, x2, y2 = detection.box_px
        self.frame_px = frame.width_px, frame.height_px
        self.frame_box = (x1 / frame.width_px, y1 / frame.height_px, x2 / frame.width_px, y2 / frame.height_px)

    def learn(self, colours: Signature | None) -> None:
        """Fold one look's colours into the track's."""
        if colours is not None:
            self.colours = colours if self.colours is None else self.colours + _LEARN * (colours - self.colours)

    def shown(self, confirm_detections: int) -> PersonState:
        """What can be seen of the track's person, or of the track until it is confirmed."""
        if self.person is not None:
            return self.person.shown()
        return PersonState(
            person_id="",
            track_id=self.track_id,
            state="new",
            reason=f"seen {self.hits} of {confirm_detections} times",
            box=self.frame_box,
            confidence=self.confidence,
            first_seen_s=self.first_s,
            last_seen_s=self.last_s,
            visible=True,
            track_ids=(self.track_id,),
            descriptions=0,
        )


@dataclass(slots=True, eq=False)
class Person:
    """One person over all their tracks."""

    person_id: str
    first_seen_s: float
    over: bool = False  # what they were seen in is over: they cannot come back
    track_id: int = 0
    track_ids: list[int] = field(default_factory=list)
    last_track: Track | None = None
    last_seen_s: float = 0.0
    visible: bool = True
    state: TrackState = "watched"
    reason: str = ""
    last_problem: str = ""
    best: View | None = None
    wanted_since_s: float | None = None  # a description is wanted, and not asked for yet
    pending: bool = False  # a request is waiting or running
    leaving: bool = False  # it was asked to be cancelled
    given_up: bool = False
    missed: bool = False  # left while nobody could be picked; over when they are seen again
    tries: int = 0
    retry_at_s: float | None = None
    descriptions: int = 0
    described_s: float | None = None
    scene_described: Signature | None = None
    scene_now: Signature | None = None

    def say(self, state: TrackState, reason: str) -> None:
        """Set what can be seen of this person's fate."""
        self.state = state
        self.reason = reason

    def adopt(self, track: Track) -> None:
        """`track` is this person."""
        track.person = self
        self.track_id = track.track_id
        self.track_ids.append(track.track_id)
        self.last_track = track
        self.last_seen_s = track.last_s
        self.visible = True
        self.missed = False
        views = [view for view in (self.best, track.best) if view is not None]
        self.best = max(views, key=lambda view: (view.quality.good, view.quality.score), default=None)
        track.best = None

    def shown(self) -> PersonState:
        """What can be seen of this person."""
        track = self.last_track
        return PersonState(
            person_id=self.person_id,
            track_id=self.track_id,
            state=self.state,
            reason=self.reason,
            box=track.frame_box if track is not None else (0.0, 0.0, 0.0, 0.0),
            confidence=track.confidence if track is not None else 0.0,
            first_seen_s=self.first_seen_s,
            last_seen_s=self.last_seen_s,
            visible=self.visible,
            track_ids=tuple(self.track_ids),
            descriptions=self.descriptions,
        )


def middle(box: Box) -> tuple[float, float]:
    """Centre of a box."""
    return (box[0] + box[2]) / 2, (box[1] + box[3]) / 2


def began_in_time(person: Person, found: Track, window_s: float) -> bool:
    """Whether a new track began after the person was lost, and at most `window_s` later."""
    return 0 < found.first_s - person.last_seen_s <= window_s


def join_cost(
    person: Person,
    found: Track,
    config: TriggerConfig,
    alike: Callable[[Signature, Signature], float],
) -> float | None:
    """How badly a new track fits a lost person; None when it cannot be them.

    It can when it began within `reentry_window_s` after the person was lost, within `reentry_distance` box heights of
    where they were last or would have walked to, at about their size, and looks like them by `reentry_similarity`.
    The picture may have changed its size in between.
    """
    lost = person.last_track
    if lost is None or not began_in_time(person, found, config.reentry_window_s):
        return None
    gap_s = found.first_s - person.last_seen_s
    wider, higher = (new / old for new, old in zip(found.frame_px, lost.frame_px, strict=True))
    before, after = (lost.box[3] - lost.box[1]) * higher, found.first_box[3] - found.first_box[1]
    if before <= 0 or after <= 0 or max(before, after) / min(before, after) > _MAX_GROWTH:
        return None
    (x0, y0), (x1, y1) = middle(lost.box), middle(found.first_box)
    x0, y0 = x0 * wider, y0 * higher
    walked = min(gap_s, _FORESEE_S)
    px, py = x0 + lost.speed[0] * wider * walked, y0 + lost.speed[1] * higher * walked
    away = min(((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5, ((x1 - px) ** 2 + (y1 - py) ** 2) ** 0.5)
    distance = away / ((before + after) / 2)
    if distance > config.reentry_distance:
        return None
    if lost.colours is None or found.colours is None:
        return None
    likeness = alike(lost.colours, found.colours)
    needed = config.reentry_similarity - (_MOMENT_EASE if gap_s <= _MOMENT_S and distance < 0.5 else 0.0)
    return None if likeness < needed else distance / 2 + (1 - likeness)


def exchange_if_swapped(
    one: Track,
    other: Track,
    looks: tuple[Signature | None, Signature | None],
    alike: Callable[[Signature, Signature], float],
) -> None:
    """Give two tracks each other's person when their present `looks` say that they changed places."""
    now_one, now_other = looks
    if one.person is None or other.person is None or one.person is other.person:
        return
    if one.colours is None or other.colours is None or now_one is None or now_other is None:
        return
    stayed = alike(now_one, one.colours) + alike(now_other, other.colours)
    swapped = alike(now_one, other.colours) + alike(now_other, one.colours)
    if swapped - stayed < _SWAP_MARGIN:
        return
    first, second = one.person, other.person
    one.colours, other.colours = now_one, now_other
    first.best = second.best = None  # may show the other one
    first.adopt(other)
    second.adopt(one)
