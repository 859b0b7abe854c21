"""What the trigger says: whom to describe or to give up, how each person stands, and the totals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipeline.api import TrackState
from pipeline.frame import Box
from pipeline.views import View


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do about one person now.

    Attributes:
        kind: `describe`: ask for a description from `view`; `cancel`: give up the request for this person.
        person_id: Unique within the trigger's camera; stays the same over lost and found tracks.
        track_id: The track behind the view (describe), or the person's last one (cancel).
        reason: Why now, in words.
        due_s: When it was decided, on the clock of `serving.records.now_s`: the request's due time.
        view: What to describe; None for `cancel`.
        again: The person has been described before (cool-down over, or the scene changed).
    """

    kind: Literal["describe", "cancel"]
    person_id: str
    track_id: int
    reason: str
    due_s: float
    view: View | None = None
    again: bool = False


@dataclass(frozen=True, slots=True)
class PersonState:
    """A person as the trigger knows them. `reason` says in words why they are (not yet) described.

    `person_id` is empty until the track is confirmed. `box` is fractions of the frame's width and height. Times are
    on the trigger's clock: arrival times, or positions in the file in batch mode.
    """

    person_id: str
    track_id: int
    state: TrackState
    reason: str
    box: Box
    confidence: float
    first_seen_s: float
    last_seen_s: float
    visible: bool
    track_ids: tuple[int, ...]
    descriptions: int


@dataclass(frozen=True, slots=True)
class TriggerCounts:
    """Totals since the start. `not_described` counts people that are gone, by the kind of reason."""

    seen: int
    described: int
    redescribed: int
    rejoined: int
    unconfirmed: int
    not_described: dict[str, int]
