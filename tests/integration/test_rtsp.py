"""A live RTSP camera on loopback: newest frames, reconnecting, passwords."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.config import CameraConfig, SourceConfig
from pipeline.source import CameraReader, open_source
from tests.rtsp import age_ms, missing, rtsp_camera

pytestmark = pytest.mark.skipif(bool(missing()), reason=f"needs an RTSP server: {missing()}")

SETTINGS = SourceConfig(reconnect_backoff_s=0.2, reconnect_backoff_max_s=0.5, read_timeout_s=1.0)


def wait_for(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.05)


def ages_ms(reader: CameraReader, seconds: float, pause_s: float = 0.0) -> list[float]:
    """True ages of the frames taken, in order."""
    ages, index = [], -1
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        frame = reader.wait_frame(index, 2.0)
        if frame is not None:
            index = frame.index
            ages.append(age_ms(frame))
            time.sleep(pause_s)
    return sorted(ages)


def test_a_slow_consumer_gets_fresh_pictures_for_nothing_queues_up() -> None:
    with rtsp_camera() as (address, _), open_source(CameraConfig(name="c", source=address), SETTINGS) as reader:
        assert reader.wait_frame(-1, 30) is not None
        ages = ages_ms(reader, 6.0, pause_s=0.4)  # takes one in ten
        status = reader.status()
    assert len(ages) >= 8
    assert ages[int(0.9 * len(ages))] < 500  # a queue would be seconds long by now
    assert status.dropped > 3 * len(ages)
    assert status.fps == pytest.approx(25, rel=0.3)


def test_the_camera_goes_away_and_comes_back() -> None:
    with rtsp_camera() as (address, _):
        reader = open_source(CameraConfig(name="c", source=address), SETTINGS)
        first = reader.wait_frame(-1, 30)
        assert first is not None
    with reader:
        wait_for(lambda: reader.status().state == "lost")
        port = int(address.split(":")[2].split("/")[0])
        with rtsp_camera(port=port):
            wait_for(lambda: reader.status().state == "live")
            newest = reader.status().frames - 1
            again = reader.wait_frame(newest, 10)
            assert again is not None
            assert again.index > first.index
            assert again.scene > first.scene
            assert age_ms(again) < 1000
            assert reader.status().reconnects >= 1


def test_a_camera_that_falls_silent_is_noticed_and_found_again() -> None:
    with rtsp_camera() as (address, server), open_source(CameraConfig(name="c", source=address), SETTINGS) as reader:
        assert reader.wait_frame(-1, 30) is not None
        server.send_signal(signal.SIGSTOP)  # the connection stays, nothing comes
        try:
            begun = time.monotonic()
            wait_for(lambda: reader.status().state == "lost", 10)
            assert time.monotonic() - begun < 5
        finally:
            server.send_signal(signal.SIGCONT)
        wait_for(lambda: reader.status().state == "live")


def test_login_with_a_password_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    password = "p@ss w/rd:1"  # noqa: S105 - the test's own
    monkeypatch.setenv("FC_TEST_CAMERA", password)
    with rtsp_camera(user="joe", password=password) as (address, _):
        login = CameraConfig.model_validate(
            {"name": "c", "source": address, "username": "joe", "password_env": "FC_TEST_CAMERA"}
        )
        with open_source(login, SETTINGS) as reader:
            assert reader.wait_frame(-1, 30) is not None
            assert reader.pid is not None
            assert b"p@ss" not in Path(f"/proc/{reader.pid}/cmdline").read_bytes()
        with open_source(CameraConfig(name="c", source=address), SETTINGS) as reader:
            wait_for(lambda: reader.status().state == "lost")
            assert "401" in reader.status().detail
