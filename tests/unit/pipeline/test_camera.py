"""One camera at work, with a reader, a detector and a describer that do what the test says."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from pipeline.camera import CameraWorker, camera_id_of, plays_out
from pipeline.config import CameraConfig, Config
from pipeline.describer import Describer, Job
from pipeline.detect import DetectorError
from pipeline.frame import Detection, Frame, Image
from pipeline.readerstatus import ReaderStatus
from serving.records import now_s

PICTURE = np.random.default_rng(1).integers(0, 255, (240, 320, 3), dtype=np.uint8)
WELL_SEEN, CUT = (100.0, 60.0, 150.0, 200.0), (0.0, 60.0, 50.0, 200.0)
STALE_S = 0.4


class Reader:
    """Gives the frames that the test puts in; live until it is said to be finished."""

    def __init__(self) -> None:
        self.frames: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self.index = 0
        self.finished = self.closed = False

    def put(self) -> None:
        self.index += 1
        self.frames.put(Frame(PICTURE, self.index, now_s()))

    def wait_frame(self, _after_index: int, timeout_s: float) -> Frame | None:
        try:
            return self.frames.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def newest(self) -> Frame | None:
        return None

    def status(self) -> ReaderStatus:
        done = self.finished or self.closed
        return ReaderStatus("ended" if done else "live", finished=done)

    def close(self) -> None:
        self.closed = True


class Parts:
    """What surrounds the worker: it stands for the detector and the describer, and opens readers."""

    def __init__(self) -> None:
        self.box = WELL_SEEN
        self.broken = False
        self.looks = 0
        self.go = threading.Event()  # cleared: the detector does not answer
        self.go.set()
        self.readers: list[Reader] = []
        self.jobs: list[Job] = []
        self.cancelled: list[str] = []

    def open_source(self, *_: object) -> Reader:
        self.readers.append(Reader())
        return self.readers[-1]

    def track(self, _camera_id: str, _image: Image, *, scene: int = 0) -> list[Detection]:
        self.looks += 1
        self.go.wait(10)
        if self.broken:
            raise DetectorError("the detector died")
        return [Detection(1, self.box, 0.9)]

    def submit(self, job: Job) -> None:
        self.jobs.append(job)

    def cancel(self, _camera_id: str, _person_id: str | None, reason: str) -> None:
        self.cancelled.append(reason)

    def takes(self) -> bool:
        return True

    has_room = takes


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Parts]:
    found = Parts()
    monkeypatch.setattr("pipeline.camera.open_source", found.open_source)
    monkeypatch.setattr("pipeline.camera._STALE_S", STALE_S)
    monkeypatch.setattr("pipeline.camera._FRAME_WAIT_S", 0.01)
    monkeypatch.setattr("pipeline.camera._DETECTOR_RETRY_S", 0.01)
    yield found
    found.go.set()


@pytest.fixture
def start(parts: Parts) -> Iterator[Callable[..., CameraWorker]]:
    workers = []

    def make(source: str = "rtsp://cam/live", **trigger: Any) -> CameraWorker:
        limits = {"confirm_detections": 1, "min_sharpness": 0, "cancel_after_gone_s": 0.3, **trigger}
        config = Config.model_validate({"trigger": limits, "detect": {"rate_hz": 240}})
        camera = CameraConfig(name="Yard", source=source)
        worker = CameraWorker("yard", camera, config, parts, cast(Describer, parts))
        workers.append(worker)
        worker.start()
        wait_for(lambda: parts.readers)
        return worker

    yield make
    parts.go.set()
    for worker in workers:
        worker.close()


def wait_for(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.005)


def look(parts: Parts, times: int = 2) -> None:
    """Let the worker look at so many pictures."""
    for _ in range(times):
        before = parts.looks
        parts.readers[-1].put()
        wait_for(lambda before=before: parts.looks > before)


Start = Callable[..., CameraWorker]


def test_a_live_camera_that_shows_nothing_keeps_no_boxes_and_cancels(parts: Parts, start: Start) -> None:
    worker = start()
    look(parts)
    wait_for(lambda: parts.jobs)
    assert [track.person_id for track in worker.tracks()] == ["yard-1"]
    wait_for(lambda: parts.cancelled)  # its lens is covered: it is live, and no picture can be used
    assert parts.cancelled[0].startswith("left ")
    assert (worker.view().state, worker.view().tracks) == ("live", [])


def test_the_deadline_is_kept_while_a_live_camera_shows_nothing(parts: Parts, start: Start) -> None:
    start(max_wait_s=0.3)
    parts.box = CUT
    look(parts)
    assert parts.jobs == []
    wait_for(lambda: parts.jobs)


def test_while_detection_fails_no_box_stays_on_the_moving_picture(parts: Parts, start: Start) -> None:
    worker = start()
    look(parts)
    wait_for(lambda: parts.jobs)
    parts.broken = True
    look(parts)
    wait_for(lambda: not worker.tracks())
    assert worker.view().detail == "no detection: the detector died"
    wait_for(lambda: look(parts, 1) or parts.cancelled)
    parts.broken = False
    look(parts)
    wait_for(worker.tracks)
    assert worker.view().detail == ""


def test_while_the_detector_does_not_answer_no_box_stays_either(parts: Parts, start: Start) -> None:
    worker = start()
    look(parts)
    wait_for(worker.tracks)
    parts.go.clear()
    look(parts, 1)
    wait_for(lambda: not worker.tracks())
    parts.go.set()
    wait_for(worker.tracks)


def test_boxes_stay_between_the_pictures_of_a_slow_source(parts: Parts, start: Start) -> None:
    worker = start(cancel_after_gone_s=60)
    for _ in range(2):
        look(parts, 1)
        wait_for(worker.tracks)
        time.sleep(1.5 * STALE_S)
        assert worker.tracks()


def test_a_pause_that_is_taken_back_at_once_does_not_play_a_file_twice(parts: Parts, start: Start) -> None:
    worker = start("yard.mp4")
    parts.go.clear()
    look(parts, 1)  # the worker is busy, and sees nothing of the pause
    worker.pause(True)
    worker.pause(False)
    parts.readers[0].finished = True
    parts.go.set()
    wait_for(lambda: worker.ended)
    time.sleep(0.1)
    assert worker.ended
    assert len(parts.readers) == 1


def test_a_file_that_has_ended_is_played_again_only_when_asked(parts: Parts, start: Start) -> None:
    worker = start("yard.mp4")
    parts.readers[0].finished = True
    wait_for(lambda: worker.ended)
    worker.pause(True)
    worker.go_on()
    time.sleep(0.1)
    assert (worker.ended, worker.view().state, len(parts.readers)) == (True, "ended", 1)
    worker.pause(True)
    worker.pause(False)
    wait_for(lambda: len(parts.readers) == 2)
    wait_for(lambda: not worker.ended)
    assert parts.readers[0].closed
    worker.pause(True)
    wait_for(lambda: parts.readers[1].closed)
    worker.go_on()
    wait_for(lambda: len(parts.readers) == 3)  # it was playing


def test_a_file_that_ends_in_the_moment_of_a_pause_has_ended(parts: Parts, start: Start) -> None:
    worker = start("yard.mp4")
    parts.go.clear()
    look(parts, 1)  # the worker is busy, and sees the pause before the end
    parts.readers[0].finished = True
    worker.pause(True)
    parts.go.set()
    wait_for(lambda: worker.ended)
    assert worker.view().state == "ended"
    worker.go_on()
    time.sleep(0.1)
    assert (worker.view().state, len(parts.readers)) == ("ended", 1)


def test_after_stop_nothing_is_asked_for(parts: Parts, start: Start) -> None:
    worker = start()
    parts.go.clear()
    look(parts, 1)
    worker.stop()
    parts.go.set()
    worker.close()
    assert (parts.jobs, parts.cancelled) == ([], [])
    assert parts.readers[0].closed


def test_a_worker_asks_no_file_system(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("is_dir", "exists", "stat"):
        monkeypatch.setattr(Path, name, lambda *_: pytest.fail("the file system was asked"))
    CameraWorker("a", CameraConfig(name="a", source="/mnt/dead/v"), Config(), parts, cast(Describer, parts))


@pytest.mark.parametrize(
    ("source", "loop", "ends"),
    [
        pytest.param("yard.mp4", False, True, id="file"),
        pytest.param("yard.mp4", True, False, id="file in a loop"),
        pytest.param("sample", False, True, id="sample"),
        pytest.param("0", False, False, id="webcam"),
        pytest.param("rtsp://cam/live", False, False, id="stream"),
        pytest.param("ftp://cam/live", False, False, id="no such kind"),
    ],
)
def test_which_sources_end(source: str, loop: bool, ends: bool) -> None:
    assert plays_out(CameraConfig(name="a", source=source, loop=loop)) == ends


@pytest.mark.parametrize(
    ("name", "camera_id"),
    [("Front door", "front-door"), ("-- A.1 --", "a-1"), ("Ümläut", "ml-ut"), ("…", "camera"), ("日本", "camera")],
)
def test_ids_are_parts_of_a_url(name: str, camera_id: str) -> None:
    assert camera_id_of(name) == camera_id
