"""A camera, stream, folder or file as timestamped frames, read by a process of its own that can be killed.

with open_source(camera, settings) as reader:
    index = -1
    while not reader.status().finished:
        frame = reader.wait_frame(index, timeout_s=1.0)
        if frame is not None:
            index = frame.index
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, Literal

from pipeline.addresses import kind_of, mask_source
from pipeline.childprocess import ChildLog, start_child
from pipeline.config import CameraConfig, SourceConfig
from pipeline.frame import Frame
from pipeline.reader_process import ReaderSettings
from pipeline.readerstatus import ReaderStatus
from pipeline.sharedframes import SharedFrames
from pipeline.sourcecheck import check_source
from pipeline.webcams import list_webcams
from serving.records import now_s

__all__ = ["CameraReader", "Frame", "ReaderStatus", "list_webcams", "mask_source", "open_source"]

_START_TIMEOUT_S = 60.0  # a Python process on a machine that is busy
_GRACE_S = 1.0  # the reader's own time-outs come first; then it is killed
_END_S = 0.2
_STOP_S = 5.0
_FILE_TRIES = 3  # restarts of a file's reader without a new frame in between
_AGES = 512
_RATE_WINDOW_S = 5.0


@dataclass(frozen=True, slots=True)
class _Published:
    """A frame that lies in shared memory."""

    index: int
    shape: tuple[int, int, int]
    arrived_s: float
    media_s: float | None
    scene: int
    cut: int


class _ReaderError(Exception):
    """One connection is over; `fatal`: trying again is of no use."""

    def __init__(self, detail: str, *, fatal: bool = False) -> None:
        super().__init__(detail)
        self.fatal = fatal


def open_source(camera: CameraConfig, settings: SourceConfig, log_name: str = "reader") -> CameraReader:
    """Start reading `camera`; returns at once and never raises for what the source does: see `CameraReader.status`.

    `log_name` names the reader's log, where there is a run folder.
    """
    return CameraReader(camera, settings, ChildLog(log_name))


class CameraReader:
    """One camera's reader process, watched, killed when it hangs, and started again.

    Live sources and files at their own pace: `wait_frame` gives the newest frame, nothing queues up. With
    `SourceConfig.as_fast_as_possible` a file that is played once gives every frame in turn, and reading waits for
    whoever takes them.
    All methods may be called from any thread.
    """

    def __init__(self, camera: CameraConfig, settings: SourceConfig, log: ChildLog) -> None:
        self.camera = camera
        self._settings = settings
        self._log = log
        self._changed = threading.Condition()
        self._status = ReaderStatus("connecting")
        self._newest: _Published | None = None
        self._pending: deque[_Published] = deque()
        self._taken = -1
        self._took = 0
        self._arrivals: deque[float] = deque()
        self._ages: deque[float] = deque(maxlen=_AGES)
        self._stop = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._frames = SharedFrames(settings.max_side_px * settings.max_side_px * 3)
        self._every = settings.as_fast_as_possible and not camera.loop
        self._resume: dict[str, Any] = {}
        self._live = True
        self._local = False
        self._thread = threading.Thread(target=self._supervise, name=f"reader {camera.name}", daemon=True)
        self._thread.start()

    def __enter__(self) -> CameraReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """The reader process, while there is one."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def wait_frame(self, after_index: int, timeout_s: float) -> Frame | None:
        """The newest frame whose index is above `after_index`, or the next one in turn when every frame counts.

        Returns None when none came within `timeout_s`, or none will come (`status().finished`).
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                frame = self._take(after_index)
                if frame is not None:
                    return frame
                left = deadline - time.monotonic()
                if left <= 0 or self._status.finished or self._stop.is_set():
                    return None
                self._changed.wait(left)

    def newest(self) -> Frame | None:
        """The newest frame, seen or not, without taking it; None before the first."""
        with self._changed:
            published = self._newest
        return self._copy(published) if published is not None else None

    def status(self) -> ReaderStatus:
        """How reading goes, now."""
        with self._changed:
            now = time.monotonic()
            while self._arrivals and now - self._arrivals[0] > _RATE_WINDOW_S:
                self._arrivals.popleft()
            spread = self._arrivals[-1] - self._arrivals[0] if len(self._arrivals) > 1 else 0.0
            ages = sorted(self._ages)
            return replace(
                self._status,
                fps=(len(self._arrivals) - 1) / spread if spread > 0 else None,
                frame_age_p95_ms=ages[min(len(ages) - 1, int(0.95 * len(ages)))] * 1000 if ages else None,
                dropped=max(0, self._status.frames - self._took - len(self._pending)) if not self._every else 0,
            )

    def close(self) -> None:
        """Stop reading; the process is gone when this returns (at most after a few seconds)."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        process = self._process
        if process is not None:
            process.kill()  # the supervising thread sees its end and cleans up
        self._thread.join(timeout=_STOP_S)
        with self._changed:
            if not self._status.finished:
                self._status = replace(self._status, state="ended", finished=True, detail="closed")
            self._changed.notify_all()
        self._frames.close()

    # Taking frames

    def _take(self, after_index: int) -> Frame | None:
        if self._every:
            while self._pending:
                published = self._pending.popleft()
                frame = self._copy(published)
                self._make_room()
                self._changed.notify_all()
                if frame is not None:
                    self._took += 1
                    return frame
            return None
        for _ in range(3):  # the writer may overtake a copy; then the newer frame is wanted anyway
            newest = self._newest
            if newest is None or newest.index <= after_index:
                return None
            frame = self._copy(newest)
            if frame is not None:
                if newest.index > self._taken:
                    self._taken = newest.index
                    self._took += 1
                self._ages.append(max(0.0, now_s() - frame.arrived_s))
                return frame
        return None

    def _copy(self, published: _Published) -> Frame | None:
        image = self._frames.read(published.index, published.shape)
        if image is None:
            return None
        return Frame(image, published.index, published.arrived_s, published.media_s, published.scene, published.cut)

    def _make_room(self) -> None:
        process = self._process
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # it died; the supervising thread sees that
                os.write(process.stdin.fileno(), b"+")

    # The supervising thread

    def _supervise(self) -> None:
        backoff = self._settings.reconnect_backoff_s
        tries = 0
        while not self._stop.is_set():
            before = self._status.frames
            try:
                settings = self._reader_settings()
                self._read(settings)
            except _ReaderError as error:
                detail, fatal = mask_source(str(error)), error.fatal
            except OSError as error:  # no process to be had: memory, process or descriptor limits
                detail, fatal = f"the reader process cannot be started: {error.strerror}", False
            except ValueError:
                if not self._stop.is_set():  # else `close` took the pipes away while they were in use
                    raise
                return
            else:
                self._finish("ended", "", failed=False)
                return
            finally:
                self._end_process()
            if self._stop.is_set():
                return
            progressed = self._status.frames > before
            tries = 1 if progressed else tries + 1
            backoff = self._settings.reconnect_backoff_s if progressed else backoff
            if fatal or (not self._live and tries >= _FILE_TRIES):
                self._finish("ended", detail, failed=True)
                return
            self._set("lost", f"{detail}; next try in {backoff:.0f} s")
            self._stop.wait(backoff)
            backoff = min(backoff * 2, self._settings.reconnect_backoff_max_s)
            with self._changed:
                self._status = replace(self._status, reconnects=self._status.reconnects + 1)

    def _finish(self, state: Literal["ended"], detail: str, *, failed: bool) -> None:
        with self._changed:
            self._status = replace(self._status, state=state, detail=detail, finished=True, failed=failed)
            self._changed.notify_all()

    def _set(self, state: Literal["connecting", "live", "lost"], detail: str) -> None:
        with self._changed:
            self._status = replace(self._status, state=state, detail=detail)
            self._changed.notify_all()

    def _reader_settings(self) -> ReaderSettings:
        camera, settings = self.camera, self._settings
        problem = check_source(camera)
        if problem is not None:
            raise _ReaderError(problem, fatal=True)
        kind, source = kind_of(camera.source), camera.source
        if kind == "sample":
            self._set("connecting", "making the sample video")
            from samples.video import SampleVideoError, ensure_video  # noqa: PLC0415 - only where it is asked for

            try:
                kind, source = "file", str(ensure_video(source))
            except SampleVideoError as error:
                raise _ReaderError(str(error), fatal=True) from error
        self._live = kind in ("webcam", "url")
        self._local = kind in ("file", "pictures")
        newest = self._newest
        return ReaderSettings(
            kind=kind,
            source=source,
            username=camera.username,
            password_env=camera.password_env,
            rotate=camera.rotate,
            loop=camera.loop,
            every_frame=self._every and not self._live,
            open_timeout_s=settings.open_timeout_s,
            read_timeout_s=settings.read_timeout_s,
            max_side_px=settings.max_side_px,
            picture_s=settings.picture_s,
            first_index=newest.index + 1 if newest is not None else 0,
            first_scene=newest.scene + (1 if self._live else 0) if newest is not None else 0,
            # A file behind a URL is found to be one only while it is read, and begins anew.
            first_cut=newest.cut + int(self._live and not self._resume["live"]) if newest is not None else 0,
            media_base_s=self._resume.get("base_s", 0.0),
            skip=0 if self._live else self._resume.get("number", 0),
        )

    def _read(self, settings: ReaderSettings) -> None:
        """Run one reader process to its end.

        Raises:
            _ReaderError: It failed, hung or died.
        """
        with self._changed:
            self._every = settings.every_frame
            while self._pending and not self._stop.is_set():  # a new reader would write over frames not yet taken
                self._changed.wait(1.0)
        self._set("connecting", "")
        process = start_child("pipeline.reader_process", self._frames.fd, self._log)
        self._process = process
        if self._stop.is_set():  # `close` may have looked for the process before it was there
            return
        stdin, stdout = process.stdin, process.stdout
        if stdin is None or stdout is None:  # asked for above; for the type checker
            return
        try:
            stdin.write(settings.to_json().encode() + b"\n")
        except BrokenPipeError:
            raise _ReaderError("the reader process did not start") from None
        patience, waiting_for = _START_TIMEOUT_S, "the reader process did not start"
        buffer = b""
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while not self._stop.is_set():
                if not selector.select(patience):
                    raise _ReaderError(f"{waiting_for} within {patience - _GRACE_S:g} s: reader killed")
                data = os.read(stdout.fileno(), 65536)
                if not data:
                    raise _ReaderError(f"the reader process died ({self._log.ending(process.wait())})")
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    event = json.loads(line)
                    if event["event"] == "end":
                        return
                    if event["event"] == "hello":
                        patience, waiting_for = settings.open_timeout_s + _GRACE_S, "could not be opened"
                    elif event["event"] == "open":
                        self._live = event["live"]
                        patience, waiting_for = settings.read_timeout_s + _GRACE_S, "no picture came"
                    self._handle(event)

    def _handle(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "error":  # what a file of ours says of itself will not change by asking again
            raise _ReaderError(event["why"], fatal=self._local)
        if kind == "frame":
            published = _Published(
                index=event["index"],
                shape=(event["height"], event["width"], 3),
                arrived_s=now_s() - (time.monotonic() - event["arrived"]),
                media_s=event["media_s"],
                scene=event["scene"],
                cut=event["cut"],
            )
            self._resume = {"base_s": event["base_s"], "number": event["number"], "live": self._live}
            with self._changed:
                self._newest = published
                if self._every:
                    self._pending.append(published)
                self._arrivals.append(event["arrived"])
                while self._arrivals and event["arrived"] - self._arrivals[0] > _RATE_WINDOW_S:
                    self._arrivals.popleft()
                self._status = replace(
                    self._status,
                    state="live",
                    detail="",
                    frames=self._status.frames + 1,
                    width_px=event["width"],
                    height_px=event["height"],
                )
                self._changed.notify_all()
        elif kind == "damaged":
            self._resume = {"base_s": event["base_s"], "number": event["number"], "live": self._live}
            with self._changed:
                detail = f"picture skipped: {event['why']}"
                self._status = replace(self._status, damaged=self._status.damaged + 1, detail=detail)

    def _end_process(self) -> None:
        """Ask the process to end by closing its stdin, then kill it. For the supervising thread only."""
        process = self._process
        if process is None:
            return
        if process.stdin is not None:
            with self._changed:  # not while `wait_frame` writes to it
                process.stdin.close()
        try:
            process.wait(timeout=0 if self._stop.is_set() else _END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
