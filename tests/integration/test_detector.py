"""The real model with the bundled weights, in its own process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import psutil
import pytest

from pipeline import detect_process
from pipeline.config import DetectConfig
from pipeline.detect import Detector, DetectorError, DetectorProcess
from pipeline.frame import Image
from pipeline.weights import ultralytics_environment

READY_S = 120.0
SURE = 0.1  # what the bundled weights, which are small, are sure enough of; the tests are about the way there
CONFIG = DetectConfig(weights="sample", confidence=SURE)


def _assets() -> Path:
    import ultralytics  # noqa: F401 - to find its folder

    return Path(sys.modules["ultralytics"].__file__ or "").parent / "assets"


@pytest.fixture(scope="module")
def people() -> Image:
    """A real photograph with several people."""
    os.environ.update(ultralytics_environment())
    image = cv2.imread(str(_assets() / "bus.jpg"))
    return np.asarray(image, np.uint8)


@pytest.fixture(scope="module")
def detector() -> Iterator[DetectorProcess]:
    with DetectorProcess(CONFIG) as process:
        status = process.wait_ready(READY_S)
        assert status.state == "ready", status
        yield process


def test_people_are_found_and_keep_their_tracks(detector: DetectorProcess, people: Image) -> None:
    first = detector.track("a", people)
    assert first
    height, width = people.shape[:2]
    for person in first:
        x1, y1, x2, y2 = person.box_px
        assert 0 <= x1 < x2 <= width
        assert 0 <= y1 < y2 <= height
        assert SURE <= person.confidence <= 1
        assert y2 - y1 > x2 - x1  # people stand
    second = detector.track("a", people)
    assert {p.track_id for p in first} == {p.track_id for p in second}


def test_cameras_have_tracks_of_their_own(detector: DetectorProcess, people: Image) -> None:
    assert detector.track("empty", np.full_like(people, 90)) == []
    one = detector.track("b", people)
    other = detector.track("c", people)
    assert [p.track_id for p in one] == [p.track_id for p in other]
    detector.forget("b")
    assert len(detector.track("b", people)) == len(one)


def test_a_new_scene_has_new_tracks(detector: DetectorProcess, people: Image) -> None:
    before = detector.track("d", people, scene=0)
    after = detector.track("d", people, scene=1)
    assert not {p.track_id for p in before} & {p.track_id for p in after}
    assert len(after) == len(before)


def test_sizes_may_change_and_large_pictures_are_scaled(detector: DetectorProcess, people: Image) -> None:
    normal = detector.track("e", people)
    large = np.asarray(cv2.resize(people, None, fx=5, fy=5), np.uint8)
    found = detector.track("e", large, scene=1)
    assert len(found) >= len(normal) - 1
    assert found
    assert max(p.box_px[3] for p in found) > people.shape[0]


def test_several_threads_take_turns(detector: DetectorProcess, people: Image) -> None:
    counts: dict[str, list[int]] = {}

    def watch(name: str) -> None:
        counts[name] = [len(detector.track(name, people)) for _ in range(3)]

    threads = [threading.Thread(target=watch, args=(f"t{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len({tuple(count) for count in counts.values()}) == 1
    assert len(counts) == 4


def test_nothing_of_torch_or_torchvision_is_loaded_here_and_no_torchvision_there(detector: DetectorProcess) -> None:
    assert detector.pid is not None
    there = Path(f"/proc/{detector.pid}/maps").read_text()
    assert "libtorch" in there
    assert "torchvision" not in there  # the NMS-free head needs none of it
    threads = psutil.Process(detector.pid).num_threads()
    assert threads < 40


def test_a_killed_detector_is_started_again(detector: DetectorProcess, people: Image) -> None:
    before = len(detector.track("f", people))
    assert detector.pid is not None
    os.kill(detector.pid, signal.SIGKILL)
    time.sleep(0.2)
    assert len(detector.track("f", people)) == before
    assert detector.status().state == "ready"
    assert detector.status().restarts >= 1


def test_one_that_hangs_is_killed_in_bounded_time(
    detector: DetectorProcess, people: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    detector.track("g", people)
    pid = detector.pid
    assert pid is not None
    monkeypatch.setattr(detect_process, "_TRACK_TIMEOUT_S", 1.0)
    os.kill(pid, signal.SIGSTOP)
    begun = time.monotonic()
    with pytest.raises(DetectorError, match="did not answer"):
        detector.track("g", people)
    assert time.monotonic() - begun < 5
    assert not psutil.pid_exists(pid)
    monkeypatch.undo()
    assert detector.track("g", people)


def test_weights_that_are_a_program_are_refused_and_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    script = (
        "import os, sys, torch\n"
        "class Evil:\n"
        "    def __reduce__(self): return (os.system, (f'touch {sys.argv[2]}',))\n"
        "torch.save({'model': Evil()}, sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "evil.pt"), str(marker)], check=True)
    with DetectorProcess(DetectConfig(weights=str(tmp_path / "evil.pt"))) as process:
        status = process.wait_ready(READY_S)
        assert status.state == "failed"
        assert "cannot be loaded" in status.detail
        with pytest.raises(DetectorError, match="cannot be loaded"):
            process.track("a", np.zeros((64, 64, 3), np.uint8))
    assert not marker.exists()


def test_unknown_weights_are_said_in_one_line() -> None:
    with DetectorProcess(DetectConfig(weights="no-such-file.pt")) as process:
        status = process.wait_ready(READY_S)
    assert status.state == "failed"
    assert "no-such-file.pt" in status.detail
    assert "\n" not in status.detail


def test_the_process_ends_with_its_parent() -> None:
    script = (
        "import time; from pipeline.config import DetectConfig; from pipeline.detect import DetectorProcess\n"
        "p = DetectorProcess(DetectConfig(weights='sample'))\n"
        "while p.pid is None: time.sleep(0.01)\n"
        "print(p.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate(timeout=10)
    deadline = time.monotonic() + 30
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_botsort_tracks_too_and_asks_for_no_download(people: Image) -> None:
    with DetectorProcess(DetectConfig(weights="sample", tracker="botsort", confidence=SURE)) as process:
        assert process.wait_ready(READY_S).state == "ready"
        first = process.track("a", people)
        second = process.track("a", people)
    assert {p.track_id for p in first} == {p.track_id for p in second}
    assert first


def test_in_process_and_beside_find_the_same(detector: DetectorProcess, people: Image) -> None:
    with Detector(CONFIG) as here:
        mine = here.track("same", people)
        assert here.weights_used == detector.weights_used
    theirs = detector.track("same", people)
    assert [p.box_px for p in mine] == [pytest.approx(p.box_px, abs=1.0) for p in theirs]
