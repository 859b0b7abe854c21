"""One camera at work: frames in, people found and tracked, the worthwhile ones handed to the describer.

A thread of its own detects at `detect.rate_hz`; the picture for the live view is read beside it, at any rate.
"""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections import deque
from dataclasses import replace
from typing import Protocol

from pipeline.addresses import is_local
from pipeline.api import CameraState, CameraView, DescriptionView, PersonView, TrackView
from pipeline.config import CameraConfig, Config
from pipeline.decisions import Decision
from pipeline.describe import kept_margin, pictures, thumbnail
from pipeline.describer import Describer, Job, new_description_id
from pipeline.detect import DetectorError
from pipeline.frame import Detection, Frame, Image
from pipeline.source import CameraReader, mask_source, open_source
from pipeline.trigger import Trigger
from serving.records import now_s

_FRAME_WAIT_S = 0.5
_ROOM_WAIT_S = 0.05
_DETECTOR_RETRY_S = 2.0
_RATE_WINDOW_S = 5.0
_STALE_S = 1.0  # unseen so long, people may be anywhere
_LONGEST_GAP_S = 5.0
_SCENES_PER_READER = 1_000_000
_numbers = itertools.count()


class PeopleDetector(Protocol):
    """What finds people (`pipeline.detect`); shared by every camera."""

    def track(self, camera_id: str, image: Image, *, scene: int = ...) -> list[Detection]: ...  # noqa: D102


