"""The logs of reader and detector processes: where they lie, what is in them, how small they stay."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline import childprocess, detect_process
from pipeline.childprocess import LOG_FOLDER_VARIABLE, ChildLog, logs_in, start_child
from pipeline.config import CameraConfig, DetectConfig, SourceConfig
from pipeline.detect import DetectorProcess
from pipeline.reader_process import OwnLog, ReaderSettings
from pipeline.source import open_source
from tests.videos import numbered, write_video

SMALL = SourceConfig(max_side_px=512, reconnect_backoff_s=0.1, reconnect_backoff_max_s=0.2)
CRASH = "import sys\ndef work():\n    raise RuntimeError('no such device')\nwork()\n"


@pytest.fixture
def frames_fd(tmp_path: Path) -> Iterator[int]:
    """Stands where the frames' descriptor does."""
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Makes a module that a child can run."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def make(code: str) -> str:
        (tmp_path / "crashing.py").write_text(code)
        return "crashing"

    return make


def wait_for(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


def end_of(process: subprocess.Popen[bytes]) -> int:
    process.communicate(timeout=30)
    return process.returncode


def test_a_traceback_is_kept_and_its_last_line_told(
    tmp_path: Path, frames_fd: int, module: Callable[[str], str]
) -> None:
    with logs_in(tmp_path):
        log = ChildLog("reader-door")
    assert LOG_FOLDER_VARIABLE not in os.environ
    assert log.ending(end_of(start_child(module(CRASH), frames_fd, log))) == (
        "exit code 1: RuntimeError: no such device"
    )
    text = (tmp_path / "reader-door.log").read_text()
    assert text.splitlines()[0].endswith(" started")
    assert "in work" in text
    # The next child appends, and the cause is its own.
    code = end_of(start_child(module("import os; os.kill(os.getpid(), 9)"), frames_fd, log))
    assert log.ending(code) == "signal 9"
    assert "in work" in (tmp_path / "reader-door.log").read_text()


def test_without_a_run_folder_there_is_no_log(tmp_path: Path, frames_fd: int, module: Callable[[str], str]) -> None:
    log = ChildLog("reader-door")
    assert log.path is None
    assert log.ending(end_of(start_child(module(CRASH), frames_fd, log))) == "exit code 1"


def test_a_log_that_cannot_be_written_keeps_no_child_from_starting(
    tmp_path: Path, frames_fd: int, module: Callable[[str], str]
) -> None:
    with logs_in(tmp_path / "gone"):
        log = ChildLog("detector")
    assert log.ending(end_of(start_child(module(CRASH), frames_fd, log))) == "exit code 1"


def test_a_noisy_child_does_not_fill_the_disk(
    tmp_path: Path, frames_fd: int, module: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(childprocess, "_MAX_LOG_BYTES", 5000)
    write = "    print('x' * 999, file=sys.stderr, flush=True)"
    noisy = f"import sys\nfor line in sys.stdin:\n{write}\nsys.exit('ValueError: why')"
    with logs_in(tmp_path):
        log = ChildLog("detector")
    path = tmp_path / "detector.log"
    with start_child(module(noisy), frames_fd, log) as process:
        assert process.stdin is not None
        for number in range(8):
            process.stdin.write(b"\n")
            lines = number % 5 + 1  # the fifth makes it too long
            wait_for(lambda lines=lines: path.read_text().count("x" * 999) == lines)
            log.keep_small()
        process.stdin.close()
        assert log.ending(process.wait(30)) == "exit code 1: ValueError: why"
    assert path.read_bytes().count(b"\0") == 0, "written at the end, wherever that is now"


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("Input/output error: 'rtsp://joe:p%40%2F%20w@cam/live'", id="in an address"),
        pytest.param("p%40%2F%20w alone", id="as it is in an address"),
        pytest.param("raw: p@/ w", id="as it is in the environment"),
        pytest.param("Traceback\n  http://cam/a?x=1&pass=p%40%2F%20w\nValueError", id="in a query, among lines"),
    ],
)
def test_no_password_gets_into_the_readers_log(tmp_path: Path, text: str) -> None:
    settings = ReaderSettings("url", "rtsp://cam/live", "joe", "PW", 0, False, False, 1, 1, 512, 1)
    with (tmp_path / "log").open("wb") as file:
        log = OwnLog(file.fileno())
        log.hide_password_of(settings, {"PW": "p@/ w"})
        log.write(text)
    written = (tmp_path / "log").read_text()
    assert "***" in written
    assert "p@/ w" not in written
    assert "p%40" not in written


def test_a_readers_crash_is_told_with_the_place_in_its_log(tmp_path: Path) -> None:
    path = write_video(tmp_path / "v.mp4", [numbered(i) for i in range(40)])
    camera = CameraConfig(name="c", source=str(path), loop=True)
    with logs_in(tmp_path), open_source(camera, SMALL, "reader-door") as reader:
        assert reader.wait_frame(-1, 30) is not None
        assert reader.pid is not None
        os.kill(reader.pid, signal.SIGSEGV)
        wait_for(lambda: reader.status().state == "lost" and "died" in reader.status().detail)
        assert "signal 11: error: Segmentation fault" in reader.status().detail
    assert "reader_process.py" in (tmp_path / "reader-door.log").read_text()


def test_what_ended_a_camera_is_in_its_log(tmp_path: Path) -> None:
    (tmp_path / "v.mp4").write_text("no video")
    with logs_in(tmp_path), open_source(CameraConfig(name="c", source=str(tmp_path / "v.mp4")), SMALL) as reader:
        wait_for(lambda: reader.status().finished)
        assert reader.status().detail in (tmp_path / "reader.log").read_text()


def test_the_detectors_crash_is_in_its_status(
    tmp_path: Path, module: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    crashing = module(CRASH)
    monkeypatch.setattr(detect_process, "start_child", lambda _module, fd, log: start_child(crashing, fd, log))
    with logs_in(tmp_path), DetectorProcess(DetectConfig(weights="sample")) as detector:
        status = detector.wait_ready(30)
    assert (status.state, status.detail) == (
        "failed",
        "the detector died (exit code 1: RuntimeError: no such device)",
    )
    assert "in work" in (tmp_path / "detector.log").read_text()
