"""Which person, in which frame, is worth a description, and why the others were not.

Pure logic: no clock, no threads, no model. Every frame's detections go in, decisions come out; what became of a
decision is told back by `waiting`, `describing`, `finished` and `dropped`.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import combinations

from pipeline.api import TrackState
from pipeline.appearance import signature, similarity, surroundings
from pipeline.config import TriggerConfig
from pipeline.decisions import Decision, PersonState, TriggerCounts
from pipeline.frame import Box, Detection, Frame
from pipeline.people import LEFT_AFTER_S, Person, Track, began_in_time, exchange_if_swapped, join_cost
from pipeline.views import judge, overlap_by_others, take_view

_MAX_TRIES = 3
_HISTORY = 256
_APART_OVERLAP = 0.05  # two people who met have parted


class Trigger:
    """Decides which people of one camera are described.

    Args:
        config: The thresholds.
        prefix: Put before person ids, to make them unique among cameras.
        keep_margin: A view keeps the box and so many box heights around it; None keeps the whole frame.
        batch: Files played as fast as possible: time is the position in the file, and nothing is cancelled for age.
        may_pick: Whether the model server can take a request. While it cannot, nobody is picked, for a person is due
            from then on; the newest good view of them is kept, and who leaves meanwhile is counted with that reason.

    All methods may be called from any thread.
    """

    def __init__(
        self,
        config: TriggerConfig,
        *,
        prefix: str = "",
        keep_margin: float | None = None,
        batch: bool = False,
        may_pick: Callable[[], bool] = lambda: True,
    ) -> None:
        self._config = config
        self._prefix = prefix
        self._keep_margin = keep_margin
        self._batch = batch
        self._may_pick = may_pick
        self._lock = threading.RLock()
        self._tracks: dict[int, Track] = {}
        self._people: dict[str, Person] = {}
        self._history: deque[PersonState] = deque(maxlen=_HISTORY)
        self._next_person = 1
        self._scene, self._cut = 0, 0  # of the newest frame
        self._together: set[tuple[int, int]] = set()  # tracks that overlap, the lower id first
        self._now_s = 0.0
        self._counts: Counter[str] = Counter()
        self._not_described: Counter[str] = Counter()

    def update(self, frame: Frame, detections: Sequence[Detection], now_s: float | None = None) -> list[Decision]:
        """Take in one frame's people.

        Args:
            frame: The frame that `detections` were found in.
            detections: Every tracked person in it; boxes without an area are ignored.
            now_s: The present (`serving.records.now_s`), for `Decision.due_s`; default: the frame's arrival.
        """
        with self._lock:
            due_s = frame.arrived_s if now_s is None else now_s
            clock = frame.media_s if self._batch and frame.media_s is not None else frame.arrived_s
            self._now_s = max(self._now_s, clock)
            if (frame.scene, frame.cut) != (self._scene, self._cut):
                self._end_tracks(over=frame.cut != self._cut)
            self._scene, self._cut = frame.scene, frame.cut
            found = [d for d in detections if d.box_px[2] - d.box_px[0] >= 1 and d.box_px[3] - d.box_px[1] >= 1]
            for track in self._tracks.values():
                track.visible = any(detection.track_id == track.track_id for detection in found)
            self._undo_swaps(frame, found)
            for detection in found:
                self._see(frame, detection, [d.box_px for d in found if d is not detection])
            self._drop_old_tracks()
            for person in self._people.values():
                person.visible = person.last_track is not None and person.last_track.visible
            return self._decide(due_s)

    def tick(self, now_s: float) -> list[Decision]:
        """Let time pass without a frame (camera lost): deadlines and cancellations still happen."""
        with self._lock:
            if not self._batch:
                self._now_s = max(self._now_s, now_s)
                for track in self._tracks.values():
                    track.visible = False
                for person in self._people.values():
                    person.visible = False
                self._drop_old_tracks()
            return self._decide(now_s)

    def flush(self, now_s: float) -> list[Decision]:
        """The source has ended: everyone still waiting for a better view is decided now."""
        with self._lock:
            self._end_tracks(over=True)
            return self._decide(now_s)

    def waiting(self, person_id: str, reason: str = "waiting for a free slot") -> None:
        """The request has been queued."""
        self._feedback(person_id, "waiting", reason)

    def describing(self, person_id: str) -> None:
        """The request has been sent."""
        self._feedback(person_id, "describing", "being described")

    def finished(self, person_id: str, now_s: float) -> None:
        """The description is complete."""
        with self._lock:
            person = self._people.get(person_id)
            if person is None or not person.pending:
                return
            self._counts["described" if person.descriptions == 0 else "redescribed"] += 1
            person.descriptions += 1
            person.pending = person.leaving = False
            person.described_s = self._now_s if self._batch else now_s
            person.tries = 0
            person.say("described", "described")
            self._forget_if_over(person)

    def dropped(self, person_id: str, reason: str, now_s: float, *, retry: bool = True) -> None:
        """The request was not answered: `reason` in words. With `retry` it is asked again while the person is seen.

        Tried at most three times, `retry_after_s` apart.
        """
        with self._lock:
            person = self._people.get(person_id)
            if person is None or not person.pending:
                return
            # A request that ended by itself before it could be cancelled has its own reason, and may be asked again.
            person.say("skipped", f"cancelled: {reason}" if person.leaving and not retry else reason)
            person.pending = person.leaving = False
            again = retry and person.tries < _MAX_TRIES
            person.retry_at_s = (self._now_s if self._batch else now_s) + self._config.retry_after_s if again else None
            person.given_up = not again
            self._forget_if_over(person)

    def tracks(self) -> list[PersonState]:
        """Everyone in the newest frame, confirmed or not."""
        with self._lock:
            confirm = self._config.confirm_detections
            return [track.shown(confirm) for track in self._tracks.values() if track.visible]

    def people(self) -> list[PersonState]:
        """Everyone confirmed and not yet forgotten, then the last people forgotten, newest first."""
        with self._lock:
            present = sorted(self._people.values(), key=lambda person: -person.first_seen_s)
            return [person.shown() for person in present] + list(reversed(self._history))

    def counts(self) -> TriggerCounts:
        """Totals since the start."""
        with self._lock:
            return TriggerCounts(
                seen=self._counts["seen"],
                described=self._counts["described"],
                redescribed=self._counts["redescribed"],
                rejoined=self._counts["rejoined"],
                unconfirmed=self._counts["unconfirmed"],
                not_described=dict(self._not_described),
            )

    # Tracks and people

    def _see(self, frame: Frame, detection: Detection, others: list[Box]) -> None:
        now = self._now_s
        track = self._tracks.get(detection.track_id)
        if track is None:
            track = self._tracks[detection.track_id] = Track(detection.track_id, now)
        track.see(now, detection, frame)
        if track.colours is None or overlap_by_others(detection.box_px, others) < self._config.max_overlap:
            track.learn(signature(frame.image, detection.box_px))
        if track.person is None and track.hits >= self._config.confirm_detections:
            self._confirm(track)
        person = track.person
        if person is not None:
            person.track_id, person.last_track = track.track_id, track
            person.last_seen_s = now
            person.missed = False
            if self._config.rescene_change and (person.described_s is not None or person.pending):
                person.scene_now = surroundings(frame.image, detection.box_px)
            if not self._wants(person):
                return
        quality = judge(frame, detection, others, self._config)
        if person is not None:
            person.last_problem = quality.problem
        holder = track if person is None else person
        best = holder.best
        newest = quality.good and not self._may_pick()  # nobody is to be described from a view of minutes ago
        if best is None or newest or (quality.good, quality.score) > (best.quality.good, best.quality.score):
            holder.best = take_view(frame, detection, quality, self._keep_margin)

    def _confirm(self, track: Track) -> None:
        person = self._same_person(track)
        if person is None:
            person = Person(f"{self._prefix}{self._next_person}", track.first_s)
            self._next_person += 1
            self._people[person.person_id] = person
            self._counts["seen"] += 1
            person.say("watched", "waiting for a good view")
        else:
            self._counts["rejoined"] += 1
            if track.first_s - person.last_seen_s > LEFT_AFTER_S:
                person.wanted_since_s = None  # they were away: good views have as long as ever to come
        person.adopt(track)

    def _same_person(self, track: Track) -> Person | None:
        """Who, of the people lost lately, this new track is; None when nobody fits."""
        best, best_cost = None, float("inf")
        for person in self._people.values():
            if person.over or (person.last_track is not None and person.last_track.visible):
                continue
            cost = join_cost(person, track, self._config, similarity)
            if cost is not None and cost < best_cost:
                best, best_cost = person, cost
        return best

    def _undo_swaps(self, frame: Frame, found: Sequence[Detection]) -> None:
        """Where two people have just passed each other and their tracks changed places, put the people right.

        Colours are not learnt while people overlap, so a track still has those from before; when each of the two now
        looks clearly more like the other, they are exchanged.
        """
        boxes = {d.track_id: d.box_px for d in found if d.track_id in self._tracks}
        for pair in [pair for pair in self._together if not (pair[0] in self._tracks and pair[1] in self._tracks)]:
            self._together.discard(pair)
        for one, other in combinations(sorted(boxes), 2):
            overlap = max(overlap_by_others(boxes[one], [boxes[other]]), overlap_by_others(boxes[other], [boxes[one]]))
            if overlap > self._config.max_overlap:
                self._together.add((one, other))
            elif (one, other) in self._together and overlap < _APART_OVERLAP:
                self._together.discard((one, other))
                looks = signature(frame.image, boxes[one]), signature(frame.image, boxes[other])
                exchange_if_swapped(self._tracks[one], self._tracks[other], looks, similarity)

    def _drop_old_tracks(self) -> None:
        horizon = self._now_s - max(self._config.reentry_window_s, LEFT_AFTER_S)
        for track_id in [t.track_id for t in self._tracks.values() if t.last_s < horizon]:
            track = self._tracks.pop(track_id)
            if track.person is None:
                self._counts["unconfirmed"] += 1

    def _end_tracks(self, *, over: bool) -> None:
        """The picture does not go on from the one before; `over`: and nobody in it can come back."""
        for track in self._tracks.values():
            track.visible = False
            if track.person is None:
                self._counts["unconfirmed"] += 1
        self._tracks.clear()
        self._together.clear()
        for person in self._people.values():
            person.visible = False
            person.over = person.over or over

    def _may_be_back(self, person: Person) -> bool:
        """A track that is not confirmed yet began in time to be this person."""
        seen_s = self._now_s - LEFT_AFTER_S
        new = [track for track in self._tracks.values() if track.person is None and track.last_s >= seen_s]
        return not person.over and any(began_in_time(person, track, self._config.reentry_window_s) for track in new)

    # Decisions

    def _wants(self, person: Person) -> bool:
        """A description of this person is wanted now. Since when is kept, and only views from then on."""
        wanted = self._is_due(person)
        if not wanted:
            person.wanted_since_s = person.best = None
        elif person.wanted_since_s is None:
            person.wanted_since_s = self._now_s
        return wanted

    def _is_due(self, person: Person) -> bool:
        if person.pending or person.given_up:
            return False
        if person.retry_at_s is not None:
            return self._now_s >= person.retry_at_s
        if person.described_s is None:
            return True
        return self._again(person) != ""

    def _again(self, person: Person) -> str:
        """Why somebody already described is to be described again; empty when not."""
        since = self._now_s - (person.described_s or 0.0)
        if self._config.cooldown_s and since >= self._config.cooldown_s:
            return "described again: cool-down over"
        if self._config.rescene_change and since >= self._config.max_wait_s:
            before, now = person.scene_described, person.scene_now
            if before is not None and now is not None and 1.0 - similarity(before, now) >= self._config.rescene_change:
                return "described again: the scene around the person changed"
        return ""

    def _decide(self, due_s: float) -> list[Decision]:
        decisions = []
        may_pick = self._may_pick()
        for person in list(self._people.values()):
            gone_s = self._now_s - person.last_seen_s
            if person.pending:
                if not (self._batch or person.leaving) and gone_s > self._config.cancel_after_gone_s:
                    reason = f"left {gone_s:.0f} s ago"
                    decisions.append(Decision("cancel", person.person_id, person.track_id, reason, due_s))
                    person.leaving = True  # whether it was cancelled, `dropped` or `finished` says
                continue
            if person.over:
                gone_s = float("inf")
            if self._wants(person) and not person.missed:
                reason = self._why_now(person, gone_s)
                if reason and person.best is not None and not may_pick:
                    if gone_s > LEFT_AFTER_S:
                        person.best, person.missed = None, True
                        person.say("skipped", "left before the model server was ready")
                    else:
                        person.say("watched", "waiting for the model server")
                elif reason and person.best is not None:
                    decisions.append(self._describe(person, reason, due_s))
                    continue
            if gone_s > max(self._config.reentry_window_s, LEFT_AFTER_S) and not self._may_be_back(person):
                self._forget(person)
        return decisions

    def _why_now(self, person: Person, gone_s: float) -> str:
        """Why this person is described at this moment; empty: not yet, and `person.reason` says why not."""
        best = person.best
        if best is not None and best.quality.good:
            return self._again(person) or "a good view"
        waited = 0.0 if person.wanted_since_s is None else self._now_s - person.wanted_since_s
        problem = best.quality.problem if best is not None else "no view"
        late = waited >= self._config.max_wait_s
        if best is not None and best.quality.usable and (late or gone_s > LEFT_AFTER_S):
            when = f"after {waited:.0f} s" if late else "left"
            return "; ".join(filter(None, [self._again(person), f"{when}, the best view so far: {problem}"]))
        if person.described_s is None and person.retry_at_s is None:
            if gone_s > LEFT_AFTER_S:
                person.say("skipped", f"left before a good view: {problem}")
            else:
                person.say("watched", f"waiting for a good view: {person.last_problem or problem}")
        return ""

    def _describe(self, person: Person, reason: str, due_s: float) -> Decision:
        view = person.best
        again = person.described_s is not None
        person.best = None
        person.pending = True
        person.retry_at_s = None
        person.tries += 1
        person.scene_described = person.scene_now
        if view is not None and self._config.rescene_change and person.scene_described is None:
            person.scene_described = surroundings(view.image, view.box_px)
        person.say("waiting", f"picked: {reason}")
        track_id = view.track_id if view is not None else person.track_id
        return Decision("describe", person.person_id, track_id, reason, due_s, view, again)

    def _forget(self, person: Person) -> None:
        if person.descriptions == 0:
            self._not_described[person.reason.split(":")[0].split("(")[0].strip()] += 1
        self._history.append(person.shown())
        del self._people[person.person_id]
        for track_id in [t.track_id for t in self._tracks.values() if t.person is person]:
            del self._tracks[track_id]

    def _forget_if_over(self, person: Person) -> None:
        """There may be no frame any more that would have it done."""
        if person.over:
            self._forget(person)

    def _feedback(self, person_id: str, state: TrackState, reason: str) -> None:
        with self._lock:
            person = self._people.get(person_id)
            if person is not None and person.pending:
                person.say(state, reason)