def camera_id_of(name: str) -> str:
    """A name as part of a URL: `Front door` is `front-door`."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "camera"


def plays_out(camera: CameraConfig) -> bool:
    """Whether the source is one that ends: a file, folder or picture, not played in a loop."""
    return is_local(camera.source) and not camera.loop


class CameraWorker:
    """Reads, detects and triggers for one camera. Every method may be called from any thread.

    Args:
        camera_id: Unique among the cameras of a service.
        detector: Shared with other cameras.
        describer: Where people worth a description go.
    """

    def __init__(
        self, camera_id: str, camera: CameraConfig, config: Config, detector: PeopleDetector, describer: Describer
    ) -> None:
        self.camera_id = camera_id
        self.camera = camera
        self._config = config
        self._detector = detector
        self._describer = describer
        # A camera of this id may be there again before the detector has forgotten the one that was removed.
        self.detector_id = f"{camera_id} {next(_numbers)}"
        self._batch = config.source.as_fast_as_possible and plays_out(camera)
        self._trigger = Trigger(
            config.trigger,
            prefix=f"{camera_id}-",
            keep_margin=kept_margin(config.describe),
            batch=self._batch,
            # People in a file that plays but once do not come again: they wait in the queue instead.
            may_pick=(lambda: True) if plays_out(camera) else describer.takes,
        )
        self._reader: CameraReader | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._paused = False
        self._scene = 0
        self._ended = threading.Event()
        self._problem = ""
        self._detections: deque[float] = deque()
        self._period_s = 1.0 / config.detect.rate_hz
        self._looked_s, self._gap_s = float("-inf"), 0.0
        self._thread = threading.Thread(target=self._work, name=f"camera {camera_id}", daemon=True)

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def stop(self) -> None:
        """Have it end. Returns at once; from then on nothing is asked for, or given up, in its name."""
        with self._lock:
            self._stop.set()
        self._wake.set()

    def close(self) -> None:
        """Stop reading and detecting. Blocks for a few seconds at most; descriptions under way are left alone."""
        self.stop()
        self._close_reader()
        if self._thread.ident is not None:
            self._thread.join(timeout=10)

    def pause(self, paused: bool) -> None:
        """Let go of the camera, or open it again (a file starts again at its beginning, also one that has ended)."""
        self._paused = paused
        if not paused:
            self._ended.clear()
        self._wake.set()

    def go_on(self) -> None:
        """Take a pause back; a source that has ended is not played again."""
        self._paused = False
        self._wake.set()

    @property
    def paused(self) -> bool:
        """It was told to pause."""
        return self._paused

    @property
    def ended(self) -> bool:
        """The source has ended, and everyone in it has been decided on."""
        return self._ended.is_set()

    @property
    def failure(self) -> str:
        """Why the source ended before its end; empty when it did not."""
        reader = self._reader
        status = None if reader is None else reader.status()
        return status.detail if status is not None and status.failed else ""

    def frame(self) -> Frame | None:
        """The newest frame; None while there is none or the camera is paused. Copies it: not for the event loop."""
        reader = self._reader
        return None if reader is None or self._paused else reader.newest()

    def tracks(self) -> list[TrackView]:
        """The people in the picture now, and what is being done about each."""
        if self._stale():  # also while the thread waits for a detector that starts again
            return []
        return [
            TrackView(
                track_id=person.track_id,
                person_id=person.person_id,
                box=_clipped(person.box),
                confidence=round(person.confidence, 3),
                state=person.state,
                reason=person.reason,
            )
            for person in self._trigger.tracks()
        ]

    def people(self) -> list[PersonView]:
        """Those seen lately, the ones still watched first."""
        return [
            PersonView(
                person_id=person.person_id,
                track_ids=person.track_ids,
                state=person.state,
                reason=person.reason,
                box=_clipped(person.box),
                first_seen_s=person.first_seen_s,
                last_seen_s=person.last_seen_s,
                visible=person.visible,
                descriptions=person.descriptions,
            )
            for person in self._trigger.people()
        ]

    def view(self) -> CameraView:
        """State and figures, as the status shows them."""
        reader = self._reader
        paused = self._paused and not self.ended
        counts = self._trigger.counts()
        base = CameraView(
            camera_id=self.camera_id,
            name=self.camera.name,
            source=mask_source(self.camera.source),
            state="paused" if paused else "connecting",
            people_seen=counts.seen,
            people_described=counts.described,
            people_not_described=counts.not_described,
            people_unconfirmed=counts.unconfirmed,
        )
        if reader is None or paused:
            return base
        status = reader.status()
        state: CameraState = status.state
        return base.model_copy(
            update={
                "state": state,
                "detail": self._problem or status.detail,
                "width_px": status.width_px,
                "height_px": status.height_px,
                "frames": status.frames,
                "frames_dropped": status.dropped,
                "frames_damaged": status.damaged,
                "source_fps": status.fps,
                "detect_fps": self._detect_fps(),
                "frame_age_p95_ms": status.frame_age_p95_ms,
                "reconnects": status.reconnects,
                "tracks": self.tracks() if state == "live" else [],
            }
        )

    # --- the camera's thread -----------------------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._stop.is_set():
            self._wake.clear()
            reader = None if self._paused or self.ended else self._open()
            if reader is not None:
                self._watch(reader)
                if self._paused:
                    finished = reader.status().finished  # at its end, just before that was noticed
                    self._act(self._trigger.flush(now_s()))
                    if finished:
                        self._ended.set()
                    else:
                        self._close_reader()
            if not self._stop.is_set():
                self._wake.wait()

    def _open(self) -> CameraReader | None:
        """A new reader; None when told to stop."""
        self._close_reader()
        with self._lock:
            if self._stop.is_set():
                return None
            if self._reader is not None:
                self._scene += _SCENES_PER_READER  # a new reader counts its scenes from 0 again
            self._reader = open_source(self.camera, self._config.source, f"reader-{self.camera_id}")
            return self._reader

    def _close_reader(self) -> None:
        reader = self._reader
        if reader is not None:
            reader.close()

    def _watch(self, reader: CameraReader) -> None:
        """Detect until the source ends, or until told to stop or pause."""
        period_s = self._period_s
        index, next_s, next_media_s = -1, time.monotonic(), 0.0
        while not (self._stop.is_set() or self._paused):
            if self._batch and not self._describer.has_room():
                self._stop.wait(_ROOM_WAIT_S)  # nothing is lost: the reader waits for us
                continue
            if not self._batch:
                self._stop.wait(max(0.0, next_s - time.monotonic()))
            frame = reader.wait_frame(index, _FRAME_WAIT_S)
            if frame is None:
                status = reader.status()
                if status.finished:
                    self._act(self._trigger.flush(now_s()))
                    self._ended.set()
                    return
                if status.state != "live" or self._stale():
                    self._act(self._trigger.tick(now_s()))
                continue
            index = frame.index
            if self._batch and frame.media_s is not None:
                if frame.media_s < next_media_s:
                    continue
                next_media_s = max(next_media_s + period_s, frame.media_s)
            next_s = max(next_s + period_s, time.monotonic())
            self._look(replace(frame, scene=frame.scene + self._scene, cut=frame.cut + self._scene))

    def _look(self, frame: Frame) -> None:
        try:
            found = self._detector.track(self.detector_id, frame.image, scene=frame.scene)
        except DetectorError as error:
            if not self._stop.is_set():
                self._problem = f"no detection: {error}"
            self._act(self._trigger.tick(now_s()))
            self._stop.wait(_DETECTOR_RETRY_S)
            return
        self._problem = ""
        looked_s = time.monotonic()
        self._looked_s, self._gap_s = looked_s, looked_s - self._looked_s
        self._detections.append(looked_s)
        self._act(self._trigger.update(frame, found, now_s()))

    def _stale(self) -> bool:
        """Nobody has looked for longer than usual: where people were then says nothing about now."""
        usual_s = max(self._period_s, min(self._gap_s, _LONGEST_GAP_S))
        return not self._batch and time.monotonic() - self._looked_s > max(_STALE_S, 2 * usual_s)

    def _act(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            # One picture, or the end of the file, may decide on more people than there is room for.
            while self._batch and decision.view is not None and not (self._describer.has_room() or self._stop.is_set()):
                self._stop.wait(_ROOM_WAIT_S)
            job = self._job(decision) if decision.view is not None else None
            with self._lock:  # whoever removes the camera relies on nothing coming after `stop`
                if self._stop.is_set():
                    return
                if job is not None:
                    self._describer.submit(job)
                elif decision.kind == "cancel":
                    self._describer.cancel(self.camera_id, decision.person_id, decision.reason)

    def _job(self, decision: Decision) -> Job:
        view = decision.view
        if view is None:
            raise ValueError("a description needs a view")
        description_id = new_description_id()
        shown = DescriptionView(
            description_id=description_id,
            camera_id=self.camera_id,
            camera=self.camera.name,
            person_id=decision.person_id,
            track_id=decision.track_id,
            state="waiting",
            frame_s=view.arrived_s,
            due_s=decision.due_s,
            frame_age_ms=(decision.due_s - view.arrived_s) * 1000,
            box=_clipped(view.frame_box),
            thumbnail=f"/thumbnails/{description_id}.jpg",
        )
        return Job(
            view=shown,
            jpegs=pictures(view.image, view.box_px, self._config.describe),
            thumbnail=thumbnail(view.image, view.box_px, self._config.store.thumbnail_side_px),
            feedback=self._trigger,
        )

    def _detect_fps(self) -> float | None:
        horizon = time.monotonic() - _RATE_WINDOW_S
        times = [at for at in tuple(self._detections) if at >= horizon]
        while len(self._detections) > len(times):
            self._detections.popleft()
        return (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 and times[-1] > times[0] else None


def _clipped(box: tuple[float, float, float, float]) -> tuple[float, float, float, float]:
    x1, y1, x2, y2 = (round(min(1.0, max(0.0, value)), 5) for value in box)
    return x1, y1, x2, y2
