"""The reader process: every way a source behaves, or does not."""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import av
import numpy as np
import psutil
import pytest

from pipeline.config import CameraConfig, SourceConfig
from pipeline.frame import Frame
from pipeline.reader_process import ReaderSettings, address
from pipeline.readerstatus import ReaderStatus
from pipeline.source import CameraReader, open_source
from pipeline.sourcecheck import check_source
from serving.records import now_s
from tests.videos import jpeg, number_of, numbered, turn_in_metadata, write_video

SMALL = SourceConfig(max_side_px=512, reconnect_backoff_s=0.1, reconnect_backoff_max_s=0.2)
BATCH = SMALL.model_copy(update={"as_fast_as_possible": True})


def camera(source: str | Path, **more: object) -> CameraConfig:
    return CameraConfig.model_validate({"name": "c", "source": str(source), **more})


def wait_for(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


def play(
    source: str | Path,
    settings: SourceConfig = BATCH,
    *,
    count: int | None = None,
    pause_s: float = 0.0,
    **more: object,
) -> tuple[list[Frame], ReaderStatus]:
    """Every frame until the end (or `count`), and the status then."""
    frames: list[Frame] = []
    with open_source(camera(source, **more), settings) as reader:
        deadline = time.monotonic() + 30
        while count is None or len(frames) < count:
            assert time.monotonic() < deadline, reader.status()
            frame = reader.wait_frame(frames[-1].index if frames else -1, 0.2)
            if frame is not None:
                frames.append(frame)
                time.sleep(pause_s)
            elif reader.status().finished:
                break
        return frames, reader.status()


@pytest.fixture
def video(tmp_path: Path) -> Path:
    return write_video(tmp_path / "v.mp4", [numbered(i) for i in range(40)])


def test_batch_delivers_every_frame_to_a_slow_consumer(video: Path) -> None:
    frames, status = play(video, pause_s=0.01)
    assert [number_of(frame.image) for frame in frames] == list(range(40))
    assert [frame.index for frame in frames] == list(range(40))
    assert [frame.media_s for frame in frames] == pytest.approx([i / 25 for i in range(40)])
    assert all(b.arrived_s >= a.arrived_s for a, b in pairwise(frames))
    assert (status.state, status.failed, status.dropped, status.damaged) == ("ended", False, 0, 0)


def test_a_file_keeps_its_own_pace(tmp_path: Path) -> None:
    path = write_video(tmp_path / "v.mp4", [numbered(i) for i in range(10)], fps=20)
    frames, status = play(path, SMALL)
    assert frames[-1].arrived_s - frames[0].arrived_s >= 0.6 * 9 / 20
    assert status.frames == 10
    assert status.dropped == 10 - len(frames)


def test_only_the_newest_frame_is_given_and_its_age_known(tmp_path: Path) -> None:
    path = write_video(tmp_path / "v.mp4", [numbered(i) for i in range(60)], fps=20)
    with open_source(camera(path), SMALL) as reader:
        first = reader.wait_frame(-1, 20)
        assert first is not None
        wait_for(lambda: reader.status().frames >= first.index + 11)  # a consumer that is busy meanwhile
        second = reader.wait_frame(first.index, 5)
        assert second is not None
        assert second.index >= first.index + 10
        assert now_s() - second.arrived_s < 0.5
        assert reader.wait_frame(second.index + 1000, 0.05) is None
        newest = reader.newest()
        assert newest is not None
        assert newest.index >= second.index
        status = reader.status()
        assert status.frame_age_p95_ms is not None
        assert status.dropped >= 9
        assert status.fps == pytest.approx(20, rel=0.35)
        assert (status.width_px, status.height_px) == (160, 120)


@pytest.mark.parametrize("settings", [SMALL, BATCH], ids=["its own pace", "as fast as possible"])
def test_loop_goes_on_with_a_new_scene_and_waits_for_nobody(tmp_path: Path, settings: SourceConfig) -> None:
    """Of a file without an end the newest picture is wanted, however fast those with one are to be read."""
    path = write_video(tmp_path / "v.mp4", [numbered(i) for i in range(10)], fps=20)
    frames, status = play(path, settings, count=8, pause_s=0.15, loop=True)
    assert status.dropped >= 8
    assert [number_of(frame.image) for frame in frames] == [frame.index % 10 for frame in frames]
    assert [frame.scene for frame in frames] == [frame.index // 10 for frame in frames]
    assert [frame.cut for frame in frames] == [frame.scene for frame in frames]
    assert all((b.media_s or 0) > (a.media_s or 0) for a, b in pairwise(frames))


def test_uniform_pictures_are_skipped_and_counted(tmp_path: Path) -> None:
    blank = np.full((120, 160, 3), 90, np.uint8)
    path = write_video(
        tmp_path / "v.mp4", [numbered(1), blank, blank, numbered(2), blank, numbered(3)], options={"g": "1"}
    )
    frames, status = play(path)
    assert [number_of(frame.image) for frame in frames] == [1, 2, 3]
    assert status.damaged == 3


def test_size_changes_in_mid_stream_begin_a_new_scene(tmp_path: Path) -> None:
    path = tmp_path / "v.mjpeg"
    pictures = [numbered(i) for i in range(4)] + [numbered(i, 320, 240) for i in range(4, 8)] + [numbered(8)]
    path.write_bytes(b"".join(jpeg(picture) for picture in pictures))
    frames, status = play(path)
    assert [number_of(frame.image) for frame in frames] == list(range(9))
    assert [frame.image.shape[1] for frame in frames] == [160] * 4 + [320] * 4 + [160]
    assert [frame.scene for frame in frames] == [0] * 4 + [1] * 4 + [2]
    assert {frame.cut for frame in frames} == {0}
    assert not status.failed


@pytest.mark.parametrize("clockwise", [0, 90, 180, 270])
@pytest.mark.parametrize("by", ["metadata", "setting"])
def test_pictures_are_turned_upright(tmp_path: Path, clockwise: int, by: str) -> None:
    upright = np.random.default_rng(1).integers(90, 160, (64, 96, 3), np.uint8)
    upright[:20, :30] = (0, 0, 255)  # red at the top left
    stored = np.ascontiguousarray(np.rot90(upright, clockwise // 90))  # turned left; to be shown turned right
    path = write_video(tmp_path / "v.mp4", [stored] * 3)
    if by == "metadata" and clockwise:
        turn_in_metadata(path, clockwise)
    frames, _ = play(path, count=1, rotate=clockwise if by == "setting" else 0)
    image = frames[0].image
    assert image.shape == (64, 96, 3)
    blue, green, red = image[10, 10].tolist()
    assert red > 200
    assert max(blue, green) < 90


def test_a_folder_is_shown_picture_by_picture(tmp_path: Path) -> None:
    for number in (2, 10, 1):
        (tmp_path / f"{number}.jpg").write_bytes(jpeg(numbered(number)))
    frames, status = play(tmp_path, BATCH.model_copy(update={"picture_s": 0.4}))
    assert [number_of(frame.image) for frame in frames] == [1, 1, 2, 2, 10, 10]
    assert [frame.scene for frame in frames] == [0, 0, 1, 1, 2, 2]
    assert [frame.cut for frame in frames] == [0, 0, 1, 1, 2, 2]
    assert status.state == "ended"


def test_a_single_picture(tmp_path: Path) -> None:
    (tmp_path / "p.png").write_bytes(jpeg(numbered(5)))
    frames, status = play(tmp_path / "p.png", BATCH.model_copy(update={"picture_s": 0.2}))
    assert [number_of(frame.image) for frame in frames] == [5]
    assert not status.failed


@pytest.mark.parametrize(
    ("make", "detail"),
    [
        pytest.param(lambda path: None, "no such file", id="missing"),
        pytest.param(lambda path: path.write_text("hello"), "cannot be opened", id="text"),
        pytest.param(lambda path: path.write_bytes(b""), "cannot be opened", id="empty"),
    ],
)
def test_a_file_that_cannot_be_read_ends_with_the_reason(
    tmp_path: Path, make: Callable[[Path], object], detail: str
) -> None:
    make(tmp_path / "v.mp4")
    frames, status = play(tmp_path / "v.mp4")
    assert frames == []
    assert (status.state, status.finished, status.failed) == ("ended", True, True)
    assert detail in status.detail


def test_a_read_that_hangs_is_killed_and_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.source._GRACE_S", 0.1)
    os.mkfifo(tmp_path / "v.mp4")  # opening it blocks in the kernel
    settings = SMALL.model_copy(update={"open_timeout_s": 0.3})
    begun = time.monotonic()
    with open_source(camera(tmp_path / "v.mp4"), settings) as reader:
        wait_for(lambda: reader.pid is not None)
        pid = reader.pid
        wait_for(lambda: reader.status().finished)
        status = reader.status()
    assert status.failed
    assert "killed" in status.detail
    assert status.reconnects == 2
    assert pid is not None
    assert not psutil.pid_exists(pid)
    assert time.monotonic() - begun < 25


@contextlib.contextmanager
def hanging(pipe: Path) -> Iterator[None]:
    """Somebody reads from `pipe` and gets nothing."""
    writing: list[int] = []

    def has_a_reader() -> bool:
        with contextlib.suppress(OSError):  # ENXIO: nobody has opened it yet
            writing.append(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        return bool(writing)

    wait_for(has_a_reader)
    yield
    os.close(writing[0])


def test_closing_a_hung_reader_does_not_wait_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "v.mp4")
    reader = open_source(camera(tmp_path / "v.mp4"), SMALL)
    with hanging(tmp_path / "v.mp4"):
        pid = reader.pid
        begun = time.monotonic()
        reader.close()
        assert time.monotonic() - begun < 3
    assert pid is not None
    assert not psutil.pid_exists(pid)


def test_a_killed_reader_is_started_again_and_no_frame_is_lost_or_repeated(video: Path) -> None:
    numbers: list[int] = []
    with open_source(camera(video), BATCH) as reader:
        while not reader.status().finished or len(numbers) < 40:
            frame = reader.wait_frame(-1, 20)
            if frame is None:
                break
            numbers.append(number_of(frame.image))
            if len(numbers) == 15 and reader.pid is not None:
                os.kill(reader.pid, signal.SIGKILL)
        status = reader.status()
    assert numbers == list(range(40))
    assert status.reconnects == 1
    assert not status.failed


def _children(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def test_kill_9_of_the_parent_leaves_no_process_and_no_shared_memory(tmp_path: Path) -> None:
    path = write_video(tmp_path / "v.mp4", [numbered(i) for i in range(100)])
    before = {entry.name for entry in Path("/dev/shm").iterdir()}  # noqa: S108 - looked at, not written to
    script = (
        "import time; from pipeline.config import *; from pipeline.source import open_source\n"
        f"r = open_source(CameraConfig(name='c', source={str(path)!r}, loop=True), SourceConfig())\n"
        "r.wait_frame(-1, 30); print(r.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stderr is not None
    child = int(parent.stdout.readline())
    assert psutil.pid_exists(child)
    assert [process.pid for process in _children(parent.pid)] == [child]  # no resource tracker beside it
    parent.kill()
    _, errors = parent.communicate(timeout=10)
    wait_for(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE, 10)
    assert errors == ""
    assert {entry.name for entry in Path("/dev/shm").iterdir()} <= before  # noqa: S108


def test_nothing_is_left_open(video: Path) -> None:
    play(video, count=2)
    before = len(os.listdir("/proc/self/fd")), threading.active_count()  # noqa: PTH208
    for _ in range(3):
        play(video, count=2)
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before  # noqa: PTH208


def test_the_reader_process_loads_no_torch(video: Path) -> None:
    with open_source(camera(video, loop=True), SMALL) as reader:
        assert reader.wait_frame(-1, 20) is not None
        assert reader.pid is not None
        maps = Path(f"/proc/{reader.pid}/maps").read_text()
    assert "libtorch" not in maps


@pytest.mark.parametrize(
    ("source", "username", "expected"),
    [
        pytest.param("rtsp://cam/live", "admin", "rtsp://admin:p%40%2F%3A%20w@cam/live", id="user beside"),
        pytest.param(
            "rtsp://joe@cam:554/live", None, "rtsp://joe:p%40%2F%3A%20w@cam:554/live", id="user in the address"
        ),
        pytest.param("rtsp://joe@cam/live", "admin", "rtsp://admin:p%40%2F%3A%20w@cam/live", id="user beside wins"),
        pytest.param(
            "http://cam/a?password={password}", None, "http://cam/a?password=p%40%2F%3A%20w", id="placeholder"
        ),
        pytest.param("http://cam/x@y", "admin", "http://admin:p%40%2F%3A%20w@cam/x@y", id="at sign in the path"),
    ],
)
def test_the_password_is_put_into_the_address(source: str, username: str | None, expected: str) -> None:
    settings = ReaderSettings("url", source, username, "PW", 0, False, False, 1, 1, 512, 1)
    assert address(settings, {"PW": "p@/: w"}) == expected


def test_no_password_no_change() -> None:
    settings = ReaderSettings("url", "http://cam/x", None, None, 0, False, False, 1, 1, 512, 1)
    assert address(settings, {}) == "http://cam/x"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"source": "nowhere.mp4"}, "no such file", id="missing file"),
        pytest.param({"source": "ftp://a/b"}, "rtsp://", id="scheme"),
        pytest.param({"source": "rtsp://a/b", "password_env": "FC_NOT_SET"}, "FC_NOT_SET", id="variable not set"),
        pytest.param({"source": "0", "password_env": "PATH"}, "rtsp:// and http://", id="password for a webcam"),
    ],
)
def test_check_source_says_what_cannot_work(changes: dict[str, str], message: str) -> None:
    assert message in (check_source(camera(**changes)) or "")
    with open_source(camera(**changes), SMALL) as reader:
        wait_for(lambda: reader.status().finished, 5)
        assert reader.status().failed
        assert message in reader.status().detail


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    authorizations: list[str | None]
    connections = 0
    frames_a_connection = 12
    silent = False


class _Mjpeg(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        server = self.server
        server.connections += 1
        server.authorizations.append(self.headers.get("Authorization"))
        if self.headers.get("Authorization") is None and "open" not in self.path:
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="cam"')
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=next")
        self.end_headers()
        with contextlib.suppress(OSError):
            for number in range(server.frames_a_connection):
                part = jpeg(numbered(number))
                head = f"--next\r\nContent-Type: image/jpeg\r\nContent-Length: {len(part)}\r\n\r\n"
                self.wfile.write(head.encode() + part + b"\r\n")
                time.sleep(0.03)
            while server.silent:
                time.sleep(0.05)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def server() -> Iterator[_Server]:
    found = _Server(("127.0.0.1", 0), _Mjpeg)
    found.authorizations = []
    thread = threading.Thread(target=found.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield found
    found.silent = False
    found.shutdown()
    found.server_close()


def test_http_stream_with_a_password_that_is_nowhere_to_be_seen(
    server: _Server, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("FC_TEST_PW", "s3 cret/@:")
    source = f"http://127.0.0.1:{server.server_port}/mjpg"
    server.frames_a_connection = 200
    with open_source(camera(source, **{"username": "joe", "password_env": "FC_TEST_PW"}), SMALL) as reader:
        assert reader.wait_frame(-1, 20) is not None
        assert reader.pid is not None
        command = Path(f"/proc/{reader.pid}/cmdline").read_bytes()
        assert b"cret" not in command
        assert "cret" not in repr(reader.status())
    assert f"Basic {base64.b64encode(b'joe:s3 cret/@:').decode()}" in server.authorizations
    assert "cret" not in "".join(capfd.readouterr())


def test_wrong_password_is_said_without_the_address(server: _Server) -> None:
    with open_source(camera(f"http://127.0.0.1:{server.server_port}/mjpg"), SMALL) as reader:
        wait_for(lambda: reader.status().state == "lost")
        assert "401" in reader.status().detail
        assert not reader.status().finished


def test_a_live_stream_that_ends_is_connected_again_for_ever(server: _Server) -> None:
    with open_source(camera(f"http://127.0.0.1:{server.server_port}/open"), SMALL) as reader:
        wait_for(lambda: reader.status().reconnects >= 2, 30)
        wait_for(lambda: reader.status().state == "live")
        frame = reader.wait_frame(-1, 20)
        assert frame is not None
        assert frame.scene >= 2
        assert frame.cut == 0
        assert frame.media_s is None
        assert frame.index >= 16
        assert not reader.status().finished


class _Folder(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


def test_a_file_behind_an_address_begins_anew(tmp_path: Path) -> None:
    write_video(tmp_path / "v.mkv", [numbered(i) for i in range(40)])
    folder = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Folder, directory=str(tmp_path)))
    threading.Thread(target=folder.serve_forever, args=(0.05,), daemon=True).start()
    with contextlib.closing(folder.socket):
        with open_source(camera(f"http://127.0.0.1:{folder.server_port}/v.mkv"), SMALL) as reader:
            first = reader.wait_frame(-1, 20)
            assert first is not None
            assert reader.pid is not None
            os.kill(reader.pid, signal.SIGKILL)
            wait_for(lambda: reader.status().reconnects == 1 and reader.status().state == "live")
            again = reader.newest()
        folder.shutdown()
    assert again is not None
    assert (first.cut, again.scene, again.cut) == (0, 1, 1)


def test_a_live_stream_that_falls_silent_is_connected_again(server: _Server) -> None:
    server.silent = True
    server.frames_a_connection = 5
    settings = SMALL.model_copy(update={"read_timeout_s": 0.5})
    with open_source(camera(f"http://127.0.0.1:{server.server_port}/open"), settings) as reader:
        wait_for(lambda: reader.status().reconnects >= 1, 30)
        wait_for(lambda: server.connections >= 2)


def test_nobody_answers(tmp_path: Path) -> None:
    with open_source(camera("rtsp://127.0.0.1:9/live"), SMALL) as reader:
        wait_for(lambda: reader.status().reconnects >= 1, 30)
        status = reader.status()
        assert status.state in ("lost", "connecting")
        assert not status.finished


def test_one_that_hangs_does_not_hold_up_another(tmp_path: Path, video: Path) -> None:
    os.mkfifo(tmp_path / "hung.mp4")
    with open_source(camera(tmp_path / "hung.mp4"), SMALL), open_source(camera(video, loop=True), SMALL) as good:
        first = good.wait_frame(-1, 20)
        assert first is not None
        begun = time.monotonic()
        wait_for(lambda: good.status().frames >= 8, 5)
        assert time.monotonic() - begun < 3
        assert good.status().state == "live"


def _frames_of(reader: CameraReader, count: int) -> list[Frame]:
    frames: list[Frame] = []
    while len(frames) < count:
        frame = reader.wait_frame(frames[-1].index if frames else -1, 10)
        assert frame is not None
        frames.append(frame)
    return frames


def test_frames_are_the_receivers_own(video: Path) -> None:
    with open_source(camera(video), BATCH) as reader:
        frames = _frames_of(reader, 10)
    assert [number_of(frame.image) for frame in frames] == list(range(10))
    frames[0].image[:] = 0  # may be written to, and outlives the reader
    assert number_of(frames[1].image) == 1


def test_video_without_time_stamps(tmp_path: Path) -> None:
    path = tmp_path / "v.h264"
    with av.open(str(path), "w", format="h264") as container:
        stream = container.add_stream("libx264", rate=25, options={"bf": "0"})
        stream.width, stream.height, stream.pix_fmt = 160, 120, "yuv420p"
        for number in range(12):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(numbered(number), format="bgr24")))
        container.mux(stream.encode())
    frames, _ = play(path)
    assert [number_of(frame.image) for frame in frames] == list(range(12))
    assert all((b.media_s or 0) > (a.media_s or 0) for a, b in pairwise(frames))
