"""The detector in a process of its own, so that its work and torch stay out of the service's process.

`DetectorProcess` is the near side; `python -m pipeline.detect_process FD` the far one: settings and requests as lines
on stdin, answers on stdout, pictures through shared memory. The far side ends when its stdin closes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

import cv2
import numpy as np

from pipeline.childprocess import ChildLog, start_child
from pipeline.config import DetectConfig
from pipeline.detector import Detector, DetectorError
from pipeline.frame import Detection, Image
from pipeline.sharedframes import SharedFrames
from pipeline.weights import WeightsError

_START_TIMEOUT_S = 240.0  # importing torch on a machine that is busy; the weights may be downloaded in it
_TRACK_TIMEOUT_S = 30.0
_MAX_SIDE_PX = 4096  # larger pictures are scaled down on the way
_DEATHS, _DEATHS_WITHIN_S, _REST_S = 3, 120.0, 30.0


@dataclass(frozen=True, slots=True)
class DetectorStatus:
    """How the detector does. `restarts` counts processes started after the first."""

    state: Literal["starting", "ready", "failed"]
    detail: str = ""
    weights_used: str = ""
    warning: str = ""
    restarts: int = 0


class _DiedError(DetectorError):
    """The process ended by itself."""


class DetectorProcess:
    """The surface of `Detector`, from any thread; cameras take turns.

    The process starts at once, in the background; `track` waits for it. When it dies or hangs it is started again, and
    the camera's tracks begin anew; when it keeps dying it rests for 30 s in between.
    """

    def __init__(self, config: DetectConfig) -> None:
        self.config = config
        self._lock = threading.Lock()
        self._status = DetectorStatus("starting", "loading the detector")
        self._frames = SharedFrames(_MAX_SIDE_PX * _MAX_SIDE_PX * 3)
        self._log = ChildLog("detector")
        self._index = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._deaths: deque[float] = deque(maxlen=_DEATHS)
        self._rest_until = 0.0
        self._starts = 0
        self._closed = False
        self._first = threading.Thread(target=self._start_early, name="detector start", daemon=True)
        self._first.start()

    def __enter__(self) -> DetectorProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def weights_used(self) -> str:
        """The file that was loaded; "" until then."""
        return self._status.weights_used

    @property
    def warning(self) -> str:
        """Something the user should see; "" otherwise."""
        return self._status.warning

    @property
    def pid(self) -> int | None:
        """The process, while there is one."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def status(self) -> DetectorStatus:
        """How it does, without waiting."""
        return self._status

    def wait_ready(self, timeout_s: float) -> DetectorStatus:
        """Wait until it is ready or has failed, at most so long."""
        deadline = time.monotonic() + timeout_s
        while self._status.state == "starting" and time.monotonic() < deadline and not self._closed:
            self._first.join(0.1) if self._first.is_alive() else time.sleep(0.05)
        return self._status

    def track(self, camera_id: str, image: Image, *, scene: int = 0) -> list[Detection]:
        """The people in the next picture of `camera_id`; see `Detector.track`.

        Raises:
            DetectorError: The process could not be started, died, or did not answer in time.
        """
        factor = min(1.0, _MAX_SIDE_PX / max(image.shape[:2]))
        if factor < 1.0:
            image = np.asarray(cv2.resize(image, None, fx=factor, fy=factor, interpolation=cv2.INTER_AREA), np.uint8)
        with self._lock:
            self._index += 1
            self._frames.write(self._index, image)
            request = {"camera": camera_id, "index": self._index, "shape": image.shape, "scene": scene}
            try:
                answer = self._ask(self._running(), request, _TRACK_TIMEOUT_S)
            except _DiedError:  # between two calls, or in this one: once more with a new process
                answer = self._ask(self._running(), request, _TRACK_TIMEOUT_S)
        if "error" in answer:
            raise DetectorError(answer["error"])
        found = []
        for track_id, (x1, y1, x2, y2), confidence in answer["people"]:
            found.append(Detection(track_id, (x1 / factor, y1 / factor, x2 / factor, y2 / factor), confidence))
        return found

    def forget(self, camera_id: str) -> None:
        """The camera was removed."""
        with self._lock:
            if self.pid is not None and self._process is not None:
                self._ask(self._process, {"forget": camera_id}, _TRACK_TIMEOUT_S)

    def close(self) -> None:
        """End the process."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._end()
        self._frames.close()

    # Below: with the lock held

    def _start_early(self) -> None:
        with self._lock, contextlib.suppress(DetectorError):  # the status says so, and `track` tries again
            self._running()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise DetectorError("the detector is closed")
        if self._process is not None and self._process.poll() is None:
            self._log.keep_small()
            return self._process
        if self._process is not None:
            self._died(f"the detector died ({self._log.ending(self._process.returncode)})")
        left = self._rest_until - time.monotonic()
        if left > 0:
            again = f"; next try in {left:.0f} s" if left < float("inf") else ""
            raise DetectorError(f"{self._status.detail}{again}")
        return self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        restarts = self._starts
        self._starts += 1
        self._status = DetectorStatus("starting", "loading the detector", restarts=restarts)
        self._buffer = b""
        process = start_child("pipeline.detect_process", self._frames.fd, self._log)
        self._process = process
        answer = self._ask(process, self.config.model_dump(mode="json"), _START_TIMEOUT_S)
        if "error" in answer:
            self._died(answer["error"])
            self._rest_until = float("inf")  # the same weights would fail again
            raise DetectorError(answer["error"])
        self._status = DetectorStatus(
            "ready", weights_used=answer["weights_used"], warning=answer["warning"], restarts=restarts
        )
        return process

    def _ask(self, process: subprocess.Popen[bytes], message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send one line and wait for the answer.

        Raises:
            DetectorError: It died or took too long; it is dead then.
        """
        if process.stdin is None or process.stdout is None:
            raise DetectorError("the detector has no pipes")
        with contextlib.suppress(BrokenPipeError, ValueError):  # the missing answer tells
            process.stdin.write(json.dumps(message).encode() + b"\n")
        deadline = time.monotonic() + timeout_s
        hung = False
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    detail = f"the detector did not answer within {timeout_s:.0f} s and was killed"
                    hung = True
                    break
                data = os.read(process.stdout.fileno(), 65536)
                if not data:
                    detail = f"the detector died ({self._log.ending(process.wait())})"
                    break
                self._buffer += data
        line, newline, rest = self._buffer.partition(b"\n")
        if not newline:
            self._died(detail)
            raise DetectorError(detail) if hung else _DiedError(detail)
        self._buffer = rest
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _died(self, detail: str) -> None:
        self._end()
        now = time.monotonic()
        self._deaths.append(now)
        if len(self._deaths) == _DEATHS and now - self._deaths[0] < _DEATHS_WITHIN_S:
            self._rest_until = now + _REST_S
        self._status = DetectorStatus("failed", detail, restarts=self._status.restarts)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _serve(detector: Detector, frames: SharedFrames, request: dict[str, Any]) -> dict[str, Any]:
    if "forget" in request:
        detector.forget(request["forget"])
        return {}
    image = frames.slot(request["index"], tuple(request["shape"]))  # stays as it is until we answer
    people = detector.track(request["camera"], image, scene=request["scene"])
    return {"people": [[p.track_id, p.box_px, p.confidence] for p in people]}


def main() -> None:
    """Load the model, then answer requests until stdin closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable(all_threads=False)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin.buffer:
            requests.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()

    def answer(message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        try:
            answers.write(data)
        except BrokenPipeError:
            os._exit(0)

    config = DetectConfig.model_validate(requests.get())
    frames = SharedFrames(_MAX_SIDE_PX * _MAX_SIDE_PX * 3, fd=int(sys.argv[1]))
    try:
        cv2.setNumThreads(1)
        detector = Detector(config)
    except (DetectorError, WeightsError) as error:
        answer({"error": str(error)})
        os._exit(1)
    answer({"weights_used": detector.weights_used, "warning": detector.warning})
    while True:
        request = requests.get()
        try:
            answer(_serve(detector, frames, request))
        except Exception as error:  # one bad picture must not end detection; said in one line, the rest in the log
            traceback.print_exc()
            answer({"error": f"detection failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"})


if __name__ == "__main__":
    main()
